"""What an embedding worker is asked: bags of ids, one a sample and feature.

A feature's bags are flat: all ids of the batch in a row, and how many belong to each
sample. Three samples with the ids (7, 8), () and (7):

    ids      7  8  7
    lengths  2  0  1

On the wire a batch is three frames: the features' names and numbers of ids and samples
as JSON, in the order of the batch, which the model's embeddings have too; the lengths
of all features; the ids of all features.

Dimension key:
    B: samples
    L: ids of one feature in a batch
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from persia_torchrec.errors import BatchError, ConfigError, FrameError
from persia_torchrec.routing.hashing import Ids
from persia_torchrec.wire.messages import (
    Frame,
    Frames,
    array_of,
    bytes_of,
    encode_json,
)

Pooling = Literal["sum", "mean", "sqrt"]

_NO_IDS = np.empty(0, dtype=np.uint64)
_NO_LENGTHS = np.empty(0, dtype=np.int32)

POOLINGS: tuple[Pooling, ...] = ("sum", "mean", "sqrt")


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureSpec:
    """One feature: which table its ids belong to, and how a bag becomes one vector."""

    name: str
    """Of the columns in the pooled array; no other feature of its collection has it."""

    key: str
    """Name of its ids in a batch; features of several tables may share it."""

    table: str
    """Name of the table; several features may share one."""

    pooling: Pooling = "sum"
    """``sum``; ``mean``: divided by the number of ids; ``sqrt``: by its root. An empty
    bag gives zeros."""

    prefix: int = 0
    """Added to each id after it has been reduced below ``2**(64 - prefix_bits) - 1``;
    0 leaves ids as they are."""

    prefix_bits: int = 0
    """Bits that prefixes take; PERSIA's ``feature_index_prefix_bit``."""

    hash_stack_rounds: int = 0
    """How many buckets stand for an id, see ``routing.hashing.hash_stack``; 0: the id
    itself does."""

    hash_stack_size: int = 0
    """Buckets a round."""

    num_places: int = 0
    """Ids of a sample that get a vector each, see ``worker/raw_ids.py``; 0: the bag
    becomes one."""

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise ConfigError(
                f"Feature {self.name!r}: pooling must be one of {POOLINGS}. "
                f"Received: {self.pooling!r}."
            )


@dataclass(frozen=True, slots=True)
class Bags:
    """The ids of one feature in a batch.

    Attributes:
        ids: uint64 ``(L,)``.
        lengths: int32 ``(B,)``, not negative, summing up to L.
    """

    ids: Ids
    lengths: npt.NDArray[np.int32]

    def check(self, feature: str) -> None:
        """Raise BatchError unless dtypes, dimensions and lengths fit.

        Args:
            feature: its name, for the message.
        """
        if self.ids.dtype != np.uint64 or self.ids.ndim != 1:
            raise BatchError(
                f"Feature {feature!r}: ids must be a flat uint64 array. "
                f"Received: dtype={self.ids.dtype}, shape={self.ids.shape}."
            )
        if self.lengths.dtype != np.int32 or self.lengths.ndim != 1:
            raise BatchError(
                f"Feature {feature!r}: lengths must be a flat int32 array. "
                f"Received: dtype={self.lengths.dtype}, shape={self.lengths.shape}."
            )
        total = int(self.lengths.sum(dtype=np.int64))
        if (self.lengths < 0).any() or total != len(self.ids):
            raise BatchError(
                f"Feature {feature!r}: lengths must not be negative and must sum up to "
                f"the number of ids, {len(self.ids)}. Received: a sum of {total}."
            )


def encode_bags(bags: Mapping[str, Bags]) -> Frames:
    """Return a batch as three frames; equal batches give equal bytes.

    Raises:
        BatchError: a feature's dtypes or lengths do not fit.
    """
    for name, bag in bags.items():
        bag.check(name)
    shapes = [[name, len(bag.ids), len(bag.lengths)] for name, bag in bags.items()]
    lengths = np.concatenate([_NO_LENGTHS, *(bag.lengths for bag in bags.values())])
    ids = np.concatenate([_NO_IDS, *(bag.ids for bag in bags.values())])
    return [encode_json(shapes), bytes_of(lengths), bytes_of(ids)]


def decode_bags(frames: Sequence[Frame]) -> dict[str, Bags]:
    """Read the frames that :func:`encode_bags` made; the arrays are views of them.

    The features have the order in which they were sent.

    Raises:
        FrameError: these are not such frames.
        BatchError: a feature's lengths do not sum up to its number of ids.
    """
    if len(frames) != 3:
        raise FrameError(f"A batch of bags has 3 frames. Received: {len(frames)}.")
    lengths = array_of(frames[1], np.int32).view(np.int32)
    ids = array_of(frames[2], np.uint64).view(np.uint64)
    bags = {}
    try:
        for name, num_ids, num_samples in json.loads(bytes(frames[0])):
            if not 0 <= num_ids <= len(ids) or not 0 <= num_samples <= len(lengths):
                raise FrameError(f"Feature {name!r} is longer than what follows.")
            if str(name) in bags:
                raise FrameError(f"Feature {name!r} comes twice.")
            bags[str(name)] = Bags(ids[:num_ids], lengths[:num_samples])
            ids, lengths = ids[num_ids:], lengths[num_samples:]
    except (ValueError, TypeError, RecursionError) as exc:
        raise FrameError(f"Frame 0 must list the features ({exc}).") from exc
    if len(ids) or len(lengths):
        raise FrameError(
            f"{len(ids)} ids and {len(lengths)} lengths belong to nothing."
        )
    for name, bag in bags.items():
        bag.check(name)
    return bags
