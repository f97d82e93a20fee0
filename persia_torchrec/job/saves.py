"""How the saves of a job's trainers went, as a note of the address book.

trainers       set the note: when they begin, after each save, before the last one
status, stop   read the note; a coordinator that ends hands it to ``JobRecord``
scale          asks for a save by another note, which comes back in the first
"""

from collections.abc import Mapping

import msgspec

from persia_torchrec.errors import FrameError
from persia_torchrec.parsing.decoding import parse_json

SAVES = "saves"
SAVE_REQUEST = "save request"  # what the next note of SAVES has as ``request``


class Saves(msgspec.Struct, frozen=True):
    """How the saves of a training went; without one, it saves nothing."""

    step: int
    """Steps that the newest checkpoint has."""
    trained: int = 0
    """Steps that were trained when a save was tried last."""
    num_failed: int = 0
    """Saves that have failed since the newest checkpoint."""
    cause: str = ""
    """Of the last one that has failed."""
    request: str = ""
    """The last request for a save that was answered."""

    @staticmethod
    def of(notes: Mapping[str, str]) -> "Saves | None":
        """Return what the notes of a job have; None: it saves nothing."""
        text = notes.get(SAVES)
        return None if text is None else parse_json(text, Saves, SAVES, FrameError)

    def text(self) -> str:
        """Return the note."""
        return msgspec.json.encode(self).decode()

    def failed(self) -> str:
        """Return how the last saves went, for who looks at the job; "": well."""
        if not self.num_failed:
            return ""
        num = self.num_failed
        which = "save" if num == 1 else f"{num} saves"
        return f"the last {which} failed: {self.cause}"


def steps(first: int, last: int) -> str:
    """Return the name of steps, both included: "steps 3 to 5"."""
    return f"step {first}" if first == last else f"steps {first} to {last}"
