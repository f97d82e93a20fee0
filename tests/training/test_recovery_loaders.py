"""Whatever loads the batches, a resumed training trains each sample once a pass."""

from itertools import chain, islice

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, get_worker_info
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

from persia_torchrec.data import IdColumn, ParquetDataset
from persia_torchrec.sharding.torchrec_api import end_iterator
from persia_torchrec.training.recoverable import recoverable
from tests.support.resumed_loops import (
    BATCH_SIZE,
    NUM_BATCHES,
    NUM_SAMPLES,
    Numbers,
    ahead_of,
    once_each,
    train,
    train_in_parts,
)
from tests.support.servers import Servers

pytestmark = pytest.mark.slow


class Around:
    """Any class of a script that reads another object."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        yield from self.data


def nodes_loader():
    source = nodes.SamplerWrapper(RandomSampler(range(NUM_SAMPLES)))
    batches = nodes.Batcher(source, BATCH_SIZE)
    return nodes.Loader(nodes.Prefetcher(batches, 2))


def streaming():
    datasets = pytest.importorskip(
        "datasets", reason="Hugging Face's are not installed"
    )
    samples = datasets.Dataset.from_dict({"x": [*range(NUM_SAMPLES)]})
    return samples.to_iterable_dataset(num_shards=3)


class Stream(IterableDataset):
    """Begins each pass where a loaded state says, as one of Hugging Face does."""

    def __init__(self):
        self.begin = self.at = 0

    def __iter__(self):
        worker = get_worker_info()
        self.at = self.begin
        for number in range(NUM_SAMPLES)[worker.id :: worker.num_workers][self.at :]:
            self.at += 1
            yield number

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.begin = state["at"]


def rows(folder, **settings):
    path = folder / "rows.parquet"
    if not path.exists():
        table = pa.table({"x": range(NUM_SAMPLES)})
        pq.write_table(table, path, row_group_size=5)
    columns = [IdColumn("x", is_text=False)]
    return ParquetDataset(path, BATCH_SIZE, columns, **settings)


LOADERS = {
    "map": lambda _: StatefulDataLoader(range(NUM_SAMPLES), BATCH_SIZE),
    "shuffled": lambda _: StatefulDataLoader(
        range(NUM_SAMPLES), BATCH_SIZE, shuffle=True
    ),
    "iterable": lambda _: StatefulDataLoader(Numbers(), BATCH_SIZE),
    "nodes": lambda _: nodes_loader(),
    "rows": rows,
    "shuffled rows": lambda folder: rows(folder, shuffle=True),
    "rows in a loader": lambda folder: StatefulDataLoader(rows(folder), None),
    "stream with persistent workers": lambda _: StatefulDataLoader(
        Stream(),
        BATCH_SIZE,
        num_workers=2,
        multiprocessing_context="fork",
        persistent_workers=True,
    ),
    "streaming": lambda _: StatefulDataLoader(streaming(), BATCH_SIZE),
    "streaming alone": lambda _: streaming().batch(BATCH_SIZE),
}
STOPS = 2, NUM_BATCHES, NUM_BATCHES + 1, 2 * NUM_BATCHES + 4


@pytest.fixture(scope="module")
def client():
    with Servers() as servers:
        yield servers.client(servers.start(1))


def end_workers(loaders):
    """End persistent workers, of which later ones hold what their ends are told by."""
    for loader in loaders:
        if isinstance(loader, DataLoader):
            end_iterator(loader)


AHEAD = [*((kind, 2) for kind in LOADERS), ("shuffled", 0), ("nodes", 0)]
AHEAD += [("stream with persistent workers", 0)]


@pytest.mark.parametrize(("kind", "num_ahead"), AHEAD)
def test_a_loader_in_state_continues_behind_what_is_trained(
    client, tmp_path, kind, num_ahead
):
    made = []

    def make():
        end_workers(made)
        made.append(LOADERS[kind](tmp_path))
        return {"data": made[-1]}, lambda _: made[-1]

    run = tmp_path / "run"
    trained = train_in_parts(client, run, make, STOPS, num_ahead=num_ahead)
    end_workers(made)
    assert [sorted(of_pass) for of_pass in trained] == once_each()


WRAPS = {
    "DataLoader": lambda data: DataLoader(data, batch_size=None),
    "generator expression": lambda data: (batch for batch in data),
    "class": Around,
    "islice": lambda data: islice(data, None),
    "class within": lambda data: Around(zip(Around(data))),
}


CASES = [
    *((wrap, "shuffled rows") for wrap in WRAPS),
    *(
        ("generator expression", kind)
        for kind in ("rows", "shuffled", "streaming alone")
    ),
]


@pytest.mark.parametrize(("wrap", "kind"), CASES)
def test_data_in_state_that_something_else_reads_are_not_skipped_twice(
    client, tmp_path, wrap, kind
):
    def make():
        data = LOADERS[kind](tmp_path)
        return {"data": data}, lambda _: WRAPS[wrap](data)

    trained = train_in_parts(client, tmp_path / "run", make, STOPS, num_ahead=2)
    assert [sorted(of_pass) for of_pass in trained] == once_each()


ROWS = {
    "alone": lambda data: data,
    "in a DataLoader": lambda data: DataLoader(data, None),
    "in nodes": lambda data: nodes.Loader(nodes.IterableWrapper(data)),
    "in a class": Around,
}


@pytest.mark.parametrize("wrap", ROWS)
@pytest.mark.parametrize("stop", STOPS)
def test_shuffled_rows_that_are_not_in_state_begin_the_epoch_of_their_pass(
    client, tmp_path, wrap, stop
):
    def make():
        loader = ROWS[wrap](rows(tmp_path, shuffle=True))
        return {}, lambda _: loader

    trained = train_in_parts(client, tmp_path / "run", make, [stop])
    assert [sorted(of_pass) for of_pass in trained] == once_each()
    assert trained == train(client, tmp_path / "whole", make, stop=0)
    assert trained[0] != trained[1]


def test_batches_that_a_pipeline_has_across_two_passes_are_told_of(
    client, tmp_path, caplog
):
    with recoverable(tmp_path, {}, client, (), interval_s=0) as run:
        both = chain.from_iterable(run.skip(range(3)) for _ in range(2))
        for _ in ahead_of(both, 2):
            run.step()
    (told,) = [one for one in caplog.messages if "are not trained" in one]
    assert told.startswith(
        "pass 2 of the data begins, and 2 batches of the pass before"
    )
