"""The bound on staleness, as the servers see it."""

import gc

import numpy as np
import pytest
import torch
from torchrec import EmbeddingBagConfig

from persia_torchrec import SGD
from persia_torchrec.errors import StalenessError
from persia_torchrec.lookup import bags
from tests.support.processes import wait_until
from tests.support.remote_job import Bags, RemoteJob, ids_of, kjt_of, remote_modules

pytestmark = pytest.mark.slow

TABLES = [EmbeddingBagConfig(1000, 64, name="term", feature_names=["ad"])]


def random_batches(num, num_samples=64):
    generator = torch.Generator().manual_seed(0)
    for _ in range(num):
        ids = torch.randint(1000, (num_samples, 8), generator=generator)
        yield kjt_of({"ad": ids.tolist()})


def train(job, model, num_steps):
    """A plain loop; yields after each backward pass."""
    for batch in random_batches(num_steps):
        model(batch).values().square().mean().backward()
        yield
    (module,) = remote_modules(model)
    module.pipeline.flush()


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_a_plain_loop_stays_within_the_bound(job, staleness):
    model = job.put_on_servers(Bags(TABLES), SGD(0.1), staleness=staleness)
    num_steps = sum(1 for _ in train(job, model, 50))
    counters = job.client.counters()
    assert max(c["open_batches_max"] for c in counters) <= max(staleness, 1)
    assert {c["open_batches"] for c in counters} == {0}
    assert {c["requests_update"] for c in counters} == {num_steps}
    assert job.total("gradients_missed") == 0


def test_at_staleness_0_an_update_is_applied_when_its_backward_pass_ends(job):
    model = job.put_on_servers(Bags(TABLES), SGD(0.1), staleness=0)
    for _ in train(job, model, 20):
        assert job.total("open_batches") == 0
        assert job.total("updates_queued") == 0


@pytest.mark.parametrize("staleness", [1, 4])
def test_pulls_ahead_fill_the_bound_and_no_more(job, staleness):
    model = job.put_on_servers(Bags(TABLES), SGD(0.1), staleness=staleness)
    (module,) = remote_modules(model)
    started = [
        module.start(batch, is_training=True) for batch in random_batches(staleness + 2)
    ]
    for pull in started[:staleness]:
        pull.wait()
    assert {c["open_batches"] for c in job.client.counters()} == {staleness}
    for pull in started:
        model(pull).values().sum().backward()
    module.pipeline.flush()
    counters = job.client.counters()
    assert {c["open_batches_max"] for c in counters} == {staleness}
    assert {c["requests_update"] for c in counters} == {staleness + 2}


def test_at_staleness_0_and_1_each_batch_sees_every_update_before_it():
    rows = {}
    for staleness in (0, 1):
        with RemoteJob() as job:
            model = job.put_on_servers(Bags(TABLES), SGD(0.1), staleness=staleness)
            for _ in train(job, model, 30):
                pass
            rows[staleness] = job.read("term", range(1000))
    assert np.array_equal(rows[0], rows[1])


def test_batches_pulled_ahead_see_the_rows_before_their_updates(job):
    model = job.put_on_servers(Bags(TABLES), SGD(1.0), staleness=2)
    (module,) = remote_modules(model)
    batch = kjt_of({"ad": [[7]]})
    first, second = (module.start(batch, is_training=True) for _ in range(2))
    first_row, second_row = (one.wait().outputs.rows[0] for one in (first, second))
    assert torch.equal(first_row, second_row)
    for started in (first, second):
        module(started).values().sum().backward()
    module.pipeline.flush()
    moved = first_row.numpy() - job.read("term", [7])
    np.testing.assert_allclose(moved, np.full((1, 64), 2.0), rtol=1e-5)


def test_a_pull_beyond_the_bound_waits_and_its_wait_ends_in_an_error(job):
    model = job.put_on_servers(Bags(TABLES), SGD(0.1), staleness=2)
    (module,) = remote_modules(model)
    kept = [model(batch) for batch in random_batches(2)]
    batch = {"ad": bags.Bags(ids_of([7]), np.array([1], dtype=np.int32))}
    late = module.pipeline.start(batch, training=True)
    with pytest.raises(StalenessError, match=r"within 0\.2 s.*its backward pass\?"):
        late.wait(0.2)
    kept.pop().values().sum().backward()
    late.wait()


def test_a_batch_that_is_dropped_makes_room_for_another(job):
    model = job.put_on_servers(Bags(TABLES), SGD(0.1), staleness=2)
    for batch in random_batches(6):
        model(batch)
    kept = model(batch)
    model(batch).values().sum().backward()
    kept.values().sum().backward()
    (module,) = remote_modules(model)
    module.pipeline.flush()
    assert job.total("open_batches") == 0


def test_an_interrupt_while_an_update_is_sent_stops_no_later_batch(job, monkeypatch):
    model = job.put_on_servers(Bags(TABLES), SGD(0.1), staleness=1)
    (module,) = remote_modules(model)
    batch = kjt_of({"ad": [[7]]})
    interrupted = model(batch).values().sum()
    put = module.pipeline.put

    def interrupt(_):
        monkeypatch.setattr(module.pipeline, "put", put)
        raise KeyboardInterrupt

    monkeypatch.setattr(module.pipeline, "put", interrupt)
    with pytest.raises(KeyboardInterrupt):
        interrupted.backward()
    before = job.read("term", [7])
    started = module.start(batch, is_training=True)
    started.wait(5.0)  # the graph of the interrupted step is alive, as in a notebook
    model(started).values().sum().backward()
    module.pipeline.flush()
    np.testing.assert_allclose(job.read("term", [7]), before - 0.1, rtol=1e-5)
    del interrupted
    gc.collect()  # frames of the error refer to each other
    wait_until(lambda: not job.total("open_batches"), "the batch is given up")
