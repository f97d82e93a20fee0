"""The rows that a trainer caches: what comes from the servers, and what goes back.

    pulling thread   unique ids -> slots       (cache/slot_map.py)
                     rows that leave -> write; rows that miss <- lookup with state
    flushing thread  rows that were trained -> write, every ``flush_s``

The servers keep all rows; here are copies of some, with their optimizer state, and they
are newer. All that concerns a row goes over one connection, in the order in which
``sending`` lets it be sent: so the lookup of a row comes behind the write of it.

A slot is pinned from the assignment of a batch until its autograd graph is freed, which
a backward pass does, or until a batch without a graph is dropped.

Dimensions: U unique rows of a batch, N rows, W floats a row.
"""

import atexit
import contextlib
import logging
import os
import queue
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from persia_torchrec import timeouts
from persia_torchrec.arrays import Counts, Floats, Positions
from persia_torchrec.cache import slot_map
from persia_torchrec.cache.slot_map import Assigned, Moves
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.client.client import BatchNumber, EmbeddingClient, Reply
from persia_torchrec.errors import (
    BatchError,
    ConfigError,
    PersiaError,
)
from persia_torchrec.routing.route import IdGroup
from persia_torchrec.rpc.messages import GENERATION_SHIFT, Precision
from persia_torchrec.rpc.own_process import OwnProcess
from persia_torchrec.sharding import cache_snapshot
from persia_torchrec.sharding.cache_settings import Cache, CacheCounts
from persia_torchrec.sharding.cache_slots import Pool
from persia_torchrec.table import TableSpec

logger = logging.getLogger(__name__)

_ROWS_AT_ONCE = 16_384  # written back by a flush, while a step waits
_RESTORED_BYTES = 2**28  # of rows, looked up at once when a run is resumed
_WRITES_IN_FLIGHT = 8  # whose rows are kept here
_SHARED_AFTER = 100  # batches of each collection, by the rows that they missed


class Held(NamedTuple):
    """The slots of a group of a batch, int32 ``(U,)``."""

    pool: Pool
    slots: Positions


class Pin:
    """Keeps the slots of a batch until it is forgotten, by whichever thread."""

    def __init__(self, held: Iterable[Held], freed: "queue.SimpleQueue[None]") -> None:
        self.held = tuple(held)
        weakref.finalize(self, _release, self.held, freed).atexit = False


def _release(held: Iterable[Held], freed: "queue.SimpleQueue[None]") -> None:
    """Release slots; takes no lock, as garbage collection may call it."""
    for pool, slots_U in held:
        pool.map.release(slots_U, trained=False)
    freed.put(None)


class _Write(NamedTuple):
    """Rows on their way to the servers, kept until these have them."""

    pool: Pool
    moves: Moves
    rows: Floats
    frequencies: Counts
    replies: list[Reply | None]  # of each server; None: to be sent (again)


def _is_lost(reply: Reply | None) -> bool:
    """Return whether a server does not have what it was sent."""
    return reply is None or (reply.has_ended() and reply.exception() is not None)


def _chosen(moves: Moves, are_chosen_N: npt.NDArray[np.bool_]) -> Moves:
    """Return some of the rows."""
    group, slots_N, counts_N = moves
    shape = group.num_ids.shape
    segments_N = np.repeat(np.arange(group.num_ids.size), group.num_ids.reshape(-1))
    num_ids = np.bincount(segments_N[are_chosen_N], minlength=group.num_ids.size)
    offsets = np.zeros(len(group.offsets), dtype=np.int64)
    np.cumsum(num_ids.reshape(shape).sum(axis=1), out=offsets[1:])
    return Moves(
        IdGroup(group.tables, group.ids[are_chosen_N], offsets, num_ids.reshape(shape)),
        slots_N[are_chosen_N],
        counts_N[are_chosen_N],
    )


class RowCache(OwnProcess):
    """The slots of a trainer's cached tables, and what goes to and from the servers.

    Any thread may call any method.
    """

    def __init__(self, client: EmbeddingClient, settings: Cache) -> None:
        self.client, self.settings = client, settings
        self._wanted: dict[object, list[tuple[TableSpec, int]]] = {}  # by pool
        self._pools: dict[str, Pool] = {}  # by table; empty until the first batch
        self.sending = threading.RLock()
        self._writes: deque[_Write] = deque()  # guarded by sending
        self._starts = list(client.incarnations)  # guarded by sending
        self.counts = CacheCounts()
        self.ending = queue.SimpleQueue[None]()  # what is put there closes it
        self.is_closed = self._is_succeeded = False
        self._closing = threading.RLock()  # who closes it
        self._freed = queue.SimpleQueue[None]()  # slots: wakes a batch that waits
        self._has_warned = False
        self._streams: dict[int, int] = {}  # of lookups, by generation of the trainers
        self.owned: list[str] = []  # tables
        self._owns = False  # since the first batch that trains
        self._sharing = threading.Lock()  # who changes the pools
        self._has_parts = False  # pools share a size
        self._shared_at: int | None = None  # batches; None: the pools stay as they are
        self._checkpoint: Folder | None = None  # whose rows the first batch finds
        client.caches.add(self)
        _OPEN.add(self)
        _end_at_sigterm()

    # While the model is sharded, and before its first batch

    def add(self, spec: TableSpec, collection: object, num_features: int) -> int:
        """Add a table of a collection; return the number of its pool."""
        if self._pools:
            raise ConfigError(
                "All collections must be sharded before the first batch where rows are "
                "cached, as the cache is shared out then. Received: table "
                f"{spec.name!r} after it. Give each model sharders of its own."
            )
        key = collection, spec.dim, spec.optimizer
        self._wanted.setdefault(key, []).append((spec, num_features))
        return list(self._wanted).index(key)

    def begin(self) -> None:
        """Make the slots, and begin to write back; before the first batch."""
        if self._pools or not self._wanted:
            return
        slot_map.warm_up()
        wanted = [[spec for spec, _ in tables] for tables in self._wanted.values()]
        nums = [sum(num for _, num in tables) for tables in self._wanted.values()]
        shares = self._shares([specs[0].dim for specs in wanted], nums)
        for specs, share in zip(wanted, shares, strict=True):
            num_slots = self.settings.num_slots(specs[0], share)
            pool = Pool(specs, num_slots, self.client.num_servers)
            self._pools.update(dict.fromkeys(pool.tables, pool))
        self._has_parts = min(shares) < 1
        self._shared_at = _SHARED_AFTER if self._has_parts else None
        self._require_room()
        threading.Thread(
            target=self._flush_at_times, name="cache flush", daemon=True
        ).start()

    def _shares(self, dims: Sequence[int], parts: Sequence[float]) -> list[float]:
        """Return the share that each pool has of a size, by its part of it."""
        return [
            part / sum(p for d, p in zip(dims, parts, strict=True) if d in sharing)
            for part, sharing in zip(
                parts,
                ({d for d in dims if self.settings.is_shared(d, dim)} for dim in dims),
                strict=True,
            )
        ]

    def _share_by_misses(self, groups: Sequence[IdGroup]) -> None:
        """Share the slots by what missed, once some batches have shown that.

        Or before, if a batch has more rows than its pool. All batches before must have
        ended; if they do not soon, it is tried again after as many more.
        """
        own = [self._pools[group.tables[0]] for group in groups]
        for pool, group in zip(own, groups, strict=True):
            pool.most_rows = max(pool.most_rows, len(group.ids))
        is_small = any(pool.most_rows > pool.num_slots for pool in own)
        if not self._has_parts or (not is_small and not self._is_due(own)):
            return
        with self._sharing:
            if self._is_due(own):
                assert self._shared_at is not None
                is_done = self._resize(self._shared_at)
                self._shared_at = None if is_done else 2 * self._shared_at
            elif any(pool.most_rows > pool.num_slots for pool in own):
                self._resize(0)

    def _is_due(self, pools: Sequence[Pool]) -> bool:
        return self._shared_at is not None and pools[0].batches >= self._shared_at

    def _resize(self, num_batches: int) -> bool:
        """Share the slots, when each pool has had some batches, and none has slots."""
        pools, give_up_s = self.pools, time.monotonic() + timeouts.CACHE_PARTS_S
        while time.monotonic() < give_up_s:
            with self.sending:
                if all(
                    pool.batches >= num_batches and not pool.map.counters.num_pinned
                    for pool in pools
                ):
                    self.flush()
                    sizes = self._sizes(pools)
                    for pool in sorted(pools, key=lambda p: sizes[p] - p.num_slots):
                        pool.resize(sizes[pool])  # those that shrink first
                    return True
            with contextlib.suppress(queue.Empty):
                self._freed.get(timeout=0.01)
        return False

    def _sizes(self, pools: Sequence[Pool]) -> dict[Pool, int]:
        """Return the slots of each pool: for four batches, and then by what missed."""
        needs = dict[Pool, float]()
        for pool in pools:
            num = 4 * pool.most_rows if pool.most_rows else pool.num_slots
            needs[pool] = num / self.settings.num_slots(pool.spec, 1.0)
        sizes = {}
        for pool in pools:
            sharing = [p for p in pools if self.settings.is_shared(p.dim, pool.dim)]
            need = sum(needs[p] for p in sharing)
            missed = sum(p.map.counters.misses + 1 for p in sharing)
            part = needs[pool] / max(need, 1.0)
            part += max(1 - need, 0.0) * (pool.map.counters.misses + 1) / missed
            sizes[pool] = self.settings.num_slots(pool.spec, part)
        told = ", ".join(f"{num} for {', '.join(p.tables)}" for p, num in sizes.items())
        logger.info("the cache has slots by what was missed: %s", told)
        return sizes

    # Checkpoints

    def snapshot(self) -> dict[str, bytes]:
        """Return files of a checkpoint: which rows are cached, and which leave next.

        Nothing, if this model does not train: another one with its tables may.
        """
        if not self._owns or self._is_succeeded:
            return {}
        with self.sending:
            return cache_snapshot.files_of(self.pools, self.settings)

    def restore(self, folder: Folder) -> None:
        """Have the rows that were cached in the run of a checkpoint, if none are yet.

        They come with the first batch.
        """
        self._checkpoint = folder

    def _restore(self) -> None:
        """Take the rows of a run that is resumed, while no batch has any."""
        with self._sharing:
            folder = self._checkpoint
            if folder is None:
                return  # another thread has done it
            if not any(pool.batches for pool in self.pools):
                read = cache_snapshot.read(folder, self.pools, self.settings)
                for found in read:
                    self._restore_pool(found)
                for found in read:  # all are there
                    pool = found.pool
                    pool.batches, pool.most_rows = found.batches, found.most_rows
                    if self._shared_at is not None and pool.batches > self._shared_at:
                        self._shared_at = None  # it was done in that run
            self._checkpoint = None

    def _restore_pool(self, found: cache_snapshot.PoolSnapshot) -> None:
        """Read rows as the servers have them; those that left there are not cached."""
        pool = found.pool
        with self.sending:
            pool.resize(found.num_slots)
            moves = pool.map.restore(found.snapshot)
            pool.loading[id(moves)] = moves.slots
        num = max(_ROWS_AT_ONCE, _RESTORED_BYTES // (4 * pool.width))
        try:
            for start in range(0, len(moves.slots), num):
                chosen_N = np.zeros(len(moves.slots), dtype=np.bool_)
                chosen_N[start : start + num] = True
                self._load([(pool, _chosen(moves, chosen_N))], None)
                pool.loading[id(moves)] = moves.slots[start + num :]
        except BaseException:
            pool.map.forget()  # rows that have not come; the next batch begins again
            raise
        finally:
            pool.loading.pop(id(moves))

    def _own(self) -> None:
        """Have no other client change rows, before this trainer does."""
        known, wanted = self.client.tables, self._wanted.values()
        names = [spec.name for tables in wanted for spec, _ in tables]
        self.owned = [name for name in names if name in known]
        if self.owned:
            # One trainer has a cache: that of rank 0.
            self.client.own(self.owned, 0)

    def _require_room(self) -> None:
        """Reject a cache whose rows, written back, would displace most others."""
        num_slots = sum(pool.num_slots for pool in self.pools)
        capacity = sum(server["capacity_rows"] for server in self.client.counters())
        if 2 * num_slots > capacity:
            raise ConfigError(
                "A cache must have at most half as many rows as the servers. Received: "
                f"{num_slots} rows, {capacity} of the servers. Use a smaller cache, or "
                "servers with more rows; tables that fit into the memory of a trainer "
                "are better there, see MixedSharder."
            )

    @property
    def pools(self) -> list[Pool]:
        """The pools, when the first batch has come."""
        return list(dict.fromkeys(self._pools.values()))

    def pool_of(self, table: str) -> Pool:
        """Return the pool of a cached table, when the first batch has come."""
        return self._pools[table]

    # Rows of a batch

    def hold(
        self, groups: Sequence[IdGroup], counts: Sequence[Counts], number: BatchNumber
    ) -> Pin:
        """Have the rows of a training batch in slots, and pin them."""
        held, missed = [], list[tuple[Pool, Moves]]()
        pin: Pin | None = None
        self._begin_to_train(number)
        self._follow_restarts()  # what could not be written goes before more leave
        self._share_by_misses(groups)
        try:
            for group, counts_U in zip(groups, counts, strict=True):
                pool = self._pools[group.tables[0]]
                if not pool.steps:
                    pool.steps = {
                        table: self.client.step(table) for table in pool.tables
                    }
                assigned = self._assign(pool, group, counts_U)
                held.append(Held(pool, assigned.slots))
                missed.append((pool, assigned.missed))
                num, num_missed = len(group.ids), len(assigned.missed.slots)
                self.counts.hits += num - num_missed
                self.counts.misses += num_missed
                self.counts.plain_bytes += 2 * 4 * num * pool.dim
                self.counts.moved_bytes += 4 * num_missed * pool.width
            pin = Pin(held, self._freed)
            self.counts.batches.add(pin)
            for pool, _ in held:
                pool.batches += 1
            self.counts.num_dirty = self._num_dirty()
            self._load(missed, number)
        except BaseException:
            for pool, moves in missed:
                pool.map.forget_slots(moves.slots)
            if pin is None:
                _release(held, self._freed)
            pin = None  # which the traceback would keep
            raise
        finally:
            for pool, moves in missed:
                pool.loading.pop(id(moves.slots))
        return pin

    def _begin_to_train(self, number: BatchNumber) -> None:
        if self._is_succeeded:
            raise ConfigError(
                "Rows of a table must be cached by one model at a time. Received: a "
                f"batch of the tables {list(self._pools)}, one of which a later model "
                'of the client trains. Give the sharders of one namespace="...", or '
                "leave cache= out of both."
            )
        if not self._owns:
            for other in self._others():
                other.end_before(self._pools)
            self._own()
            self._owns = True
        self.client.checkpoints.require_no_load()
        if self._checkpoint is not None:
            self._restore()

    def _assign(self, pool: Pool, group: IdGroup, counts_U: Counts) -> Assigned:
        """Assign slots, when earlier batches have left enough; write what leaves."""
        give_up_s = time.monotonic() + self.client.timeout_s
        has_waited = False
        while True:
            while not self._freed.empty():
                self._freed.get()
            with self.sending:
                self.client.checkpoints.require_no_load()  # since `empty`
                assigned = pool.map.assign(group, counts_U)
                if assigned is not None:
                    missed = assigned.missed.slots
                    pool.loading[id(missed)] = missed
                    try:
                        self._write(pool, assigned.left, have_left=True)
                    except BaseException:
                        pool.loading.pop(id(missed))
                        pool.map.forget_slots(missed)
                        _release([Held(pool, assigned.slots)], self._freed)
                        raise
                    return assigned
            if time.monotonic() > give_up_s:
                raise BatchError(
                    f"The cache of the tables {pool.tables} must have slots for the "
                    "rows of all batches in flight, and of all calls of a forward "
                    f"pass. Received: {len(group.ids)} rows, while "
                    f"{pool.map.counters.num_pinned} of {pool.num_slots} slots are "
                    "those of batches without their backward pass. Use a larger cache, "
                    "or a smaller staleness."
                )
            self.counts.waits += not has_waited
            has_waited = True
            with contextlib.suppress(queue.Empty):
                self._freed.get(timeout=max(give_up_s - time.monotonic(), 0))

    def _load(
        self, missed: list[tuple[Pool, Moves]], number: BatchNumber | None
    ) -> None:
        """Look rows up into their slots; without a batch, the servers make none."""
        if number is not None:
            generation = number.stream >> GENERATION_SHIFT
            stream = self._streams.get(generation)
            if stream is None:  # servers reopen no batch of it when they come back
                stream = BatchNumber.new_stream(generation)
                self._streams = {generation: stream}
            number = BatchNumber(stream, number.batch)
        groups = [moves.group for _, moves in missed]
        counts = [moves.counts for _, moves in missed]
        while True:
            starts = self._follow_restarts()
            asked = self.client.begin_pull(
                groups, number, Precision.FP32, counts, with_state=True
            )
            rows = asked.rows()
            if self.client.incarnations == starts:
                break  # else what was written before may have come behind
        for (pool, moves), rows_NW, frequencies_N, unadmitted in zip(
            missed, rows, asked.use.frequencies, asked.use.unadmitted, strict=True
        ):
            pool.scatter(moves.slots, rows_NW, frequencies_N)
            # These have no row: they are of this batch alone, and are not written.
            pool.map.forget_slots(moves.slots[unadmitted])

    def _follow_restarts(self) -> list[int]:
        """Have the servers get again what one has lost; return their incarnations."""
        with self.sending:
            now = list(self.client.incarnations)
            for server, (start, was) in enumerate(zip(now, self._starts, strict=True)):
                if start != was:
                    for pool in self.pools:
                        pool.map.redirty(server, list(pool.loading.values()))
            is_lost = any(_is_lost(r) for write in self._writes for r in write.replies)
            if now != self._starts or is_lost:
                self._starts = now
                self._await_writes(0)
            return now

    # Writes

    def _write(self, pool: Pool, moves: Moves, *, have_left: bool = False) -> None:
        """Send rows of slots, which others have if they ``have_left``.

        ``sending`` is held.
        """
        if not len(moves.slots):
            return
        rows_NW = pool.gather(moves.slots)
        are_finite_N = np.logical_and.reduce(np.isfinite(rows_NW), axis=1)
        if not are_finite_N.all():
            if not have_left:
                pool.map.forget_slots(moves.slots[~are_finite_N])
            self._tell_of_infinite(pool, int((~are_finite_N).sum()))
            moves, rows_NW = _chosen(moves, are_finite_N), rows_NW[are_finite_N]
        if not len(rows_NW):
            return
        replies: list[Reply | None] = [None] * self.client.num_servers
        write = _Write(pool, moves, rows_NW, pool.frequencies(moves), replies)
        self._writes.append(write)
        replies[:] = self._send(write, np.ones(len(rows_NW), dtype=np.bool_))
        self.counts.written += len(rows_NW)
        self.counts.moved_bytes += rows_NW.nbytes
        self._await_writes(_WRITES_IN_FLIGHT)

    def _send(self, write: _Write, chosen_N: npt.NDArray[np.bool_]) -> list[Reply]:
        """Send chosen rows of a write."""
        moves = write.moves if chosen_N.all() else _chosen(write.moves, chosen_N)
        return self.client.write_rows(
            [moves.group],
            [write.rows[chosen_N]],
            counts=[moves.counts],
            frequencies=[write.frequencies[chosen_N]],
            steps=write.pool.steps,
        )

    def _await_writes(self, most: int) -> None:
        """Wait until at most some are on their way; send again what a server lost."""
        while len(self._writes) > most:
            self.client.repeat(partial(self._await, self._writes[0]))
            self._writes.popleft()

    def _await(self, write: _Write) -> None:
        for server, reply in enumerate(write.replies):
            if reply is None or _is_lost(reply):
                reply = self._send(write, self._not_newer(write, server))[server]
                write.replies[server] = reply
            try:
                reply.frames()
            except PersiaError:
                write.replies[server] = None
                raise

    def _not_newer(self, write: _Write, server: int) -> npt.NDArray[np.bool_]:
        """Return which rows of a server no later write has."""
        later = [other.moves.group for other in list(self._writes)[1:]]
        group = write.moves.group
        chosen_N = np.zeros(len(group.ids), dtype=np.bool_)
        for t, table in enumerate(group.tables):
            start, stop = group.ranges_of(t)[server]
            newer = [
                other.ids[slice(*other.ranges_of(other.tables.index(table))[server])]
                for other in later
                if table in other.tables
            ]
            ids_N = group.ids[start:stop]
            chosen_N[start:stop] = ~np.isin(ids_N, np.concatenate([ids_N[:0], *newer]))
        return chosen_N

    def _tell_of_infinite(self, pool: Pool, num: int) -> None:
        logger.warning(
            "%d cached rows of the tables %s are not finite: they are not written back,"
            " and begin again as the servers have them; is the learning rate too high?",
            num,
            pool.tables,
        )

    def flush(self) -> None:
        """Write all rows that were trained, in slices; wait until the servers have."""
        began_s = time.monotonic()
        self._follow_restarts()
        for pool in self.pools:
            left = pool.map.counters.num_dirty
            while left > 0:
                with self.sending, pool.stepping:
                    moves = pool.map.take_dirty(_ROWS_AT_ONCE)
                    self._write(pool, moves)
                left = min(left - len(moves.slots), pool.map.counters.num_dirty)
        with self.sending:
            self._await_writes(0)
        self.counts.flushed_s, self.counts.num_dirty = began_s, self._num_dirty()

    def _num_dirty(self) -> int:
        return sum(pool.map.counters.num_dirty for pool in self.pools)

    def empty(self) -> None:
        """Flush, and forget all rows: the servers are about to have others.

        This trainer owns its tables from then on.
        """
        if not self._owns:
            self._own()
        self.flush()
        with self.sending:
            for pool in self.pools:
                for table in pool.tables:
                    pool.map.forget(table)
                pool.steps = {}

    def _flush_at_times(self) -> None:
        """Flush it until it ends; also for a model that is dropped without close()."""
        flush_s = min(self.settings.flush_s, threading.TIMEOUT_MAX) or None
        while True:
            try:
                self.ending.get(timeout=flush_s)
            except queue.Empty:
                try:
                    self.flush()
                except Exception as exc:  # the next flush writes them
                    logger.warning(
                        "rows of the cache could not be written back: %s",
                        exc,
                        exc_info=not isinstance(exc, PersiaError),
                    )
            else:
                self.close()
                return

    def report(self) -> None:
        """Log what it has done; once, if it moves more than it saves."""
        logger.info("%s", self.counts.describe())
        if self.counts.moved_bytes > self.counts.plain_bytes and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the cache moves more bytes of rows than training without it would: "
                "give it more memory, a longer flush_s, or leave cache= out"
            )

    def close(self) -> None:
        """Write all rows that were trained; end the thread. May be called twice.

        What cannot be written is lost, and logged.
        """
        if self._pid != os.getpid():
            return  # a forked child
        with self._closing:
            if self.is_closed:
                return
            self.is_closed = True
            self.ending.put(None)
            try:
                self.flush()
                of_others = {t for other in self._others() for t in other.owned}
                if owned := [t for t in self.owned if t not in of_others]:
                    self.client.disown(owned)
            except PersiaError as exc:
                num = self._num_dirty()
                num += sum(len(write.rows) for write in self._writes)
                if num:
                    logger.error("updates of %d cached rows are lost: %s", num, exc)
                else:  # nothing is lost; the next trainer becomes the owner
                    logger.warning("cached tables could not be disowned: %s", exc)
            except BaseException:
                self.is_closed = False  # an interrupt: the end of the script closes it
                raise

    def _others(self) -> "list[RowCache]":
        """Return the other caches of the client that are open."""
        return [
            other
            for other in list(_OPEN)
            if other is not self and other.client is self.client and not other.is_closed
        ]

    def end_before(self, tables: Iterable[str]) -> None:
        """Close it where a later model of the client begins to train its tables."""
        if not self._owns or self._pools.keys().isdisjoint(tables):
            return
        self._is_succeeded = True
        self.close()
        with self.sending:
            for pool in self.pools:  # steps of batches in flight are dropped
                pool.map.forget()

    # Rows for evaluation

    def find(self, group: IdGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which rows of a group are in slots, int64 ``(N,)``, and their weights.

        The answers to a request that is sent before ``sending`` is left are as new, of
        the other rows.
        """
        pool = self._pools[group.tables[0]]
        slots_U = np.empty(len(group.ids), dtype=np.int32)
        for t, table in enumerate(group.tables):
            for start, stop in group.ranges_of(t):
                slots_U[start:stop] = pool.map.slots_of(table, group.ids[start:stop])
        for loading in list(pool.loading.values()):
            slots_U[np.isin(slots_U, loading)] = -1
        (found_N,) = np.nonzero(slots_U >= 0)
        slots_N = torch.from_numpy(slots_U[found_N]).long()
        with pool.stepping:
            return torch.from_numpy(found_N), pool.weights.index_select(0, slots_N)


_OPEN: "weakref.WeakSet[RowCache]" = weakref.WeakSet()


def _end_at_sigterm() -> None:
    """Let SIGTERM end this process as ``sys.exit`` does, so that caches are closed.

    A handler of the script's own stays; in a job, its handlers end trainers already.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, partial(_end_this_process, os.getpid()))


def _end_this_process(pid: int, *_: object) -> None:
    if os.getpid() == pid:
        sys.exit(128 + signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked child has no cache
    os.kill(os.getpid(), signal.SIGTERM)


@atexit.register
def _close_all() -> None:
    """Write what a script leaves in caches that it has not closed."""
    for cache in list(_OPEN):
        cache.close()
