"""A batch as PERSIA's users write it: ids, dense features, labels; and as bytes.

Each part is checked where it is made, and that the parts fit one another where they
become a :class:`PersiaBatch`, so that both can be trusted everywhere else: plain
dtypes, contiguous memory. Ids lie flat, sample after sample, as TorchRec and the
servers want them::

    samples  [7, 3]  []  [3]
    ids       7  3        3         uint64 (L,)
    lengths   2      0    1         int32  (B,)

Dimension key:
    B: samples
    L: ids of a feature in the batch, over all samples
"""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from persia_torchrec.embedding.batch_codec import (
    BatchHeader,
    Buffer,
    DenseHeader,
    IdsHeader,
    SectionReader,
    write_sections,
)
from persia_torchrec.errors import BatchError, FrameError

MAX_BATCH_SIZE = 65_535
"""Most samples in a batch."""

DTYPES = tuple(
    np.dtype(name)
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "float32", "float64"
    )
)  # fmt: skip
"""What dense features and labels may be made of."""

_DTYPE_OF = {dtype.name: dtype for dtype in DTYPES}

Ids = npt.NDArray[np.uint64]
Lengths = npt.NDArray[np.int32]
Dense = npt.NDArray[np.generic]


class IDTypeFeature:
    """A feature with any number of ids per sample, none included.

    Args:
        name: of the slot in ``embedding_config.yml``.
        data: one flat uint64 array per sample, copied; signed ids are refused, not
            converted.

    Attributes:
        ids: uint64 ``(L,)``, the ids of all samples in order.
        lengths: int32 ``(B,)``, how many of them are each sample's.

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

        ``ids`` ``(L,)`` and ``lengths`` ``(B,)``, each ``>= 0`` and L in sum, are kept,
        not copied, when contiguous. BatchError says what does not fit.
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
    """A feature with exactly one id per sample.

    Means the same as an :class:`IDTypeFeature` whose arrays have one id each, and costs
    less to make, check and send. ``data`` is uint64 ``(B,)``; it is kept, not copied,
    when contiguous, so leave it unchanged until the batch is sent.
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

    ``data`` is ``(B, ...)`` of a dtype in :data:`DTYPES`; it is kept, not copied, when
    contiguous, so leave it unchanged until the batch is sent. ``name`` is for messages
    only: the model receives dense data in order.
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


class PersiaBatch:
    """One batch of training, evaluation or inference.

    Args:
        id_type_features: at least one; their names differ. Any of the slots of the job,
            in any order; the model gets their embeddings in this one.
        non_id_type_features: the dense features, in the model's order.
        labels: in the order of the training loop; needed to train.
        batch_size: number of samples in ``[1, 65535]``; taken from the first id type
            feature when None.
        requires_grad: whether the embeddings are trained on this batch: the servers
            then make rows for new ids, and expect gradients.
        meta: bytes that travel with the batch untouched.

    Attributes:
        batch_id: the batch's number in the order of all loaders, from 0; None until
            it is sent. The other attributes are the arguments, sequences as tuples.
    """

    def __init__(
        self,
        id_type_features: Sequence[IDFeature],
        non_id_type_features: Sequence[NonIDTypeFeature] | None = None,
        labels: Sequence[Label] | None = None,
        batch_size: int | None = None,
        requires_grad: bool = True,
        meta: bytes | None = None,
    ) -> None:
        self.id_type_features = tuple(id_type_features)
        self.non_id_type_features = tuple(non_id_type_features or ())
        self.labels = tuple(labels or ())
        self.requires_grad = bool(requires_grad)
        self.meta = meta
        self.batch_id: int | None = None

        _check_classes(
            "id_type_features",
            self.id_type_features,
            (IDTypeFeature, IDTypeFeatureWithSingleID),
        )
        _check_classes(
            "non_id_type_features", self.non_id_type_features, (NonIDTypeFeature,)
        )
        _check_classes("labels", self.labels, (Label,))
        if not self.id_type_features:
            raise BatchError("A batch must have at least one id type feature.")
        if batch_size is None:
            batch_size = self.id_type_features[0].batch_size
        self.batch_size = operator.index(batch_size)
        self._check_sizes()
        self._check_names()
        if requires_grad and not self.labels:
            raise BatchError(
                "A batch with requires_grad=True must have labels. Received: none. "
                "Give labels, or requires_grad=False."
            )
        if not isinstance(meta, bytes | None):
            raise BatchError(
                "meta must be bytes. "
                f"Received: {describe(meta)}. Encode text with .encode()."
            )

    @property
    def data(self) -> "PersiaBatch":
        """The batch itself, where PERSIA has a native object."""
        return self

    @classmethod
    def from_bytes(cls, data: Buffer) -> "PersiaBatch":
        """Read what :meth:`to_bytes` wrote; the arrays are views of ``data``.

        Raises:
            FrameError: the bytes are not a batch of this version, are cut off or too
                many, or describe a batch that cannot be.
        """
        reader = SectionReader(data)
        header = reader.header
        try:
            features = [_read_ids(reader, ids, header.batch_size) for ids in header.ids]
            dense, labels, meta = _read_rest(reader)
            batch = cls(
                features,
                dense,
                labels,
                batch_size=header.batch_size,
                requires_grad=header.requires_grad,
                meta=meta,
            )
        except BatchError as exc:
            raise _invalid(exc) from exc
        batch.batch_id = header.batch_id
        reader.expect_end()
        return batch

    def to_bytes(self) -> bytes:
        """Return the batch as bytes; equal batches give equal bytes."""
        return _encode(self, self.id_type_features)

    def _check_sizes(self) -> None:
        if not 1 <= self.batch_size <= MAX_BATCH_SIZE:
            raise BatchError(
                f"A batch must have 1 to {MAX_BATCH_SIZE} samples. "
                f"Received: {self.batch_size}."
            )
        for kind, part in self._parts():
            if part.batch_size != self.batch_size:
                raise BatchError(
                    f"All parts of a batch must have its {self.batch_size} samples. "
                    f"Received: {part.batch_size} in {kind} {part.name!r}."
                )

    def _check_names(self) -> None:
        anonymous = {NonIDTypeFeature.DEFAULT_NAME, Label.DEFAULT_NAME}
        seen = set()
        for kind, part in self._parts():
            if (kind, part.name) in seen:
                raise BatchError(
                    "The names of a batch's parts must differ. "
                    f"Received: {kind} {part.name!r} twice."
                )
            if part.name not in anonymous:
                seen.add((kind, part.name))

    def _parts(self) -> Iterable[tuple[str, IDFeature | NdarrayDataBase]]:
        yield from (("id type feature", part) for part in self.id_type_features)
        yield from ((part.KIND, part) for part in self.non_id_type_features)
        yield from ((part.KIND, part) for part in self.labels)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferencedBatch:
    """A batch without its ids, which wait at an embedding worker.

    Attributes:
        worker: number of that worker.
        loader: number of the data loader that left the ids there.
        reference: what the worker called them.
        batch_id: the batch's number among those of all data loaders.
    """

    worker: int
    loader: int
    reference: int
    batch_size: int
    non_id_type_features: tuple[NonIDTypeFeature, ...]
    labels: tuple[Label, ...]
    requires_grad: bool
    meta: bytes | None
    batch_id: int | None


def encode_rest(batch: PersiaBatch) -> bytes:
    """Return the batch without its ids as bytes."""
    return _encode(batch, ())


def decode_rest(
    data: Buffer, *, worker: int, loader: int, reference: int
) -> ReferencedBatch:
    """Read what :func:`encode_rest` wrote; the arrays are views of the bytes."""
    reader = SectionReader(data)
    header = reader.header
    if header.ids:
        raise FrameError("The rest of a batch must be without ids.")
    try:
        dense, labels, meta = _read_rest(reader)
    except BatchError as exc:
        raise _invalid(exc) from exc
    reader.expect_end()
    return ReferencedBatch(
        worker=worker,
        loader=loader,
        reference=reference,
        batch_size=header.batch_size,
        non_id_type_features=dense,
        labels=labels,
        requires_grad=header.requires_grad,
        meta=meta,
        batch_id=header.batch_id,
    )


def _encode(batch: PersiaBatch, features: Sequence[IDFeature]) -> bytes:
    dense = batch.non_id_type_features
    header = BatchHeader(
        batch_id=batch.batch_id,
        batch_size=batch.batch_size,
        ids=[IdsHeader(f.name, len(f.ids), _is_single(f)) for f in features],
        labels=[_describe_dense(label) for label in batch.labels],
        meta_bytes=None if batch.meta is None else len(batch.meta),
        dense=[_describe_dense(feature) for feature in dense],
        requires_grad=batch.requires_grad,
    )
    arrays: list[Dense] = []
    for feature in features:
        arrays.append(feature.ids)
        if not _is_single(feature):
            arrays.append(feature.lengths)
    arrays += [part.data for part in (*dense, *batch.labels)]
    return write_sections(header, arrays, batch.meta or b"")


def _is_single(feature: IDFeature) -> bool:
    return isinstance(feature, IDTypeFeatureWithSingleID)


def _describe_dense(dense: NdarrayDataBase) -> DenseHeader:
    return DenseHeader(dense.name, dense.data.dtype.name, dense.data.shape)


def _read_ids(reader: SectionReader, ids: IdsHeader, batch_size: int) -> IDFeature:
    what = f"id type feature {ids.name!r}"
    array = reader.read_array(np.dtype(np.uint64), (ids.num_ids,), what)
    if ids.single_id:
        return IDTypeFeatureWithSingleID(ids.name, array)
    int32 = np.dtype(np.int32)
    lengths = reader.read_array(int32, (batch_size,), f"the lengths of {what}")
    return IDTypeFeature.from_flat(ids.name, array, lengths)


def _read_rest(
    reader: SectionReader,
) -> tuple[tuple[NonIDTypeFeature, ...], tuple[Label, ...], bytes | None]:
    """Read dense features, labels and meta, in the order of the sections."""
    header = reader.header
    dense = [NonIDTypeFeature(_read_dense(reader, d), d.name) for d in header.dense]
    labels = [Label(_read_dense(reader, d), d.name) for d in header.labels]
    meta = None
    if header.meta_bytes is not None:
        meta = bytes(reader.read(header.meta_bytes, "meta"))
    return tuple(dense), tuple(labels), meta


def _read_dense(reader: SectionReader, dense: DenseHeader) -> Dense:
    if dense.dtype not in _DTYPE_OF:
        raise FrameError(
            f"The dtype of {dense.name!r} must be one of {', '.join(_DTYPE_OF)}. "
            f"Received: {dense.dtype!r}."
        )
    return reader.read_array(_DTYPE_OF[dense.dtype], dense.shape, repr(dense.name))


def _invalid(exc: BatchError) -> FrameError:
    return FrameError(f"The bytes of a batch must hold a valid one: {exc}")


def _check_classes(
    argument: str, parts: tuple[object, ...], classes: tuple[type, ...]
) -> None:
    for part in parts:
        if not isinstance(part, classes):
            raise BatchError(
                f"{argument} must hold {' or '.join(cls.__name__ for cls in classes)}. "
                f"Received: {describe(part)}."
            )


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
