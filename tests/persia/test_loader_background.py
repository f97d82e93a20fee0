import threading
import weakref

import pytest

from persia_torchrec.persia.loader import in_background
from tests.support.servers import DEADLINE_S


class Item:
    """Something whose end can be seen."""


class Source:
    """Counts what it makes; ``ended`` is set when it is let go."""

    def __init__(self, num: int = 1000) -> None:
        self.num = num
        self.num_made = 0
        self.ended = threading.Event()

    def __iter__(self):
        try:
            for number in range(self.num):
                self.num_made += 1
                yield number
        finally:
            self.ended.set()


def test_all_items_come_in_their_order():
    assert list(in_background(range(100), 3, "numbers")) == list(range(100))


def test_nothing_comes_of_nothing():
    assert list(in_background([], 1, "numbers")) == []


def test_the_items_are_made_by_another_thread():
    def names():
        yield threading.current_thread().name

    assert list(in_background(names(), 1, "the maker")) == ["the maker"]


def test_no_more_items_are_made_than_may_wait():
    source = Source()
    items = in_background(source, 3, "numbers")
    for taken in range(1, 20):
        next(items)
        # Three wait, and a fourth is made and waits to be put.
        assert source.num_made <= taken + 4
    items.close()


def test_an_exception_comes_where_its_item_would_have():
    def breaks():
        yield 1
        raise ValueError("the file is cut")

    items = in_background(breaks(), 5, "numbers")
    assert next(items) == 1
    with pytest.raises(ValueError, match="the file is cut"):
        next(items)


def test_the_thread_ends_when_the_caller_stops_early():
    source = Source()
    for item in in_background(source, 2, "numbers"):
        if item == 5:
            break
    assert source.ended.wait(DEADLINE_S)
    assert source.num_made < 20


def test_items_that_are_not_taken_are_freed_while_the_next_is_waited_for():
    asked, go_on = threading.Event(), threading.Event()
    made = []

    def stalls():
        for _ in range(3):
            item = Item()
            made.append(weakref.ref(item))
            yield item
            del item
        asked.set()
        go_on.wait(DEADLINE_S)

    items = in_background(stalls(), 10, "items")
    next(items)
    assert asked.wait(DEADLINE_S)
    items.close()
    assert [ref() for ref in made] == [None, None, None]
    go_on.set()
