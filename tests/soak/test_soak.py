"""A job of many minutes: memory, descriptors, threads, files and latency stay flat."""

import os
import threading
import time

import numpy as np
import pytest

from persia_torchrec.client.client import EmbeddingClient
from tests.soak import job
from tests.soak.conftest import COLUMNS, LEAST_OF_A_TABLE, RESULTS
from tests.soak.series import Series, files_of, sample
from tests.soak.trend import trend_of
from tests.support.processes import wait_until

NUM_SAMPLES = 120
LEAST_S = 0.02

pytestmark = pytest.mark.multiprocess


def watch(running, folder, seconds):
    """Measure all processes again and again."""
    series, seen = Series(), 0
    begun_s = time.monotonic()
    for number in range(NUM_SAMPLES):
        wait_s = begun_s + (number + 1) * seconds / NUM_SAMPLES - time.monotonic()
        threading.Event().wait(max(wait_s, LEAST_S))
        for of, process in running.items():
            series.add(of, sample(process.pid))
        series.add("job", files_of(folder, but=["memory", "latencies"]))
        latencies = folder / "latencies"
        lines = latencies.read_text().split() if latencies.exists() else []
        if len(lines) > seen:
            new = np.array(lines[seen:], dtype=float)
            p50, p99 = np.percentile(new, [50, 99])
            series.add("trainer", {"p50 ms": p50, "p99 ms": p99})
            seen = len(lines)
    return series


def test_a_job_grows_by_nothing(processes, tmp_path, minutes):
    running, addresses = job.start(
        processes, str(tmp_path), fills=minutes >= LEAST_OF_A_TABLE
    )
    series = watch(running, tmp_path, 60 * minutes)
    for name, process in running.items():
        assert process.process.is_alive(), f"{name}: {process.output()[-3000:]}"
        assert "Traceback" not in process.output(), process.output()[-3000:]
    turns = running["trainer"].output().count("turn")
    visits = running["clients that come and go"].output().count("visit")
    assert turns
    assert visits
    client = EmbeddingClient.connect(addresses)
    counters = client.counters()
    client.close()
    assert [c["increments"] for c in counters] > [0] * job.NUM_SERVERS
    if minutes < LEAST_OF_A_TABLE:  # in seconds, all caches still fill
        assert len(series.values) == 3 * len(running) + 4
        return
    assert all(c["evictions"] for c in counters)
    lines, grown = series.grown()
    head = RESULTS.read_text().partition(COLUMNS)[0].rpartition("The last run:")[0]
    RESULTS.write_text(
        f"{head}The last run: {minutes:g} minutes, {100 * turns} batches, {turns} "
        f"connections of the trainer, {visits} of others, "
        f"{sum(c['evictions'] for c in counters)} evictions, "
        f"{sum(c['increments'] for c in counters)} increments, {os.cpu_count()} "
        f"cores.\n\n{COLUMNS}|---|---|---|---|---|---|\n{''.join(lines)}"
    )
    assert not grown, "".join(grown)


def test_a_leak_is_found(processes):
    process = processes.start("leaking", job.leak)
    process.has_printed("leaked 3")
    series = Series()
    for number in range(24):
        wait_until(lambda n=number: f"leaked {4 + 2 * n}" in process.output(), "more")
        series.add("leaking", sample(process.pid))
    _, grown = series.grown()
    found = " ".join(grown)
    assert all(what in found for what in ("memory MiB", "descriptors", "threads"))


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_grow_and_a_slow_trend_in_it_does(seed):
    noise = np.random.default_rng(seed).normal(100, 1, 120)
    assert not trend_of(noise).grows(1.0)
    assert not trend_of(np.full(120, 7.0)).grows(0.0)
    assert not trend_of(noise - 0.02 * np.arange(120)).grows(0.0)
    trend = trend_of(noise + 0.03 * np.arange(120))
    assert trend.grows(1.0)
    assert trend.growth == pytest.approx(0.03 * 89, rel=0.5)
    assert not trend.grows(20.0)  # it is too little to matter
