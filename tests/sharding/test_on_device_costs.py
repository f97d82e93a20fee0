"""What a step costs: 26 tables are no more work than 2.

Counted are operators of torch that no other one
called, of all threads; calls of Python functions in the trainer's threads; and bytes.
"""

import sys
import threading

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor, PoolingType

from persia_torchrec import SGD, RemoteEmbeddingBagCollectionSharder
from persia_torchrec.sharding.on_device import RowsOnDevice
from tests.support.remote_job import Bags, RemoteJob

pytestmark = pytest.mark.slow

MIXED = [PoolingType.SUM, PoolingType.MEAN]


class Steps:
    """A model of some tables, and what takes its steps."""

    def __init__(self, job, num_tables, poolings, dim=4, num_samples=64):
        names = [f"t{t}" for t in range(num_tables)]
        self.tables = [
            EmbeddingBagConfig(
                10,
                dim,
                name=name,
                feature_names=[name],
                pooling=poolings[t % len(poolings)],
            )
            for t, name in enumerate(names)
        ]
        # One after the other: a number of calls that is the same each time.
        sharder = RemoteEmbeddingBagCollectionSharder(job.client, SGD(1.0))
        self.model = job.shard(Bags(self.tables), [sharder])
        rng = np.random.default_rng(0)
        ids = torch.from_numpy(rng.integers(0, 10**6, num_tables * num_samples * 2))
        lengths = torch.full((num_tables * num_samples,), 2, dtype=torch.int32)
        self.batch = KeyedJaggedTensor(names, ids, lengths=lengths)
        self.grad = torch.ones(num_samples, num_tables * dim)
        self.take(3)

    def take(self, num=1):
        for _ in range(num):
            self.model(self.batch).values().backward(self.grad)


def operators(steps):
    """Return the names of the operators of a step that no other one called."""
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, experimental_config=config) as profiled:
        steps.take()

    def is_inner(event):
        parent = event.cpu_parent
        while parent is not None:
            if parent.name.startswith("aten::"):
                return True
            parent = parent.cpu_parent
        return False

    events = [e for e in profiled.events() if e.name.startswith("aten::")]
    return [event.name for event in events if not is_inner(event)]


def calls(steps, monkeypatch):
    """Return how many functions of Python a step calls in the trainer's threads."""
    counted = []
    main = threading.current_thread()

    def note(frame, event, _):
        thread = threading.current_thread()
        if is_on.is_set() and event == "call" and not thread.name.startswith("server"):
            counted.append(frame.f_code.co_qualname)

    is_on = threading.Event()
    threading.setprofile(note)
    try:
        made = steps()
        assert threading.current_thread() is main
        sys.setprofile(note)
        is_on.set()
        made.take(4)
    finally:
        is_on.clear()
        sys.setprofile(None)
        threading.setprofile(None)
    return len(counted) / 4


@pytest.mark.parametrize("poolings", [MIXED[:1], MIXED])
def test_26_tables_are_as_many_operators_as_2(poolings):
    found = []
    for num_tables in (2, 26):
        with RemoteJob() as job:
            found.append(operators(Steps(job, num_tables, poolings)))
    few, many = found
    assert len(many) <= 40, many
    assert len(many) <= len(few) + 4, (few, many)


@pytest.mark.parametrize("poolings", [MIXED[:1], MIXED])
def test_26_tables_are_hardly_more_calls_than_2(poolings, monkeypatch):
    found = []
    for num_tables in (2, 26):
        with RemoteJob() as job:
            found.append(
                calls(lambda: Steps(job, num_tables, poolings), monkeypatch)  # noqa: B023
            )
    few, many = found
    assert many <= 1.3 * few, found


def test_a_step_allocates_rows_once_and_their_gradient_once(monkeypatch):
    """Beside what is pooled and the indices; on a GPU rows are there once more."""
    staged, build = [], RowsOnDevice._index

    def note(self, batch, group):
        index = build(self, batch, group)
        staged.append(index.flat.untyped_storage().nbytes())
        return index

    with RemoteJob() as job:
        steps = Steps(job, 8, MIXED[:1], dim=64, num_samples=512)
        names = [table.name for table in steps.tables]
        ids = [steps.batch[name].values() for name in names]
        of_rows = sum(len(of_table.unique()) for of_table in ids) * 64 * 4
        monkeypatch.setattr(RowsOnDevice, "_index", note)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            steps.take()
        sizes = [e.self_cpu_memory_usage for e in found.events()]
        allocated = sum(size for size in sizes if size > 0)
        num_ids = len(steps.batch.values())
        of_batch = num_ids * (8 + 4) + 4 * len(steps.batch.lengths())
        assert sum(staged) <= 4 * 4 * num_ids  # the indices alone
        assert of_rows <= allocated <= of_rows + steps.grad.nbytes + 2 * of_batch
