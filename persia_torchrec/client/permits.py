"""The bound on staleness: permits that batches take and give back.

A training batch takes a permit before its rows are pulled and gives it back when its
update has been acknowledged by every server. With ``n`` permits,

    batches pulled - batches acknowledged <= n        at every moment,

so the rows of a batch lack the updates of at most ``n - 1`` earlier batches. One permit
is the schedule of ordinary training: each batch sees all updates before it.

A permit is given back exactly once, whatever happens to its batch: acknowledged,
failed, or dropped without a backward pass.
"""

import threading

from persia_torchrec.errors import ConfigError, PersiaError, StalenessError


class Permit:
    """One batch's permit; :meth:`give_back` may be called twice."""

    def __init__(self, permits: "Permits") -> None:
        self._permits = permits
        self._lock = threading.Lock()
        self._is_held = True  # guarded by _lock

    def give_back(self) -> None:
        """Let another batch be pulled."""
        with self._lock:
            was_held, self._is_held = self._is_held, False
        if was_held:
            self._permits.release()


class Permits:
    """The permits of one stream of batches. Any thread may call any method.

    Args:
        num: how many batches may be between pull and acknowledgement, at least 1.
        timeout_s: seconds to wait for a permit.

    Raises:
        ConfigError: ``num`` is below 1.
    """

    def __init__(self, num: int, timeout_s: float) -> None:
        if num < 1:
            raise ConfigError(f"There must be at least one permit. Received: {num}.")
        self.num = num
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._num_free = num  # guarded by _changed
        self._is_closed = False  # guarded by _changed

    def take(self) -> Permit:
        """Wait for a permit.

        Raises:
            StalenessError: none became free in time.
            PersiaError: the permits were closed.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._num_free or self._is_closed, self._timeout_s
            )
            if self._is_closed:
                raise PersiaError("The embedding pipeline is closed.")
            if not self._num_free:
                raise StalenessError(
                    f"{self.num} batches have been pulled and not updated for "
                    f"{self._timeout_s:g} s, as many as the staleness bound allows. "
                    "Does every training batch get its backward pass?"
                )
            self._num_free -= 1
        return Permit(self)

    def release(self) -> None:
        """Give one permit back; :class:`Permit` calls this."""
        with self._changed:
            self._num_free += 1
            assert self._num_free <= self.num
            self._changed.notify()

    def close(self) -> None:
        """Hand out no further permit; who waits for one gets an error."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
