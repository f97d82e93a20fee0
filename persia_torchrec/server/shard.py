"""The state of one shard of all tables: its rows, and the updates that wait for them.

Updates are applied in the order in which they came, and acknowledged then. A request
that changes tables or drops rows waits for all earlier updates. What is sent again is
recognised, and answered as before: see ``dedup.py``.

Dimension key:
    N: ids of one table in a request
    D: its embedding dim
    S: its optimizer-state floats per row
"""

import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Floats
from persia_torchrec.checkpoint.background import Activity
from persia_torchrec.errors import BatchError, ConfigError, StoreError
from persia_torchrec.metrics.values import Durations, Stages
from persia_torchrec.parsing.decoding import parse_json
from persia_torchrec.rpc import messages
from persia_torchrec.rpc.float_codec import UNDERFLOWS, decode_floats, num_zeroed
from persia_torchrec.rpc.listener import Listener
from persia_torchrec.rpc.messages import Frame, Frames, Header, Kind, TableSegments
from persia_torchrec.rpc.sockets import MAX_MESSAGE_BYTES
from persia_torchrec.server.checkpoint_service import CheckpointService
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.server.dedup import MAX_GROUPS_BYTES, Outcome, Streams
from persia_torchrec.server.follower import ServedCheckpoint
from persia_torchrec.server.joint_steps import (
    JointSteps,
    SavedGroup,
)
from persia_torchrec.server.open_batches import Batch
from persia_torchrec.server.owners import TableOwners
from persia_torchrec.server.update_queue import UpdateQueue
from persia_torchrec.table import TableSpec

logger = logging.getLogger(__name__)


_JOINT_UPDATE_BYTES = 4 * 2**30  # gradients of joint steps that may wait for others
_MAX_USERS = 4096


class _Kept(msgspec.Struct):
    """What ``Streams.groups`` keeps once a table has had an owner."""

    groups: list[SavedGroup]
    owners: TableOwners


class Shard:
    """One shard. Owned by the serving thread; any thread may set ``stopping``.

    ``afterwards`` is what is left to do when the request has its reply.
    """

    def __init__(self, config: ServerConfig, listener: Listener) -> None:
        self.config = config
        self.store = config.make_store()
        self.activity = Activity()
        self.streams = Streams(self.store)
        self.checkpoints: CheckpointService | ServedCheckpoint
        if config.checkpoint is None:
            self.checkpoints = CheckpointService(
                config,
                self.store,
                self.activity,
                roots=config.roots(listener.address),
                incarnation=self.streams.incarnation,
            )
        else:
            self.checkpoints = ServedCheckpoint(config, self.store, self.activity)
        names = "requests_lookup_inference", "requests_refused", "requests_repeated"
        self.counts = Counter[str](dict.fromkeys((*names, UNDERFLOWS), 0))
        self.stages, self.lookup_durations = Stages(), Durations()
        self.updates = UpdateQueue(
            self.store, self.streams, listener, self.stages, self.reject
        )
        self.joint_steps = JointSteps(
            self.updates.add,
            self.updates.reject,
            is_connected=listener.is_connected,
            max_bytes=_JOINT_UPDATE_BYTES,
            grace_s=config.recovery_s,
            keep=self._keep_groups,
        )
        listener.waits_for = self.joint_steps.waits_for
        kept = self.streams.groups
        found = parse_json(
            kept or b"[]", list[SavedGroup] | _Kept, "groups and owners", StoreError
        )
        if isinstance(found, list):
            found = _Kept(found, TableOwners())
        self.owners, self._groups = found.owners, list[bytes]()
        self.joint_steps.restore(found.groups)
        self.afterwards: Callable[[], None] | None = None
        self.must_drop = False
        self.stopping = threading.Event()
        self.restored: set[int] = set()  # tables that no client has added since
        # Peers that have added tables: process and host, and the numbers of these.
        self._users: dict[bytes, tuple[str, set[int]]] = {}
        self._listener, self.slabs = listener, listener.slabs

    def find_outcome(self, batch: Batch) -> Outcome | None:
        """Return the outcome of a request that was answered before; None: it is new."""
        if batch[0] and batch in self.updates:
            self.updates.apply_all()
        outcome = self.streams.outcome(batch)
        self.counts["requests_repeated"] += outcome is not None
        return outcome

    def drop_older_streams(self) -> None:
        """Give up what trainers of older generations have begun, or note to do so."""
        self.checkpoints.drop(self.streams.is_older)
        self.must_drop = self.checkpoints.is_loading  # which owns the store
        if self.must_drop:
            return
        self.updates.apply_all()
        self.joint_steps.reject_all("The group of trainers was started again.")
        self.updates.open_batches.drop(self.streams.is_older)
        self.owners.drop(self.streams.is_older)
        self.keep_owners()
        self.streams.drop_older()

    def reject(self, peer: bytes, request: int, exc: Exception) -> None:
        """Tell a peer that its request failed."""
        self.counts["requests_refused"] += 1
        if isinstance(exc, MemoryError):
            exc = StoreError(
                f"The server must have the memory that a request takes ({exc}). Send "
                "smaller requests, or lower its capacity."
            )
        self._listener.send_error(peer, request, exc)
        self.stages.lap("send")

    def _keep_groups(self, groups: Sequence[bytes]) -> None:
        self._groups = list(groups)
        self.keep_owners()

    def keep_owners(self) -> None:
        """Keep owners, and the first groups, as many as there is room for."""
        owners = b""
        if self.owners.owners or self.owners.ended:
            owners = b',"owners":' + msgspec.json.encode(self.owners) + b"}"
        room = MAX_GROUPS_BYTES - len(owners) - 32
        if room < 0:
            raise ConfigError(
                f"Owners must take at most {MAX_GROUPS_BYTES} bytes. Received: more. "
                "Cache the rows of fewer tables."
            )
        num_bytes = itertools.accumulate(len(group) + 1 for group in self._groups)
        num = sum(so_far < room for so_far in num_bytes)
        groups = b"[" + b",".join(self._groups[:num]) + b"]"
        self.streams.groups = b'{"groups":' + groups + owners if owners else groups

    def counters(self) -> dict[str, int]:
        """Return everything that is counted, see ``docs/metrics.md``."""
        self.stages.lap("other")
        return {
            **self.store.counters(),
            **self.lookup_durations.counters("lookup"),
            **self.updates.counters(),
            **self.counts,
            **self.joint_steps.counters(),
            **self.stages.counters(),
            **self.checkpoints.counters(),
            "bytes_received": self._listener.bytes_received,
            "bytes_sent": self._listener.bytes_sent,
            **self.slabs.counters(),
        }

    def read_ids(self, frames: Frames, num_frames: int) -> TableSegments:
        """Read the ids of each table that a request names."""
        asked = messages.decode_segments(frames, num_frames=num_frames)
        num_ids = len(asked.ids)
        if num_ids > self.config.max_request_ids:
            raise BatchError(
                f"A request may name {self.config.max_request_ids} ids. Received: "
                f"{num_ids}. Send smaller requests, or raise the server's "
                "max_request_ids."
            )
        if not self.store.is_group(asked.tables):
            for table in asked.tables:
                self.require_table(table)
        return asked

    def require_table(self, number: int) -> None:
        """Check the number of a table."""
        if not 0 <= number < len(self.store.states):
            raise ConfigError(
                f"Unknown table number {number}: this server has "
                f"{len(self.store.states)} tables. Add the tables first."
            )
        if (state := self.store.states[number]).is_dropped:
            raise ConfigError(
                f"Table {state.spec.name!r} was dropped (drop_table), and has no rows. "
                "Call add_tables, or shard the model, to begin it again."
            )

    def replace_restored(self, specs: Sequence[TableSpec]) -> None:
        """Drop tables that were restored if they come with other rows.

        The trainers load a checkpoint, where rules say what becomes of their rows.
        """
        given = {spec.name: spec for spec in specs}
        for state in [s for s in self.store.present if s.number in self.restored]:
            if (spec := given.get(state.spec.name)) is None:
                continue
            had, has = state.describe_both(spec)
            if had != has:
                self.store.drop_tables([state.number])
                logger.warning(
                    "table %r has %s, and was restored with %s: its restored rows are "
                    "dropped, and on_change of the load says whether it begins again",
                    spec.name,
                    has,
                    had,
                )
            self.restored.discard(state.number)

    def note_user(self, peer: bytes, who: str, numbers: Sequence[int]) -> None:
        """Note that a client has added tables, by which a trainer says it uses them."""
        if len(self._users) >= _MAX_USERS:
            gone = [p for p in self._users if not self._listener.is_connected(p)]
            for other in gone:
                del self._users[other]
        _, known = self._users.setdefault(peer, (who, set()))
        known.update(numbers)

    def require_unused(self, number: int, name: str, peer: bytes) -> None:
        """Reject dropping a table that others than a peer have added, and may train."""
        states = self.store.states
        if number >= len(states) or states[number].spec.name != name:
            raise ConfigError(
                f"Table {number} of this server must be {name!r}. Received: another "
                f"one, because the server has lost its memory."
                " Call drop_table again."
            )
        users = [
            who
            for other, (who, numbers) in self._users.items()
            if number in numbers
            and other != peer
            and self._listener.is_connected(other)
        ]
        if users and not states[number].is_dropped:
            raise ConfigError(
                f"Table {name!r} must not be trained while it is dropped. Received: "
                f"{', '.join(users)}, which has added it and is connected. End that "
                "training, or close its client, and drop it then."
            )

    def read_rows(
        self,
        asked: TableSegments,
        frame: Frame,
        precision: messages.Precision,
        *,
        has_state: bool = False,
    ) -> tuple[npt.NDArray[np.int64], Floats]:
        """Read weights or gradients: float32, flat, table by table; and their widths.

        With ``has_state``, rows are weights and optimizer state: D + S wide.
        """
        group = self.store.group(asked.tables)
        widths = group.widths if has_state else group.dims
        nums = np.diff(asked.starts)
        shapes: list[tuple[int, ...]] = [(int(nums.dot(widths)),)]
        if precision is messages.Precision.FP16:  # which has a scale a row
            shapes = list(zip(nums.tolist(), widths.tolist(), strict=True))
        flat = decode_floats(frame, shapes, precision)
        self.counts[UNDERFLOWS] += num_zeroed(frame, precision)
        return widths, flat


def require_fits(num_bytes: int) -> None:
    """Reject a request whose reply would be too large, before it takes memory."""
    if num_bytes > MAX_MESSAGE_BYTES:
        raise BatchError(
            f"A reply may have {MAX_MESSAGE_BYTES} bytes. Received: a request whose "
            f"reply has {num_bytes} bytes. Send smaller requests."
        )


class ShardRequest(NamedTuple):
    """A message of a client."""

    peer: bytes
    header: Header
    frames: Frames


class RequestKind(NamedTuple):
    """How one kind of request is answered."""

    kind: Kind
    answer: Callable[[Shard, ShardRequest], Frames | None]
    """Returns the frames after the reply's header; None if the reply comes later."""
    needs_rows: bool = True  # rejected while a checkpoint is loaded; counts as activity
    in_inference: bool = False  # answered by servers that serve a checkpoint, too
