"""The bound on staleness: a counting semaphore with owners.

A training batch takes a permit before its rows are pulled and gives it back when its
update has been acknowledged by every server. With ``n`` permits,

    batches pulled - batches acknowledged <= n        at every moment,

so the rows of a batch lack the updates of at most ``n - 1`` earlier batches. One permit
is the schedule of ordinary training: each batch sees all updates before it.

A thread may need several batches for one backward pass: when a module is called twice
in a forward pass, or the losses of several batches are added up. It *holds* a batch
from when it waits for it until it pushes it. When it waits for one more and holds all
that are out, it alone could give a permit back, and does not while it waits: so this
batch proceeds without waiting. What it sees are the rows before the updates of the
others, which is what it would see if the tables were local; only batches that are
pulled ahead, or pushed and not acknowledged, add staleness, and those stay bounded.

A permit is given back exactly once, whatever happens to its batch: acknowledged,
failed, or dropped without a backward pass.
"""

import threading
from dataclasses import dataclass, replace

from persia_torchrec.errors import ConfigError, PersiaError, StalenessError

CLOSED = "The embedding pipeline is closed."


class Permit:
    """One batch's permit.

    Attributes:
        holder: the thread that holds the batch, if one does.
        was_held: whether one ever did.
        has_left: whether the batch is pushed or dropped: no thread holds it any more.
    """

    holder: int | None = None
    was_held = False
    has_left = False

    def let_go(self) -> None:
        """Note that the batch is pushed or dropped.

        Takes no lock, since a garbage collection may call it anywhere.
        """
        self.has_left = True
        self.holder = None


@dataclass(slots=True)
class LookupCounts:
    """How stale the rows of lookups were.

    Attributes:
        num: permits that were taken, one per lookup.
        num_waited: of these, how many had to wait.
        num_lacking: batches that were pulled and not acknowledged when a permit was
            taken, added up: the updates that the rows of this lookup lack.
    """

    num: int = 0
    num_waited: int = 0
    num_lacking: int = 0


class StalenessSemaphore:
    """The permits of one stream of batches. Any thread may call any method.

    Args:
        num: how many batches may be between pull and acknowledgement, at least 1.
        timeout_s: seconds to wait for a permit.
        counts: what is counted so far, by a previous semaphore that is not used any
            more; handed over.

    Raises:
        ConfigError: ``num`` is below 1.
    """

    def __init__(
        self, num: int, timeout_s: float, counts: LookupCounts | None = None
    ) -> None:
        if num < 1:
            raise ConfigError(f"There must be at least one permit. Received: {num}.")
        self.num = num
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._out: set[Permit] = set()  # guarded by _changed
        self._is_closed = False  # guarded by _changed
        self._counts = counts or LookupCounts()  # guarded by _changed

    def counts(self) -> LookupCounts:
        """Return what is counted so far; a copy."""
        with self._changed:
            return replace(self._counts)

    def take(self, permit: Permit) -> None:
        """Wait until a batch may be pulled.

        Raises:
            StalenessError: there was no permit in time.
            PersiaError: the semaphore was closed.
        """
        with self._changed:
            must_wait = len(self._out) >= self.num and not self._holds_all(permit)
            if must_wait:
                self._changed.wait_for(
                    lambda: (
                        len(self._out) < self.num
                        or self._holds_all(permit)
                        or self._is_closed
                    ),
                    self._timeout_s,
                )
            if self._is_closed:
                raise PersiaError(CLOSED)
            if len(self._out) >= self.num and not self._holds_all(permit):
                raise StalenessError(
                    f"{self.num} batches have been pulled and not updated for "
                    f"{self._timeout_s:g} s, as many as the staleness bound allows. "
                    "Does every training batch get its backward pass?"
                )
            self._counts.num += 1
            self._counts.num_waited += must_wait
            self._counts.num_lacking += len(self._out)
            self._out.add(permit)

    def hold(self, permit: Permit) -> None:
        """Note that the calling thread waits for a batch, and will push it."""
        if not permit.has_left:
            permit.holder, permit.was_held = threading.get_ident(), True
            with self._changed:
                self._changed.notify_all()

    def give_back(self, permit: Permit) -> None:
        """Let another batch be pulled; may be called twice."""
        with self._changed:
            self._out.discard(permit)
            self._changed.notify_all()

    def close(self) -> None:
        """Hand out no further permit; who waits for one gets an error."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _holds_all(self, permit: Permit) -> bool:
        """Return whether the thread that waits for a batch holds all that are out."""
        thread = permit.holder
        return thread is not None and all(out.holder == thread for out in self._out)
