"""Joint steps: one update of the shares of all trainers.

    share of rank 0 --.
    share of rank 1 ---+--> complete --> applied as one update --> all acknowledged
    rank 2 has left --'

The shares for a row are added up in the order of the ranks, so that the sum does not
depend on the order of arrival, and the optimizer sees one gradient per row. A trainer
without gradients gives an empty update. A step that waits for a trainer whose
connection is lost, or longer than its timeout, is rejected, and so are all later shares
of its group. What is known of the groups outlives the server, which then waits for the
shares again: their trainers send them until they are acknowledged.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from persia_torchrec import timeouts
from persia_torchrec.errors import BatchError, PersiaError, StoreError
from persia_torchrec.rpc.messages import Share
from persia_torchrec.server.open_batches import Batch
from persia_torchrec.server.update_queue import QueuedUpdate

_MAX_GROUPS = 1024  # groups remembered
_CHECK_S = 0.5  # how often a step checks the trainers that it waits for


@dataclass(slots=True)
class JointTrainer:
    """A trainer of a group, as far as the server knows it.

    ``who`` is its process and host, if it has said; ``ended`` why it gives no more
    shares; ``lost_s`` when its connection was first seen to be lost.
    """

    peer: bytes
    who: str = ""
    ended: str = ""
    lost_s: float = math.inf

    def describe(self, rank: int) -> str:
        """Return what an error says of it."""
        who = f"{self.who}: " if self.who else ""
        return f"rank {rank} ({who}{self.ended or 'its connection was lost'})"

    def name(self, rank: int) -> str:
        """Return its rank, and its process and host as far as they are known."""
        return f"rank {rank}{self.who and f' ({self.who})'}"


class SavedGroup(msgspec.Struct, array_like=True):
    """What is kept of a group: peer, name and end of its members, and the others."""

    number: int
    members: dict[int, tuple[bytes, str, str]]
    left: dict[int, int]
    broken: str


@dataclass(slots=True)
class _Step:
    """One step that waits: its shares so far, by rank."""

    timeout_s: float
    deadline_s: float
    num_ranks: int
    updates: dict[int, QueuedUpdate] = field(default_factory=dict)


@dataclass(slots=True)
class _Group:
    """Trainers that step together.

    By rank, ``first`` is the first step that waits for it, ``left`` the first that does
    not any more.
    """

    members: dict[int, JointTrainer] = field(default_factory=dict)
    steps: dict[int, _Step] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)
    broken: str = ""
    first: dict[int, int] = field(default_factory=dict)

    def missing(self, number: int) -> list[int]:
        """Return the ranks that a step still waits for."""
        step = self.steps[number]
        return [
            rank
            for rank in range(step.num_ranks)
            if rank not in step.updates
            and self.first.get(rank, number) <= number < self.left.get(rank, number + 1)
        ]

    def save(self, number: int) -> bytes:
        """Return what is kept of the group."""
        members = {r: (m.peer, m.who, m.ended) for r, m in self.members.items()}
        saved = SavedGroup(number, members, self.left, self.broken)
        return msgspec.json.encode(saved)

    def require_in_step(self, share: Share, batch: Batch) -> None:
        """Reject a share that does not fit those that have come, or was sent again."""
        if self.broken:
            raise StoreError(self.broken)
        step = self.steps.get(share.step)
        if step is not None and step.num_ranks != share.num_ranks:
            raise BatchError(
                f"All shares of a step must have the same number of ranks. Received: "
                f"{share.num_ranks} from rank {share.rank} of step {share.step}, "
                f"{step.num_ranks} from the others."
            )
        given = None if step is None else step.updates.get(share.rank)
        is_given = given is not None and (given.batch != batch or not batch[0])
        if is_given or self.left.get(share.rank, share.step + 1) <= share.step:
            raise BatchError(
                f"Rank {share.rank} must give its share of step {share.step} once, and "
                "before it leaves. Received: another one."
            )

    def find_fault(self, now_s: float, is_lost: Callable[[JointTrainer], bool]) -> str:
        """Describe the first step that waits too long, or for lost trainers, if any."""
        for number, step in sorted(self.steps.items()):
            ranks, known = self.missing(number), self.members
            must = (
                f"Step {number} must get the gradients of all {step.num_ranks} "
                "trainers. Received: none of"
            )
            if step.deadline_s <= now_s:
                return (
                    f"{must} rank {', '.join(map(str, ranks))} within "
                    f"{step.timeout_s:g} s. Every trainer must run as many training "
                    "steps; where data may end earlier, train inside join()."
                )
            lost = [r for r in ranks if r in known and is_lost(known[r])]
            if lost:
                return (
                    f"{must} {', '.join(known[r].describe(r) for r in lost)}. See the "
                    "log of that trainer; where data may end earlier, train inside "
                    "join()."
                )
        return ""


@dataclass
class JointSteps:
    """Collects the shares of joint steps. Owned by the serving thread.

    ``apply`` gets the updates of a complete step, in the order of their ranks;
    ``max_bytes`` bounds the ids and gradients that wait. A trainer is lost when its
    connection is away for ``grace_s``. ``keep`` gets what :meth:`restore` needs.
    """

    apply: Callable[[list[QueuedUpdate]], None]
    reject: Callable[[QueuedUpdate, PersiaError], None]
    is_connected: Callable[[bytes], bool]
    max_bytes: int
    clock: Callable[[], float] = time.monotonic
    grace_s: float = 0.0
    keep: Callable[[list[bytes]], None] = lambda _: None

    def __post_init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        self.num_steps = self._max_steps = 0  # that wait
        self._num_bytes = self._most_bytes = 0
        self._num_broken = 0
        self._next_check_s = self._all_read_s = -math.inf

    def restore(self, saved: Sequence[SavedGroup]) -> None:
        """Know the groups of the previous process, the latest first."""
        for kept in reversed(saved):
            members = {
                rank: JointTrainer(*member) for rank, member in kept.members.items()
            }
            group = _Group(members, left=kept.left, broken=kept.broken)
            self._groups[kept.number] = group

    def join(self, share: Share, member: JointTrainer) -> list[str]:
        """Register a rank, or that it has ended; return which other ranks are gone."""
        group = self._get_group(share.group)
        members = group.members
        if share.rank not in members:  # else it says that it has ended
            group.first[share.rank] = share.step
        members[share.rank] = member
        self._keep_groups()
        self._apply_complete(group, sorted(group.steps))
        return [
            other.describe(rank)
            for rank, other in sorted(members.items())
            if rank != share.rank and (other.ended or not self.is_connected(other.peer))
        ]

    def add(self, share: Share, update: QueuedUpdate) -> None:
        """Take a trainer's share of a step, or reject it."""
        group = self._get_group(share.group)
        size_bytes = update.size_bytes
        try:
            group.require_in_step(share, update.batch)
            if self._num_bytes + size_bytes > self.max_bytes:
                why = (
                    f"Joint steps may keep {self.max_bytes} bytes of gradients "
                    f"waiting. Received: {self._num_bytes} bytes, and {size_bytes} "
                    f"more of rank {share.rank}. Lower the "
                    "staleness, or add servers."
                )
                self._break(group, why)
                raise StoreError(why)
        except PersiaError as exc:
            self.reject(update, exc)
            return
        member = group.members.setdefault(share.rank, JointTrainer(b""))
        member.lost_s = math.inf
        if member.peer != update.peer:
            member.peer = update.peer
            self._keep_groups()
        if share.step not in group.steps:
            timeout_s = share.timeout_ms / 1000
            deadline_s = self.clock() + timeout_s
            group.steps[share.step] = _Step(timeout_s, deadline_s, share.num_ranks)
            self._next_check_s = min(self._next_check_s, deadline_s)
            self.num_steps += 1
        updates = group.steps[share.step].updates
        if share.rank in updates:  # it was sent again
            self._num_bytes -= updates[share.rank].size_bytes
        updates[share.rank] = update
        self._num_bytes += size_bytes
        self._apply_complete(group, [share.step])

    def leave(self, share: Share) -> None:
        """Stop waiting for a rank, from the share's step on, until the next group."""
        group = self._get_group(share.group)
        if member := group.members.get(share.rank):
            next_group = self._get_group(share.group + 1)
            next_group.members.setdefault(share.rank, member)
        group.left[share.rank] = min(share.step, group.left.get(share.rank, share.step))
        self._keep_groups()
        self._apply_complete(group, sorted(group.steps))

    def waits_for(self, peer: bytes) -> str:
        """Return which trainers the first step lacks that has a share of a peer."""
        for group in self._groups.values():
            for number, step in sorted(group.steps.items()):
                if any(update.peer == peer for update in step.updates.values()):
                    known = group.members
                    names = [
                        known.get(rank, JointTrainer(b"")).name(rank)
                        for rank in group.missing(number)
                    ]
                    return (
                        f"step {number} waits for the gradients of "
                        f"{timeouts.some_of(names)}"
                    )
        return ""

    def has_read_all(self) -> None:
        """Note that the server has no message to read."""
        self._all_read_s = self.clock()

    def reject_overdue(self) -> None:
        """Reject steps that wait too long, or for lost trainers; break their groups."""
        now_s = self.clock()
        if now_s < self._next_check_s:
            return
        for group in list(self._groups.values()):
            if why := group.find_fault(now_s, self._is_lost):
                self._break(group, why)
        waiting = [s for group in self._groups.values() for s in group.steps.values()]
        deadlines = (step.deadline_s for step in waiting)
        self._next_check_s = min([now_s + _CHECK_S, *deadlines])

    def reject_all(self, why: str) -> None:
        """Reject all steps, and break their groups."""
        for group in list(self._groups.values()):
            if group.steps:
                self._break(group, why)

    def _is_lost(self, member: JointTrainer) -> bool:
        """Return whether no more shares of a trainer will come."""
        if not member.ended and self.is_connected(member.peer):
            member.lost_s = math.inf
            return False
        now_s = self.clock()
        member.lost_s = min(member.lost_s, now_s)
        gone_s = now_s - member.lost_s
        has_read_all = self._all_read_s > member.lost_s
        grace_s = (
            timeouts.JOINT_GRACE_S
            if member.ended
            else max(timeouts.JOINT_GRACE_S, self.grace_s)
        )
        return gone_s >= grace_s and (has_read_all or gone_s >= timeouts.JOINT_UNREAD_S)

    def _keep_groups(self) -> None:
        """Have the groups kept, the latest first."""
        self.keep([g.save(number) for number, g in reversed(self._groups.items())])

    def _get_group(self, number: int) -> _Group:
        group = self._groups.pop(number, None) or _Group()
        if len(self._groups) >= _MAX_GROUPS:
            idle = (n for n, other in self._groups.items() if not other.steps)
            self._groups.pop(next(idle, number), None)
        self._groups[number] = group  # the latest one
        return group

    def _apply_complete(self, group: _Group, steps: Iterable[int]) -> None:
        for step in steps:
            if not group.missing(step):
                self.apply(self._take(group, step))
        self._max_steps = max(self._max_steps, self.num_steps)
        self._most_bytes = max(self._most_bytes, self._num_bytes)

    def _take(self, group: _Group, step: int) -> list[QueuedUpdate]:
        """Take a step out; return its updates in the order of their ranks."""
        updates = group.steps.pop(step).updates
        self.num_steps -= 1
        self._num_bytes -= sum(update.size_bytes for update in updates.values())
        return [updates[rank] for rank in sorted(updates)]

    def _break(self, group: _Group, why: str) -> None:
        group.broken = why
        self._keep_groups()
        self._num_broken += len(group.steps)
        for step in sorted(group.steps):
            for update in self._take(group, step):
                self.reject(update, StoreError(why))

    def counters(self) -> dict[str, int]:
        """Return what waits now, the most that waited, and how many steps failed."""
        return {
            "joint_steps": self.num_steps,
            "joint_steps_max": self._max_steps,
            "joint_bytes": self._num_bytes,
            "joint_bytes_max": self._most_bytes,
            "joint_steps_broken": self._num_broken,
        }
