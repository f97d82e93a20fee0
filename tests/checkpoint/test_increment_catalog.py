"""From where a training can be followed."""

from persia_torchrec.checkpoint.catalog import (
    Base,
    Log,
    LogPosition,
    Manifest,
    SavedShard,
    find_end,
    find_start,
    latest_logs,
)
from persia_torchrec.checkpoint.folder import Folder

ANYWHERE = Folder("/tmp")
EMPTY = Base("empty")


def log(name, shard, begun, base=EMPTY, num_shards=2):
    return Log(name, shard, num_shards, f"2026-01-{begun:02d}", base)


def dumped(created, *positions):
    shards = [
        SavedShard("f", 1, 1, 1, 1, {}, position and LogPosition(*position))
        for position in positions
    ]
    return Manifest((), tuple(shards), created)


def logs_of(start):
    return [position.log for position in start.positions]


FIRST = [log("a0", 0, 1), log("a1", 1, 1)]
DUMP = dumped("noon", ("a0", 3), ("a1", 7))
LATER = dumped("evening", ("a0", 5), ("a1", 9))
ON_DUMP = Base("checkpoint", "x", "noon")


def test_a_log_is_followed_from_where_the_dump_began_in_it():
    start = find_start(latest_logs(FIRST), [(ANYWHERE, DUMP)])
    assert start.positions == (LogPosition("a0", 3), LogPosition("a1", 7))
    assert start.created == "noon"


def test_the_latest_checkpoint_that_fits_has_the_fewest_increments():
    other = dumped("night", None, None)
    checkpoints = [(ANYWHERE, manifest) for manifest in (other, LATER, DUMP)]
    assert find_start(latest_logs(FIRST), checkpoints).created == "evening"
    assert find_start(latest_logs(FIRST), [(ANYWHERE, other)]) is None


def test_a_training_that_began_from_a_checkpoint_is_followed_from_that():
    second = [log(f"b{s}", s, 2, ON_DUMP, num_shards=3) for s in range(3)]
    logs = latest_logs([*FIRST, *second])
    start = find_start(logs, [(ANYWHERE, LATER), (ANYWHERE, DUMP)])
    assert start.created == "noon"
    assert start.positions == tuple(LogPosition(f"b{s}", 1) for s in range(3))


def test_logs_of_two_runs_are_not_put_together():
    half = [*FIRST, log("b0", 0, 2, ON_DUMP)]  # the other server has not begun its own
    assert find_start(latest_logs(half), [(ANYWHERE, DUMP)]) is None
    assert logs_of(find_end(half, ANYWHERE, DUMP)) == ["a0", "a1"]
    whole = [*half, log("b1", 1, 2, ON_DUMP)]
    assert logs_of(find_end(whole, ANYWHERE, DUMP)) == ["b0", "b1"]


def test_logs_of_rows_without_a_copy_can_only_be_followed_from_a_dump():
    unknown = [log(f"c{s}", s, 3, Base("unknown")) for s in range(2)]
    logs = latest_logs([*FIRST, *unknown])
    assert find_start(logs, [(ANYWHERE, DUMP)]) is None
    within = dumped("later", ("c0", 1), ("c1", 4))
    assert logs_of(find_start(logs, [(ANYWHERE, within)])) == ["c0", "c1"]


def test_nothing_is_followed_before_all_servers_have_begun():
    assert latest_logs(FIRST[:1]) == []
    assert latest_logs([]) == []
    assert find_start([], [(ANYWHERE, DUMP)]) is None
