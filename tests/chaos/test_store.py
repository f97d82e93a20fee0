"""Deaths of a store's process at every moment; ``pytest -rP`` prints how many."""

import pytest

from tests.processes import Processes, wait_until
from tests.store import deaths, kills

NUM_KILLS = 1000
ALL = 10**9

needs_traps = pytest.mark.skipif(
    not deaths.ARE_POSSIBLE, reason="needs the trap flag of x86"
)


def run(folder, target, *arguments):
    with Processes(folder) as processes:
        process = processes.start("store", target, *arguments)
        wait_until(
            lambda: process.process.exitcode is not None,
            "all deaths are survived",
            timeout_s=3000,
            details=process.output,
        )
        assert process.status() == 0, process.output()
        print(process.output())


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_sigkill_at_any_moment_leaves_whole_requests(tmp_path, path, eviction):
    run(tmp_path, kills.kill_again_and_again, path, eviction, "fused", NUM_KILLS, 1)


@needs_traps
@pytest.mark.parametrize("case", deaths.CASES, ids=str)
def test_death_before_any_store_leaves_a_whole_request(tmp_path, path, case):
    run(tmp_path, deaths.die_before_any_store, path, [case], ALL)


@needs_traps
@pytest.mark.parametrize("case", deaths.CASES, ids=str)
def test_death_within_recovery_leaves_a_whole_request(tmp_path, path, case):
    run(tmp_path, deaths.die_within_recovery, path, [case], 5, ALL)


@needs_traps
def test_death_while_a_file_is_made_leaves_one_that_can_be_used(tmp_path, path):
    run(tmp_path, deaths.die_while_it_is_made, path, ALL)
