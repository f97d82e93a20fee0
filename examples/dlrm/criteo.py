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
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

import numba
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from pyarrow import csv
from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch

NUM_COUNTS = 13
CATEGORIES = tuple(f"category{f}" for f in range(26))
MISSING = 2**32
"""Id of an empty category; no 32 bits are it."""

_NUM_FIELDS = 1 + NUM_COUNTS + len(CATEGORIES)
_MAX_DIGITS = 8
_NUMBER = re.compile(rb"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
_COUNT = re.compile(rb"(-?\d{1,18})?")
_CATEGORY = re.compile(rb"[0-9a-f]{0,8}", re.IGNORECASE)

Numbers = npt.NDArray[np.int64]


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
    text = b"".join(lines)
    try:
        labels, counts, ids_FB = _read(text)
        if len(labels) != len(lines) or not np.isfinite(labels).all():
            raise ValueError("lines without fields, or labels that are not finite")
    except ValueError as exc:
        _require_lines(lines, first_number)
        raise ValueError(f"Lines must be Criteo's. Received: {exc}.") from exc
    dense = np.log1p(np.maximum(counts, 0)).astype(np.float32)
    return Batch(
        torch.from_numpy(dense),
        KeyedJaggedTensor(
            keys=list(CATEGORIES),
            values=torch.from_numpy(ids_FB.reshape(-1)),
            lengths=torch.ones(ids_FB.size, dtype=torch.int32),
        ),
        torch.from_numpy(labels),
    )


def _read(text: bytes) -> tuple[npt.NDArray[np.float32], Numbers, Numbers]:
    """Return labels, counts (B, 13) and ids (F, B); ArrowInvalid is a ValueError."""
    names = [f"{i}" for i in range(_NUM_FIELDS)]
    kinds = {name: pa.binary() for name in names}
    kinds |= dict.fromkeys(names[: 1 + NUM_COUNTS], pa.int64()) | {"0": pa.float64()}
    table = csv.read_csv(
        pa.BufferReader(text),
        csv.ReadOptions(
            use_threads=False, block_size=len(text) + 1, column_names=names
        ),
        csv.ParseOptions(delimiter="\t", quote_char=False),
        csv.ConvertOptions(column_types=kinds, null_values=[""]),
    )
    columns = [column.combine_chunks() for column in table.columns]
    if columns[0].null_count:
        raise ValueError("a line without a label")
    counts = [c.fill_null(0).to_numpy() for c in columns[1 : 1 + NUM_COUNTS]]
    ids_FB = np.empty((len(CATEGORIES), len(table)), np.int64)
    for column, ids in zip(columns[1 + NUM_COUNTS :], ids_FB, strict=True):
        _from_hexadecimal(column, ids)
    labels = columns[0].to_numpy().astype(np.float32)
    return labels, np.stack(counts, 1), ids_FB


_NO_DIGIT = 255
_DIGITS = np.full(256, _NO_DIGIT, np.uint8)
for _value, _digit in enumerate("0123456789abcdef"):
    _DIGITS[[ord(_digit), ord(_digit.upper())]] = _value


def _from_hexadecimal(texts: pa.BinaryArray, ids: Numbers) -> None:
    """Write up to 8 hexadecimal digits as a number; no digit as ``MISSING``."""
    _, ends, data = texts.buffers()
    offsets = np.frombuffer(ends, np.int32)[texts.offset :][: len(texts) + 1]
    if not _write_ids(np.frombuffer(data or b"", np.uint8), offsets, ids):
        raise ValueError("a category that is not hexadecimal")


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _write_ids(
    raw: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int32], ids: Numbers
) -> bool:
    """Return whether all texts are numbers; write those."""
    for i in range(len(ids)):
        start, stop = offsets[i], offsets[i + 1]
        if stop - start > _MAX_DIGITS:
            return False
        number = np.int64(0)
        for at in range(start, stop):
            digit = _DIGITS[raw[at]]
            if digit == _NO_DIGIT:
                return False
            number = number << 4 | np.int64(digit)
        ids[i] = number if stop > start else MISSING
    return True


def _require_lines(lines: Sequence[bytes], first_number: int) -> None:
    """Raise ValueError for the first line that is malformed."""
    for number, line in enumerate(lines, first_number):
        fields = line.rstrip(b"\r\n").split(b"\t")
        fault = ""
        if len(fields) != _NUM_FIELDS:
            fault = f"{len(fields)} fields"
        elif not _NUMBER.fullmatch(fields[0]):
            fault = f"label {fields[0]!r}"
        elif bad := [x for x in fields[1 : 1 + NUM_COUNTS] if not _COUNT.fullmatch(x)]:
            fault = f"count {bad[0]!r}"
        elif bad := [x for x in fields[1 + NUM_COUNTS :] if not _CATEGORY.fullmatch(x)]:
            fault = f"category {bad[0]!r}"
        if fault:
            raise ValueError(
                f"Line {number} must have a label, 13 counts and 26 hexadecimal "
                f"categories, divided by tabs. Received: {line!r:.100} ({fault})."
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
