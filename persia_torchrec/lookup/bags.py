"""Bags of ids, one per sample and feature: flat ids, and how many belong to each.

    samples (7, 8), () and (7):    ids      7  8  7
                                   lengths  2  0  1

On the wire a batch is three frames: the features' names and numbers of ids and samples
as JSON, in the order of the batch, which the model's embeddings have too; the lengths
of all features; the ids of all features.

Dimensions: B samples, L ids of one feature in a batch.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Ids, Lengths
from persia_torchrec.errors import BatchError, FrameError
from persia_torchrec.parsing.decoding import parse_json
from persia_torchrec.rpc.messages import Frame, Frames, array_of, bytes_of, encode_json

Pooling = Literal["sum", "mean", "sqrt"]
"""The sum; divided by the number of ids; or by its root. An empty bag gives zeros."""

MAX_BATCH_SIZE = 65_535
"""Most samples in a batch of PERSIA's, and in a request for predictions."""

POOLINGS: tuple[Pooling, ...] = ("sum", "mean", "sqrt")


class FeatureSpec(NamedTuple):
    """One feature: which table its ids belong to, and how a bag becomes one vector.

    ``prefix`` is added to each id when it has been reduced below
    ``2**(64 - prefix_bits) - 1``. Of ``num_places`` ids of a sample each gets a vector,
    see ``RawIds``; 0: the bag becomes one vector.
    """

    name: str  # of its columns, each once in a collection
    key: str  # of its ids in a batch; features of several tables may share it
    table: str
    pooling: Pooling = "sum"
    prefix: int = 0  # 0 leaves ids as they are
    prefix_bits: int = 0  # PERSIA's feature_index_prefix_bit
    hash_stack_rounds: int = 0  # how many buckets stand for an id; 0: the id itself
    hash_stack_size: int = 0  # buckets per round
    num_places: int = 0


class Bags(NamedTuple):
    """The ids of one feature in a batch."""

    ids: Ids  # uint64 (L,)
    lengths: Lengths  # int32 (B,), not negative, summing up to L
    # Of the ids in the values of the KeyedJaggedTensor that they come from, if they do.
    indices: slice | npt.NDArray[np.int64] | None = None


class JaggedIds(Mapping[str, Bags]):
    """The ids of all keys of a batch, side by side: what one compiled call takes.

    Attributes:
        ids: uint64, those of key ``k`` from ``id_starts[k]`` to ``id_starts[k + 1]``.
        lengths: int32, likewise by ``bag_starts``; not negative, summing up to the
            number of ids of the key.
        positions: which ``k`` a key is; there may be ids of other keys.
        num_samples: of the first key.
        sources: of each id, its position in what the caller gave; None: the same.
    """

    def __init__(
        self,
        keys: Iterable[str],
        positions: Mapping[str, int],
        ids: Ids,
        lengths: Lengths,
        id_starts: npt.NDArray[np.int64],
        bag_starts: npt.NDArray[np.int64],
    ) -> None:
        self.positions = {key: positions[key] for key in keys}
        self.ids, self.lengths = ids, lengths
        self.id_starts, self.bag_starts = id_starts, bag_starts
        self.sources: npt.NDArray[np.int64] | None = None
        self.num_samples = int(bag_starts[1]) if len(bag_starts) > 1 else 0

    @classmethod
    def of(cls, bags: Mapping[str, Bags]) -> "JaggedIds":
        """Put the bags of keys side by side; their numbers of samples may differ."""
        none = Bags(np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int32))
        each = none, *bags.values()
        positions = {key: k for k, key in enumerate(bags)}
        jagged = cls(
            bags,
            positions,
            np.concatenate([bag.ids for bag in each]),
            np.concatenate([bag.lengths for bag in each]),
            np.cumsum([len(bag.ids) for bag in each]),
            np.cumsum([len(bag.lengths) for bag in each]),
        )
        given = [bag.indices for bag in bags.values()]
        indices = [of_key for of_key in given if isinstance(of_key, np.ndarray)]
        if indices and len(indices) == len(given):
            jagged.sources = np.concatenate(indices)
        return jagged

    def of_keys(self, keys: Iterable[str]) -> "JaggedIds":
        """Return those of some keys; the arrays are shared."""
        return JaggedIds(
            keys,
            self.positions,
            self.ids,
            self.lengths,
            self.id_starts,
            self.bag_starts,
        )

    def __getitem__(self, key: str) -> Bags:
        k = self.positions[key]
        own = slice(int(self.id_starts[k]), int(self.id_starts[k + 1]))
        bags = slice(int(self.bag_starts[k]), int(self.bag_starts[k + 1]))
        return Bags(self.ids[own], self.lengths[bags], own)

    def __iter__(self) -> Iterator[str]:
        return iter(self.positions)

    def __len__(self) -> int:
        return len(self.positions)


def check_bags(bags: Mapping[str, Bags]) -> int:
    """Check that the features of a batch fit together; return B."""
    for name, (ids, lengths, _) in bags.items():
        if ids.dtype != np.uint64 or ids.ndim != 1:
            raise BatchError(
                f"Feature {name!r}: ids must be a flat uint64 array. "
                f"Received: dtype={ids.dtype}, shape={ids.shape}."
            )
        if lengths.dtype != np.int32 or lengths.ndim != 1:
            raise BatchError(
                f"Feature {name!r}: lengths must be a flat int32 array. "
                f"Received: dtype={lengths.dtype}, shape={lengths.shape}."
            )
    sizes = {len(bag.lengths) for bag in bags.values()}
    if len(sizes) > 1:
        raise BatchError(
            "All features must have the same number of samples. "
            f"Received: { {name: len(bag.lengths) for name, bag in bags.items()} }."
        )
    if not bags:
        return 0
    lengths_KB = np.stack([bag.lengths for bag in bags.values()])
    totals = lengths_KB.sum(axis=1, dtype=np.int64).tolist()
    has_negative = lengths_KB.min(initial=0) < 0
    for (name, bag), total in zip(bags.items(), totals, strict=True):
        is_negative = has_negative and bag.lengths.min() < 0
        if total != len(bag.ids) or is_negative:
            raise BatchError(
                f"Feature {name!r}: lengths must not be negative and must sum up to "
                f"the number of ids, {len(bag.ids)}. Received: a sum of {total}."
            )
    return sizes.pop()


def encode_bags(bags: Mapping[str, Bags]) -> Frames:
    """Return a batch as three frames; equal batches give equal bytes."""
    check_bags(bags)
    shapes = [[name, len(bag.ids), len(bag.lengths)] for name, bag in bags.items()]
    none = Bags(np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int32))
    lengths = np.concatenate([bag.lengths for bag in (none, *bags.values())])
    ids = np.concatenate([bag.ids for bag in (none, *bags.values())])
    return [encode_json(shapes), bytes_of(lengths), bytes_of(ids)]


def decode_bags(frames: Sequence[Frame]) -> dict[str, Bags]:
    """Read the frames of :func:`encode_bags`; the arrays are views of them."""
    if len(frames) != 3:
        raise FrameError(f"A batch of bags has 3 frames. Received: {len(frames)}.")
    shapes = parse_json(frames[0], list[tuple[str, int, int]], "Frame 0", FrameError)
    lengths, ids = array_of(frames[1], np.int32), array_of(frames[2], np.uint64)
    bags = {}
    for name, num_ids, num_samples in shapes:
        if not 0 <= num_ids <= len(ids) or not 0 <= num_samples <= len(lengths):
            raise FrameError(f"Feature {name!r} is longer than what follows.")
        if name in bags:
            raise FrameError(f"Duplicate feature {name!r}.")
        bags[name] = Bags(ids[:num_ids], lengths[:num_samples])
        ids, lengths = ids[num_ids:], lengths[num_samples:]
    if len(ids) or len(lengths):
        raise FrameError(
            f"{len(ids)} ids and {len(lengths)} lengths follow the last feature."
        )
    check_bags(bags)
    return bags
