"""A batch as PERSIA's users write it: ids, dense features, labels.

The parts are checked where they are made (``embedding/features.py``), and that they fit
one another here, so that a :class:`PersiaBatch` can be trusted everywhere else.
"""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from persia_torchrec.embedding.features import (
    DTYPES,
    IDFeature,
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NdarrayDataBase,
    NonIDTypeFeature,
    describe,
)
from persia_torchrec.errors import BatchError

__all__ = [
    "DTYPES",
    "MAX_BATCH_SIZE",
    "BatchRest",
    "IDFeature",
    "IDTypeFeature",
    "IDTypeFeatureWithSingleID",
    "Label",
    "NdarrayDataBase",
    "NonIDTypeFeature",
    "PersiaBatch",
]

MAX_BATCH_SIZE = 65_535
"""Most samples in a batch."""


class PersiaBatch:
    """One batch of training, evaluation or inference.

    Args:
        id_type_features: at least one; their names differ. Any of the slots of the
            job, in any order; the model gets their embeddings in this one.
        non_id_type_features: the dense features, in the model's order.
        labels: in the order of the training loop; needed to train.
        batch_size: number of samples in ``[1, 65535]``; taken from the first id type
            feature when None.
        requires_grad: whether the embeddings are trained on this batch: the servers
            then make rows for new ids, and expect gradients.
        meta: bytes that travel with the batch untouched.

    Attributes:
        batch_id: the batch's number in the order of all loaders, from 0; None until
            it is sent. The other attributes are the arguments, the sequences as
            tuples.

    Raises:
        BatchError: an argument is of the wrong class, the parts differ in batch size,
            two parts have the same name, or there is nothing to train for.
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
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> "PersiaBatch":
        """Read what :meth:`to_bytes` wrote.

        Args:
            data: kept, not copied: the batch's arrays are views of it.

        Raises:
            FrameError: the bytes are no batch, are cut off or too many, or describe
                a batch that cannot be.
        """
        # As in to_bytes().
        from persia_torchrec.embedding.batch_bytes import decode_batch

        return decode_batch(data)

    def to_bytes(self) -> bytes:
        """Return the batch as bytes; equal batches give equal bytes."""
        # batch_bytes builds the classes of this file, so it cannot be above.
        from persia_torchrec.embedding.batch_bytes import encode_batch

        return encode_batch(self)

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
class BatchRest:
    """What a batch is without its ids, which have gone to an embedding worker."""

    batch_size: int
    """Samples."""

    non_id_type_features: tuple[NonIDTypeFeature, ...]
    """All of ``batch_size`` samples."""

    labels: tuple[Label, ...]
    """All of ``batch_size`` samples."""

    requires_grad: bool
    """Whether the batch is for training."""

    meta: bytes | None
    """The user's own bytes."""

    batch_id: int | None
    """Its number among all batches of all data loaders."""


def _check_classes(
    argument: str, parts: tuple[object, ...], classes: tuple[type, ...]
) -> None:
    for part in parts:
        if not isinstance(part, classes):
            raise BatchError(
                f"{argument} must hold {' or '.join(cls.__name__ for cls in classes)}. "
                f"Received: {describe(part)}."
            )
