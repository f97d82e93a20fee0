"""The memory file as another program reads it, by what its page says alone."""

import json
import mmap

import numpy as np

from tests.support import kills
from tests.support.consistency import ids_oldest_first
from tests.support.servers import ids_of

FILE_BYTES = 8 * 2**40
MIB = 2**20
TALLY, CURSOR, LOGS, ARENAS, STEPS, RECOVERY = 4096, 4608, 8192, 16384, 409_600, 933_888
MARK = 2**32 - 1


class Reader:
    """A copy of a memory file, without what a request has done that is in progress."""

    def __init__(self, path):
        flags = mmap.MAP_PRIVATE | 0x4000  # MAP_NORESERVE
        with open(path, "r+b") as file:  # noqa: PTH123  # a descriptor
            memory = mmap.mmap(file.fileno(), FILE_BYTES, flags=flags)
        self.words = np.frombuffer(memory, np.uint64)
        self.bytes = self.words.view(np.uint8)
        assert bytes(self.bytes[:8]) == b"PERSIAME"
        assert (self.words[1], self.words[13]) == (5, 0)
        if self.at(TALLY, 16)[15] == 1:
            self.undo()
        published = int(self.words[9])
        tables = (6 + 64 * (published >> 63)) * MIB
        self.head = json.loads(bytes(self.bytes[tables : tables + published % 2**32]))

    def at(self, offset, num):
        return self.words[offset // 8 : offset // 8 + num].tolist()

    def undo(self):
        end, _, lost, begin = self.at(RECOVERY, 4)
        assert not lost
        at = (RECOVERY + end) // 8
        while at > (RECOVERY + begin) // 8:
            what = int(self.words[at - 1])
            place, num = what >> 24, what % 2**23
            at -= 1 + num
            self.words[place : place + num] = self.words[at : at + num]

    def slots(self, arena):
        """Return the used slots of an arena, as bytes."""
        base, stride, num_used, *_ = self.at(ARENAS + 48 * arena, 6)
        begin = (ARENAS + base) % 2**64
        return self.bytes[begin : begin + num_used * stride].reshape(num_used, stride)

    def rows(self, number):
        """Return weights, and bits of the state, of rows, by table and id."""
        table = self.head["tables"][number]
        dim, dtype = table["spec"]["dim"], table["spec"]["weight_dtype"]
        kind = {"fp32": np.float32, "fp16": np.float16}[dtype]
        dim //= table["spec"]["dynamic"]["blocks"]
        weights, state, num_state = table["row"]
        found = {}
        for slot in self.slots(table["arena"]):
            id_, use = slot[:16].view(np.uint64).tolist()
            if use >> 48 == number + 1:
                floats = slot[weights:].view(kind)[:dim].tolist()
                floats += slot[state:].view(np.uint32)[:num_state].tolist()
                found[number, id_] = floats
        return found

    def oldest_first(self):
        """Return table and id of each row, the next to leave first."""
        log, head, tick, arena, *_, tail = self.at(LOGS, 10)
        assert not self.at(LOGS, 13)[12]  # it is not being compacted
        begin = (LOGS + log) % 2**64
        words = self.bytes[begin : begin + 4 * tail].view(np.uint32).tolist()
        found = []
        while head < tail:
            if words[head] == MARK:
                arena, low, high = words[head + 1 : head + 4]
                tick = high << 32 | low
                head += 4
                continue
            slot = self.slots(arena)[words[head]]
            id_, use = slot[:16].view(np.uint64).tolist()
            if use % 2**48 == tick:
                found.append(((use >> 48) - 1, id_))
            head += 1
        return found

    def indexed_slots(self):
        """Return the slots that the index names, of all arenas."""
        _, num_lines, _, num, _, lines = self.at(CURSOR, 6)
        begin = (CURSOR + lines) % 2**64 // 8
        words = self.words[begin : begin + 8 * (num_lines + 100)]
        slots = [int(word) % 2**32 - 1 for word in words[words != 0]]
        assert len(slots) == num
        return sorted(slots)

    def used_slots(self):
        found = []
        for arena in range(self.head["num_arenas"]):
            uses = self.slots(arena)[:, 8:16].copy().view(np.uint64)
            found += np.flatnonzero(uses).tolist()
        return sorted(found)


def test_a_file_is_read_by_the_numbers_of_its_document(path):
    store, number = kills.store_of(path), 0
    while number < 40 or store.rows.logs.directory[0, 12]:
        kills.request(store, number)
        number += 1
    order = ids_oldest_first(store)
    rows = {}
    for table, id_ in order:
        slots = store.find(table, ids_of(id_))
        [row] = store.states[table].read_slots(slots)
        weights, state = np.split(row, [store.tables[table].row_dim])
        rows[table, id_] = weights.tolist() + state.view(np.uint32).tolist()
    steps = [state.num_updates for state in store.states]

    def is_read():
        reader = Reader(path)
        assert reader.oldest_first() == order
        first = reader.rows(0) | reader.rows(1) | reader.rows(2)
        assert first | reader.rows(4) == rows  # and those of further blocks
        assert reader.used_slots() == reader.indexed_slots()
        assert reader.at(STEPS, 3) == steps[:3]  # shared rows count with table 0
        distance, num = reader.head["notes"]
        assert reader.at((RECOVERY + distance) % 2**64, num)[0] == number
        return True

    assert is_read()
    with store.rows.transaction():
        ids, out = np.arange(200, dtype=np.uint64), np.empty((200, 8), np.float32)
        store.lookup(1, ids, out, training=True)
        store.remove(0, ids)
        assert ids_oldest_first(store) != order
        assert is_read()
