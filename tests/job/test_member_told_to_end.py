"""A job that is told to end: by a scheduler, a user, or a signal to one process."""

import contextlib
import os
import re
import signal
import sys
import time

import pytest

from persia_torchrec import timeouts
from persia_torchrec.checkpoint import catalog
from persia_torchrec.job import supervisor
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.job.requests import JobTimings
from tests.support import members
from tests.support.processes import children_of
from tests.support.repository import ROOT
from tests.support.script_jobs import WAIT_FOR_EVER, Job
from tests.support.torchx_jobs import TorchxJob

pytestmark = pytest.mark.multiprocess

SAVES = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from persia_torchrec.job.member import JobMember
from persia_torchrec.job.member_record import MemberRecord
try:
    print('at work', flush=True)
    time.sleep(600)
except BaseException:
    time.sleep(1)  # for longer than a heartbeat
    record = MemberRecord(JobMember.current.book, 'server', 0)
    print('the server has ended:', record.read().ending(), flush=True)
    raise
"""
GOES_ON = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: None)
print('at work', flush=True)
while True:
    time.sleep(0.05)
"""


def start_supervised(processes, job, name, *words, **env):
    command = ["--", sys.executable, *words]
    variables = {
        "PYTHONPATH": str(ROOT),
        "PERSIA_STORE_PORT": str(job.port),
        "REPLICA_INDEX": "0",
        "REPLICA_SIZE": "1",
        **env,
    }
    return processes.start(name, supervisor.main, command, env=variables)


def all_below(pid):
    return [pid, *(one for child in children_of(pid) for one in all_below(child))]


def test_servers_stay_until_a_trainer_that_is_interrupted_has_saved(processes):
    job = Job(processes, loader=1, trainer=1, server=1)
    server = processes.start("server-0", members.serve, job.port)
    server.has_printed("serving")
    loader = job.start("loader", WAIT_FOR_EVER)
    trainer = job.start("trainer", SAVES)
    for member in (loader, trainer):
        member.has_printed("at work")
    for process in (server, loader, trainer, job.coordinator):
        process.send(signal.SIGTERM)
    for process in (server, loader, trainer, job.coordinator):
        assert process.status() in (1, 143), process.output()
    assert "the server has ended: None" in trainer.output()
    assert trainer.status() == job.coordinator.status() == 143
    assert "graceful shutdown (SIGTERM to " in job.coordinator.output()
    assert "job ended: it was told to end (SIGTERM)" in job.coordinator.output()
    assert "ERROR persia_torchrec" not in server.output() + trainer.output()


@pytest.mark.parametrize(
    "number", [signal.SIGUSR1, pytest.param(signal.SIGUSR2, marks=pytest.mark.long)]
)
def test_a_warning_of_a_scheduler_to_every_process_starts_none_again(processes, number):
    job = Job(processes, trainer=1, server=1, recovers=True)
    code = f"from tests.support import members; members.serve({job.port})"
    server = start_supervised(processes, job, "server-0", "-c", code)
    script = processes.folder / "train.py"
    script.write_text(SAVES)
    words = ["-m", "persia_torchrec.job.script", "trainer", str(script)]
    trainer = start_supervised(processes, job, "trainer-0", *words)
    for process in (server, trainer):
        process.has_printed("at work" if process is trainer else "serving")
    started = [trainer, server, job.coordinator]
    for pid in [pid for process in started for pid in all_below(process.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    outputs = "".join(process.output() for process in started)
    assert trainer.status() == job.coordinator.status() == 128 + number, outputs
    assert "restarting it" not in outputs
    assert "the server has ended: None" in trainer.output()
    assert f"it was told to end ({number.name})" in job.coordinator.output()


def test_a_second_signal_ends_the_job_at_once(processes):
    job = Job(processes, "--grace-s", "100000", trainer=1)
    trainer = job.start("trainer", GOES_ON)
    trainer.has_printed("at work")
    job.coordinator.send(signal.SIGTERM)
    job.coordinator.has_printed("graceful shutdown (SIGTERM")

    # One that comes sooner is the first, passed on.
    time.sleep(timeouts.SAME_SIGNAL_S + 0.1)
    job.coordinator.send(signal.SIGTERM)
    assert job.coordinator.status() == 143
    assert "told to end (SIGTERM), twice" in job.coordinator.output()
    assert trainer.status() == 1


def test_a_trainer_that_does_not_save_in_time_is_named(processes):
    job = Job(processes, "--grace-s", "0.5", trainer=1)
    trainer = job.start("trainer", GOES_ON)
    trainer.has_printed("at work")
    job.coordinator.send(signal.SIGTERM)
    assert job.coordinator.status() == 143
    why = "told to end (SIGTERM), and trainer 0 did not exit within grace_s=0.5"
    assert why in job.coordinator.output()


def test_a_process_of_a_job_under_graceful_shutdown_does_not_start_again(processes):
    with contextlib.closing(AddressBook.host(0)) as book:
        book.publish(JobTimings())
        book.tell_to_end("SIGTERM", "server 0")
        env = {"PERSIA_RESTARTS": "1"}
        member = processes.start("member", members.serve, book.port, env=env)
        assert member.status() != 0
        assert "is told to end (SIGTERM): nothing starts again" in member.output()


TRAIN = """
import sys, time, numpy as np, torch, torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from persia_torchrec import SGD, EmbeddingClient, join, recoverable, remote_sharders

dist.init_process_group("gloo")
rank = dist.get_rank()
client = EmbeddingClient.of_job()
sharders = remote_sharders(client, SGD(lr=1.0))
table = EmbeddingBagConfig(1000, 4, "item", feature_names=["item"])
collection = EmbeddingBagCollection(tables=[table], device="meta")
model = DistributedModelParallel(collection, sharders=sharders)
with recoverable(None, {"model": model}, client, sharders) as run:
    if run.num_steps:
        print(f"rows {client.read('item', np.arange(1, dtype='u8'))[0, 0]:.3f}.")
    print(f"begins at {run.num_steps}.", flush=True)
    with join(model):
        for _ in run.skip(range(int(sys.argv[1 + rank]))):
            ids = torch.arange(4) + 4 * rank
            bags = KeyedJaggedTensor(["item"], ids, lengths=torch.ones(4).int())
            model(bags).values().sum().backward()
            time.sleep(0.02)
            run.step()
            print(f"step {run.num_steps}.", flush=True)
print("ends well", flush=True)
"""


@contextlib.contextmanager
def training(folder, gateway, *nums):
    """Start a job of trainers with so many steps each."""
    script = folder / "train.py"
    script.write_text(TRAIN)
    words = " ".join(map(str, [script, *nums]))
    arguments = ["--script", words, "--servers", "2"]
    arguments += ["--nproc_per_node", str(len(nums))]
    arguments += ["--run_dir", str(folder / "run"), "--grace_s", "60"]
    folder = folder / "-".join(map(str, nums))
    folder.mkdir()
    variables = {"PERSIA_METRICS_GATEWAY_ADDR": gateway.address}
    component = "persia.train_torchrec"
    with TorchxJob(folder, component, *arguments, variables=variables) as job:
        yield job


def last_step(folder):
    latest = catalog.find_checkpoint(folder / "run")
    return catalog.Manifest.read(latest).step


@pytest.mark.long
@pytest.mark.slow
def test_a_job_of_torchx_loses_no_step_when_it_is_shut_down(tmp_path, gateway):
    train_until_it_is_shut_down(tmp_path, gateway)


@pytest.mark.long
def test_a_job_resumes_at_the_step_at_which_it_was_shut_down(tmp_path, gateway):
    saved, last = train_until_it_is_shut_down(tmp_path, gateway)
    with training(tmp_path, gateway, saved + 3) as job:
        ended = job.wait()
    assert ended.status == 0, ended.output
    then = gateway.pushes(role="nn_worker")[-1]
    assert then.values["persia_lookups_total"] == 3
    assert then.labels["job"] != last.labels["job"]
    assert f"begins at {saved}." in ended.output
    row = float(re.search(r"rows (-?\d+\.\d+)\.", ended.output)[1])
    assert row == pytest.approx(-saved, abs=0.5)
    assert last_step(tmp_path) == saved + 3


@pytest.mark.long
def test_a_job_is_saved_when_it_is_shut_down_and_a_trainer_has_ended(tmp_path, gateway):
    with training(tmp_path, gateway, 3, 10_000) as job:
        job.has_printed("step 9.")
        os.kill(job.pids("torchx.cli.main")[0], signal.SIGTERM)
        ended = job.wait()
    saved = last_step(tmp_path)
    last = max(map(int, re.findall(r"step (\d+)\.", ended.output)))
    assert saved == last + 1, ended.output
    assert "did not exit within" not in ended.output
    with training(tmp_path, gateway, 3, saved + 2) as job:
        ended = job.wait()
    assert ended.status == 0, ended.output
    assert {*re.findall(r"begins at (\d+)\.", ended.output)} == {"3", f"{saved}"}
    assert last_step(tmp_path) == saved + 2


def train_until_it_is_shut_down(tmp_path, gateway):
    """Return the step of the last checkpoint, and the last metrics of the trainer."""
    with training(tmp_path, gateway, 10_000) as job:
        job.has_printed("step 5.")
        torchx = job.pids("torchx.cli.main")
        for pid in set(job.pids()) - set(torchx):  # as Slurm does
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        ended = job.wait()
    steps = [int(step) for step in re.findall(r"step (\d+)\.", ended.output)]
    saved = last_step(tmp_path)
    assert ended.status != 0
    assert saved == len(steps) + 1, ended.output  # what step() has raised after
    assert "restarting it" not in ended.output
    assert "told to end (SIGUSR1); the last checkpoint is" in ended.output
    # What it has pushed when its processes end: all trained in less than an interval.
    last = gateway.pushes(role="nn_worker")[-1]
    assert last.values["persia_lookups_total"] == saved
    return saved, last
