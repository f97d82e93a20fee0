"""What a journal keeps in memory that outlives the process."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia_torchrec.errors import StoreError
from persia_torchrec.store.change_log import ChangedSlots, ChangeJournal, Changes, Ring
from persia_torchrec.store.memory import NUM_TALLIES


class Kept:
    """Words that outlive a journal, of which so many can be used."""

    def __init__(self, num_words, num_free=10_000):
        self.words = np.zeros(num_words, dtype=np.uint64)
        self.num_free = num_free

    def commit(self, words, num_words):
        if num_words > self.num_free:
            raise StoreError("The file system is full.")
        return len(words)

    def open(self):
        tally = np.zeros(NUM_TALLIES, dtype=np.int64)
        return ChangeJournal(tally, Ring(self.words, self.commit))


def change(journal, *slots, tick=9):
    """Note what a lookup has used, or with tick 0 what an update has changed."""
    journal.changed(ChangedSlots(2, 8191, tick, np.array(slots, dtype=np.uint32)))


def noted(kept):
    """Return what the next process finds: tokens, and slots used and updated."""
    tokens, changes = kept.open().previous()
    assert all((note.table, note.arena) == (2, 8191) for note in changes.slots)
    used = [note.slots.tolist() for note in changes.slots if note.tick == 9]
    return tokens, used, [n.slots.tolist() for n in changes.slots if n.tick == 0]


def test_the_next_process_finds_what_was_not_released():
    kept = Kept(200)
    journal = kept.open()
    journal.begin(77)
    change(journal, 1, 2)
    change(journal, 2, tick=0)
    assert noted(kept) == ([77], [[1, 2]], [[2]])
    first = journal.cut()
    change(journal, 3)
    assert noted(kept) == ([77], [[1, 2], [3]], [[2]])
    journal.release(first.number)
    assert noted(kept) == ([77], [[3]], [])
    second = kept.open()
    second.begin(78, second.previous()[1])
    assert [note.slots.tolist() for note in second.changes.slots] == [[3]]
    change(second, 4)
    assert noted(kept) == ([78, 77], [[3], [4]], [])
    second.end()
    assert noted(kept) == ([], [], [])


def test_notes_go_round_in_the_ring():
    kept = Kept(8 + 50)
    journal = kept.open()
    journal.begin(77)
    for number in range(40):
        change(journal, *range(number, number + 1 + number % 7))
        last = journal.cut()
        assert noted(kept)[1][-1] == last.slots[0].slots.tolist()
        if number % 3 == 2:
            journal.release(last.number)
            assert noted(kept) == ([77], [], [])


@pytest.mark.parametrize("kept", [Kept(8 + 10), Kept(200, num_free=8 + 10)])
def test_a_ring_without_room_is_of_no_use_until_all_is_written(kept):
    journal = kept.open()
    journal.begin(77)
    change(journal, 1, 2, 3)
    first = journal.cut()
    change(journal, *range(9))
    assert noted(kept)[0] == []
    journal.release(first.number)
    assert noted(kept)[0] == []
    journal.release(journal.cut().number)
    assert noted(kept) == ([77], [], [])


def test_a_clear_forgets_what_came_before():
    kept = Kept(200)
    journal = kept.open()
    journal.begin(77)
    change(journal, 1)
    journal.cleared()
    change(journal, 2)
    _, changes = kept.open().previous()
    assert changes.was_cleared
    assert noted(kept) == ([77], [[2]], [])


@settings(max_examples=20)
@given(st.integers(2**63 - 2**10, 2**63 + 2**10))
def test_notes_go_round_after_any_number_of_words(num_words):
    kept = Kept(8 + 50)
    kept.words[[2, 3]] = num_words - num_words % 50  # head and tail
    journal = kept.open()
    journal.begin(77, Changes())  # which keeps the place
    for number in range(20):
        change(journal, *range(number, number + 1 + number % 7), tick=2**48 - 1)
        last = journal.cut()
        found = [note.slots.tolist() for note in kept.open().previous()[1].slots]
        assert found[-1] == last.slots[0].slots.tolist()
        journal.release(last.number)
