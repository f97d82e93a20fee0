"""A job that is told to end loses no step, where its signals reach loaders' workers."""

import contextlib
import os
import pickle
import re
import signal
import subprocess
import sys

import pytest
from torch.utils.data import DataLoader

from persia_torchrec.checkpoint import catalog
from persia_torchrec.job.signals import OutlivesSignals
from persia_torchrec.training.loader_workers import (
    WorkerDeaths,
    is_of_worker,
    let_workers_outlive_signals,
)
from tests.support.forked_jobs import ForkedJob
from tests.support.processes import children_of, is_running, wait_until

SCRIPT = """
import sys, time, torch, torch.distributed as dist
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from persia_torchrec import SGD, EmbeddingClient, recoverable, remote_sharders

def hidden(loader):
    yield from loader

def main(start, kind):
    dist.init_process_group("gloo")
    client = EmbeddingClient.of_job()
    sharders = remote_sharders(client, SGD(lr=1.0))
    table = EmbeddingBagConfig(1000, 4, "item", feature_names=["item"])
    collection = EmbeddingBagCollection(tables=[table], device="meta")
    model = DistributedModelParallel(collection, sharders=sharders)
    make = StatefulDataLoader if kind == "stateful" else DataLoader
    given = {"num_workers": 2, "multiprocessing_context": start}
    loader = make(range(10**6), persistent_workers=True, **given)
    state = {"model": model}
    if kind == "stateful":
        state["loader"] = loader
    if kind == "begun":
        next(iter(loader))
    with recoverable(None, state, client, sharders) as run:
        for _ in run.skip(hidden(loader) if kind == "hidden" else loader):
            ids = torch.arange(4)
            features = KeyedJaggedTensor(["item"], ids, lengths=torch.ones(4).int())
            model(features).values().sum().backward()
            time.sleep(0.02)
            run.step()
            print(f"step {run.num_steps}.", flush=True)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def tree_of(pid):
    return [pid, *(one for child in children_of(pid) for one in tree_of(child))]


def end_by_signal(
    folder, start, kind, number, first_step, *, only_trainer, num_trainers=1
):
    """Train until signals come; return the steps, that of the checkpoint, the end."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    arguments = ["--script", f"{script} {start} {kind}", "--servers", "1"]
    arguments += ["--run_dir", str(folder / "run"), "--grace_s", "20"]
    arguments += ["--trainers", str(num_trainers)]
    trainers = [f"trainer {index}" for index in range(num_trainers)]
    with ForkedJob(folder, "train_torchrec", *arguments) as job:
        job.has_printed(f"step {first_step}.")
        pids = [pid for trainer in trainers for pid in tree_of(job.pid(trainer))]
        workers = [*set(pids).difference(map(job.pid, trainers))]
        assert len(workers) >= 2
        if not only_trainer:
            pids += [job.pid("server 0"), job.pid("coordinator 0")]
        for pid in reversed(pids):  # the workers first
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        ended = job.wait()
        wait_until(lambda: not any(map(is_running, workers)), "the workers end")
    steps = re.findall(r"step \d+\.", ended.logs["trainer 0"])
    latest = catalog.find_checkpoint(folder / "run")
    return steps, catalog.Manifest.read(latest).step, ended


def check_that_no_step_is_lost(folder, start, kind, number, first_step, **given):
    steps, saved, ended = end_by_signal(
        folder, start, kind, number, first_step, **given
    )
    assert saved in (len(steps), len(steps) + 1)
    assert f"it was told to end ({number.name})" in ended.output
    assert "waits for its return" not in ended.output


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("kind", "first_step"),
    [pytest.param("known", 1, marks=pytest.mark.long), ("hidden", 20)],
)
def test_no_step_is_lost_where_signals_reach_workers(tmp_path, kind, first_step):
    given = "fork", kind, signal.SIGTERM, first_step
    check_that_no_step_is_lost(tmp_path, *given, only_trainer=True)


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("only_trainer", [True, False])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("first_step", [1, 30])
@pytest.mark.parametrize("kind", ["known", "stateful", "hidden", "begun"])
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_no_step_is_lost_whatever_signal_reaches_whichever_workers(
    tmp_path, start, kind, number, first_step, only_trainer
):
    check_that_no_step_is_lost(
        tmp_path, start, kind, number, first_step, only_trainer=only_trainer
    )


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", ["known", "hidden"])
def test_trainers_save_the_step_at_which_all_of_them_are(tmp_path, kind):
    given = "fork", kind, signal.SIGTERM, 20
    check_that_no_step_is_lost(tmp_path, *given, only_trainer=False, num_trainers=2)


def test_a_loader_of_several_passes_is_wrapped_once_around_the_function_of_its_user():
    begun = []
    loader = DataLoader(range(2), num_workers=1, worker_init_fn=begun.append)
    let_workers_outlive_signals(loader)
    wrapper = loader.worker_init_fn
    let_workers_outlive_signals(loader)
    let_workers_outlive_signals(range(2))
    assert loader.worker_init_fn is wrapper
    assert [*map(int, loader)] == [0, 1]
    assert begun == []  # in the worker


def test_a_worker_that_is_spawned_does_not_import_torchrec():
    """Its import takes twice as long as torch's alone."""
    code = (
        "import pickle, sys; pickle.load(sys.stdin.buffer);"
        "sys.exit('torch' in sys.modules)"
    )
    given = pickle.dumps(OutlivesSignals(print))
    subprocess.run([sys.executable, "-c", code], input=given, check=True)


@pytest.fixture
def sigchld():
    """Restore the handler of SIGCHLD."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("sigchld")
def test_the_death_of_a_worker_is_raised_behind_the_step():
    deaths, raised = WorkerDeaths(), []

    def torch_raises(*_):
        raised.append("worker")

    torch_raises.__module__ = "torch.utils.data._utils.signal_handling"
    signal.signal(signal.SIGCHLD, torch_raises)
    batches = deaths.watch(iter(range(3)))
    next(batches)
    os.kill(os.getpid(), signal.SIGCHLD)
    assert raised == []
    deaths.end_step()
    assert raised == ["worker"]
    os.kill(os.getpid(), signal.SIGCHLD)
    assert raised == ["worker"] * 2
    next(batches)
    deaths.close()
    os.kill(os.getpid(), signal.SIGCHLD)
    assert raised == ["worker"] * 3


def test_a_worker_that_is_out_of_memory_is_told_of_no_end():
    text = "DataLoader worker (pid 7) is killed by signal: "
    assert not is_of_worker(RuntimeError(f"{text}Killed."))
    assert is_of_worker(RuntimeError(f"{text}Terminated."))
