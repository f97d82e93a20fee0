"""A server is killed with its memory, again and again, in the middle of a training."""

import time

import pytest

from tests.support.server_processes import NUM_IDS, counted_job

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

INTERVAL_S = 0.5
TOLERATED_S = 1.0  # later than that, a server warns


def test_lost_updates_are_of_the_last_two_intervals(
    tmp_path, draw, kills, record_property
):
    flags = "--increments-interval-s", str(INTERVAL_S)
    trained_s, lost, longest_s = [], set(), 0.0
    with counted_job(tmp_path, *flags) as (job, _):
        num_kills, steps = kills(20), 0
        for number in range(num_kills):
            previous, told = len(trained_s), job.client.lost["lost_updates"]
            end_s = time.monotonic() + draw.uniform(0.1, 8 * INTERVAL_S)
            while time.monotonic() < end_s:
                job.train(len(trained_s))
                trained_s.append(time.monotonic())
            if number == 0:
                job.dump()
            killed_s = time.monotonic()
            steps += len(trained_s) - previous
            job.lose_memory()
            counts = job.counts(len(trained_s))
            assert ((counts == 0) | (counts == 1)).all()
            gone = {n for n, of_batch in enumerate(counts) if not of_batch.all()} - lost
            lost |= gone
            age_s = max([killed_s - trained_s[n] for n in gone], default=0.0)
            longest_s = max(longest_s, age_s)
            name = f"start {job.num_starts - 1}.log"
            has_warned = "changes since then are lost" in (tmp_path / name).read_text()
            assert has_warned or age_s <= 2 * INTERVAL_S + TOLERATED_S
            restored = job.client.step("count")
            assert len(gone) <= steps - restored
            reported = job.client.lost["lost_updates"] - told
            assert reported <= steps - restored
            assert job.client.lost["lost_rows"] % NUM_IDS == 0
            steps = restored
        job.train(len(trained_s))
    told = (
        f"{len(lost)} of {len(trained_s)} updates lost, of the last {longest_s:.2f} s"
    )
    record_property("measured", told)
