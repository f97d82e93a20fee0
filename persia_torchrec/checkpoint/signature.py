"""The signature of a dense model: its inputs by name, in the order that it takes.

A context learns it from the batches that it runs the model on. TorchScript keeps it in
the model's own file, so that a server gives the model its inputs by their names,
whatever their order in a request.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from persia_torchrec.errors import CheckpointError
from persia_torchrec.parsing.decoding import decoder_of

EXTRA_FILE = "persia_signature.json"
"""Name within the TorchScript file."""

SERVED_MODEL = "serving_model.pt"
"""Name of the file of a TorchRec model, which ``export_for_serving`` writes."""


class DenseInput(msgspec.Struct, frozen=True):
    """A dense input.

    ``shape`` is that of a sample, without the batch; ``dtype`` is NumPy's name.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


class ModelSignature(msgspec.Struct, frozen=True):
    """The inputs of a dense model, in its order, and the shape of its output.

    Attributes:
        slots: names of the ID features.
        dense: the dense inputs. Two of one name are told apart by ``.1``, ``.2``.
        output: shape of the output of a sample, without the batch; None if the model
            returns no tensor.
    """

    slots: tuple[str, ...]
    dense: tuple[DenseInput, ...]
    output: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls, slots: Sequence[str], dense: Sequence[Any], output: object
    ) -> "ModelSignature":
        """Return that of a batch: its slots, dense features and the model's output."""
        names = distinct_names([feature.name for feature in dense])
        inputs = [
            DenseInput(name, str(feature.data.dtype), tuple(feature.data.shape[1:]))
            for name, feature in zip(names, dense, strict=True)
        ]
        shape = getattr(output, "shape", None)
        return cls(
            tuple(slots), tuple(inputs), None if shape is None else tuple(shape[1:])
        )

    def encode(self) -> bytes:
        """Return it as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes, file: str) -> "ModelSignature":
        """Read what :meth:`encode` returned, or raise CheckpointError."""
        try:
            signature: ModelSignature = decoder_of(cls).decode(data)
            return signature
        except msgspec.MsgspecError as exc:
            raise CheckpointError(
                f"{file} must have a valid signature ({exc}). Write the model again."
            ) from exc


def distinct_names(names: Sequence[str]) -> list[str]:
    """Return names that differ: the second of one name gets ``.1``, and so on."""
    taken: dict[str, int] = {}
    found = []
    for name in names:
        number = taken.get(name, 0)
        taken[name] = number + 1
        found.append(f"{name}.{number}" if number else name)
    return found
