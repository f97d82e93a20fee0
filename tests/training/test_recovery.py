"""Trainers that are killed continue, when they are started again, where they were."""

import logging
import random

import numpy as np
import pytest
import torch

from persia_torchrec import SGD, RemoteEmbeddingBagCollectionSharder
from persia_torchrec.checkpoint import catalog
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.data import CsvDataset, IdColumn
from persia_torchrec.errors import ConfigError, RemoteError
from persia_torchrec.rpc.messages import NO_GENERATION
from persia_torchrec.sharding.optimizer import set_values
from persia_torchrec.table import TableSpec
from persia_torchrec.training.checkpoint import apply_state
from persia_torchrec.training.data_state import random_state, set_random_state
from persia_torchrec.training.recoverable import recoverable
from persia_torchrec.training.recovery import folder_of_job
from persia_torchrec.training.schedule import CheckpointClock, RecoveryConfig
from tests.support import recovering_trainers
from tests.support.groups import run, run_through_a_kill
from tests.support.local_job import LocalJob
from tests.support.processes import Processes
from tests.support.recovering_trainers import NUM_COUNTED, PASSES
from tests.support.remote_job import Servers


def variables_of(job, folder):
    return {
        "PERSIA_STORE_PORT": str(job.book.port),
        "PERSIA_EMBEDDING_CONFIG": str(job.config_path),
        "PERSIA_CHECKPOINT_DIR": str(folder / "checkpoints"),
        "LOG_LEVEL": "INFO",
    }


@pytest.mark.multiprocess
def test_a_persia_script_that_is_killed_ends_as_one_that_was_not(tmp_path, monkeypatch):
    learnt = {}
    with LocalJob(tmp_path, monkeypatch) as job, Processes(tmp_path) as processes:
        script = recovering_trainers.run_script
        for name, dies_at in (("undisturbed", 0), ("killed", 5)):
            folder = tmp_path / name
            folder.mkdir()
            given = folder, 2, dies_at
            variables = variables_of(job, folder)
            start = run_through_a_kill if dies_at else run
            outputs = start(processes, name, script, *given, **variables)
            of_both = [dict(np.load(folder / f"{rank}.npz")) for rank in range(2)]
            rows = {
                "rows": job.read("item", *range(60)),
                "steps": job.client.step("item"),
            }
            learnt[name] = [*of_both, rows]
    for expected, received in zip(*learnt.values(), strict=True):
        for key, values in expected.items():
            np.testing.assert_array_equal(received[key], values, err_msg=key)
    assert learnt["killed"][2]["steps"] == sum(map(sum, PASSES))
    for call in ("clear_embeddings", "configure_embedding_parameter_servers"):
        assert f"{call}() is skipped: training resumes from" in outputs[0]
    killed = (tmp_path / "killed" / "checkpoints").glob("*/checkpoints/checkpoint-*")
    assert len(list(killed)) == 2


@pytest.mark.multiprocess
@pytest.mark.parametrize("resume", ["exact", "rows_ahead"])
def test_each_update_counts_once_along_the_history(tmp_path, monkeypatch, resume):
    with LocalJob(tmp_path, monkeypatch) as job, Processes(tmp_path) as processes:
        given = tmp_path, 3, 6, resume
        run_through_a_kill(
            *(processes, "counting", recovering_trainers.count),
            *given,
            size=1,
            **variables_of(job, tmp_path),
        )
        num_sent = len((tmp_path / "sent").read_text().splitlines())
        assert num_sent == NUM_COUNTED + 3
        counted = job.read("item", 7, *range(100, 100 + NUM_COUNTED))[:, 0].tolist()
    again = 3 if resume == "rows_ahead" else 0
    once_more = [0, 0, 0, 1, 1, 1, 0, 0] if again else [0] * NUM_COUNTED
    assert counted == [NUM_COUNTED + again, *(1 + more for more in once_more)]


@pytest.mark.multiprocess
def test_a_torchrec_loop_that_is_killed_ends_as_one_that_was_not(tmp_path):
    learnt = {}
    for at in (0, 1, 6):
        with Servers(2) as servers, Processes(tmp_path) as processes:
            given = (lambda rank: rank), servers.addresses, tmp_path, at
            start = run_through_a_kill if at else run
            start(
                processes, f"killed at {at}", recovering_trainers.run_torchrec, *given
            )
        learnt[at] = [dict(np.load(tmp_path / f"{at} {rank}.npz")) for rank in range(2)]
    for expected, *received in zip(*learnt.values(), strict=True):
        for key, values in expected.items():
            for of_run in received:
                np.testing.assert_array_equal(of_run[key], values, err_msg=key)


def test_requests_of_an_older_generation_are_rejected(servers):
    running = servers.start(2)
    old, new = (servers.client(running) for _ in range(2))
    old.begin_generation(1)
    old.clear()
    new.begin_generation(2)
    new.clear()
    with pytest.raises(RemoteError, match=r"must be of generation 2\. Received: 1"):
        old.clear()
    assert servers.client(running).generation == 2
    new.begin_generation(NO_GENERATION - 1)
    new.clear()
    for generation in (NO_GENERATION, NO_GENERATION + 1):
        with pytest.raises(ConfigError, match=r"at most 65534 times again\."):
            new.begin_generation(generation)
    new.clear()


def test_the_clock_says_at_once_that_a_save_is_asked_for():
    requests = []
    clock = CheckpointClock(600.0, delta_interval_s=1e-9, must_save=lambda: requests)
    assert clock.is_time()
    assert clock.is_delta
    clock.restart(took_s=100.0, was_delta=True)
    assert [clock.is_time() for _ in range(3)] == [False] * 3
    requests.append("scale")
    assert clock.is_time()
    assert not clock.is_delta


def test_a_trainer_at_its_end_tells_that_others_make_steps():
    clock = CheckpointClock(600.0)
    clock.is_time()
    assert not clock.has_answered()
    clock.main_hook()
    assert clock.has_answered()
    assert not clock.has_answered()


def test_the_clock_is_asked_rarely_and_says_when_it_is_time():
    now_s, asked = 0.0, []

    def now():
        asked.append(now_s)
        return now_s

    clock = CheckpointClock(600.0, now)
    times = []
    for _ in range(3000):
        now_s += 0.5
        if clock.is_time():
            times.append(now_s)
            clock.restart(took_s=1.0)
    assert times[0] == pytest.approx(600, abs=2)
    assert np.diff(times) == pytest.approx(600, abs=2)
    assert len(asked) < 100


@pytest.mark.parametrize("first", [0, 40])
@pytest.mark.parametrize("save_steps", [1, 7, 500])
@pytest.mark.parametrize("interval_s", [0.0, 100.0])
def test_steps_may_say_when_it_is_time(first, save_steps, interval_s):
    now_s = 0.0
    clock = CheckpointClock(interval_s, lambda: now_s, save_steps=save_steps)
    clock.num_trained = first
    saved = []
    for step in range(first + 1, first + 1001):
        now_s += 0.01
        if clock.is_time():
            saved.append(step)
            clock.restart(took_s=0.0)
    assert saved == [s for s in range(first + 1, first + 1001) if s % save_steps == 0]


def test_a_checkpoint_that_takes_long_takes_a_twentieth_of_the_time():
    now_s = 0.0
    clock = CheckpointClock(1.0, lambda: now_s)
    clock.restart(took_s=2.0)
    times = []
    for _ in range(500):
        now_s += 0.1
        if clock.is_time():
            times.append(now_s)
            clock.restart(took_s=2.0)
    assert times[0] == pytest.approx(40, abs=0.2)


def test_a_job_has_its_checkpoints_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PERSIA_CHECKPOINT_DIR", raising=False)
    assert folder_of_job("a/b") == str(tmp_path / "runs/a_b/checkpoints")
    for name in ("PERSIA_RESUME_DIR", "PERSIA_RUN_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
        assert folder_of_job("a") == str(tmp_path / name / "checkpoints")
    (tmp_path / "PERSIA_RUN_DIR/checkpoint-00000001").mkdir(parents=True)
    assert folder_of_job("a") == str(tmp_path / "PERSIA_RUN_DIR")


def test_deltas_come_between_checkpoints():
    now_s, kinds = 0.0, []
    clock = CheckpointClock(100.0, lambda: now_s, delta_interval_s=10.0)
    for _ in range(3050):
        now_s += 0.1
        if clock.is_time():
            kinds.append("delta" if clock.is_delta else "whole")
            clock.restart(took_s=0.0, was_delta=clock.is_delta)
    between = "".join(kind[0] for kind in kinds).split("w")
    assert [len(deltas) for deltas in between[:3]] == [9, 9, 9]
    assert len(between) == 4


def test_random_numbers_continue_from_a_state():
    def draw():
        numbers = old_numpy.uniform(), torch.rand(()).item(), random.random()
        return (*numbers, old_numpy.normal())

    old_numpy = np.random.mtrand._rand  # which scripts draw from
    old_numpy.normal()  # keeps a second number
    state = random_state()
    expected = draw()
    set_random_state(state)
    assert draw() == expected


@pytest.mark.parametrize("parts", [1, 3])
def test_a_loop_that_calls_no_step_is_an_error(servers, tmp_path, parts):
    most = 128 * parts  # batches that a pipeline may take ahead, or parts of them
    path, taken = tmp_path / "rows.csv", []
    path.write_text("1\n" * (most + 4 * parts))
    data = CsvDataset(path, parts, [IdColumn("one")], micro_batches=parts)
    client = servers.client(servers.start(1))
    sharder = RemoteEmbeddingBagCollectionSharder(client, SGD(1.0))
    message = rf"step\(\) must be called.*Received: {most + 1} batches"
    given = tmp_path / "run", {"data": data}, client, sharder
    with (
        pytest.raises(ConfigError, match=message),
        recoverable(*given, interval_s=0) as run,
    ):
        taken.extend(run.skip(data))
    assert len(taken) == most
    sharder.close()


def test_a_rate_that_is_a_tensor_stays_the_one_that_a_compiled_step_reads(
    servers, tmp_path
):
    client = servers.client(servers.start(1))
    client.add_tables([TableSpec(name="item", dim=4, optimizer=SGD(1.0))])

    def train(lr, num_steps):
        rate, weight = torch.tensor(lr), torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.Adam([weight], lr=rate)
        state = {"optimizer": optimizer}
        with recoverable(tmp_path, state, client, (), interval_s=0) as run:
            for _ in run.skip(range(num_steps)):
                weight.grad = torch.ones(2)
                optimizer.step()
                rate.mul_(0.5)
                run.step()
            run.save()
        assert optimizer.param_groups[0]["lr"] is rate
        return float(rate)

    assert train(0.5, 2) == 0.5 / 4
    assert train(0.75, 5) == 0.5 / 32


def test_a_resume_into_less_room_reports_it_and_keeps_the_fuller_checkpoint(
    servers, tmp_path, caplog
):
    caplog.set_level(logging.INFO)

    def run(capacity, num_saves):
        client = servers.client(servers.start(1, capacity_rows=capacity))
        client.add_tables([TableSpec(name="item", dim=4, optimizer=SGD(1.0))])
        with recoverable(tmp_path, {}, client, (), interval_s=0) as training:
            if not training.resumed_from:
                client.write(
                    "item", np.arange(100, dtype="u8"), np.ones((100, 4), "f4")
                )
            for _ in range(num_saves):
                training.save()
        return sum(client.num_rows())

    assert run(100, 1) == 100
    caplog.clear()
    assert run(30, 5) == 30
    assert "70 rows were left out" in caplog.text
    assert "has 100 rows, and the servers have room for 30" in caplog.text
    assert "without 70 rows" in caplog.text
    assert "(exact)" not in caplog.text
    kept = [
        f.url.rpartition("-")[2] for f in catalog.complete_checkpoints(Folder(tmp_path))
    ]
    assert kept == ["00000006", "00000005", "00000001"]
    caplog.clear()
    assert run(30, 3) == 30  # which continues those that lack rows
    assert "(exact)" in caplog.text
    kept = [
        f.url.rpartition("-")[2] for f in catalog.complete_checkpoints(Folder(tmp_path))
    ]
    assert kept == ["00000009", "00000008", "00000001"]


@pytest.mark.parametrize("lr", [0.25, torch.tensor(0.25)])
def test_a_loaded_state_is_set_in_the_tensors_of_the_optimizer(lr):
    def make(lr, beta):
        weight = torch.nn.Parameter(torch.ones(2))
        betas = torch.tensor(beta), torch.tensor(0.9)
        given = {"betas": betas, "foreach": False, "capturable": True}
        return torch.optim.Adam([weight], lr=lr, **given)

    optimizer, saved = make(torch.tensor(1.0), 0.5), make(lr, 0.75)
    (group,) = optimizer.param_groups
    held = group["lr"], *group["betas"]
    apply_state(optimizer, saved.state_dict(), "opt.pt")
    (group,) = optimizer.param_groups
    for one, other in zip(held, (group["lr"], *group["betas"]), strict=True):
        assert one is other
    assert [float(one) for one in held] == pytest.approx([0.25, 0.75, 0.9])
    set_values(group, {"lr": lr, "weight_decay": 0.5, "new": 3})
    assert group["lr"] is held[0]
    assert (group["weight_decay"], group["new"]) == (0.5, 3)


def test_invalid_settings_are_rejected():
    with pytest.raises(ConfigError, match=r"interval must be >= 0 s\. Received: -1"):
        RecoveryConfig(folder="x", interval_s=-1)
    with pytest.raises(ConfigError, match=r"resume must be one of .*Received: 'ahead'"):
        RecoveryConfig(folder="x", resume="ahead")


@pytest.mark.parametrize(
    ("variable", "interval_s", "arguments"),
    [("7", 7.0, {}), (None, 600.0, {}), ("7", 3.0, {"interval_s": 3.0})],
)
def test_the_environment_reports_how_often_what_an_argument_leaves_open(
    servers, tmp_path, monkeypatch, variable, interval_s, arguments
):
    if variable is not None:
        monkeypatch.setenv("PERSIA_CHECKPOINT_INTERVAL_S", variable)
    monkeypatch.setenv("PERSIA_RESUME", "rows_ahead")
    client = servers.client(servers.start(1))
    with recoverable(tmp_path, {}, client, (), **arguments) as run:
        config = run._recovery._config
    assert (config.interval_s, config.resume) == (interval_s, "rows_ahead")
