"""``torchx run`` of scripts as PERSIA's users write them; of each role one dies."""

import contextlib
import os
import signal

import numpy as np
import pytest

from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.job.member_record import MemberRecord
from persia_torchrec.job.registry import AddressBook
from tests.support.faults import kill
from tests.support.local_job import ONE_SLOT
from tests.support.ports import draw_port
from tests.support.processes import parent_of, wait_until
from tests.support.torchx_jobs import TorchxJob

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

NUM_BATCHES = 900
NUM_IDS = 50
BATCHES = f"""
import numpy as np
from persia_torchrec.persia.batch import IDTypeFeature, Label, PersiaBatch

def ids_of(number):
    return np.random.default_rng(number).integers(0, {NUM_IDS}, (8, 3), np.uint64)

def make_batch(number):
    samples = [np.unique(sample) for sample in ids_of(number)]
    labels = [Label(np.zeros((8, 1), dtype=np.float32))]
    return PersiaBatch([IDTypeFeature("item", samples)], labels=labels)
"""
LOADER = f"""
from batches import make_batch
from persia_torchrec.ctx import DataCtx

with DataCtx() as ctx:
    for number in range({NUM_BATCHES}):
        ctx.send_data(make_batch(number))
"""
TRAIN = """
import os, pathlib, time
import torch
from persia_torchrec.ctx import TrainCtx
from persia_torchrec.data import DataLoader, StreamingDataset
from persia_torchrec.embedding import EmbeddingConfig
from persia_torchrec.embedding.optim import SGD

class Sum(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, non_id_tensors, embeddings):
        return self.bias + sum(e.sum() for e in embeddings)

model = Sum()
with TrainCtx(
    model=model,
    embedding_optimizer=SGD(lr=1.0),
    dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    embedding_config=EmbeddingConfig((0, 0), weight_bound=0),
    mixed_precision=False,
) as ctx:
    for batch in DataLoader(StreamingDataset(3), embedding_staleness=4):
        output, _ = ctx.forward(batch)
        ctx.backward(-output)
        time.sleep(0.02)
print("through", os.environ["RANK"], flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.05)
"""
ROLES = ["server", "worker", "loader", "coordinator", "trainer"]


def write(folder):
    """Write the files of a job; return the component's arguments."""
    files = {
        "batches.py": BATCHES,
        "load.py": LOADER,
        "train.py": TRAIN,
        "embedding.yml": ONE_SLOT,
        "global.yml": "{}",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    return [
        *("--nn_worker", "train.py", "--data_loader", "load.py"),
        *("--embedding_config", "embedding.yml", "--global_config", "global.yml"),
        *("--servers", "2", "--nproc_per_node", "2"),
        *("--env", "PERSIA_CHECKPOINT_INTERVAL_S=1"),
    ]


def progress(book):
    return sum(MemberRecord(book, "trainer", rank).read().progress for rank in range(2))


def weights_of(book):
    """Return the weights of all ids; zeros where there is no row."""
    with contextlib.closing(
        EmbeddingClient.connect(book.addresses("server"), greeting=book.greeting)
    ) as client:
        (table,) = client.learn_tables()
        prefix = np.uint64(1 << 56)
        return client.read(table.name, np.arange(NUM_IDS, dtype=np.uint64) + prefix)


def kill_and_await(job, book, role, *, kills_torchrun=False):
    """Kill a process of a role, and wait until the next one takes part."""
    record = MemberRecord(book, role, 0)
    before, steps = record.process(), progress(book)
    pid = parent_of(before.pid) if kills_torchrun else before.pid
    kill(pid)
    wait_until(
        lambda: record.process() != before, f"{role} is back", details=job.output
    )
    wait_until(
        lambda: progress(book) > steps or "through" in job.output(),
        "training continues",
        details=job.output,
    )


def counted():
    batches = {}
    exec(BATCHES, batches)  # what the job runs
    ids = [np.unique(s) for n in range(NUM_BATCHES) for s in batches["ids_of"](n)]
    return np.bincount(np.concatenate(ids).astype(np.int64), minlength=NUM_IDS)


def test_a_job_survives_the_death_of_a_process_of_each_role(tmp_path):
    port = draw_port()
    arguments = [*write(tmp_path), "--port", str(port)]
    component = "persia.train"
    with TorchxJob(tmp_path, component, *arguments, cwd=tmp_path) as job:
        job.has_printed("trainer 1 joined")
        with contextlib.closing(AddressBook.join("localhost", port)) as book:
            wait_until(lambda: progress(book) > 20, "it trains", details=job.output)
            for role in ROLES:
                kill_and_await(job, book, role)
            kill_and_await(job, book, "trainer", kills_torchrun=True)
            for rank in range(2):
                job.has_printed(f"through {rank}")
            weights = weights_of(book)
            (tmp_path / "go").touch()
        ended = job.wait()
    assert ended.status == 0, ended.output
    assert np.array_equal(weights, np.repeat(counted()[:, None], 4, axis=1))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_job_continues_when_it_is_started_again_with_its_folder(tmp_path, number):
    port, saved = draw_port(), tmp_path / "saved"
    arguments = [*write(tmp_path), "--port", str(port), "--run_dir", str(saved)]
    component = "persia.train"
    with TorchxJob(tmp_path, component, *arguments, cwd=tmp_path) as job:
        job.has_printed("trainer 1 joined")
        with contextlib.closing(AddressBook.join("localhost", port)) as book:
            wait_until(lambda: progress(book) > 400, "it trains", details=job.output)
        os.kill(job._torchx.pid, number)
        wait_until(lambda: not job.pids(), "all processes end", details=job.output)
        assert "automatic checkpoint" in job.output()
    with TorchxJob(tmp_path, component, *arguments, cwd=tmp_path) as job:
        job.has_printed(f"training resumes from {saved}")
        for rank in range(2):
            job.has_printed(f"through {rank}")
        with contextlib.closing(AddressBook.join("localhost", port)) as book:
            weights = weights_of(book)
        (tmp_path / "go").touch()
        ended = job.wait()
    assert ended.status == 0, ended.output
    assert np.array_equal(weights, np.repeat(counted()[:, None], 4, axis=1))
