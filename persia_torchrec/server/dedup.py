"""Request deduplication (exactly once): sequence numbers of client streams.

A client that lost its connection sends what is unanswered again. A stream numbers what
changes the server: batches, with a lookup in up to 7 parts and an update each, or other
requests. Numbers come in any order, within the last 4096 of their stream:

    marks of a number   bits 0 to 6: its lookup of that part was answered
                        bit 7: settled, as its update was applied or rejected
    outcome             four words of what was replied, of the last 256

They are kept with the rows: ``docs/formats/memory.md`` has the words, ``notes`` of the
store. A mark is set by the ``StoreRows.transaction`` that it is of, in one change
with the rows; the others, which make room for marks, may be set before.
"""

import secrets
from collections import OrderedDict

import numpy as np

from persia_torchrec.errors import FencedError, FrameError, StoreError
from persia_torchrec.rpc.messages import GENERATION_SHIFT, MAX_PARTS, NO_GENERATION
from persia_torchrec.server.open_batches import Batch
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.store_rows import Transaction

Outcome = tuple[int, ...]
"""Four words, as of an update: ids without a row, rows that were rejected, ids that
were never admitted, all ids. Another request may use the first."""

NOTHING: Outcome = (0, 0, 0, 0)
REJECTED: Outcome = (2**64 - 1, 0, 0, 0)
"""The outcome of an update that failed, of which nothing is known any more."""

MAX_STREAMS = 1024
WINDOW = 4096
NUM_OUTCOMES = 256
MAX_GROUPS_BYTES = 2**18

_INCARNATION, _GENERATION, _GROUPS, _NUM_STREAMS = range(4)
_HALVES = 64
_STREAMS = _HALVES + 2 * MAX_GROUPS_BYTES // 8
_STREAM, _NEXT, _USED, _NEEDS_NO_UPDATE, _MARKS = range(5)
_OUTCOMES = _MARKS + WINDOW // 8
_OUTCOME_WORDS = 5
_STREAM_WORDS = _OUTCOMES + _OUTCOME_WORDS * NUM_OUTCOMES
NUM_WORDS = _STREAMS + MAX_STREAMS * _STREAM_WORDS

_SETTLED = 1 << MAX_PARTS
_MAX_NUMBER = 2**63
_NOT_FOUND = 0, 0, 0  # stream, number, and where its marks are


class Streams:
    """The last requests of each stream. Owned by the serving thread.

    Beyond ``MAX_STREAMS``, the least recently used stream is forgotten. Stream 0 has no
    memory: each of its requests is a new one. ``incarnation`` identifies the rows: it
    stays as long as they do.
    """

    def __init__(self, store: EmbeddingStore) -> None:
        self._commit = store.rows.memory.commit
        self._notes = notes = store.notes(NUM_WORDS)
        self._commit(notes, _STREAMS)
        # Single words are faster to reach in them than in an array.
        self._words = notes.data
        self._bytes = self._words.cast("B")
        if self._words[_NUM_STREAMS] > MAX_STREAMS:
            raise StoreError(
                f"The memory of a server must know at most {MAX_STREAMS} streams. "
                f"Received: {self._words[_NUM_STREAMS]}. Delete the file."
            )
        stop = _STREAMS + self._words[_NUM_STREAMS] * _STREAM_WORDS
        if store.rows.was_loading:  # all that is known is of rows that are gone
            self._words[_INCARNATION] = self._words[_GROUPS] = 0
            notes[_STREAMS:stop:_STREAM_WORDS] = 0
        if not self._words[_INCARNATION]:
            self._words[_INCARNATION] = secrets.randbits(63) | 1
        self.incarnation = self._words[_INCARNATION]
        self.generation = self._words[_GENERATION]
        found = list(range(_STREAMS, stop, _STREAM_WORDS))
        self._free = [at for at in found if not self._words[at + _STREAM]]
        found.sort(key=lambda at: self._words[at + _USED])
        self._tick = self._words[found[-1] + _USED] if found else 0
        self._latest, self._found = 0, _NOT_FOUND
        # Where the words of a stream begin, the least recently used stream first.
        self._at = OrderedDict(
            (self._words[at + _STREAM], at) for at in found if self._words[at + _STREAM]
        )

    def admit(self, stream: int, number: int) -> bool:
        """Reject an older generation; return whether it is newer than all before."""
        if stream >= _MAX_NUMBER or number >= _MAX_NUMBER:
            raise FrameError(
                f"Stream and batch must have 63 bits. Received: {stream}, {number}."
            )
        generation = stream >> GENERATION_SHIFT
        if generation in (self.generation, NO_GENERATION):
            return False
        if self.is_older(stream):
            raise FencedError(
                f"Trainers must be of generation {self.generation}. Received: "
                f"{generation}. Their group was started again: end this process."
            )
        self.generation = self._words[_GENERATION] = generation
        return True

    def is_older(self, stream: int) -> bool:
        """Return whether a stream is of an older generation."""
        return stream >> GENERATION_SHIFT < self.generation

    def drop_older(self) -> None:
        """Forget the streams of older generations."""
        self._found = _NOT_FOUND
        for stream in list(filter(self.is_older, self._at)):
            at = self._at.pop(stream)
            self._words[at + _STREAM] = 0
            self._free.append(at)

    def outcome(self, batch: Batch) -> Outcome | None:
        """Return the outcome of a settled request, zeros if forgotten, or None."""
        stream, number = batch
        if not stream:
            return None
        mark = self._find(stream, number)
        if mark and not self._bytes[mark] & _SETTLED:
            return None
        at = self._outcome_at(batch)
        if self._words[at] != number + 1:
            return NOTHING
        return tuple(self._words[at + 1 : at + _OUTCOME_WORDS])

    def settle(
        self, transaction: Transaction, batch: Batch, outcome: Outcome = NOTHING
    ) -> None:
        """Note that a request is applied, or rejected for good."""
        if self.mark(transaction, batch, _SETTLED):
            at = self._outcome_at(batch)
            for offset, word in enumerate((batch[1] + 1, *outcome)):
                transaction.note(at + offset, word)

    def settle_update(
        self, transaction: Transaction, batch: Batch, num_ids: int
    ) -> None:
        """Note that an update of the transaction is applied, with its results."""
        if self.mark(transaction, batch, _SETTLED):
            at = self._outcome_at(batch)
            transaction.notes += (at, batch[1] + 1), (at + 4, num_ids)
            transaction.note_results(at + 1)

    def was_looked_up(self, batch: Batch, part: int) -> bool:
        """Return whether the lookup of a part was answered before."""
        stream, number = batch
        if not stream:
            return False
        mark = self._find(stream, number)
        return not mark or bool(self._bytes[mark] & (_SETTLED | 1 << part))

    def open_batches(self) -> list[Batch]:
        """Return the batches that were looked up and are not settled.

        But those of streams with lookups that need no update.
        """
        found = []
        for stream, at in self._at.items():
            if self._words[at + _NEEDS_NO_UPDATE]:
                continue
            words = self._notes[at + _MARKS : at + _OUTCOMES]
            marks, next_ = words.view(np.uint8), self._words[at + _NEXT]
            for place in np.flatnonzero((marks > 0) & (marks < _SETTLED)).tolist():
                number = next_ - 1 - (next_ - 1 - place) % WINDOW
                found.append((stream, number))
        return found

    @property
    def groups(self) -> bytes:
        """What was kept of joint steps; replaced as a whole."""
        at, length = self._half(self._words[_GROUPS] >> 63)
        return bytes(self._bytes[at : at + length])

    @groups.setter
    def groups(self, saved: bytes) -> None:
        half = 1 - (self._words[_GROUPS] >> 63)
        at, _ = self._half(half)
        self._bytes[at : at + len(saved)] = saved
        self._words[_GROUPS] = half << 63 | len(saved)

    def mark(self, transaction: Transaction, batch: Batch, mark: int) -> bool:
        """Have a transaction set a mark; return False for a number that is too old.

        That of an answered lookup of a part is ``1 << part``.
        """
        stream, number = batch
        place = self._find(stream, number) if stream else 0
        if place:
            word = self._words[place // 8]
            transaction.note(place // 8, word | mark << 8 * (place % 8))
        return bool(place)

    def mark_lookup(self, transaction: Transaction, batch: Batch, part: int) -> None:
        """Note that a lookup of a part is answered, which needs no update."""
        if self.mark(transaction, batch, 1 << part):
            at = self._at[batch[0]] + _NEEDS_NO_UPDATE
            if not self._words[at]:
                transaction.note(at, 1)

    def _outcome_at(self, batch: Batch) -> int:
        stream, number = batch
        return self._at[stream] + _OUTCOMES + _OUTCOME_WORDS * (number % NUM_OUTCOMES)

    def _half(self, half: int) -> tuple[int, int]:
        """Return where a half begins, and how much is in the present one."""
        length = min(self._words[_GROUPS] & (2**32 - 1), MAX_GROUPS_BYTES)
        return 8 * _HALVES + half * MAX_GROUPS_BYTES, length

    def _find(self, stream: int, number: int) -> int:
        """Return where the marks of a number are; 0 if it is older than all others."""
        found = self._found
        if found[1] == number and found[0] == stream:  # it is looked for twice
            return found[2]
        at, words = self._at.get(stream) or self._begin(stream), self._words
        if stream != self._latest:
            self._latest = stream
            self._at.move_to_end(stream)
            self._tick += 1
            words[at + _USED] = self._tick
        marks, next_ = 8 * (at + _MARKS), words[at + _NEXT]
        if number >= next_:
            for new in range(max(next_, number + 1 - WINDOW), number + 1):
                self._bytes[marks + new % WINDOW] = 0
            words[at + _NEXT] = number + 1
        elif number < next_ - WINDOW:
            return 0
        self._found = stream, number, marks + number % WINDOW
        return self._found[2]

    def _begin(self, stream: int) -> int:
        """Return where a new stream begins."""
        self._latest, self._found = 0, _NOT_FOUND
        if self._free:
            at = self._free.pop()
        elif len(self._at) < MAX_STREAMS:
            num_streams = self._words[_NUM_STREAMS]
            at = _STREAMS + num_streams * _STREAM_WORDS
            self._commit(self._notes, at + _STREAM_WORDS)
            self._words[_NUM_STREAMS] = num_streams + 1
        else:
            _, at = self._at.popitem(last=False)
        self._words[at + _STREAM] = 0
        self._notes[at : at + _STREAM_WORDS] = 0
        self._words[at + _STREAM] = stream
        self._at[stream] = at
        return at
