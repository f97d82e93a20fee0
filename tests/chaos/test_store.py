import os

import pytest

from tests.processes import Processes, wait_until
from tests.store import kills
from tests.store.test_recovery import CASES, die_after_any_store

NUM_KILLS = 1000


@pytest.fixture
def path():
    """A file that this process holds open, for itself and for others."""
    file = os.memfd_create("store")
    yield f"/proc/{os.getpid()}/fd/{file}"
    os.close(file)


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_sigkill_at_any_moment_leaves_whole_requests(tmp_path, path, eviction):
    arguments = path, eviction, "fused", NUM_KILLS, 1
    with Processes(tmp_path) as processes:
        process = processes.start("store", kills.kill_again_and_again, *arguments)
        wait_until(
            lambda: process.process.exitcode is not None,
            "all kills are survived",
            timeout_s=3000,
            details=process.output,
        )
        assert process.status() == 0, process.output()


@pytest.mark.parametrize(
    "case",
    CASES,
    ids=[f"{action.__name__}-{eviction}" for _, eviction, _, action in CASES],
)
def test_death_after_any_store_leaves_a_whole_request(monkeypatch, path, case):
    die_after_any_store(monkeypatch, path, case, most=10**6)
