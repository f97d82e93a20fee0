"""Joint steps: updates of several trainers that wait for one another.

    share of rank 0 --.
    share of rank 1 ---+--> all there --> applied as one update --> all acknowledged
    rank 2 has left --'

A trainer gives its share of a step with its gradients, or gives it up with an update
without any. One that has no more data leaves: the steps from then on do not wait for
it. One that ended does neither. So a step that has waited for a while looks whether the
connections of those that it waits for are still there. It is refused when one is not,
or has waited too long; the message names who is missing. Its group is broken from then
on: whoever comes later is refused at once, since trainers that lost a step are not in
step any more. A trainer that ended after its last share, while nobody waits for it, is
no fault.

The last shares of a trainer may still wait to be read when its connection is gone. So
it counts as lost only when its connection has been away for ``_GRACE_S``, and the
server has read every message since, or has not come to that within ``_MAX_UNREAD_S``.

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
"""Groups remembered."""

_LOOK_S = 0.5
"""A step looks for the trainers that it waits for after so long, and as often."""

_GRACE_S = 1.0
"""A connection may be away for so long, and come back."""

_MAX_UNREAD_S = 4.0
"""A server with messages to read all the time waits no longer for those of one that
is gone."""


@dataclass(slots=True)
class _Step:
    """One step that waits: its shares so far, by rank."""

    since: float
    timeout_s: float
    num_ranks: int
    updates: dict[int, Update] = field(default_factory=dict)

    @property
    def deadline(self) -> float:
        return self.since + self.timeout_s


@dataclass(slots=True)
class Member:
    """A trainer of a group, as far as the server knows it.

    Attributes:
        peer: where its messages come from.
        who: its process and host; empty where it has not said.
        ended: why it gives no more shares; empty as long as it may.
        gone_since: when its connection was first seen to be gone.
    """

    peer: bytes
    who: str = ""
    ended: str = ""
    gone_since: float = math.inf

    def describe(self, rank: int) -> str:
        """Return what an error says of it."""
        why = self.ended or "its connection was lost"
        return (
            f"rank {rank} ({self.who}: {why})" if self.who else f"rank {rank} ({why})"
        )


@dataclass(slots=True)
class _Group:
    """Trainers that step together."""

    members: dict[int, Member] = field(default_factory=dict)
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
        is_connected: tells whether the connection that messages came from is there.
        max_bytes: of ids and gradients that may wait.
        clock: seconds that only rise.
    """

    def __init__(
        self,
        metrics: Metrics,
        apply: Callable[[list[Update]], None],
        refuse: Callable[[Update, PersiaError], None],
        *,
        is_connected: Callable[[bytes], bool],
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._apply = apply
        self._refuse = refuse
        self._is_connected = is_connected
        self._max_bytes = max_bytes
        self._clock = clock
        self._groups: OrderedDict[int, _Group] = OrderedDict()
        self._num_steps = 0
        self._num_bytes = 0
        self._earliest = math.inf  # no deadline, and no look, is earlier
        self._has_read_all_at = -math.inf
        metrics.count("joint_steps_broken", 0)
        self._publish()

    def __len__(self) -> int:
        """Return how many steps wait."""
        return self._num_steps

    def join(self, share: Share, member: Member) -> list[str]:
        """Take note of who a rank is, or that it has ended; the last word holds.

        Returns:
            Which other ranks of its group are gone.
        """
        members = self._group(share.group).members
        members[share.rank] = member
        return [
            other.describe(rank)
            for rank, other in sorted(members.items())
            if rank != share.rank
            and (other.ended or not self._is_connected(other.peer))
        ]

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
        group.members.setdefault(share.rank, Member(update.peer)).peer = update.peer
        if share.step not in group.steps:
            step = _Step(self._clock(), share.timeout_ms / 1000, share.num_ranks)
            group.steps[share.step] = step
            self._earliest = min(self._earliest, step.deadline, step.since + _LOOK_S)
            self._num_steps += 1
        group.steps[share.step].updates[share.rank] = update
        self._num_bytes += update.size_bytes
        self._apply_complete(share.group, [share.step])

    def leave(self, share: Share) -> None:
        """Wait for a rank no more, in the share's step and all later ones.

        It is expected in the next group, which all come to when they have left.
        """
        group = self._group(share.group)
        if member := group.members.get(share.rank):
            self._group(share.group + 1).members.setdefault(share.rank, member)
        group.left[share.rank] = min(share.step, group.left.get(share.rank, share.step))
        self._apply_complete(share.group, sorted(group.steps))

    def has_read_all(self) -> None:
        """Take note that the server has no message to read."""
        self._has_read_all_at = self._clock()

    def refuse_overdue(self) -> None:
        """Refuse what waits too long, or for ranks that are gone; break its group."""
        now = self._clock()
        if now < self._earliest:
            return
        for number, group in list(self._groups.items()):
            overdue = [n for n, step in group.steps.items() if step.deadline <= now]
            if overdue:
                self._break(number, _overdue(group, min(overdue)))
            elif why := self._departed(group, now):
                self._break(number, why)
        waiting = [s for group in self._groups.values() for s in group.steps.values()]
        self._earliest = min((step.deadline for step in waiting), default=math.inf)
        if waiting:
            self._earliest = min(self._earliest, now + _LOOK_S)

    def _departed(self, group: _Group, now: float) -> str:
        """Say of the first step that waits for ranks which are gone; or nothing."""
        for number in sorted(group.steps):
            if now < group.steps[number].since + _LOOK_S:
                continue
            known = ((r, group.members.get(r)) for r in group.missing(number))
            gone = [m.describe(r) for r, m in known if m and self._is_gone(m, now)]
            if gone:
                return (
                    f"Step {number} must get the gradients of all "
                    f"{group.steps[number].num_ranks} trainers. Received: none of "
                    f"{', '.join(gone)}. See the log of that trainer; where data may "
                    "end earlier, train inside join()."
                )
        return ""

    def _is_gone(self, member: Member, now: float) -> bool:
        """Return whether no share of a trainer will come any more."""
        if not member.ended and self._is_connected(member.peer):
            member.gone_since = math.inf
            return False
        member.gone_since = min(member.gone_since, now)
        gone_s = now - member.gone_since
        has_read_all = self._has_read_all_at > member.gone_since
        return gone_s >= _GRACE_S and (has_read_all or gone_s >= _MAX_UNREAD_S)

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
