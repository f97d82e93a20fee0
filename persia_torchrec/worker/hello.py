"""What a lookup of slots says of itself: to whoever knows only its address."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from persia_torchrec.errors import BatchError, WireError


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """One slot, as a model is given it."""

    name: str
    """Of its ids in a batch."""

    dim: int
    """Floats of a vector."""

    num_places: int
    """Ids of a sample that get a vector each; 0: they are pooled to one."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The answer of a lookup that is ready.

    Attributes:
        slots: in the order of the model's embeddings.
        num_rows: of each embedding server, in the order of their shards.
    """

    slots: tuple[Slot, ...]
    num_rows: tuple[int, ...]

    def to_json(self) -> dict[str, object]:
        """Describe it in plain JSON values."""
        slots = [asdict(slot) for slot in self.slots]
        return {"slots": slots, "num_rows": list(self.num_rows)}

    @classmethod
    def from_json(cls, value: object) -> "Hello":
        """Read what :meth:`to_json` returned.

        Raises:
            WireError: it is something else.
        """
        try:
            assert isinstance(value, dict)
            slots = tuple(
                Slot(
                    name=str(slot["name"]),
                    dim=int(slot["dim"]),
                    num_places=int(slot["num_places"]),
                )
                for slot in value["slots"]
            )
            return cls(slots, tuple(int(rows) for rows in value["num_rows"]))
        except (AssertionError, KeyError, TypeError, ValueError) as exc:
            raise WireError(
                "An embedding worker must tell its slots and rows. "
                f"Received: {value!r:.100}. Is this the address of another role?"
            ) from exc


def require_slots(received: Sequence[str], expected: Sequence[str]) -> None:
    """Check that a batch has the slots, each of them and no others.

    Args:
        received: names of the ID features of the batch.
        expected: names of the slots.

    Raises:
        BatchError: a slot is missing or unknown.
    """
    names, slots = set(received), set(expected)
    if names != slots:
        raise BatchError(
            "A batch must have the ID features of the embedding config, "
            f"{sorted(slots)}. Received: missing {sorted(slots - names)}, unknown "
            f"{sorted(names - slots)}."
        )
