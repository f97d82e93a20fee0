"""How the saves of a job's trainers went, as a note of the address book.

trainers       set the note: when they begin, after each save, before the last one
status, stop   read the note; a coordinator that ends hands it to ``JobRecord``
scale          asks for a save by another note, which comes back in the first
"""

from collections.abc import Mapping

import msgspec

from persia_torchrec.errors import FrameError
from persia_torchrec.job import failures
from persia_torchrec.parsing.decoding import parse_json

LAST_CHECKPOINT = "checkpoint"  # note that names the last complete one
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

    def lost(self, outcome: str, reason: str) -> str:
        """Return which steps a job that was told to end has lost, and why; or ""."""
        reason = reason.removeprefix("coordinator: ")
        if self.trained > self.step:
            cause = self.cause if self.num_failed else reason
            lost = steps(self.step + 1, self.trained)
            return f"the last save failed: {cause}; {lost} are lost"
        if outcome == "finished" or failures.was_told_alone(reason):
            return ""
        return f"no last save: {reason}; steps behind step {self.step} are lost"

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


def verdict(outcome: str, reason: str, saves: Saves | None) -> str:
    """Return how a job has ended: ``stopped`` if it was told to, and lost nothing."""
    if outcome != "failed" or not failures.was_told(reason):
        return outcome
    if reason.endswith(failures.AT_ONCE):
        return "stopped"
    return "failed" if saves and saves.lost(outcome, reason) else "stopped"
