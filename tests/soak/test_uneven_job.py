"""A job whose trainers' data end unevenly, killed again and again: nothing grows."""

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from persia_torchrec.checkpoint import catalog
from persia_torchrec.job.member_record import MemberRecord
from tests.soak.conftest import COLUMNS, LEAST_OF_A_TABLE
from tests.soak.series import Series, files_of, sample
from tests.support.processes import wait_until
from tests.support.uneven_job import end_job, uneven_job, wait_for_steps

PAGE = Path(__file__).with_name("uneven_job.md")
NUM_SAMPLES = 120
EACH_KILL = 3  # samples between two kills
MOST_STEPS, SAVE_STEPS = 800, 200  # of a trainer in a pass; between two checkpoints
PAUSE_S = 0.004  # a step; less than two cores can do, so that the rate is even
MEMBERS = [(role, index) for role in ("server", "trainer") for index in range(2)]

pytestmark = pytest.mark.multiprocess


def measure(series, folder, members):
    """Measure what is there; return the process of each member."""
    found = {}

    def are_there():
        found.update({name: record.process() for name, record in members.items()})
        return all(found.values())

    wait_until(are_there, "all members are there")
    pids = {name: process.pid for name, process in found.items()}
    with contextlib.suppress(FileNotFoundError, psutil.NoSuchProcess):  # one has ended
        pids["agent"] = psutil.Process(pids["trainer 0"]).ppid()
        measured = {name: sample(pid) for name, pid in pids.items()}
        for name, values in measured.items():
            series.add(name, values)
    for name, at in (
        ("temporary files", folder / "tmp"),
        ("checkpoints", folder / "checkpoints"),
        ("shared memory", Path("/dev/shm")),
    ):
        series.add(name, files_of(at))
    return found


def kill(record, process):
    """Kill a member, and wait for the next one."""
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: record.process() not in (None, process), "it is back")


def watch(folder, job, members, seconds, num_samples):
    """Measure the job, and kill a trainer now and then; return the number of kills."""
    series, num_kills = Series(), 0
    begun_s = time.monotonic()
    for number in range(num_samples):
        wait_s = begun_s + (number + 1) * seconds / num_samples - time.monotonic()
        time.sleep(max(wait_s, 0))
        wait_for_steps(folder, job)  # all are back
        found = measure(series, folder, members)
        if number % EACH_KILL == 0:
            name = f"trainer {num_kills % 2}"
            kill(members[name], found[name])
            num_kills += 1
    wait_for_steps(folder, job)
    return series, num_kills


@pytest.mark.long
def test_a_job_of_uneven_data_grows_by_nothing_and_loses_nothing(tmp_path, minutes):
    is_whole = minutes >= LEAST_OF_A_TABLE
    most_steps = MOST_STEPS if is_whole else 20
    (tmp_path / "tmp").mkdir()
    variables = {
        "TMPDIR": str(tmp_path / "tmp"),
        "SAVE_STEPS": str(SAVE_STEPS),
        "PAUSE_S": str(PAUSE_S),
    }
    with uneven_job(tmp_path, most_steps, **variables) as (job, book):
        members = {f"{r} {i}": MemberRecord(book, r, i) for r, i in MEMBERS}
        wait_for_steps(tmp_path, job)
        given = tmp_path, job, members, 60 * minutes, NUM_SAMPLES if is_whole else 1
        series, num_kills = watch(*given)
        passes = end_job(tmp_path, job, most_steps)
    if not is_whole:
        return
    (run,) = (tmp_path / "checkpoints").iterdir()
    newest = next(catalog.saved_states(run)).url
    num_checkpoints = int(newest.rpartition("-")[2])
    lines, grown = series.grown()
    head = PAGE.read_text().partition(COLUMNS)[0].rpartition("The last run:")[0]
    PAGE.write_text(
        f"{head}The last run: {minutes:g} minutes, {sum(map(max, passes))} steps in "
        f"{len(passes)} passes, {num_checkpoints} checkpoints, {num_kills} restarts, "
        f"{os.cpu_count()} cores.\n\n"
        f"{COLUMNS}|---|---|---|---|---|---|\n{''.join(lines)}"
    )
    assert num_checkpoints >= 5 * minutes
    assert num_kills >= 0.5 * minutes
    assert not grown, "".join(grown)
