"""One checkpoint of both halves: training continues exactly."""

import errno
import json
import os
import pickle  # as who changes a file would
from pathlib import Path
from traceback import StackSummary

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, save
from torch.distributed.checkpoint.api import CheckpointException
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from persia_torchrec import (
    AdmitProbability,
    EmbeddingClient,
    RemoteEmbeddingBagCollectionSharder,
    TableSettings,
)
from persia_torchrec.embedding.optim import Adam
from persia_torchrec.errors import CheckpointError
from persia_torchrec.training import checkpoint
from persia_torchrec.training.checkpoint import load_checkpoint, save_checkpoint
from tests.support.models import Tower, tables_of
from tests.support.remote_job import Servers, kjt_of, shard
from tests.support.servers import DEADLINE_S

pytestmark = pytest.mark.slow

TABLES = tables_of(["first", "second"], 50)


class Run:
    """One trainer's model on servers of its own."""

    def __init__(
        self, num_servers, *, seed, staleness=0, is_combined=False, admission=None
    ):
        self.servers = Servers(num_servers)
        self.servers.__enter__()
        self.client = EmbeddingClient.connect(
            self.servers.addresses, timeout_s=DEADLINE_S
        )
        torch.manual_seed(seed)
        self.sharder = RemoteEmbeddingBagCollectionSharder(
            *(self.client, Adam(0.1), staleness),
            tables={t.name: TableSettings(admission=admission) for t in TABLES},
        )
        self.model = shard(Tower(TABLES), self.sharder)
        dense = dict(self.model.module.over.named_parameters())
        if is_combined:  # with that of the tables, as TorchRec's examples do
            adam = KeyedOptimizerWrapper(dense, lambda p: torch.optim.Adam(p, lr=0.05))
            self.optimizer = CombinedOptimizer([self.model.fused_optimizer, adam])
            self.optimizer.save_param_groups(True)
            schedulable = adam
        else:
            self.optimizer = torch.optim.Adam(dense.values(), lr=0.05)
            schedulable = self.optimizer
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(schedulable, 0.9)
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "tables": self.sharder.optimizer,
            "num_batches": 0,
        }

    def train(self, num_batches):
        losses = []
        for _ in range(num_batches):
            seed = self.state["num_batches"]
            loss = self.model(batch_of(seed)).sub(torch.arange(6) % 2).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.state["num_batches"] += 1
            losses.append(loss.item())
        self.sharder.flush()
        return losses

    def save(self, path, **settings):
        return save_checkpoint(
            path, self.state, self.client, [self.sharder], **settings
        )

    def load(self, path):
        return load_checkpoint(path, self.state, self.client)

    def close(self):
        self.sharder.close()
        self.client.close()
        self.servers.stop()


def batch_of(seed):
    rng = np.random.default_rng(seed)
    return kjt_of({t.name: rng.integers(0, 30, (6, 2)).tolist() for t in TABLES})


@pytest.fixture
def start(request, group):
    runs = []

    def start(*args, **settings):
        runs.append(Run(*args, **settings))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


@pytest.mark.parametrize(
    ("num_servers", "is_combined"), [(1, False), (3, False), (2, True)]
)
def test_a_resumed_run_has_the_losses_of_one_that_was_not_interrupted(
    start, tmp_path, num_servers, is_combined
):
    run = start(1, seed=0, is_combined=is_combined)
    run.train(5)
    saved = run.save(tmp_path, step=5)
    expected = run.train(5)
    resumed = start(num_servers, seed=1, is_combined=is_combined)
    assert resumed.load(tmp_path) == saved
    assert (saved.step, resumed.state["num_batches"]) == (5, 5)
    assert resumed.train(5) == expected
    rates = {group["lr"] for group in resumed.optimizer.param_groups}
    assert list(rates - {0.1}) == [pytest.approx(0.05 * 0.9**10)]


def test_a_resumed_run_draws_the_ids_of_one_that_was_not_interrupted(start, tmp_path):
    admission = AdmitProbability(0.4)
    run = start(1, seed=0, admission=admission)
    run.train(2)
    saved = run.save(tmp_path)
    expected = run.train(3)
    resumed = start(3, seed=1, admission=admission)
    assert resumed.load(tmp_path) == saved
    assert saved.num_batches == 2
    assert resumed.train(3) == expected
    assert sum(resumed.client.num_rows()) == sum(run.client.num_rows())
    assert sum(run.client.num_rows()) < sum(len(table) for table in ids_seen(5))


def ids_seen(num_batches):
    """Return the different ids of each table in the first batches."""
    batches = [batch_of(seed).to_dict() for seed in range(num_batches)]
    return [{i for b in batches for i in b[f].values().tolist()} for f in batches[0]]


def test_without_the_dense_optimizers_state_the_losses_would_differ(start, tmp_path):
    run = start(1, seed=0)
    run.train(5)
    run.save(tmp_path)
    expected = run.train(5)
    resumed = start(1, seed=1)
    del resumed.state["optimizer"]
    resumed.load(tmp_path)
    assert resumed.train(5) != pytest.approx(expected, rel=1e-3)


def test_the_dense_half_does_not_look_for_rows_that_the_servers_save(start, tmp_path):
    run = start(1, seed=0)
    run.train(1)
    run.state["again"] = run.model.state_dict()  # a state is saved like a model
    saved = run.save(tmp_path)
    names = FileSystemReader(Path(saved.path) / "dense").read_metadata()
    assert not any("embedding_bags" in name for name in names.state_dict_metadata)
    assert not any("embedding_bags" in name for name in names.planner_data)
    resumed = start(1, seed=1)
    resumed.state["again"] = resumed.model.state_dict()
    resumed.load(tmp_path)
    assert torch.equal(
        resumed.state["again"]["over.weight"], run.model.module.over.weight
    )


def test_updates_on_their_way_are_waited_for(start, tmp_path):
    run = start(2, seed=0, staleness=3)
    for seed in range(4):
        run.model(batch_of(seed)).sum().backward()
    run.save(tmp_path)
    read = [run.client.read(t.name, np.arange(30, dtype=np.uint64)) for t in TABLES]
    resumed = start(1, seed=1)
    resumed.load(tmp_path)
    for table, rows in zip(TABLES, read, strict=True):
        mine = resumed.client.read(table.name, np.arange(30, dtype=np.uint64))
        assert np.array_equal(mine, rows)


def test_a_half_that_fails_leaves_the_previous_checkpoint(start, tmp_path, monkeypatch):
    run = start(2, seed=0)
    run.train(2)
    first = run.save(tmp_path)
    run.train(2)

    def fail(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint, "save_state", fail)
    with pytest.raises(CheckpointError, match="trainer 0: OSError: no space left"):
        run.save(tmp_path)
    monkeypatch.undo()
    run.servers.servers[1].stop()
    with pytest.raises(CheckpointError, match=r"trainer 0: .*embedding server 1"):
        run.save(tmp_path)
    assert list(Path(tmp_path).iterdir()) == [Path(first.path)]
    resumed = start(1, seed=1)
    assert resumed.load(tmp_path).path == first.path
    assert resumed.state["num_batches"] == 2


def fill(path, num_bytes_left):
    """Fill the disk of a file but for some bytes."""
    with path.open("wb") as file:
        disk = os.statvfs(path.parent)
        num_bytes = disk.f_bavail * disk.f_bsize - num_bytes_left
        os.posix_fallocate(file.fileno(), 0, num_bytes)


@pytest.mark.parametrize("tmpfs", ["size=4m"], indirect=True)
@pytest.mark.parametrize("has_room_for_a_part", [False, True])
def test_a_full_disk_is_the_cause_and_leaves_nothing_of_what_failed(
    start, tmpfs, has_room_for_a_part
):
    disk = Path(tmpfs).parents[1] / "root" / "tmp"
    run = start(2, seed=0)
    run.state["large"] = torch.zeros(200_000)  # torch writes parts of a file before
    run.train(2)
    ballast, first = disk / "ballast", run.save(disk / "run")
    before = sorted(disk.rglob("*"))
    of_dense = sum(4096 + p.stat().st_size for p in Path(first.path, "dense").iterdir())
    fill(ballast, of_dense // 2 if has_room_for_a_part else 0)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="No space left on device") as told:
            run.save(disk / "run")
        assert "\n" not in str(told.value)
    ballast.unlink()
    assert sorted(disk.rglob("*")) == before
    assert run.save(disk / "run").path > first.path


def test_each_trainer_that_failed_tells_its_own_cause(start, tmp_path, monkeypatch):
    run = start(1, seed=0)
    full = OSError(errno.ENOSPC, "No space left on device", "a file")
    denied, stack = RuntimeError("no access\nframe #0"), StackSummary()

    def fail_at(*failures):
        def fail(*_, **__):
            raise CheckpointException(
                "", {rank: (exc, stack) for rank, exc in failures}
            )

        monkeypatch.setattr(checkpoint, "save_state", fail)
        with pytest.raises(CheckpointError) as told:
            run.save(tmp_path)
        return str(told.value)

    first = fail_at((0, full), (1, denied))
    assert first.startswith("trainer 0: No space left on device (the dense half in ")
    only = fail_at((0, denied), (1, full))
    assert only.startswith("trainer 0: RuntimeError: no access frame #0 (the dense ")


def test_a_checkpoint_of_the_servers_alone_has_no_dense_half(start, tmp_path):
    run = start(1, seed=0)
    run.train(1)
    run.client.checkpoints.dump(tmp_path)
    with pytest.raises(CheckpointError, match="must have both halves"):
        run.load(tmp_path)


class Command:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def replace_list(folder, command):
    (folder / ".metadata").write_bytes(pickle.dumps({"a": command}))


def replace_numbers(folder, command):
    """Put a command where the scheduler's numbers are, in a checkpoint of torch's."""
    save({"num_batches": command}, checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize("replace", [replace_list, replace_numbers])
def test_nothing_that_a_file_names_is_run(start, tmp_path, replace):
    run, made = start(1, seed=0), tmp_path / "made"
    run.state = {"num_batches": 3}
    dense = Path(run.save(tmp_path).path) / "dense"
    assert dense.exists()
    replace(dense, Command(str(made)))
    manifest = dense.parent / "manifest.json"
    named = json.loads(manifest.read_text())
    del named["files"]  # who replaces a file can do that, too
    manifest.write_text(json.dumps(named))
    with pytest.raises(CheckpointError, match="mkdir"):
        run.load(tmp_path)
    assert not made.exists()


def test_missing_parameters_of_the_dense_half_are_named(start, tmp_path):
    run = start(1, seed=0)
    run.train(1)
    run.save(tmp_path)
    run.state["other"] = torch.zeros(3)
    with pytest.raises(CheckpointError, match="other"):
        run.load(tmp_path)
