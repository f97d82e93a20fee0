"""What a lookup of slots says of itself: to whoever knows only its address."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from persia_torchrec.errors import (
    BatchError,
    PersiaError,
    RequestTimeoutError,
    WireError,
)

_RETRY_S = 0.1


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
        slots: all that a batch may have.
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


def wait_until_ready(ask: Callable[[], Hello], timeout_s: float) -> Hello:
    """Ask a lookup whether it is ready until it is.

    Args:
        ask: returns its answer, or raises why it is not ready.
        timeout_s: seconds to go on asking; the last question may end later.

    Raises:
        RequestTimeoutError: it was not in time; the last reason follows.
    """
    deadline = time.monotonic() + timeout_s
    never = threading.Event()
    while True:
        try:
            return ask()
        except PersiaError as exc:
            if time.monotonic() >= deadline:
                raise RequestTimeoutError(
                    f"not ready within {timeout_s:g} s. {exc}", server="embeddings"
                ) from exc
        never.wait(_RETRY_S)


def require_slots(received: Sequence[str], expected: Sequence[str]) -> None:
    """Check that a batch has slots, any of them and no others.

    Args:
        received: names of the ID features of the batch.
        expected: names of the slots.

    Raises:
        BatchError: a slot is unknown, or there is none.
    """
    unknown = set(received).difference(expected)
    if unknown or not received:
        raise BatchError(
            "The ID features of a batch must be slots of the embedding config, at "
            f"least one of {sorted(expected)}. Received: {sorted(received)}, unknown "
            f"{sorted(unknown)}."
        )
