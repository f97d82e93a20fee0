"""A whole job around a block."""

import contextlib
import os
import socket
import threading

import pytest
import torch.distributed as dist

from persia_torchrec.errors import ConfigError, JobError
from persia_torchrec.persia.helper import PersiaServiceCtx, ensure_persia_service
from persia_torchrec.persia.utils import dump_yaml
from tests.persia import failing
from tests.support import helped, helped_training
from tests.support.processes import DEADLINE_S, children_of_this_process
from tests.support.script_jobs import draw_service_ports

VARIABLES = ("PERSIA_STORE_PORT", "PERSIA_STORE_HOST", "PERSIA_EMBEDDING_CONFIG")


def with_marks(test):
    return pytest.mark.multiprocess(pytest.mark.slow(test))


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(monkeypatch, tmp_path):
    for name in (*VARIABLES, "PERSIA_GLOBAL_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(helped.__file__).partition("/tests/")[0])


@with_marks
def test_the_block_trains_on_what_a_data_loader_sends(monkeypatch):
    """An error of the block is raised as it is, and the variables are restored."""
    before = children_of_this_process()
    around = {"PERSIA_STORE_PORT": "1", "PERSIA_JOB_ID": "of the outer job"}
    for name, value in around.items():
        monkeypatch.setenv(name, value)
    ports = draw_service_ports()
    taken = ports["nats_server_port"]
    with (
        contextlib.suppress(KeyError),
        contextlib.closing(socket.create_server(("127.0.0.1", taken))),
        ensure_persia_service(
            data_loader_func=helped.send,
            embedding_config=helped.SLOTS,
            embedding_parameter_replica_num=2,
            **ports,
        ),
    ):
        assert all(name in os.environ for name in VARIABLES)
        assert int(os.environ["PERSIA_STORE_PORT"]) > taken
        assert os.environ["PERSIA_JOB_ID"] not in ("", around["PERSIA_JOB_ID"])
        started = children_of_this_process() - before
        try:
            num, rows = helped_training.train()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        raise KeyError
    assert num == helped.NUM_BATCHES
    assert sum(rows) == helped.NUM_BATCHES
    assert len(rows) == 2
    assert {name: os.environ[name] for name in around} == around
    assert "PERSIA_EMBEDDING_CONFIG" not in os.environ
    assert len(started) >= 6  # coordinator, two servers, worker, loader, proxy trainer
    assert children_of_this_process() == before


@pytest.mark.long
@with_marks
def test_the_block_waits_for_nn_workers_and_takes_scripts_and_files(tmp_path):
    dump_yaml(helped.SLOTS, tmp_path / "slots.yml")
    dump_yaml({"common_config": {"job_type": "Train"}}, tmp_path / "global.yml")
    with PersiaServiceCtx(
        data_loader_func=helped.__file__,
        nn_worker_func=helped_training.train_and_tell,
        embedding_config_path=tmp_path / "slots.yml",
        global_config_path=str(tmp_path / "global.yml"),
        data_loader_replica_num=2,
        **draw_service_ports(),
    ):
        assert os.environ["PERSIA_GLOBAL_CONFIG"] == str(tmp_path / "global.yml")
    assert (
        tmp_path / "trained.txt"
    ).read_text() == f"{helped.NUM_BATCHES} {helped.NUM_BATCHES} 1"


def wait_to_be_interrupted():
    threading.Event().wait(DEADLINE_S)
    pytest.fail("the block was not interrupted")


@pytest.mark.long
@with_marks
def test_a_process_that_fails_interrupts_the_block_and_is_named():
    before = children_of_this_process()
    service = PersiaServiceCtx(
        failing.send_nothing, embedding_config=helped.SLOTS, **draw_service_ports()
    )
    with pytest.raises(JobError, match="loader 0: ValueError: there is no"), service:
        wait_to_be_interrupted()
    assert children_of_this_process() == before


class HasAMethod:
    def send(self):
        pass


def a_function_in_a_function():
    def send():
        pass

    return send


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "embedding_config, or embedding_config_path, must .* Received: neither"),
        (
            {"embedding_config": helped.SLOTS, "embedding_config_path": "a.yml"},
            "one of them. Received: both",
        ),
        ({"embedding_config": "a.yml"}, "must be a mapping.*is embedding_config_path"),
        (
            {"embedding_config": helped.SLOTS, "data_loader_func": lambda: None},
            "data_loader_func must be a function at the top of a module",
        ),
        (
            {
                "embedding_config": helped.SLOTS,
                "nn_worker_func": a_function_in_a_function(),
            },
            "nn_worker_func must be a function at the top of a module",
        ),
        (
            {"embedding_config": helped.SLOTS, "nn_worker_func": HasAMethod().send},
            "nn_worker_func must be a function at the top of a module",
        ),
        (
            {"embedding_config": helped.SLOTS, "data_loader_func": "absent.py"},
            "'absent.py', and there is no such file",
        ),
        (
            {"embedding_config": helped.SLOTS, "embedding_worker_replica_num": 0},
            "embedding_worker_replica_num must be >= 1. Received: 0",
        ),
        (
            {"embedding_config": helped.SLOTS, "nproc_per_node": 2},
            "nproc_per_node must be 1 where no function is given",
        ),
        (
            {"embedding_config": helped.SLOTS, "timeout_s": 0},
            "timeout_s must be > 0. Received: 0",
        ),
    ],
)
def test_invalid_settings_are_rejected(settings, message):
    with pytest.raises(ConfigError, match=message):
        PersiaServiceCtx(**settings)


def test_invalid_files_are_rejected_before_a_process_starts(tmp_path):
    before = children_of_this_process()
    with (
        pytest.raises(ConfigError, match="slots_config must have at least one slot"),
        PersiaServiceCtx(embedding_config={"slots_config": {}}),
    ):
        pytest.fail("the block was entered")
    infer = {"servers": ["127.0.0.1:1"], "embedding_checkpoint": "run"}
    with (
        pytest.raises(ConfigError, match="job_type: Infer"),
        PersiaServiceCtx(
            embedding_config=helped.SLOTS,
            global_config={
                "common_config": {"job_type": "Infer", "infer_config": infer}
            },
        ),
    ):
        pytest.fail("the block was entered")
    assert children_of_this_process() == before
    assert "PERSIA_STORE_PORT" not in os.environ
