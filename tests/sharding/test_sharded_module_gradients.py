"""Gradients reach the ids they belong to, or are counted as missed."""

import numpy as np
import pytest
import torch
from torchrec import PoolingType

from persia_torchrec import SGD, Adagrad
from persia_torchrec.client.client import BatchNumber
from tests.sharding.shared_table import DIM, tables
from tests.support.remote_job import (
    Bags,
    HeldPushes,
    RemoteJob,
    ids_of,
    kjt_of,
    remote_modules,
)


def push(model, bags, scales=None):
    """Look bags up; their pooled vectors have the gradients ``scales``, or all 1."""
    pooled = model(kjt_of(bags)).values()
    scales = torch.ones_like(pooled) if scales is None else torch.tensor(scales)
    pooled.backward(scales.expand_as(pooled).contiguous())


def moves(job, before):
    """Return how far the rows went of ids 0, 1, ..., in the direction of -gradient."""
    return (before - job.read("term", range(len(before))))[:, :DIM]


@pytest.fixture
def model(job):
    return job.put_on_servers(Bags(tables()), SGD(1.0))


def make_rows(job, model, ids):
    """Look ids up in training, so that they have rows; push nothing."""
    model(kjt_of({"ad": [list(ids)], "query": [[]]})).values()
    for module in remote_modules(model):
        module.pipeline.flush()
    return job.read("term", ids)


def assert_moves(moves_ND, expected_N):
    np.testing.assert_allclose(
        moves_ND, np.repeat(np.array(expected_N)[:, None], DIM, axis=1), rtol=1e-4
    )


def test_a_repeated_id_gets_the_sum(job, model):
    before = make_rows(job, model, range(4))
    push(model, {"ad": [[1, 1, 2]], "query": [[]]})
    assert_moves(moves(job, before), [0, 2, 1, 0])


def test_an_id_of_two_features_gets_the_sum_of_both(job, model):
    before = make_rows(job, model, range(4))
    scales = [[3.0] * DIM + [5.0] * DIM]
    push(model, {"ad": [[1]], "query": [[1, 2]]}, scales)
    assert_moves(moves(job, before), [0, 8, 5, 0])


def test_an_id_is_updated_once_a_batch(job):
    # Two updates by g and h would leave an accumulator of g * g + h * h.
    optimizer = Adagrad(lr=1.0, initial_accumulator_value=0, eps=0)
    model = job.put_on_servers(Bags(tables()), optimizer)
    before = make_rows(job, model, range(2))
    scales = [[3.0] * DIM + [5.0] * DIM]
    push(model, {"ad": [[1, 1]], "query": [[1]]}, scales)
    assert_moves(moves(job, before), [0, 1])
    assert job.read("term", [1])[0, DIM:].tolist() == [11.0**2] * DIM
    assert job.total("requests_update") == 2 * job.client.num_servers


def test_samples_without_ids_shift_nothing(job, model):
    before = make_rows(job, model, range(6))
    scales = [[10.0 * sample] * 2 * DIM for sample in range(1, 6)]
    ad = [[], [1], [], [2, 3], []]
    query = [[4], [], [], [], [5]]
    push(model, {"ad": ad, "query": query}, scales)
    assert_moves(moves(job, before), [0, 20, 40, 40, 10, 50])


def test_a_mean_divides_the_gradient_by_the_number_of_ids(job):
    model = job.put_on_servers(Bags(tables(PoolingType.MEAN)), SGD(1.0))
    before = make_rows(job, model, range(5))
    push(model, {"ad": [[1, 1, 2, 3], []], "query": [[], [4]]})
    assert_moves(moves(job, before), [0, 0.5, 0.25, 0.25, 1])


def test_a_batch_without_ids_moves_nothing(job, model):
    before = make_rows(job, model, range(3))
    push(model, {"ad": [[], []], "query": [[], []]})
    assert_moves(moves(job, before), [0, 0, 0])
    assert job.total("open_batches") == 0


def test_a_batch_that_gets_no_backward_pass_moves_nothing(job, model):
    before = make_rows(job, model, range(3))
    for _ in range(3):  # each waits for the permit of the one before
        model(kjt_of({"ad": [[1]], "query": [[2]]})).values()
    push(model, {"ad": [[1]], "query": [[2]]})
    assert_moves(moves(job, before), [0, 1, 1])
    assert job.total("open_batches") == 0


class TestEviction:
    """One server with room for four rows; another trainer's lookups evict."""

    @pytest.fixture
    def job(self):
        with RemoteJob(num_servers=1, capacity_rows=4) as job:
            yield job

    def evict_by(self, job, ids):
        number = BatchNumber(BatchNumber.new_stream(), 1)
        job.client.pull([("term", job.client.split(ids_of(ids)))], batch=number)

    def num_missed(self, model):
        (module,) = remote_modules(model)
        module.pipeline.flush()
        return module.pipeline.tally.total.num_missed

    def test_the_gradient_of_an_evicted_row_is_counted_and_moves_nothing(
        self, job, model
    ):
        pooled = model(kjt_of({"ad": [[0, 1], [2, 3]], "query": [[], [3]]})).values()
        self.evict_by(job, [10, 11])  # instead of 0 and 1
        before = job.read("term", [0, 1, 2, 3, 10, 11])
        assert not before[:2].any()
        pooled.sum().backward()
        after = job.read("term", [0, 1, 2, 3, 10, 11])
        assert_moves(before - after, [0, 0, 1, 2, 0, 0])
        assert self.num_missed(model) == 2
        assert job.total("gradients_missed") == 2
        assert job.total("rows") == 4

    def test_when_all_rows_are_evicted_nothing_moves(self, job, model):
        pooled = model(kjt_of({"ad": [[0, 1, 2]], "query": [[3]]})).values()
        self.evict_by(job, [10, 11, 12, 13])
        before = job.read("term", [10, 11, 12, 13])
        pooled.sum().backward()
        assert np.array_equal(job.read("term", [10, 11, 12, 13]), before)
        assert not job.read("term", [0, 1, 2, 3]).any()
        assert self.num_missed(model) == 4
        assert job.total("gradients_missed") == 4

    def test_a_row_that_came_back_gets_its_gradient(self, job, model):
        pooled = model(kjt_of({"ad": [[0]], "query": [[]]})).values()
        fresh = job.read("term", [0])
        self.evict_by(job, [10, 11, 12, 13])
        self.evict_by(job, [0])
        pooled.sum().backward()
        assert_moves(fresh - job.read("term", [0]), [1])
        assert self.num_missed(model) == 0

    def test_a_batch_of_more_ids_than_rows_keeps_the_last_of_them(self, job, model):
        pooled = model(kjt_of({"ad": [[0, 1, 2, 3, 4, 5]], "query": [[]]})).values()
        assert (pooled[:, :DIM] != 0).all()
        before = job.read("term", range(6))
        assert before.any(axis=1).tolist() == [False, False, True, True, True, True]
        pooled.sum().backward()
        assert_moves(before - job.read("term", range(6)), [0, 0, 1, 1, 1, 1])
        assert self.num_missed(model) == 2

    def test_the_next_batch_trains_as_if_nothing_had_been_missed(self, job, model):
        pooled = model(kjt_of({"ad": [[0, 1, 2, 3]], "query": [[]]})).values()
        self.evict_by(job, [10, 11, 12, 13])
        pooled.sum().backward()
        push(model, {"ad": [[0]], "query": [[12]]})
        assert self.num_missed(model) == 4
        assert job.total("open_batches_max") == 1


def give(out, kept):
    kept.append(torch.ones_like(out))
    out.backward(kept[-1])


def give_a_view(out, kept):
    kept.append(torch.ones(4, out.shape[1]))
    out.backward(kept[-1][: len(out)])


def give_through_a_reshape(out, kept):
    kept.append(torch.ones(out.numel()))
    out.reshape(-1).backward(kept[-1])


def keep_by_a_hook(out, kept):
    out.register_hook(kept.append)
    (3 * out - 2 * out).sum().backward()


@pytest.mark.parametrize("staleness", [1, 4])
@pytest.mark.parametrize(
    "run", [give, give_a_view, give_through_a_reshape, keep_by_a_hook]
)
def test_a_gradient_may_be_written_right_after_the_backward_pass(job, run, staleness):
    model = job.put_on_servers(Bags(tables()), SGD(1.0), staleness=staleness)
    before = make_rows(job, model, range(4))
    held, kept = HeldPushes(model), []
    run(model(kjt_of({"ad": [[1, 2]], "query": [[]]})).values(), kept)
    kept[-1].zero_()
    held.may_push.set()
    for module in remote_modules(model):
        module.pipeline.flush()
    assert_moves(moves(job, before), [0, 1, 1, 0])
