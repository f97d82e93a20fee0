"""From where a training can be followed."""

from dataclasses import replace

import pytest

from persia_torchrec.checkpoint.catalog import LogPosition, Manifest, SavedShard
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.increment_log import (
    Base,
    Log,
    find_end,
    find_start,
    is_newer,
    latest_lines,
    lines_of,
)

ANYWHERE = Folder("/tmp")
EMPTY = Base("empty")


def log(name, shard, begun, base=EMPTY, num_shards=2, history=""):
    return Log(name, shard, num_shards, f"2026-01-{begun:02d}", base, history)


def dumped(created, *positions):
    shards = [
        SavedShard("f", 1, 1, 1, 1, {}, position and LogPosition(*position))
        for position in positions
    ]
    return Manifest((), tuple(shards), created)


def latest(logs):
    return latest_lines(lines_of(logs))


def logs_of(start):
    return [position.log for position in start.positions]


FIRST = [log("a0", 0, 1), log("a1", 1, 1)]
DUMP = dumped("noon", ("a0", 3), ("a1", 7))
LATER = dumped("evening", ("a0", 5), ("a1", 9))
ON_DUMP = Base("checkpoint", "x", "noon")


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ((("a0", 3), ("a1", 8)), False),
        ((("a0", 4), ("a1", 8)), False),
        ((("a0", 4), ("a1", 9)), True),  # of one server
        ((("b0", 1), ("a1", 8)), True),
        ((("b0", 1),), True),  # of another number of servers
        ((("a0", 9),), False),
        ((None, None), False),
        ((("gone", 9), ("gone too", 9)), False),
    ],
)
def test_what_is_newer_is_told_by_positions(positions, expected):
    lines = lines_of([*FIRST, log("b0", 0, 2)])
    base = dumped("1999", ("a0", 4), ("a1", 8))
    for created in ("1980", "2099"):
        assert is_newer(dumped(created, *positions), base, lines) == expected


def test_logs_are_ordered_by_number_and_those_without_one_come_first():
    clocks = [("c0", 3, 0), ("b0", 2, 2), ("a0", 9, 1), ("d0", 1, 0)]
    logs = [replace(log(name, 0, day), number=number) for name, day, number in clocks]
    names = [line.logs[0].name for line in lines_of(logs)]
    assert names == ["d0", "c0", "a0", "b0"]


def test_a_log_is_followed_from_where_the_dump_began_in_it():
    start = find_start(latest(FIRST), [(ANYWHERE, DUMP)])
    assert start.positions == (LogPosition("a0", 3), LogPosition("a1", 7))
    assert start.created == "noon"


def test_the_latest_checkpoint_that_fits_has_the_fewest_increments():
    other = dumped("night", None, None)
    checkpoints = [(ANYWHERE, manifest) for manifest in (other, LATER, DUMP)]
    assert find_start(latest(FIRST), checkpoints).created == "evening"
    assert find_start(latest(FIRST), [(ANYWHERE, other)]) is None


def test_a_training_that_began_from_a_checkpoint_is_followed_from_that():
    second = [log(f"b{s}", s, 2, ON_DUMP, num_shards=3) for s in range(3)]
    logs = latest([*FIRST, *second])
    start = find_start(logs, [(ANYWHERE, LATER), (ANYWHERE, DUMP)])
    assert start.created == "noon"
    assert start.positions == tuple(LogPosition(f"b{s}", 1) for s in range(3))


def test_logs_of_two_runs_are_not_put_together():
    half = [*FIRST, log("b0", 0, 2, ON_DUMP)]  # the other server has not begun its own
    assert find_start(latest(half), [(ANYWHERE, DUMP)]) is None
    assert logs_of(find_end(lines_of(half), ANYWHERE, DUMP)) == ["a0", "a1"]
    whole = [*half, log("b1", 1, 2, ON_DUMP)]
    assert logs_of(find_end(lines_of(whole), ANYWHERE, DUMP)) == ["b0", "b1"]


def test_logs_of_rows_without_a_copy_can_only_be_followed_from_a_dump():
    unknown = [log(f"c{s}", s, 3, Base("unknown")) for s in range(2)]
    logs = latest([*FIRST, *unknown])
    assert find_start(logs, [(ANYWHERE, DUMP)]) is None
    within = dumped("later", ("c0", 1), ("c1", 4))
    assert logs_of(find_start(logs, [(ANYWHERE, within)])) == ["c0", "c1"]


def test_nothing_is_followed_before_all_servers_have_begun():
    assert latest(FIRST[:1]) == []
    assert latest([]) == []
    assert find_start([], [(ANYWHERE, DUMP)]) is None


def test_two_trainings_from_one_checkpoint_are_not_put_together():
    first = [log(f"b{s}", s, 2, ON_DUMP, history="b") for s in range(2)]
    second = [log(f"c{s}", s, 3, ON_DUMP, history="c") for s in range(2)]
    half = [*first, second[0]]
    assert find_start(latest(half), [(ANYWHERE, DUMP)]) is None
    assert logs_of(find_end(lines_of(half), ANYWHERE, DUMP)) == ["b0", "b1"]
    whole = [*first, *second]
    assert logs_of(find_start(latest(whole), [(ANYWHERE, DUMP)])) == ["c0", "c1"]


def continuing(history, number=6):
    """Return the logs of two servers; the first continues its own in another one."""
    parent = Base("log", parent=LogPosition("a0", number))
    first = [log("a0", 0, 1, history="a"), log("a1", 1, 1, history="a")]
    return latest([*first, log("d0", 0, 2, parent, history=history)])


def test_a_log_that_continues_another_one_is_followed_from_its_checkpoint():
    lines = continuing("a")
    start = find_start(lines, [(ANYWHERE, LATER), (ANYWHERE, DUMP)])
    assert start.created == "evening"
    assert logs_of(start) == ["a0", "a1"]
    assert lines[0].segments(start.positions[0]) == [("a0", 5, 6), ("d0", 1, None)]
    assert lines[0].segments(LogPosition("d0", 3)) == [("d0", 3, None)]
    assert lines[0].segments(LogPosition("x", 3)) == []
    assert start.leads_over(LogPosition("d0", 2))
    assert start.leads_over(LogPosition("a0", 5))
    assert not start.leads_over(LogPosition("a0", 6))


def test_a_checkpoint_behind_what_was_restored_is_of_another_history():
    later = dumped("night", ("a0", 7), ("a1", 11))
    start = find_start(continuing("d"), [(ANYWHERE, later), (ANYWHERE, DUMP)])
    assert start.created == "noon"


def test_a_follower_continues_to_a_log_that_continues_its_own():
    line = continuing("a")[0]
    assert line.next_position(LogPosition("a0", 5)) == LogPosition("a0", 5)
    assert line.next_position(LogPosition("a0", 6)) == LogPosition("d0", 1)
    assert line.next_position(LogPosition("d0", 4)) == LogPosition("d0", 4)
    assert line.next_position(LogPosition("a0", 7)) is None  # it was rolled back
    assert line.next_position(LogPosition("x", 1)) is None


def test_a_follower_continues_to_another_history_from_its_checkpoint_only():
    line = continuing("d")[0]
    assert line.next_position(LogPosition("a0", 6)) is None
    assert line.next_position(LogPosition("a0", 6), {"d0"}) == LogPosition("d0", 1)
