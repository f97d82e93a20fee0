"""Deaths of a store's process at every moment, one after the other."""

import re

import pytest

from tests.support import deaths
from tests.support.kills import kill_again_and_again
from tests.support.processes import Processes, wait_until

ALL = 10**9
NUM_KILLS = 1000

needs_traps = pytest.mark.skipif(
    not deaths.ARE_POSSIBLE, reason="needs the trap flag of x86"
)


@pytest.fixture
def die(tmp_path, path, record_property):
    """Return what lets a process die again and again, and counts how often."""

    def run(target, *arguments):
        with Processes(tmp_path) as processes:
            process = processes.start("store", target, path, *arguments)
            wait_until(
                lambda: process.process.exitcode is not None,
                "all deaths are survived",
                timeout_s=3000,
                details=process.output,
            )
            assert process.status() == 0, process.output()
            found = re.findall(r"^\| \S+ \| (\d+) \|", process.output(), re.MULTILINE)
            if found:
                record_property("kills", sum(map(int, found)))

    return run


@pytest.mark.parametrize(
    ("eviction", "tables"),
    [("lru", "compiled"), ("lfu", "compiled"), ("lru", "parts"), ("lfu", "parts")],
    ids=["lru", "lfu", "lru with parts", "lfu with parts"],
)
def test_sigkill_at_any_moment_leaves_whole_requests(die, kills, eviction, tables):
    die(kill_again_and_again, eviction, tables, kills(NUM_KILLS), 1)


@needs_traps
@pytest.mark.parametrize("case", deaths.CASES, ids=str)
def test_death_before_any_store_leaves_a_whole_request(die, case):
    die(deaths.die_before_any_store, [case], ALL)


@needs_traps
@pytest.mark.parametrize("case", deaths.CASES, ids=str)
def test_death_within_recovery_leaves_a_whole_request(die, case):
    die(deaths.die_within_recovery, [case], 5, ALL)


@needs_traps
def test_death_while_a_file_is_made_leaves_one_that_can_be_used(die):
    die(deaths.die_while_it_is_made, ALL)
