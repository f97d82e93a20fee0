from types import MappingProxyType

import pytest

from persia_torchrec.data import DataLoader, IterableDataset, PersiaTrainingBatch
from persia_torchrec.errors import ConfigError
from persia_torchrec.persia.loader import entered, entered_context, leave_context
from tests.support.local_job import batch_of


class Batches(IterableDataset):
    """As many batches as one likes, which end in an error if one says so."""

    def __init__(self, num: int, error: Exception | None = None) -> None:
        super().__init__()
        self.num = num
        self.error = error

    def __iter__(self):
        for number in range(self.num):
            yield batch_of([number])
        if self.error is not None:
            raise self.error


class Context:
    """Notes what a loader asks of it."""

    trained, takes_ids = MappingProxyType({}), False
    count = staticmethod(iter)
    skip = staticmethod(lambda batches, dataset: iter(batches))

    def __init__(self) -> None:
        self.started = []
        self.settings = set()
        self.waits_s = []

    def note_wait(self, seconds):
        self.waits_s.append(seconds)

    def start_lookup(self, batch, settings):
        self.started.append(batch)
        self.settings.add(settings)
        return PersiaTrainingBatch(
            pull=len(self.started),
            non_id_type_features=batch.non_id_type_features,
            labels=batch.labels,
            is_training=True,
            meta=None,
            batch_id=None,
        )


@pytest.fixture
def context():
    context = Context()
    entered.append(context)
    yield context
    leave_context(context)


def pulls(loader):
    return [batch.pull for batch in loader]


def test_the_context_learns_how_long_each_batch_was_waited_for(context):
    assert len(pulls(DataLoader(Batches(3)))) == 3
    assert len(context.waits_s) == 3
    assert all(0 <= seconds < 60 for seconds in context.waits_s)


def test_every_batch_is_looked_up_in_the_order_of_the_dataset(context):
    loader = DataLoader(Batches(5))
    assert pulls(loader) == [1, 2, 3, 4, 5]
    ids = [batch.id_type_features[0].ids.tolist() for batch in context.started]
    assert ids == [[0], [1], [2], [3], [4]]
    assert pulls(loader) == [6, 7, 8, 9, 10]


def test_lookups_are_no_further_ahead_than_the_buffer(context):
    batches = iter(DataLoader(Batches(100), forward_buffer_size=2))
    for taken in range(1, 20):
        next(batches)
        # Two wait, and a third was started and waits for its place.
        assert len(context.started) <= taken + 3
    batches.close()


def test_the_context_learns_how_far_lookups_may_be_ahead(context):
    pulls(
        DataLoader(
            Batches(1), forward_buffer_size=3, num_workers=4, embedding_staleness=5
        )
    )
    (settings,) = context.settings
    assert settings.forward_buffer_size == 3
    assert settings.num_workers == 4
    assert settings.embedding_staleness == 5


def test_a_reproducible_loader_looks_up_one_batch_at_a_time(context):
    pulls(DataLoader(Batches(1), num_workers=4, reproducible=True))
    (settings,) = context.settings
    assert settings.num_workers == 1


def test_an_error_of_the_dataset_reaches_the_loop(context):
    seen = []
    with pytest.raises(ValueError, match="the file is cut"):
        seen.extend(DataLoader(Batches(2, ValueError("the file is cut"))))
    assert len(context.started) == 2


def test_a_loader_belongs_to_the_innermost_context(context):
    inner = Context()
    entered.append(inner)
    assert entered_context() is inner
    pulls(DataLoader(Batches(2)))
    leave_context(inner)
    assert entered_context() is context
    pulls(DataLoader(Batches(3)))
    assert (len(inner.started), len(context.started)) == (2, 3)


def test_leaving_a_context_leaves_those_within_it():
    outer, inner = Context(), Context()
    entered.append(outer)
    entered.append(inner)
    leave_context(outer)
    leave_context(inner)
    assert entered_context() is None


def test_a_loader_outside_a_context_is_rejected():
    with pytest.raises(ConfigError, match=r"inside a context\. Use `with TrainCtx"):
        iter(DataLoader(Batches(1)))


@pytest.mark.parametrize(
    "name", ["forward_buffer_size", "timeout_ms", "num_workers", "embedding_staleness"]
)
def test_a_number_below_one_is_rejected(name):
    with pytest.raises(ConfigError, match=rf"{name} must be >= 1\. Received: 0"):
        DataLoader(Batches(1), **{name: 0})
