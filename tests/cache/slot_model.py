"""What a slot map does, with dicts and lists, a row at a time."""

import numpy as np

from persia_torchrec.cache.slot_map import MOST_USES, WALK
from tests.support.reference import farmhash64


def rows_of(group):
    """Return the table and id of each row."""
    tables = np.tile(np.arange(len(group.tables)), len(group.num_ids))
    tables_U = np.repeat(tables, group.num_ids.reshape(-1))
    return list(zip(tables_U.tolist(), group.ids.tolist(), strict=True))


def moved(moves):
    """Return table, id, slot and count of each row, and how many each place has."""
    columns = moves.slots.tolist(), moves.counts.tolist()
    rows = [
        (*row, *more) for row, *more in zip(rows_of(moves.group), *columns, strict=True)
    ]
    num_P = moves.group.num_ids.sum(axis=1)
    assert moves.group.offsets.tolist() == [0, *np.cumsum(num_P).tolist()]
    return rows, moves.group.num_ids.tolist()


class SlotModel:
    """A slot map whose results are lists, as :func:`moved` returns them."""

    def __init__(self, num_slots, tables, num_servers):
        self.num_slots, self.tables, self.num_servers = num_slots, tables, num_servers
        self.slot_of = {}
        self.row = [None] * num_slots
        self.pins, self.uses, self.hits = ([0] * num_slots for _ in range(3))
        self.dirty = [False] * num_slots
        self.free = []
        self.hand = self.cursor = self.used = self.walked = 0
        self.counted = [0, 0, 0, 0]

    def assign(self, group, counts):
        rows = rows_of(group)
        found = [self.slot_of.get(row, -1) for row in rows]
        num_missed = found.count(-1)
        new = sum(slot >= 0 and not self.pins[slot] for slot in found)
        if self.num_pinned() + new + num_missed > self.num_slots:
            return None
        for slot, count in zip(found, counts.tolist(), strict=True):
            if slot >= 0:
                self.pins[slot] += 1
                self.uses[slot] = min(self.uses[slot] + 1, MOST_USES)
                self.hits[slot] = min(self.hits[slot] + count, 2**32 - 1)
        taken = iter(self.take(num_missed))
        left, missed = [], []
        for i, slot in enumerate(found):
            if slot < 0:
                slot = found[i] = next(taken)
                if (old := self.row[slot]) is not None:
                    self.counted[2] += 1
                    del self.slot_of[old]
                    if self.dirty[slot]:
                        left.append((*old, slot, self.hits[slot]))
                self.row[slot], self.slot_of[rows[i]] = rows[i], slot
                self.uses[slot], self.hits[slot], self.dirty[slot] = 0, 0, False
                missed.append((*rows[i], slot, int(counts[i])))
        self.counted[0] += len(found) - num_missed
        self.counted[1] += num_missed
        self.counted[3] += len(left)
        return found, self.placed(missed), self.placed(left)

    def take(self, num):
        taken = []
        while len(taken) < num and (self.free or self.used < self.num_slots):
            if self.free:
                taken.append(self.free.pop())
            else:
                taken.append(self.used)
                self.used += 1
            self.pins[taken[-1]] = 1
        walked = 0
        for n in range(1, num - len(taken) + 1):
            best, least = -1, MOST_USES + 1
            while least and (best < 0 or walked < WALK * n):
                slot, self.hand = self.hand, (self.hand + 1) % self.num_slots
                self.walked += 1
                uses = self.uses[slot]
                self.uses[slot] = max(uses - 1, 0)
                if not self.pins[slot]:
                    walked += 1
                    if uses < least:
                        best, least = slot, uses
            self.pins[best] = 1
            taken.append(best)
        return taken

    def release(self, slots, *, trained):
        for slot in slots:
            if trained and self.row[slot]:
                self.dirty[slot] = True
            self.pins[slot] -= 1
            if not self.pins[slot] and not self.row[slot]:
                self.free.append(slot)

    def mark_dirty(self, slots):
        for slot in slots:
            self.dirty[slot] = self.row[slot] is not None

    def take_dirty(self, max_rows):
        taken = []
        while len(taken) < max_rows and any(self.dirty):
            slot, self.cursor = self.cursor, (self.cursor + 1) % self.used
            if self.dirty[slot]:
                taken.append((*self.row[slot], slot, self.hits[slot]))
                self.dirty[slot], self.hits[slot] = False, 0
        self.counted[3] += len(taken)
        return self.placed(taken)

    def redirty(self, server, loading):
        slots = self.slot_of.items()
        own = [s for (_, id_), s in slots if self.server(id_) == server]
        self.mark_dirty([s for s in own if s not in loading])

    def forget(self, table=None, ids=None):
        t = None if table is None else self.tables.index(table)
        if ids is not None:
            self.forget_slots([self.slot_of.get((t, i), -1) for i in ids])
        else:
            own = enumerate(self.row)
            self.forget_slots([s for s, row in own if row and t in (None, row[0])])

    def forget_slots(self, slots):
        for slot in slots:
            if slot >= 0 and self.row[slot]:
                del self.slot_of[self.row[slot]]
                self.row[slot], self.dirty[slot] = None, False
                if not self.pins[slot]:
                    self.free.append(slot)

    def rows(self):
        held = enumerate(self.row)
        return self.placed([(*row, s, self.hits[s]) for s, row in held if row])

    def counters(self):
        return *self.counted, len(self.slot_of), sum(self.dirty), self.num_pinned()

    def resumed(self):
        """Return what a map is that was restored from a snapshot."""
        other = SlotModel(self.num_slots, self.tables, self.num_servers)
        lost = [s for s in range(self.used) if self.pins[s] and not self.row[s]]
        other.slot_of, other.row = dict(self.slot_of), list(self.row)
        other.uses, other.free = list(self.uses), [*self.free, *lost]
        other.hand, other.cursor, other.used = self.hand, self.cursor, self.used
        return other

    def num_pinned(self):
        return sum(pins > 0 for pins in self.pins)

    def server(self, id_):
        return farmhash64(id_) % self.num_servers

    def placed(self, rows):
        num_PT = [[0] * len(self.tables) for _ in range(self.num_servers)]
        keyed = sorted(((self.server(r[1]), *r) for r in rows), key=lambda r: r[:2])
        for server, table, *_ in keyed:
            num_PT[server][table] += 1
        return [row[1:] for row in keyed], num_PT
