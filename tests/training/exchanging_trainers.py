"""What each of two trainers does whose own group waits for 0.3 s at most."""

import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.client.codec import BatchCount
from persia_torchrec.data import CsvDataset, IdColumn, LabelColumn
from persia_torchrec.datasets.work_queue import _from_first
from persia_torchrec.errors import ConfigError
from persia_torchrec.training.checkpoint import (
    ContextCheckpoints,
    at_first,
    everywhere,
    from_all,
    save_dense_beside,
)
from persia_torchrec.training.data_state import require_same_data
from persia_torchrec.training.recovery import Recovery
from persia_torchrec.training.schedule import CheckpointClock, RecoveryConfig
from tests.support.processes import DEADLINE_S

TIMEOUT_S = 0.3
SLOW_S = 1.0


def be_slow(rank=0):
    """Let a trainer be as slow as servers that write many rows; return the own rank."""
    if dist.get_rank() == rank:
        time.sleep(SLOW_S)
    return dist.get_rank()


class SlowServers:
    """What a recovery asks of a client of servers that take their time."""

    generation, recovery_s, batches = 0, 600.0, BatchCount()
    checkpoints = SimpleNamespace(job="")

    def begin_generation(self, generation):
        pass

    def clear(self):
        time.sleep(SLOW_S)


class SlowTask:
    def wait(self):
        time.sleep(SLOW_S)


class SlowState:
    """A part of the dense half that rank 0 needs long to write."""

    def state_dict(self):
        be_slow()
        return {"number": 3}


def exchange(folder):
    """Do all that lets trainers wait for one of them; then find the limit, too."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=DEADLINE_S))
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S))
    for work in (tell, resume, load, save, ask_the_clock, share_files):
        work(folder)
        print(f"{work.__name__} is done", flush=True)
    be_slow()
    with pytest.raises(RuntimeError, match=r"Timed out|closed by peer"):
        dist.all_reduce(torch.zeros(1))


def tell(_):
    assert at_first(be_slow, int) == 0
    assert everywhere(lambda: be_slow(1), int) == 0
    assert from_all(lambda: be_slow(1), int) == [0, 1]


def resume(folder):
    sharders = [SimpleNamespace(remote_tables=SimpleNamespace(pipelines=()))]
    recovery = Recovery(
        RecoveryConfig(folder=folder, interval_s=0), SlowServers(), sharders, {}
    )
    recovery.begin_generation()
    recovery.resume(is_restart=True)


def load(_):
    checkpoints = ContextCheckpoints(SlowServers(), lambda: None)
    checkpoints._is_loading = True
    checkpoints._load = SlowTask() if dist.get_rank() == 0 else None
    checkpoints.wait_for_load()


def save(folder):
    save_dense_beside(None, {"slow": SlowState()}, Folder(folder))


def ask_the_clock(_):
    clock = CheckpointClock(interval_s=0.0, save_steps=1)
    clock.is_time()
    be_slow()
    clock.is_time()


def share_files(folder):
    """Trainers whose lists of files differ all say so, with or without a queue."""
    rank = be_slow()
    assert _from_first(7 + rank, 2**60) == [7, 2**60]
    with pytest.raises(ConfigError, match=r"trainer 1 lacks \['0'\] and has \['1'\]"):
        _from_first(7, items=[f"{rank}", "2"])
    paths = [Path(f"{folder}-{rank}-{name}.csv") for name in "ab"]
    for path in paths:
        path.write_text("1,1\n" * 9)
    columns = IdColumn("id"), LabelColumn("label")
    own = {"partition_count": 2, "partition_index": rank}
    with pytest.raises(ConfigError, match=r"trainer 1 lacks \['run-0-a.csv \(36 bytes"):
        require_same_data({"data": CsvDataset(paths, 2, columns, **own)})
    require_same_data({"data": CsvDataset(paths, 2, columns)})  # files of its own
