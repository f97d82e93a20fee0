"""Criteo's click logs: files as they are published, and made-up lines like theirs.

A line is an advertisement that was shown, its fields divided by tabs:

    label (1: clicked), 13 counts, 26 categories as 32 bits in hexadecimal

Any field but the label may be empty. So are the files of the Kaggle challenge
(``train.txt``) and the days of the terabyte data set (``day_0.gz`` ...).

A category's 32 bits are its id, as they are: there is no pass over the data to count
or number them, and no rare one is dropped. An empty one is the id 2**32.

    python examples/dlrm/criteo.py made_up.tsv --rows 100000

writes made-up lines, whose labels follow from counts and categories.

Dimension key:
    B: samples
    F: categories, 26
"""

import argparse
import gzip
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch

NUM_COUNTS = 13
CATEGORIES = tuple(f"category{f}" for f in range(26))
MISSING = 2**32
"""Id of an empty category; no 32 bits are it."""

_NUM_FIELDS = 1 + NUM_COUNTS + len(CATEGORIES)


def read_lines(files: Iterable[str | Path]) -> Iterator[bytes]:
    """Yield the lines of files, one after the other, plain or ``.gz``."""
    for file in map(Path, files):
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
            yield from lines


def batches(
    lines: Iterable[bytes],
    batch_size: int,
    wanted: Callable[[int], bool] = lambda _: True,
) -> Iterator[Batch]:
    """Yield lines as batches; the last one holds what is left.

    Args:
        lines: of the format above.
        batch_size: samples a batch.
        wanted: given the number of a batch, from 0, says whether it is to be had.

    Raises:
        ValueError: a line is malformed; the message names it by its number, from 1.
    """
    rest = iter(lines)
    for number in range(2**63):
        chunk = list(islice(rest, batch_size))
        if not chunk:
            return
        if wanted(number):
            yield parse(chunk, 1 + number * batch_size)


def parse(lines: Sequence[bytes], first_number: int = 1) -> Batch:
    """Return lines as a batch.

    Args:
        lines: of the format above, at least one.
        first_number: of the first line, for errors.

    Returns:
        float32 ``(B, 13)`` as ``log(1 + count)``, an empty or negative count as 0; ids
        int64, one a category and sample; labels float32 ``(B,)``.

    Raises:
        ValueError: a line is malformed.
    """
    labels, counts, ids = [], [], []
    for number, line in enumerate(lines, first_number):
        fields = line.rstrip(b"\r\n").split(b"\t")
        try:
            if len(fields) != _NUM_FIELDS:
                raise ValueError(f"{len(fields)} fields")
            labels.append(float(fields[0]))
            counts.append([int(x) if x else 0 for x in fields[1 : 1 + NUM_COUNTS]])
            ids.append([int(x, 16) if x else MISSING for x in fields[1 + NUM_COUNTS :]])
        except ValueError as exc:
            raise ValueError(
                f"Line {number} must have a label, 13 counts and 26 hexadecimal "
                f"categories, divided by tabs. Received: {line!r:.100} ({exc})."
            ) from exc
    ids_FB = np.array(ids, dtype=np.int64).T
    dense = np.log1p(np.maximum(np.array(counts), 0)).astype(np.float32)
    return Batch(
        torch.from_numpy(dense),
        KeyedJaggedTensor(
            keys=list(CATEGORIES),
            values=torch.from_numpy(ids_FB.reshape(-1)),
            lengths=torch.ones(ids_FB.size, dtype=torch.int32),
        ),
        torch.tensor(labels),
    )


# Made-up lines. The commonest category of a column is about four times as frequent as
# the third; each adds its own weight, drawn from its bits, to the logit of a click.

_CARDINALITIES = np.array([4, 20, 100, 500, 2500, 12_500, 62_500, 312_500, 10**7] * 3)
_CARDINALITIES = _CARDINALITIES[: len(CATEGORIES)]
_BLOCK = 4096
_BIAS = -1.2
_COUNT_WEIGHTS = np.linspace(-0.6, 0.6, NUM_COUNTS)
_CATEGORY_WEIGHT = 0.8
_MISSING_SHARE = 0.05

Numbers = npt.NDArray[np.int64]


def generate_lines(num_lines: int, seed: int) -> Iterator[bytes]:
    """Make lines up, always the same for the same seed.

    What a category means does not depend on it: train with one seed, test with another.
    """
    rng = np.random.default_rng(seed)
    for start in range(0, num_lines, _BLOCK):
        block = _generate_block(rng)
        yield from islice(block, num_lines - start)


def _generate_block(rng: np.random.Generator) -> Iterator[bytes]:
    shape = (_BLOCK, len(CATEGORIES))
    ranks_BF = (rng.zipf(1.2, shape) - 1) % _CARDINALITIES
    counts = np.floor(rng.lognormal(0.5, 1.2, (_BLOCK, NUM_COUNTS))).astype(np.int64)
    logits = _BIAS + np.log1p(counts) @ _COUNT_WEIGHTS
    logits += _category_weights(ranks_BF).sum(axis=1)
    labels = (logits + rng.logistic(size=_BLOCK) > 0).astype(np.int64)
    is_there = rng.random((_BLOCK, NUM_COUNTS + len(CATEGORIES))) > _MISSING_SHARE
    bits_BF = _bits(ranks_BF)
    for label, numbers, bits, there in zip(
        labels.tolist(),
        counts.tolist(),
        bits_BF.tolist(),
        is_there.tolist(),
        strict=True,
    ):
        fields = chain((f"{n}" for n in numbers), (f"{b:08x}" for b in bits))
        shown = (field if t else "" for field, t in zip(fields, there, strict=True))
        yield "\t".join((str(label), *shown)).encode() + b"\n"


def _bits(ranks_BF: Numbers) -> Numbers:
    """Return 32 bits for each category: others for each rank of a column."""
    columns_F = np.arange(ranks_BF.shape[1]) * 40_503
    return (ranks_BF * 2_654_435_761 + columns_F) % 2**32


def _category_weights(ranks_BF: Numbers) -> npt.NDArray[np.float64]:
    """Return a weight for each category, in ``[-0.8, 0.8)``."""
    mixed_BF = (_bits(ranks_BF) * 1_103_515_245 + 12_345) % 2**31
    return (mixed_BF / 2**30 - 1) * _CATEGORY_WEIGHT


def main() -> None:
    """Write made-up lines to a file."""
    parser = argparse.ArgumentParser(description="Make click logs up.")
    parser.add_argument("file", type=Path, help="where the lines go")
    parser.add_argument("--rows", type=int, default=100_000, help="lines [100000]")
    parser.add_argument("--seed", type=int, default=0, help="of other lines [0]")
    arguments = parser.parse_args()
    with arguments.file.open("wb") as file:
        file.writelines(generate_lines(arguments.rows, arguments.seed))


if __name__ == "__main__":
    main()
