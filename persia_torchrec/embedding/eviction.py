"""Which rows of a table leave although the server is not full."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from persia_torchrec.embedding.setting import NonNegative, Registry, Setting, integer_in

Steps = Annotated[int, integer_in(0, 2**48)]


@dataclass(frozen=True)
class Expiry(Setting):
    """Say when a row of a table leaves, with its optimizer state; 0 switches off.

    ``updated`` is the step or the time of the row's last update, or of its creation if
    it was never updated; ``created`` is that of its creation; ``now`` is the table's
    step, which is its number of update requests on the server, or the time. All
    settings are ``>= 0``. A row leaves when one of the conditions that are switched on
    holds::

        steps_to_live:    now - updated > steps_to_live               in steps
        seconds_to_live:  now - updated > seconds_to_live             in seconds
        min_l2_norm:      sqrt(sum(w**2)) < min_l2_norm
                          and now - created >= spared_steps           in steps

    Lookups keep no row alive. Optimizer state does not count towards the norm.
    ``spared_steps`` needs ``min_l2_norm``.

    A ``min_l2_norm`` above the norm of the initial weights needs ``spared_steps``
    enough for a row to grow. DeepRec has the first and the third condition, both only
    while a full checkpoint is written. In its first a row never updated counts as just
    updated; its third compares half the squared norm, and spares no row.
    """

    kind: ClassVar[str] = "expiry"

    steps_to_live: Steps = 0
    seconds_to_live: NonNegative = 0.0
    min_l2_norm: NonNegative = 0.0
    spared_steps: Steps = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(
            "spared_steps",
            self.min_l2_norm > 0 or self.spared_steps == 0,
            "0 without min_l2_norm, from which it spares young rows",
        )

    @property
    def is_on(self) -> bool:
        """Whether any row can expire."""
        return any((self.steps_to_live, self.seconds_to_live, self.min_l2_norm))


EXPIRIES: Registry[Expiry] = Registry(Expiry, Expiry)
"""The one kind of expiry."""
