"""What a journal keeps in memory that outlives the process."""

import numpy as np
import pytest

from persia_torchrec.errors import StoreError
from persia_torchrec.store.journal import ChangeJournal, Ring, UsedRows
from persia_torchrec.store.memory import NUM_TALLIES
from tests.servers import ids_of

NONE = np.empty(0, dtype=np.int64)


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


def use(journal, *ids):
    journal.used(UsedRows(2, 9, ids_of(*ids), NONE, NONE))


def noted(kept):
    """Return what the next process finds: tokens, and ids."""
    tokens, changes = kept.open().previous()
    used = [rows.ids.tolist() for rows in changes.used]
    return tokens, used, [ids.tolist() for _, ids in changes.updated]


def test_the_next_process_finds_what_was_not_released():
    kept = Kept(200)
    journal = kept.open()
    journal.begin(77)
    use(journal, 1, 2)
    journal.updated(2, ids_of(2))
    assert noted(kept) == ([77], [[1, 2]], [[2]])
    first = journal.cut()
    use(journal, 3)
    assert noted(kept) == ([77], [[1, 2], [3]], [[2]])
    journal.release(first.number)
    assert noted(kept) == ([77], [[3]], [])
    second = kept.open()
    second.begin(78, second.previous()[1])
    assert [rows.ids.tolist() for rows in second.changes.used] == [[3]]
    use(second, 4)
    assert noted(kept) == ([78, 77], [[3], [4]], [])
    second.end()
    assert noted(kept) == ([], [], [])


def test_notes_go_round_in_the_ring():
    kept = Kept(8 + 50)
    journal = kept.open()
    journal.begin(77)
    for number in range(40):
        use(journal, *range(number, number + 1 + number % 7))
        last = journal.cut()
        assert noted(kept)[1][-1] == last.used[0].ids.tolist()
        if number % 3 == 2:
            journal.release(last.number)
            assert noted(kept) == ([77], [], [])


@pytest.mark.parametrize("kept", [Kept(8 + 10), Kept(200, num_free=8 + 10)])
def test_a_ring_without_room_is_of_no_use_until_all_is_written(kept):
    journal = kept.open()
    journal.begin(77)
    use(journal, 1, 2, 3)
    first = journal.cut()
    use(journal, *range(8))
    assert noted(kept)[0] == []
    journal.release(first.number)
    assert noted(kept)[0] == []
    journal.release(journal.cut().number)
    assert noted(kept) == ([77], [], [])


def test_a_clear_forgets_what_came_before():
    kept = Kept(200)
    journal = kept.open()
    journal.begin(77)
    use(journal, 1)
    journal.cleared()
    use(journal, 2)
    _, changes = kept.open().previous()
    assert changes.was_cleared
    assert noted(kept) == ([77], [[2]], [])
