"""Memory that two processes share: messages in it, and which of it is free."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec.errors import FrameError
from persia_torchrec.rpc import slab as layout
from persia_torchrec.rpc.slab import FreeList, RequestSlot, Slab


@pytest.fixture(scope="module")
def slab():
    fd = layout.make_memory(layout.LEAST_BYTES)
    try:
        return Slab(fd)
    finally:
        os.close(fd)


def read(slab, begin, room):
    return [bytes(slab.bytes[at : at + n]) for at, n in slab.frames(begin, room)]


def test_the_size_of_the_memory_cannot_be_changed():
    fd = layout.make_memory(layout.LEAST_BYTES)
    for size in (0, 2 * layout.LEAST_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)


@given(st.lists(st.integers(0, 20_000), min_size=1, max_size=layout.MAX_FRAMES))
def test_a_message_is_read_as_it_was_written(slab, sizes):
    frames = [bytes([i + 1]) * size for i, size in enumerate(sizes)]
    size = layout.size_of_message(sizes)
    if size <= slab.size_bytes - layout.FIRST:
        slab.write(layout.FIRST, frames)
        assert read(slab, layout.FIRST, size) == frames
        if sum(sizes):
            head = layout.size_of_message([0] * len(sizes))
            with pytest.raises(FrameError, match="must fit into"):
                slab.frames(layout.FIRST, head + sum(sizes) - 1)


def test_sizes_beyond_a_message_are_not_read(slab):
    slab.write(layout.FIRST, [b"a"] * 8)
    with pytest.raises(FrameError, match="in 127 bytes"):
        slab.frames(layout.FIRST, 127)


def test_a_gpu_is_given_the_memory_that_is_used_until_it_is_unmapped(monkeypatch):
    monkeypatch.setattr(layout, "_pin", None)
    given, taken = [], []

    def pin(address, size):
        given.append((address, size))
        return lambda: taken.append(slab_is_mapped(address))

    def slab_is_mapped(address):
        maps = Path("/proc/self/maps").read_text()
        return f"{base:x}-" in maps and "memfd:persia_torchrec" in maps

    fd = layout.make_memory(3 * layout.PINNED)
    slab = Slab(fd)
    os.close(fd)
    base = slab.address(0)
    slab.touch(100)
    assert not given
    layout.pin_with(pin)
    slab.touch(100)
    assert len(given) == 1
    slab.touch(slab.size_bytes)
    slab.touch(slab.size_bytes)
    ends = [address + size for address, size in given]
    assert [address for address, _ in given] == [base, *ends[:-1]]
    assert ends[-1] == base + slab.size_bytes
    assert all(end % layout.PINNED == 0 for end in ends[:-1])
    assert all(size <= layout.PINNED for _, size in given)
    view = slab.view[100:200]
    del slab
    assert not taken
    del view
    assert taken == [True] * len(given)


@pytest.mark.parametrize("num", [0, 64, 2**64 - 1])
def test_a_message_of_no_or_many_frames_is_an_error(slab, num):
    slab.words[layout.FIRST // 8] = num
    with pytest.raises(FrameError, match=f"1 to 63 frames. Received: {num}"):
        slab.frames(layout.FIRST, 4096)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=8, max_size=8))
def test_frames_of_any_bytes_lie_within_their_message(slab, numbers):
    for i, number in enumerate(numbers):
        slab.words[layout.FIRST // 8 + i] = number
    try:
        found = slab.frames(layout.FIRST, 4096)
    except FrameError:
        return
    assert all(at >= layout.FIRST and at + n <= layout.FIRST + 4096 for at, n in found)


def test_the_rings_begin_again(slab):
    for i in range(layout.RING + 3):
        place = RequestSlot(i, i + 1, i + 2, i + 3, i + 4)
        assert not slab.post_request(place)
        assert slab.request(i) == place
        slab.post_reply(10 * i)
        assert slab.reply(i) == 10 * i


@given(st.lists(st.tuples(st.integers(1, 40_000), st.integers(0, 9)), max_size=60))
def test_rooms_do_not_overlap_and_all_come_back(steps):
    rooms, taken = FreeList(4096, 4096 + 2**18), []
    for size, which in steps:
        if (room := rooms.take(size)) is not None:
            assert room[1] >= size
            begin, stop = room[0], sum(room)
            assert begin >= 4096
            assert stop <= 4096 + 2**18
            assert all(stop <= b or b + n <= begin for b, n in taken)
            taken.append(room)
        if taken and which < 5:
            rooms.give(taken.pop(which % len(taken)))
        assert rooms.num_bytes == sum(n for _, n in taken)
    for room in taken:
        rooms.give(room)
    assert rooms.take(2**18) == (4096, 2**18)
