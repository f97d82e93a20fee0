"""A batch as PERSIA's users write it: ids, dense features, labels; and as bytes.

Each part is checked where it is made, and that the parts fit one another in
:class:`PersiaBatch`, so that all else can trust them: plain dtypes, contiguous memory.
Ids lie flat, sample after sample, as TorchRec and the servers want them::

    samples  [7, 3]  []  [3]
    ids       7  3        3         uint64 (L,)
    lengths   2      0    1         int32  (B,)

The bytes are a frame of fixed width, a JSON header that says what follows, and the
arrays themselves, little-endian, each at a multiple of 8 and padded with zeros::

    offset
    0         magic "PTRB"
    4         version, uint32
    8         size of the header, uint64
    16        header, JSON: _Header, with _Ids and _Dense
    then      for each id type feature: ids, uint64 (L,)
                                        lengths, int32 (B,), unless all are 1 by class
              for each non-id type feature, then for each label: the array
              meta, if there is any

Writing copies every array once; reading copies none, so that arrays are views of the
bytes. What a trainer receives is copied array by array: each has memory of its own, and
one that is kept holds no other.

A batch keeps the arrays that it is given. :meth:`PersiaBatch.copy` is for who keeps a
batch while its maker may fill the arrays again.

Bytes from outside are not trusted: every size is compared with what is there before it
is used, and what is there must be used up to the last byte.

Dimension key:
    B: samples
    L: ids of a feature in the batch, over all samples
"""

import contextlib
import copy
import math
import operator
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, TypeGuard, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Ids, Lengths
from persia_torchrec.errors import BatchError, FrameError, TooLargeError
from persia_torchrec.lookup.bags import MAX_BATCH_SIZE, Bags
from persia_torchrec.parsing.decoding import parse_json

DTYPES = tuple(map(np.dtype, ("?", "i1", "i2", "i4", "i8", "u1", "f4", "f8")))
"""What dense features and labels may be made of."""

_ND_ARRAY_SUPPORT_TYPE = {dtype.type for dtype in DTYPES}
"""PERSIA's name of them, as NumPy's types."""

MAGIC = b"PTRB"
VERSION = 1

NO_WORKER = -1
"""In the place of a worker: none has the ids, and the data loader lacks them."""

WITH_BATCH = -2
"""In the place of a worker: none is needed, the ids came with the batch."""

Dense = npt.NDArray[np.generic]
Buffer = bytes | bytearray | memoryview
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
S = TypeVar("S", bound=np.generic)
P = TypeVar("P", bound="IDTypeFeature | IDTypeFeatureWithSingleID | NdarrayDataBase")

_DTYPE_OF = {dtype.name: dtype for dtype in DTYPES}
_FRAME = struct.Struct("<4sIQ")
_ALIGNMENT = 8


class IDTypeFeature:
    """A feature with any number of ids per sample, none included.

    Args:
        name: of the slot in ``embedding_config.yml``.
        data: one flat uint64 array per sample, copied; signed ids are rejected, not
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

    KIND: ClassVar[str] = "id type feature"
    DEFAULT_NAME: ClassVar[str] = ""

    def __init__(self, name: str, data: Sequence[Ids]) -> None:
        self.name = _plain_name(self.KIND, name)
        self.ids = _concatenate(self.name, data)
        self.lengths = np.fromiter(map(len, data), dtype=np.int32, count=len(data))

    @classmethod
    def from_flat(cls, name: str, ids: Ids, lengths: Lengths) -> "IDTypeFeature":
        """Build the feature from ids that lie flat already.

        ``ids`` ``(L,)`` and ``lengths`` ``(B,)``, each ``>= 0`` and L in sum, are kept,
        not copied, when contiguous. BatchError says what does not fit.
        """
        name = _plain_name(cls.KIND, name)
        _require_flat_ids(name, "data", ids)
        if lengths.dtype != np.int32 or lengths.ndim != 1:
            raise BatchError(
                f"Id type feature {name!r}: lengths must be a flat int32 array. "
                f"Received: {describe(lengths)}."
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
        return np.split(self.ids, np.cumsum(self.lengths)[:-1])[: self.batch_size]

    def batch_arrays(self) -> list[Dense]:
        """Return ids and lengths."""
        return [self.ids, self.lengths]

    @property
    def batch_size(self) -> int:
        """How many samples there are."""
        return len(self.lengths)


class IDTypeFeatureWithSingleID:
    """A feature with exactly one id per sample.

    Means the same as an :class:`IDTypeFeature` whose arrays have one id each, and costs
    less to make, check and send. ``data`` is uint64 ``(B,)``; it is kept, not copied,
    when contiguous. ``send_data``, a ``DataLoader`` and a lookup copy it: then it may
    change.
    """

    KIND = IDTypeFeature.KIND
    DEFAULT_NAME = IDTypeFeature.DEFAULT_NAME

    def __init__(self, name: str, data: Ids) -> None:
        self.name = _plain_name(self.KIND, name)
        _require_flat_ids(self.name, "data", data)
        self.data = self.ids = np.ascontiguousarray(data)
        self.lengths: Lengths = np.ones(len(data), dtype=np.int32)
        self.batch_size = len(data)

    def batch_arrays(self) -> list[Dense]:
        """Return the ids."""
        return [self.data]


IDFeature = IDTypeFeature | IDTypeFeatureWithSingleID


class NdarrayDataBase:
    """Dense data with the samples along the first dimension; use a subclass.

    ``data`` is ``(B, ...)`` of a dtype in :data:`DTYPES`; it is kept, not copied, when
    contiguous. ``send_data``, a ``DataLoader`` and a lookup copy it: then it may
    change, and a model may change its own. ``name`` is for messages only: the model
    receives dense data in order.
    """

    KIND: ClassVar[str] = "ndarray"
    DEFAULT_NAME: ClassVar[str] = "ndarray_base"

    def __init__(self, data: Dense, name: str | None = None) -> None:
        name = self.DEFAULT_NAME if name is None else name
        self.name = _plain_name(self.KIND, name)
        if not _is_plain(data) or data.ndim == 0:
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
        self.batch_size = len(data)

    def __len__(self) -> int:
        return self.batch_size

    def batch_arrays(self) -> list[Dense]:
        """Return the data."""
        return [self.data]


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
        meta: bytes that travel with the batch untouched; text is encoded as UTF-8.

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
        meta: bytes | str | None = None,
    ) -> None:
        self.id_type_features = tuple(id_type_features)
        self.non_id_type_features = tuple(non_id_type_features or ())
        self.labels = tuple(labels or ())
        self.requires_grad = bool(requires_grad)
        self.meta = meta.encode() if isinstance(meta, str) else meta
        self.batch_id: int | None = None

        for argument, classes in _CLASSES.items():
            for part in getattr(self, argument):
                if not isinstance(part, classes):
                    known = " or ".join(cls.__name__ for cls in classes)
                    raise BatchError(
                        f"{argument} must hold {known}. Received: {describe(part)}."
                    )
        if not self.id_type_features:
            raise BatchError("A batch must have at least one id type feature.")
        if batch_size is None:
            batch_size = self.id_type_features[0].batch_size
        self.batch_size = operator.index(batch_size)
        self._check_parts()
        if requires_grad and not self.labels:
            raise BatchError(
                "A batch with requires_grad=True must have labels. Received: none. "
                "Give labels, or requires_grad=False."
            )
        if not isinstance(self.meta, bytes | None):
            raise BatchError(f"meta must be bytes or text. Received: {describe(meta)}.")

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
        return _read(data)

    def to_bytes(self) -> bytes:
        """Return the batch as bytes; equal batches give equal bytes."""
        return _encode(self, self.id_type_features)

    def bags(self) -> dict[str, Bags]:
        """Return the ID features by name, without copies."""
        return {f.name: Bags(f.ids, f.lengths) for f in self.id_type_features}

    def batch_arrays(self) -> list[Dense]:
        """Return all arrays: ids and lengths, dense features, labels."""
        parts = (*self.id_type_features, *self.non_id_type_features, *self.labels)
        return [array for part in parts for array in part.batch_arrays()]

    def copy(self, *, copies_dense: bool = True) -> "PersiaBatch":
        """Return the batch with arrays of its own, which may be written.

        Without ``copies_dense`` dense features and labels are shared: for who copies
        them next.
        """
        features = tuple(map(_copied, self.id_type_features))
        batch = copy.copy(self)
        batch.id_type_features = features
        if copies_dense:
            batch.non_id_type_features = tuple(map(_copied, self.non_id_type_features))
            batch.labels = tuple(map(_copied, self.labels))
        return batch

    def _check_parts(self) -> None:
        """Check the number of samples, which all parts have, and that names differ."""
        if not 1 <= self.batch_size <= MAX_BATCH_SIZE:
            error = TooLargeError if self.batch_size else BatchError
            raise error(
                f"A batch must have 1 to {MAX_BATCH_SIZE} samples. "
                f"Received: {self.batch_size}."
            )
        seen = set()
        for part in (*self.id_type_features, *self.non_id_type_features, *self.labels):
            if part.batch_size != self.batch_size:
                raise BatchError(
                    f"All parts of a batch must have its {self.batch_size} samples. "
                    f"Received: {part.batch_size} in {part.KIND} {part.name!r}."
                )
            if (part.KIND, part.name) in seen:
                raise BatchError(
                    "The names of a batch's parts must differ. "
                    f"Received: {part.KIND} {part.name!r} twice."
                )
            if part.name != part.DEFAULT_NAME:
                seen.add((part.KIND, part.name))


def _copied(part: P) -> P:
    """Return a part of a batch with arrays of its own, each copied once."""
    new = object.__new__(type(part))
    own = vars(new)
    own.update(vars(part))
    if isinstance(part, IDTypeFeature):
        own.update(ids=part.ids.copy(), lengths=part.lengths.copy())
    else:
        own["data"] = data = part.data.copy()
        if isinstance(part, IDTypeFeatureWithSingleID):
            own["ids"] = data  # lengths are ones, made here
    return new


_CLASSES: dict[str, tuple[type, ...]] = {
    "id_type_features": (IDTypeFeature, IDTypeFeatureWithSingleID),
    "non_id_type_features": (NonIDTypeFeature,),
    "labels": (Label,),
}


class Origin:
    """Which batch of which data loader, and where its ids wait. Any thread may use it.

    Attributes:
        loader: number of the data loader.
        number: of the batch among those of the loader, from 1.
        worker: number of the embedding worker that has the ids; NO_WORKER: it is lost.
        is_lost: whether that worker has lost them, so that the loader must send them.
        is_settled: whether no process needs the ids any more.
    """

    def __init__(self, loader: int, number: int, worker: int) -> None:
        self.loader, self.number, self.worker = loader, number, worker
        self.is_lost = self.is_settled = False
        self._changed = threading.Condition()

    def lose(self, worker: int) -> None:
        """Ask for the ids that a worker has lost, unless they have moved meanwhile."""
        with self._changed:
            self.is_lost = self.is_lost or worker == self.worker

    def wait(self, timeout_s: float) -> bool:
        """Wait until a worker has the ids; return whether one has in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.is_lost, timeout_s)

    def move(self, worker: int) -> None:
        """Note that a worker has the ids again, or that the loader lacks them."""
        with self._changed:
            self.worker, self.is_lost = worker, False
            self._changed.notify_all()

    def settle(self) -> None:
        """Note that the batch is trained, or given up, or was only looked up."""
        self.is_settled = True


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferencedBatch:
    """A batch of a data loader, without its ids, which wait at an embedding worker.

    Attributes:
        origin: which batch it is, and where its ids wait.
        batch_id: the batch's number among those of all data loaders.
        id_type_features: the ids, if they came with the batch; else empty.
    """

    origin: Origin
    batch_size: int
    non_id_type_features: tuple[NonIDTypeFeature, ...]
    labels: tuple[Label, ...]
    requires_grad: bool
    meta: bytes | None
    batch_id: int | None
    id_type_features: tuple[IDFeature, ...] = ()

    @property
    def loader(self) -> int:
        """Number of the data loader that sent it."""
        return self.origin.loader


class _Ids(msgspec.Struct):
    name: str
    num_ids: Count
    single_id: bool


class _Dense(msgspec.Struct):
    name: str
    dtype: str
    shape: tuple[Count, ...]


class _Header(msgspec.Struct, kw_only=True):
    batch_id: Count | None
    batch_size: Count
    ids: list[_Ids]
    labels: list[_Dense]
    meta_bytes: Count | None
    dense: list[_Dense]
    requires_grad: bool


def encode_rest(batch: PersiaBatch) -> bytes:
    """Return the batch without its ids as bytes."""
    return _encode(batch, ())


def decode_rest(data: Buffer, origin: Origin) -> ReferencedBatch:
    """Read what :func:`encode_rest` wrote; each array has memory of its own."""
    try:
        batch_id, features, rest = _decode(data, copies=True)
    except BatchError as exc:
        raise _invalid(exc) from exc
    if features:
        raise FrameError("The rest of a batch must be without ids.")
    return ReferencedBatch(origin=origin, batch_id=batch_id, **rest)


def decode_whole(data: Buffer, origin: Origin) -> ReferencedBatch:
    """Read what ``to_bytes`` wrote, of a data loader; no process is asked for its ids.

    Each array has memory of its own.
    """
    batch = _read(data, copies=True)
    origin.settle()
    names = {field.name for field in fields(ReferencedBatch)} - {"origin"}
    return ReferencedBatch(origin=origin, **{n: getattr(batch, n) for n in names})


def _read(data: Buffer, *, copies: bool = False) -> PersiaBatch:
    try:
        batch_id, features, rest = _decode(data, copies=copies)
        batch = PersiaBatch(features, **rest)
    except BatchError as exc:
        raise _invalid(exc) from exc
    batch.batch_id = batch_id
    return batch


def _invalid(exc: BatchError) -> FrameError:
    return FrameError(f"The bytes of a batch must hold a valid one: {exc}")


def _encode(batch: PersiaBatch, features: Sequence[IDFeature]) -> bytes:
    arrays: list[Dense] = []
    ids = []
    for feature in features:
        is_single = isinstance(feature, IDTypeFeatureWithSingleID)
        ids.append(_Ids(feature.name, len(feature.ids), is_single))
        arrays += [feature.ids] if is_single else [feature.ids, feature.lengths]
    parts = (*batch.non_id_type_features, *batch.labels)
    arrays += [part.data for part in parts]
    dense = [_Dense(p.name, p.data.dtype.name, p.data.shape) for p in parts]
    header = _Header(
        batch_id=batch.batch_id,
        batch_size=batch.batch_size,
        ids=ids,
        labels=dense[len(batch.non_id_type_features) :],
        meta_bytes=None if batch.meta is None else len(batch.meta),
        dense=dense[: len(batch.non_id_type_features)],
        requires_grad=batch.requires_grad,
    )
    text = msgspec.json.encode(header)
    little = (a.astype(a.dtype.newbyteorder("<"), copy=False).data for a in arrays)
    frame = _FRAME.pack(MAGIC, VERSION, len(text))
    sections: list[Buffer] = [frame, text, *little, batch.meta or b""]
    padded = []
    for section in sections:
        padded += [section, bytes(-memoryview(section).nbytes % _ALIGNMENT)]
    return b"".join(padded)


def _decode(
    data: Buffer, *, copies: bool = False
) -> tuple[int | None, list[IDFeature], dict[str, Any]]:
    """Read a batch's number, its features, and the arguments beside them by name."""
    reader = _SectionReader(data, copies=copies)
    header = reader.header
    features = [reader.read_ids(ids, header.batch_size) for ids in header.ids]
    dense = [NonIDTypeFeature(reader.read_dense(d), d.name) for d in header.dense]
    labels = [Label(reader.read_dense(d), d.name) for d in header.labels]
    meta = None
    if header.meta_bytes is not None:
        meta = bytes(reader.read(header.meta_bytes, "meta"))
    if reader.offset != len(reader.data):
        raise FrameError(
            f"The bytes of a batch must end with it, after {reader.offset}. "
            f"Received: {len(reader.data)} bytes."
        )
    parts = {"non_id_type_features": tuple(dense), "labels": tuple(labels)}
    size, requires_grad = header.batch_size, header.requires_grad
    rest = {"batch_size": size, "requires_grad": requires_grad, "meta": meta}
    return header.batch_id, features, {**parts, **rest}


class _SectionReader:
    """Reads one section after the other, never beyond the end.

    Arrays are views of the bytes, or ``copies``.
    """

    def __init__(self, data: Buffer, *, copies: bool) -> None:
        self._copies = copies
        self.data = memoryview(data).cast("B")
        self.offset = 0
        magic, version, num_bytes = _FRAME.unpack(self.read(_FRAME.size, "the frame"))
        if magic != MAGIC:
            raise FrameError(
                f"The bytes of a batch must start with {MAGIC!r}. Received: {magic!r}."
            )
        if version != VERSION:
            raise FrameError(
                f"The bytes of a batch must be of version {VERSION}. Received: "
                f"{version}. Run the same release in all processes of a job."
            )
        text = self.read(num_bytes, "the header")
        self.header: _Header = parse_json(
            text, _Header, "header of a batch", FrameError
        )

    def read_ids(self, ids: _Ids, batch_size: int) -> IDFeature:
        what = f"id type feature {ids.name!r}"
        array = self._read_array(np.dtype(np.uint64), (ids.num_ids,), what)
        if ids.single_id:
            return IDTypeFeatureWithSingleID(ids.name, array)
        int32 = np.dtype(np.int32)
        lengths = self._read_array(int32, (batch_size,), f"the lengths of {what}")
        return IDTypeFeature.from_flat(ids.name, array, lengths)

    def read_dense(self, dense: _Dense) -> Dense:
        if dense.dtype not in _DTYPE_OF:
            raise FrameError(
                f"The dtype of {dense.name!r} must be one of {', '.join(_DTYPE_OF)}. "
                f"Received: {dense.dtype!r}."
            )
        return self._read_array(_DTYPE_OF[dense.dtype], dense.shape, repr(dense.name))

    def read(self, num_bytes: int, what: str) -> memoryview:
        """Return the next section, and step over it and its padding."""
        start, end = self.offset, self.offset + num_bytes
        padded = end + -num_bytes % _ALIGNMENT
        if padded > len(self.data):
            raise FrameError(
                f"The bytes of a batch must not end within {what}. "
                f"Received: {len(self.data)} bytes."
            )
        if any(self.data[end:padded]):
            raise FrameError(f"The padding of {what} must be zeros.")
        self.offset = padded
        return self.data[start:end]

    def _read_array(
        self, dtype: np.dtype[S], shape: tuple[int, ...], what: str
    ) -> npt.NDArray[S]:
        section = self.read(math.prod(shape) * dtype.itemsize, what)
        if dtype == np.bool_ and (np.frombuffer(section, dtype=np.uint8) > 1).any():
            raise FrameError(f"The booleans of {what} must be 0 or 1.")
        try:
            array = np.frombuffer(section, dtype=dtype.newbyteorder("<"))
            return array.astype(dtype, copy=self._copies).reshape(shape)
        except ValueError as exc:
            raise FrameError(f"{what} must have a shape for NumPy ({exc}).") from exc


def _concatenate(name: str, samples: Sequence[Ids]) -> Ids:
    """Join the samples' ids; NumPy checks all dtypes and shapes in that one call."""
    ids = np.empty(0, dtype=np.uint64)
    with contextlib.suppress(TypeError, ValueError):  # no sample, or one that misfits
        ids = np.concatenate(samples, dtype=np.uint64, casting="no")
    kinds = {type(sample): sample for sample in samples}
    if len(ids) == 0 or ids.ndim != 1 or not all(map(_is_plain, kinds.values())):
        for position, sample in enumerate(samples):
            _require_flat_ids(name, f"sample {position}", sample)
    return ids


def _require_flat_ids(name: str, which: str, ids: object) -> None:
    if not _is_plain(ids) or ids.ndim != 1 or ids.dtype != np.uint64:
        raise BatchError(
            f"Id type feature {name!r}: {which} must be a flat uint64 array. "
            f"Received: {describe(ids)}."
        )


def _is_plain(value: object) -> TypeGuard[npt.NDArray[Any]]:
    return isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray)


def _plain_name(kind: str, name: object) -> str:
    """Return a name as a plain string: one out of an array is NumPy's."""
    if not isinstance(name, str) or not name:
        hint = ""
        if kind == IDTypeFeature.KIND:
            hint = (
                " The name comes first, then the data; some of PERSIA's examples have "
                "it the other way round."
            )
        raise BatchError(
            f"Every {kind} must have a name, a string that is not empty. "
            f"Received: {describe(name)}.{hint}"
        )
    return str(name)


def describe(value: object) -> str:
    """Return what a message says of a value: dtype and shape, or the value."""
    if isinstance(value, np.ndarray):
        masked = ", masked: use its filled()" if np.ma.isMaskedArray(value) else ""
        return f"dtype={value.dtype}, shape={value.shape}{masked}"
    return f"{value!r:.100} ({type(value).__name__})"


def check_pyarray_dtype_valid(
    py_object: Dense, dtype: object, name: str | None = None
) -> None:
    """Raise BatchError unless a batch may have the array; ``dtype`` is the array's."""
    NdarrayDataBase(py_object, name)
