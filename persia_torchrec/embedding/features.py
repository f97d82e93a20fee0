"""What a batch is made of: ids a sample, and arrays with the samples first.

Each part is checked where it is made, so that it can be trusted everywhere else: plain
dtypes, contiguous memory. Ids lie flat, sample after sample, as TorchRec and the
servers want them::

    samples  [7, 3]  []  [3]
    ids       7  3        3         uint64 (L,)
    lengths   2      0    1         int32  (B,)

``embedding/data.py`` is where users import these from.

Dimension key:
    B: samples
    L: ids of a feature in the batch, over all samples
"""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from persia_torchrec.errors import BatchError

DTYPES = tuple(
    np.dtype(name)
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "float32", "float64"
    )
)  # fmt: skip
"""What dense features and labels may be made of."""

Ids = npt.NDArray[np.uint64]
Lengths = npt.NDArray[np.int32]
Dense = npt.NDArray[np.generic]


class IDTypeFeature:
    """A feature with any number of ids a sample, none included.

    Args:
        name: of the slot in ``embedding_config.yml``.
        data: one flat uint64 array a sample; copied.

    Attributes:
        name: as given.
        ids: uint64 ``(L,)``, the ids of all samples in order.
        lengths: int32 ``(B,)``, how many of them are each sample's.

    Raises:
        BatchError: a sample is no flat uint64 array; signed ids are refused, not
            converted.

    Example:
        >>> samples = [np.array(ids, dtype=np.uint64) for ids in ([7, 3], [], [3])]
        >>> feature = IDTypeFeature("item", samples)
        >>> feature.ids.tolist(), feature.lengths.tolist()
        ([7, 3, 3], [2, 0, 1])
    """

    def __init__(self, name: str, data: Sequence[Ids]) -> None:
        _check_name("id type feature", name)
        self.name = name
        self.ids = _concatenate(name, data)
        self.lengths = np.fromiter(map(len, data), dtype=np.int32, count=len(data))

    @classmethod
    def from_flat(cls, name: str, ids: Ids, lengths: Lengths) -> "IDTypeFeature":
        """Build the feature from ids that lie flat already.

        Args:
            name: of the slot in ``embedding_config.yml``.
            ids: uint64 ``(L,)``; kept, not copied, when contiguous.
            lengths: int32 ``(B,)``, each ``>= 0``, L in sum; kept likewise.

        Raises:
            BatchError: a dtype or shape is another, or the lengths do not fit.
        """
        _check_name("id type feature", name)
        _check_flat_ids(name, ids)
        if lengths.dtype != np.int32 or lengths.ndim != 1:
            raise BatchError(
                f"Id type feature {name!r}: lengths must be a flat int32 array. "
                f"Received: dtype={lengths.dtype}, shape={lengths.shape}."
            )
        total = int(lengths.sum(dtype=np.int64))
        if (lengths < 0).any() or total != len(ids):
            raise BatchError(
                f"Id type feature {name!r}: lengths must be >= 0 and sum up to the "
                f"number of ids. Received: a sum of {total} for {len(ids)} ids."
            )
        feature = cls.__new__(cls)
        feature.name = name
        feature.ids = np.ascontiguousarray(ids)
        feature.lengths = np.ascontiguousarray(lengths)
        return feature

    @property
    def data(self) -> list[Ids]:
        """The ids of each sample, as views of ``ids``."""
        return (
            np.split(self.ids, np.cumsum(self.lengths)[:-1]) if self.batch_size else []
        )

    @property
    def batch_size(self) -> int:
        """How many samples there are."""
        return len(self.lengths)


class IDTypeFeatureWithSingleID:
    """A feature with exactly one id a sample.

    Means the same as an :class:`IDTypeFeature` whose arrays have one id each, and
    costs less to make, check and send.

    Args:
        name: of the slot in ``embedding_config.yml``.
        data: uint64 ``(B,)``; kept, not copied, when contiguous, so leave it unchanged
            until the batch is sent.

    Attributes:
        name: as given.
        ids: uint64 ``(B,)``.
        lengths: int32 ``(B,)``, all 1.

    Raises:
        BatchError: ``data`` is no flat uint64 array.
    """

    def __init__(self, name: str, data: Ids) -> None:
        _check_name("id type feature", name)
        _check_flat_ids(name, data)
        self.name = name
        self.ids: Ids = np.ascontiguousarray(data)
        self.lengths: Lengths = np.ones(len(data), dtype=np.int32)

    @property
    def data(self) -> Ids:
        """The same as ``ids``."""
        return self.ids

    @property
    def batch_size(self) -> int:
        """How many samples there are."""
        return len(self.ids)


IDFeature = IDTypeFeature | IDTypeFeatureWithSingleID


class NdarrayDataBase:
    """Dense data with the samples along the first dimension; use a subclass.

    Args:
        data: ``(B, ...)`` of a dtype in :data:`DTYPES`; kept, not copied, when
            contiguous, so leave it unchanged until the batch is sent.
        name: for messages only, the model receives dense data in order.

    Attributes:
        data: the array, contiguous.
        name: as given, or ``DEFAULT_NAME``.

    Raises:
        BatchError: ``data`` is no array, a scalar, or of another dtype.
    """

    KIND: ClassVar[str] = "ndarray"
    DEFAULT_NAME: ClassVar[str] = "ndarray_base"

    def __init__(self, data: Dense, name: str | None = None) -> None:
        self.name = self.DEFAULT_NAME if name is None else name
        _check_name(self.KIND, self.name)
        if not isinstance(data, np.ndarray) or data.ndim == 0:
            raise BatchError(
                f"{self.KIND} {self.name!r} must be an array with the samples along "
                f"its first dimension. Received: {describe(data)}."
            )
        if data.dtype not in DTYPES:
            raise BatchError(
                f"{self.KIND} {self.name!r} must have one of the dtypes "
                f"{', '.join(map(str, DTYPES))}. Received: {data.dtype}."
            )
        self.data: Dense = np.ascontiguousarray(data)

    def __len__(self) -> int:
        return self.batch_size

    @property
    def batch_size(self) -> int:
        """How many samples there are."""
        return len(self.data)


class NonIDTypeFeature(NdarrayDataBase):
    """A dense feature; see :class:`NdarrayDataBase`."""

    KIND = "non-id type feature"
    DEFAULT_NAME = "non_id_type_feature_anonymous"


class Label(NdarrayDataBase):
    """What the model learns to predict; see :class:`NdarrayDataBase`."""

    KIND = "label"
    DEFAULT_NAME = "label_anonymous"


def _concatenate(name: str, samples: Sequence[Ids]) -> Ids:
    """Join the samples' ids; NumPy checks all dtypes and shapes in that one call."""
    if len(samples) == 0:
        return np.empty(0, dtype=np.uint64)
    try:
        ids = np.concatenate(samples, dtype=np.uint64, casting="no")
    except (TypeError, ValueError) as exc:
        raise _misfit_among(name, samples) from exc
    are_arrays = all(issubclass(cls, np.ndarray) for cls in set(map(type, samples)))
    if ids.ndim != 1 or not are_arrays:
        raise _misfit_among(name, samples)
    return ids


def _misfit_among(name: str, samples: Sequence[object]) -> BatchError:
    return next(
        _misfit(name, f"sample {position}", sample)
        for position, sample in enumerate(samples)
        if not _is_flat_ids(sample)
    )


def _misfit(name: str, which: str, ids: object) -> BatchError:
    return BatchError(
        f"Id type feature {name!r}: {which} must be a flat uint64 array. "
        f"Received: {describe(ids)}."
    )


def _is_flat_ids(ids: object) -> bool:
    return isinstance(ids, np.ndarray) and ids.ndim == 1 and ids.dtype == np.uint64


def _check_flat_ids(name: str, ids: object) -> None:
    if not _is_flat_ids(ids):
        raise _misfit(name, "data", ids)


_NAME_FIRST = {
    "id type feature": " The name comes first, then the data; some of PERSIA's "
    "examples have it the other way round."
}


def _check_name(kind: str, name: object) -> None:
    if not isinstance(name, str) or not name:
        raise BatchError(
            f"Every {kind} must have a name, a string that is not empty. "
            f"Received: {describe(name)}.{_NAME_FIRST.get(kind, '')}"
        )


def describe(value: object) -> str:
    """Return what a message says of a value: dtype and shape, or the value."""
    if isinstance(value, np.ndarray):
        return f"dtype={value.dtype}, shape={value.shape}"
    return f"{value!r:.100} ({type(value).__name__})"
