"""Joint steps: updates of several trainers that wait for one another.

    share of rank 0 --.
    share of rank 1 ---+--> all there --> applied as one update --> all acknowledged
    rank 2 has left --'

A trainer gives its share of a step with its gradients, or gives it up with an update
without any. One that has no more data leaves: the steps from then on do not wait for
it. One that died does neither; so a step that has waited too long is refused, and the
message names who is missing. Its group is broken from then on: whoever comes later is
refused at once, since trainers that lost a step are not in step any more.

What waits is bounded in bytes. A lookup of step n + 1 comes after the acknowledgement
of step n if each trainer waits for its own: that is the only barrier there is.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from persia_torchrec.errors import BatchError, PersiaError, StoreError
from persia_torchrec.metrics import Metrics
from persia_torchrec.server.updates import Update
from persia_torchrec.wire.messages import Share

_MAX_GROUPS = 1024
"""Groups remembered that some have left, or that are broken."""


@dataclass(slots=True)
class _Step:
    """One step that waits: its shares so far, by rank."""

    deadline: float
    timeout_s: float
    num_ranks: int
    updates: dict[int, Update] = field(default_factory=dict)


@dataclass(slots=True)
class _Group:
    """Trainers that step together."""

    steps: dict[int, _Step] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)
    """By rank: the first step that it gives no share of."""
    broken: str = ""

    def missing(self, number: int) -> list[int]:
        """Return the ranks that a step still waits for."""
        step = self.steps[number]
        return [
            rank
            for rank in range(step.num_ranks)
            if rank not in step.updates and self.left.get(rank, number + 1) > number
        ]


class JointSteps:
    """Collects the shares of joint steps. Owned by the server's thread.

    Args:
        metrics: gets the gauges ``joint_steps`` and ``joint_bytes``, what waits now,
            and counts ``joint_steps_broken``.
        apply: is given the updates of a step, in the order of their ranks, when the
            last one is there.
        refuse: is given an update that will not be applied, and why.
        max_bytes: of ids and gradients that may wait.
        clock: seconds that only rise.
    """

    def __init__(
        self,
        metrics: Metrics,
        apply: Callable[[list[Update]], None],
        refuse: Callable[[Update, PersiaError], None],
        *,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._apply = apply
        self._refuse = refuse
        self._max_bytes = max_bytes
        self._clock = clock
        self._groups: OrderedDict[int, _Group] = OrderedDict()
        self._num_steps = 0
        self._num_bytes = 0
        self._earliest = math.inf  # no deadline is earlier
        metrics.count("joint_steps_broken", 0)
        self._publish()

    def __len__(self) -> int:
        """Return how many steps wait."""
        return self._num_steps

    def add(self, share: Share, update: Update) -> None:
        """Take a trainer's share of a step, or refuse it.

        Refused is what this rank has given already, or after it has left; a share of
        another number of ranks; one more than there is room for; and every share of a
        broken group.
        """
        group = self._group(share.group)
        try:
            _require_in_step(group, share)
            self._require_room(share, group, update)
        except PersiaError as exc:
            self._refuse(update, exc)
            return
        timeout_s = share.timeout_ms / 1000
        if share.step not in group.steps:
            deadline = self._clock() + timeout_s
            group.steps[share.step] = _Step(deadline, timeout_s, share.num_ranks)
            self._earliest = min(self._earliest, deadline)
            self._num_steps += 1
        group.steps[share.step].updates[share.rank] = update
        self._num_bytes += update.size_bytes
        self._apply_complete(share.group, [share.step])

    def leave(self, share: Share) -> None:
        """Wait for a rank no more, in the share's step and all later ones."""
        group = self._group(share.group)
        group.left[share.rank] = min(share.step, group.left.get(share.rank, share.step))
        self._apply_complete(share.group, sorted(group.steps))

    def refuse_overdue(self) -> None:
        """Refuse what has waited too long, and break its group."""
        now = self._clock()
        if now < self._earliest:
            return
        for number, group in list(self._groups.items()):
            overdue = [n for n, step in group.steps.items() if step.deadline <= now]
            if overdue:
                self._break(number, _overdue(group, min(overdue)))
        waiting = (s for group in self._groups.values() for s in group.steps.values())
        self._earliest = min((step.deadline for step in waiting), default=math.inf)

    def refuse_all(self, why: str) -> None:
        """Refuse everything that waits, and break its group."""
        for number, group in list(self._groups.items()):
            if group.steps:
                self._break(number, why)

    def _group(self, number: int) -> _Group:
        group = self._groups.setdefault(number, _Group())
        self._groups.move_to_end(number)
        if len(self._groups) > _MAX_GROUPS:
            oldest = next(
                (n for n, other in self._groups.items() if not other.steps), number
            )
            if oldest != number:
                del self._groups[oldest]
        return group

    def _require_room(self, share: Share, group: _Group, update: Update) -> None:
        if self._num_bytes + update.size_bytes <= self._max_bytes:
            return
        why = (
            f"Joint steps may keep {self._max_bytes} bytes of gradients waiting. "
            f"Received: {self._num_bytes} bytes, and {update.size_bytes} more of rank "
            f"{share.rank}. Raise joint_update_bytes of the server, or lower the "
            "staleness."
        )
        self._break(share.group, why)
        raise StoreError(group.broken)

    def _apply_complete(self, number: int, steps: Iterable[int]) -> None:
        group = self._groups[number]
        for step in steps:
            if not group.missing(step):
                updates = self._take(group, step)
                self._apply([updates[rank] for rank in sorted(updates)])
        if not (group.steps or group.left or group.broken):
            del self._groups[number]
        self._publish()

    def _take(self, group: _Group, step: int) -> dict[int, Update]:
        updates = group.steps.pop(step).updates
        self._num_steps -= 1
        self._num_bytes -= sum(update.size_bytes for update in updates.values())
        return updates

    def _break(self, number: int, why: str) -> None:
        group = self._groups[number]
        group.broken = why
        self._metrics.count("joint_steps_broken", len(group.steps))
        for step in sorted(group.steps):
            for update in self._take(group, step).values():
                self._refuse(update, StoreError(why))
        self._publish()

    def _publish(self) -> None:
        self._metrics.set_gauge("joint_steps", self._num_steps)
        self._metrics.set_gauge("joint_bytes", self._num_bytes)


def _require_in_step(group: _Group, share: Share) -> None:
    if group.broken:
        raise StoreError(group.broken)
    step = group.steps.get(share.step)
    if step is not None and step.num_ranks != share.num_ranks:
        raise BatchError(
            f"All shares of a step must have the same number of ranks. Received: "
            f"{share.num_ranks} from rank {share.rank} of step {share.step}, "
            f"{step.num_ranks} from the others."
        )
    is_given = step is not None and share.rank in step.updates
    if is_given or group.left.get(share.rank, share.step + 1) <= share.step:
        raise BatchError(
            f"Rank {share.rank} must give its share of step {share.step} once, and "
            "before it leaves. Received: another one."
        )


def _overdue(group: _Group, number: int) -> str:
    step = group.steps[number]
    return (
        f"Step {number} must get the gradients of all {step.num_ranks} trainers. "
        f"Received: none of rank {', '.join(map(str, group.missing(number)))} within "
        f"{step.timeout_s:g} s. Every trainer must run as many training steps; where "
        "data may end earlier, train inside join()."
    )
