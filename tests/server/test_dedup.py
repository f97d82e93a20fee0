"""Which requests a server knows to have answered."""

import gc
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia_torchrec.client.codec import BatchNumber
from persia_torchrec.errors import FencedError, FrameError
from persia_torchrec.rpc.messages import NO_GENERATION
from persia_torchrec.server import dedup as module
from persia_torchrec.server.dedup import (
    NOTHING,
    NUM_OUTCOMES,
    REJECTED,
    WINDOW,
    Streams,
)
from persia_torchrec.store.embedding_store import EmbeddingStore


class Reopened:
    """Streams in a memory file, which another store opens again and again."""

    def __init__(self, path):
        self._path, self.store, self.streams = path, None, None
        self.reopen()

    def reopen(self):
        if self.store is not None:
            self.store.close()
            self.store = self.streams = None
            gc.collect()  # each maps 8 TiB of 128
        self.store = EmbeddingStore(10, memory_file=self._path)
        self.streams = Streams(self.store)

    def settle(self, batch, *outcome):
        with self.store.rows.transaction() as request:
            self.streams.settle(request, batch, (*outcome, 0, 0, 0, 0)[:4])

    def look_up(self, batch, part):
        with self.store.rows.transaction() as request:
            self.streams.mark(request, batch, 1 << part)


numbers = st.tuples(st.integers(1, 3), st.integers(0, 9) | st.integers(0, 3 * WINDOW))
steps = st.lists(
    st.tuples(numbers, st.sampled_from(["look up", "settle", "reject", "reopen"])),
    max_size=30,
)


@pytest.mark.slow
def test_marks_and_outcomes_survive_a_restart(path):
    @settings(max_examples=settings().max_examples // 4)  # a store is opened slowly
    @given(steps)
    def remembers(steps):
        os.truncate(path, 0)
        kept = Reopened(path)
        looked_up, settled, highest = set(), {}, {}
        for n, ((stream, number), step) in enumerate(steps):
            if step == "reopen":
                kept.reopen()
            streams, batch = kept.streams, (stream, number)
            highest[stream] = max(number, highest.get(stream, 0))
            is_old = number <= highest[stream] - WINDOW
            assert streams.was_looked_up(batch, 2) == (
                is_old or batch in looked_up or batch in settled
            )
            outcome = streams.outcome(batch)
            assert (outcome is not None) == (is_old or batch in settled)
            if outcome is not None and outcome != NOTHING:
                assert outcome == settled[batch]
            if is_old:
                continue
            if step == "look up":
                kept.look_up(batch, 2)
                looked_up.add(batch)
            elif step != "reopen":
                settled[batch] = REJECTED if step == "reject" else (n + 1, 2, 3, 4)
                kept.settle(batch, *settled[batch])
                assert streams.outcome(batch) == settled[batch]
        expected = {
            (stream, number)
            for stream, number in looked_up - settled.keys()
            if number > highest[stream] - WINDOW
        }
        assert set(kept.streams.open_batches()) == expected
        kept.store.close()

    remembers()


def test_the_last_outcomes_are_remembered(path):
    kept = Reopened(path)
    for number in range(300):
        kept.settle((1, number), number, 1)
    kept.reopen()
    found = [kept.streams.outcome((1, number)) for number in range(300)]
    num = 300 - NUM_OUTCOMES
    assert found == [NOTHING] * num + [(n, 1, 0, 0) for n in range(num, 300)]
    assert kept.streams.outcome((1, 300)) is None


def test_a_window_forgets_what_it_has_left(path):
    kept = Reopened(path)
    for number in (0, WINDOW - 1):
        kept.look_up((1, number), 0)
    assert kept.streams.outcome((1, 0)) is None  # the oldest of the window
    kept.look_up((1, 2 * WINDOW - 1), 0)
    assert kept.streams.outcome((1, WINDOW - 1)) == NOTHING
    assert not kept.streams.was_looked_up((1, WINDOW), 0)  # its place was that of 0


def test_stream_0_remembers_nothing(path):
    kept = Reopened(path)
    kept.look_up((0, 5), 0)
    kept.settle((0, 5), 1)
    assert not kept.streams.was_looked_up((0, 5), 0)
    assert kept.streams.outcome((0, 5)) is None


def test_the_least_recently_used_stream_is_forgotten(path, monkeypatch):
    monkeypatch.setattr(module, "MAX_STREAMS", 3)
    kept = Reopened(path)
    for stream in (1, 2, 3):
        kept.settle((stream, 1), stream)
    assert kept.streams.outcome((1, 1)) == (1, 0, 0, 0)
    for stream in (4, 5):  # in the place of 2, and of 3
        kept.reopen()
        kept.settle((stream, 1), stream)
    assert [kept.streams.outcome((s, 1))[0] for s in (1, 4, 5)] == [1, 4, 5]
    assert kept.streams.outcome((3, 1)) is kept.streams.outcome((2, 1)) is None


def test_an_older_generation_is_rejected_and_forgotten(path):
    kept = Reopened(path)
    first, second = (BatchNumber.new_stream(generation) for generation in (0, 3))
    free = BatchNumber.new_stream(NO_GENERATION)
    for stream in (first, free):
        assert not kept.streams.admit(stream, 1)
        kept.settle((stream, 1), 5)
    kept.look_up((first, 2), 0)
    assert kept.streams.admit(second, 1)
    assert not kept.streams.admit(second, 2)
    kept.streams.drop_older()
    assert kept.streams.open_batches() == []
    kept.reopen()
    assert kept.streams.open_batches() == []
    with pytest.raises(FencedError, match=r"generation 3\. Received: 0\."):
        kept.streams.admit(first, 2)
    assert not kept.streams.admit(free, 2)
    assert kept.streams.outcome((free, 1)) == (5, 0, 0, 0)
    with pytest.raises(FrameError, match="must have 63 bits"):
        kept.streams.admit(2**63, 1)


@pytest.mark.slow
def test_incarnation_and_groups_stay_with_the_rows(path):
    kept = Reopened(path)
    incarnation = kept.streams.incarnation
    assert kept.streams.groups == b""
    for text in (b"one", b"three", b""):
        kept.streams.groups = text
        kept.reopen()
        assert kept.streams.groups == text
    assert kept.streams.incarnation == incarnation
    assert Streams(EmbeddingStore(10)).incarnation != incarnation
