"""Who sees a job's token, and what its processes open to others."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq
from torchx.runner import get_runner

from persia_torchrec.job.supervisor import main as supervise
from persia_torchrec.job.survivable_memory import AUTO, open_memory
from persia_torchrec.persia.data_parallel import _make_store
from persia_torchrec.persia.distributed import DDPOption
from persia_torchrec.persia.helper import PersiaServiceCtx
from persia_torchrec.rpc import auth
from tests.support import helped
from tests.support.components import COMPONENTS, SCHEDULERS, cfg_of, load
from tests.support.ports import draw_port
from tests.support.processes import (
    DEADLINE_S,
    children_of,
    children_of_this_process,
    wait_until,
)
from tests.support.script_jobs import Job, draw_service_ports, start_trainers
from tests.support.sockets import ending_of, listening

TOKEN = "the-token-that-no-one-is-shown"


@pytest.mark.multiprocess
@pytest.mark.slow
def test_no_port_of_a_job_answers_a_stranger(monkeypatch, tmp_path, capfd):
    """Nor do its processes show the token, in a log or on a command line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PERSIA_JOB_TOKEN_FILE", raising=False)
    monkeypatch.setenv("PERSIA_JOB_TOKEN", TOKEN)
    before = children_of_this_process()
    with PersiaServiceCtx(embedding_config=helped.SLOTS, **draw_service_ports()):
        pids = children_of_this_process() - before
        wait_until(lambda: len(listening(pids)) == 3, "coordinator, server and worker")
        found = listening(pids)
        assert set(found.values()) == {"127.0.0.1"}
        for port in found:
            address = f"tcp://127.0.0.1:{port}"
            for token in (None, "another-token-than-theirs"):
                for encrypts in (False, True):
                    options = auth.client_options(token, encrypts=encrypts)
                    ended = ending_of(address, options, DEADLINE_S)
                    assert ended != zmq.EVENT_HANDSHAKE_SUCCEEDED
            with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as raw:
                raw.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(2**16))
                assert len(received(raw)) <= 64  # ZeroMQ's greeting
        for pid in pids:
            assert TOKEN not in Path(f"/proc/{pid}/cmdline").read_text()
    output = capfd.readouterr()
    assert TOKEN not in output.out + output.err


def received(connection):
    """Return what comes until the other side closes."""
    chunks = []
    try:
        while chunk := connection.recv(65536):
            chunks.append(chunk)
    except ConnectionResetError:
        pass
    return b"".join(chunks)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_no_one_is_shown_the_token(monkeypatch, tmp_path, scheduler):
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text(TOKEN)
    monkeypatch.setenv("PERSIA_JOB_TOKEN_FILE", str(file))
    app = load("train")(**COMPONENTS["train"])
    with get_runner() as runner:
        request = runner.dryrun(app, scheduler, cfg_of(scheduler, tmp_path))
    assert TOKEN not in str(request)
    assert (str(file) in str(request)) == (scheduler != "kubernetes")
    for role in app.roles:
        assert role.env["PERSIA_JOB_TOKEN_FILE"] == str(file)


def test_the_store_of_one_machine_listens_on_the_loopback(monkeypatch):
    port = draw_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    option = DDPOption(backend="gloo")
    with ThreadPoolExecutor(2) as trainers:
        stores = list(trainers.map(lambda rank: _make_store(option, rank, 2), (0, 1)))
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"
    assert listening([os.getpid()])[port] == "127.0.0.1"


MEETS = """
import pathlib, time
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print("at work", flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.02)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "has_torchrun", [False, pytest.param(True, marks=pytest.mark.long)]
)
def test_no_process_of_a_job_of_one_machine_listens_beyond_the_loopback(
    processes, monkeypatch, has_torchrun
):
    monkeypatch.setenv("PERSIA_STORE_HOST", "127.0.0.1")
    job = Job(processes, trainer=2)
    if has_torchrun:
        first = start_trainers(processes, job, MEETS, 2, max_restarts=0)
        wait_until(lambda: first.output().count("at work") == 2, "both have met")
    else:
        first, other = (job.start("trainer", MEETS, index=i) for i in range(2))
        other.has_printed("at work")
        first.has_printed("at work")
    jobs = [job.coordinator.pid, *(one.pid for one in processes.started)]
    pids = {*jobs, *(pid for one in jobs for pid in children_of(one))}
    found = listening(pids)
    assert len(found) >= 4  # address book, the trainers' store, gloo of both
    assert set(found.values()) == {"127.0.0.1"}
    (processes.folder / "go").touch()
    assert first.status() == 0, first.output()
    assert job.coordinator.status() == 0, job.coordinator.output()


def test_memory_is_of_mode_600():
    descriptor = open_memory(AUTO)
    assert os.fstat(descriptor).st_mode & 0o777 == 0o600
    os.close(descriptor)


def test_a_supervisor_without_a_token_opens_no_port_to_others(monkeypatch, capfd):
    for name in ("PERSIA_JOB_TOKEN", "PERSIA_JOB_TOKEN_FILE", "PERSIA_STORE_HOST"):
        monkeypatch.delenv(name, raising=False)
    assert supervise(["--host", "0.0.0.0", "--port", "0", "--", "true"]) == 1
    assert (
        "must be set to listen on another address than 127.0.0.1"
        in capfd.readouterr().err
    )
