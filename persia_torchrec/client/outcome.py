"""What became of a push."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Self

from persia_torchrec.errors import WireError

_NAMES = ("missed", "refused", "unadmitted", "gradients")


@dataclass(frozen=True, slots=True)
class PushOutcome:
    """What became of the gradients of a push.

    Attributes:
        num_missed: ids that had no row: it had been evicted, or never admitted.
        num_refused: rows whose gradient was not finite: NaN or infinite.
        num_unadmitted: of the missed, those that were never admitted.
        num_gradients: ids that had a gradient, applied or not.
    """

    num_missed: int = 0
    num_refused: int = 0
    num_unadmitted: int = 0
    num_gradients: int = 0

    @property
    def num_evicted(self) -> int:
        """Ids whose row left between its lookup and its gradient."""
        return self.num_missed - self.num_unadmitted

    @classmethod
    def total(cls, outcomes: Iterable[Self]) -> Self:
        """Add outcomes up."""
        num_missed = num_refused = num_unadmitted = num_gradients = 0
        for outcome in outcomes:
            num_missed += outcome.num_missed
            num_refused += outcome.num_refused
            num_unadmitted += outcome.num_unadmitted
            num_gradients += outcome.num_gradients
        return cls(num_missed, num_refused, num_unadmitted, num_gradients)

    def to_json(self) -> dict[str, int]:
        """Describe the outcome as it stands in a reply."""
        return dict(zip(_NAMES, astuple(self), strict=True))

    @classmethod
    def from_json(cls, answer: object) -> Self:
        """Read what :meth:`to_json` wrote.

        Raises:
            WireError: it is something else.
        """
        if isinstance(answer, dict):
            values = [answer.get(name) for name in _NAMES]
            numbers = [value for value in values if isinstance(value, int)]
            if len(numbers) == len(_NAMES):
                return cls(*numbers)
        raise WireError(
            "The reply to an update must tell how many gradients it had, and how many "
            f"were missed and refused. Received: {answer!r:.100}."
        )
