"""Stop and resume a training with every loader: each sample is trained once a pass.

    python -m tests.resume.run [--only TEXT] [--seed N]

Servers count: SGD with a rate of 1 and a gradient of 1 for each occurrence of a sample,
whose id tells the pass too. ``README.md`` gets the table, unless ``--only`` chooses.
"""

import argparse
import itertools
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from persia_torchrec import (
    SGD,
    Constant,
    EmbeddingClient,
    EmbeddingCluster,
    TableSettings,
    recoverable,
    remote_sharders,
)
from persia_torchrec.data import IdColumn, ParquetDataset
from persia_torchrec.errors import ConfigError
from tests.support.resumed_loops import StoppedError, ids_of

README = Path(__file__).with_name("README.md")
NUM_SAMPLES, BATCH_SIZE, NUM_PASSES = 40, 4, 3
NUM_BATCHES = NUM_SAMPLES // BATCH_SIZE
STOPS = {
    "in a pass": (NUM_BATCHES + 4, False),
    "at its last step": (2 * NUM_BATCHES, False),
    "between passes": (2 * NUM_BATCHES, True),
}
LOOPS = "plain", "TrainPipelineSparseDist"


def rows(folder: Path, *, shuffle: bool) -> ParquetDataset:
    """Return the dataset of this package."""
    columns = [IdColumn("x", is_text=False)]
    return ParquetDataset(folder / "rows.parquet", BATCH_SIZE, columns, shuffle=shuffle)


class Samples(IterableDataset):  # type: ignore[type-arg]
    """Sample numbers without a position, in an order of torch's random numbers."""

    def __init__(self, *, shuffle: bool) -> None:
        self._shuffle = shuffle

    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info()
        order = torch.randperm if self._shuffle and info is None else torch.arange
        numbers = order(NUM_SAMPLES).tolist()
        yield from numbers if info is None else numbers[info.id :: info.num_workers]


class Batches:
    """A list of batches, in an order of torch's random numbers."""

    def __init__(self, *, shuffle: bool) -> None:
        self._shuffle = shuffle

    def __iter__(self) -> Any:
        order = torch.randperm if self._shuffle else torch.arange
        yield from order(NUM_SAMPLES).split(BATCH_SIZE)


def of_nodes(*, shuffle: bool) -> Any:
    kinds = torch.utils.data.RandomSampler, torch.utils.data.SequentialSampler
    sampler = kinds[not shuffle](range(NUM_SAMPLES))
    return nodes.Loader(nodes.Batcher(nodes.SamplerWrapper(sampler), BATCH_SIZE))


def streaming(*, shuffle: bool) -> Any:
    import datasets  # the package of Hugging Face, which tests do not install

    samples = datasets.Dataset.from_dict({"x": [*range(NUM_SAMPLES)]})
    stream = samples.to_iterable_dataset(num_shards=5)
    return stream.shuffle(seed=1, buffer_size=1) if shuffle else stream


WORKERS = {"num_workers": 2}
PERSISTENT = WORKERS | {"persistent_workers": True}
LOADERS: dict[str, Callable[[Path, bool], Any]] = {
    "batches of a class": lambda _, s: Batches(shuffle=s),
    "ParquetDataset": lambda f, s: rows(f, shuffle=s),
    "streaming of Hugging Face": lambda _, s: streaming(shuffle=s).batch(BATCH_SIZE),
    "torchdata.nodes": lambda _, s: of_nodes(shuffle=s),
    "torchdata.nodes of ParquetDataset": lambda f, s: nodes.Loader(
        nodes.IterableWrapper(rows(f, shuffle=s))
    ),
}


def add(kind: str, loader: Callable[..., Any], how: str, given: dict[str, Any]) -> None:
    """Add the loaders of a class of torch's with some settings of workers."""
    samples, name = range(NUM_SAMPLES), f"{kind}{how}"
    LOADERS[name] = lambda _, s: loader(samples, BATCH_SIZE, shuffle=s, **given)
    LOADERS[f"{name}, of ParquetDataset"] = lambda f, s: loader(
        rows(f, shuffle=s), batch_size=None, **given
    )
    LOADERS[f"{name}, of a stream"] = lambda _, s: loader(
        streaming(shuffle=s), BATCH_SIZE, **given
    )
    LOADERS[f"{name}, iterable"] = lambda _, s: loader(
        Samples(shuffle=s), BATCH_SIZE, **given
    )


for _class in (DataLoader, StatefulDataLoader):
    for _how, _given in (
        ("", {}),
        (", 2 workers", WORKERS),
        (", persistent", PERSISTENT),
    ):
        add(_class.__name__, _class, _how, _given)


class Net(torch.nn.Module):
    """Looks up the samples."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(1000, 4, "x", feature_names=["x"])
        self.bags = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))

    def forward(self, batch: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.bags(batch).values()
        return -found.sum(), found


def to_ids(batch: Any, number: int) -> KeyedJaggedTensor:
    """Return the ids of a batch, each of its sample and of the pass."""
    ids = torch.tensor(ids_of(batch)) + number * NUM_SAMPLES
    return KeyedJaggedTensor(
        ["x"], ids, lengths=torch.ones(len(ids), dtype=torch.int32)
    )


def train(
    client: EmbeddingClient,
    folder: Path,
    cell: dict[str, Any],
    stop: int,
    between: bool,
) -> None:
    """Train up to a step, or what is left."""
    torch.manual_seed(cell["seed"])
    tables = {"x": TableSettings(initializer=Constant(0.0))}
    sharders = remote_sharders(client, SGD(lr=1.0), staleness=1, tables=tables)
    model = DistributedModelParallel(Net(), sharders=sharders)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    loader = LOADERS[cell["loader"]](folder, cell["is_shuffled"])
    state = {"model": model} | ({"data": loader} if cell["in_state"] else {})
    given = folder / "run", state, client, sharders
    num_steps = 0
    with recoverable(*given, interval_s=0) as run:
        for number in range(NUM_PASSES):
            taken = (to_ids(batch, number) for batch in run.skip(loader))
            pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
            while True:
                try:
                    if cell["loop"] == "plain":
                        model(next(taken))[0].backward()
                    else:
                        pipeline.progress(taken)
                except StopIteration:
                    break
                run.step()
                num_steps += 1
                if num_steps == stop and not between:
                    run.save()
                    raise StoppedError
            if num_steps == stop and between:
                run.save()
                raise StoppedError
    sharders.flush()


def result_of(
    client: EmbeddingClient, cell: dict[str, Any], stop: int, between: bool
) -> str:
    """Stop and resume one training; return what became of its samples."""
    client.clear()
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        table = pa.table({"x": range(NUM_SAMPLES)})
        pq.write_table(table, folder / "rows.parquet", row_group_size=7)
        try:
            try:
                train(client, folder, cell, stop, between)
            except StoppedError:
                train(client, folder, cell, 0, between=False)
        except ConfigError as exc:
            is_known = "must get the batches of its pass again" in str(exc)
            return "error: other batches" if is_known else f"error: {str(exc)[:60]}"
        except IndexError:  # of datasets, as it loads a state in a worker
            return "error of datasets"
        ids = np.arange(NUM_PASSES * NUM_SAMPLES, dtype=np.uint64)
        counts = client.read("x", ids)[:, 0].round().astype(int)
    twice, never = int((counts > 1).sum()), int((counts < 1).sum())
    return f"WRONG: {twice} twice, {never} never" if twice or never else "once"


def is_possible(cell: dict[str, Any]) -> bool:
    """Return whether there is such a loader, and it can be in state."""
    has_state = not cell["loader"].startswith(("DataLoader", "batches of a class"))
    return has_state or not cell["in_state"]


def main() -> int:
    """Run the cells; return 1 if samples were trained twice or never."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="text in the names of cells")
    parser.add_argument("--seed", type=int, default=20261128)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    lines, began_s, results = [], time.monotonic(), []
    with EmbeddingCluster.local(1) as cluster:
        client = EmbeddingClient.connect(cluster.addresses)
        kinds = itertools.product(LOADERS, (False, True), (False, True), LOOPS)
        for loader, is_shuffled, in_state, loop in kinds:
            cell = {"loader": loader, "is_shuffled": is_shuffled, "in_state": in_state}
            cell |= {"loop": loop, "seed": args.seed}
            how = "shuffled" if is_shuffled else "in order"
            where = "in state" if in_state else "not"
            name = f"| {loader} | {how} | {where} | {loop} |"
            if args.only in name and is_possible(cell):
                found = [result_of(client, cell, *stop) for stop in STOPS.values()]
                results += found
                lines.append(f"{name} {' | '.join(found)} |")
                print(lines[-1], flush=True)
                if not args.only:
                    write(lines, results, time.monotonic() - began_s, args.seed)
    return any("WRONG" in result for result in results)


def write(lines: list[str], results: list[str], took_s: float, seed: int) -> None:
    """Write the table behind the head of the page."""
    head = README.read_text().partition("The last run:")[0]
    num_once = sum(result == "once" for result in results)
    num_errors = sum(result.startswith("error") for result in results)
    told = (
        f"The last run: {len(results)} cells, seed {seed}, {took_s:.0f} s: {num_once} "
        f"once, {num_errors} errors, {len(results) - num_once - num_errors} wrong.\n\n"
    )
    names = ["loader", "order", "state", "loop", *STOPS]
    rule = "|---" * len(names) + "|"
    table = "\n".join([f"| {' | '.join(names)} |", rule, *lines])
    README.write_text(f"{head}{told}{table}\n")


if __name__ == "__main__":
    sys.exit(main())
