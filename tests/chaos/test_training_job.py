"""A job that trains, whose processes are killed: what has become of each batch."""

import contextlib
import os
import signal
from collections import Counter

import numpy as np
import pytest

from persia_torchrec.embedding.embedding_config import load_embedding_config
from persia_torchrec.job.member_record import MemberRecord
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.routing.route import is_of_shard
from tests.chaos import counting
from tests.chaos.killing import AGENT, RAISING, SUPERVISOR, Killer, recovering_job
from tests.support.processes import Processes, wait_until
from tests.support.repository import ROOT
from tests.support.script_jobs import Job, start_trainers

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

SCRIPTS = [f"{ROOT}/tests/chaos/{name}.py" for name in ("counting_trainer", "counting")]
SIZES = {"server": 2, "worker": 2, "loader": 2, "trainer": 2}
# Each as often as the others, but for the three after which all NN workers start again.
ALL = 2 * ["server", "worker", "loader", "coordinator", SUPERVISOR]
ALL += ["trainer", AGENT, RAISING]
FIRST = 20  # batches before the first kill
REST = 200  # batches after the last: loaders are ahead of NN workers by fewer
SAVES_OFTEN = {"PERSIA_CHECKPOINT_INTERVAL_S": "1"}


def numbers_of(folder, name):
    """Return how often each batch is in the notes of the NN workers."""
    notes = [path.read_text() for path in folder.glob(f"{name} ?")]
    return Counter(int(line) for text in notes for line in text.split())


@pytest.fixture
def run(tmp_path, draw, kills, record_property):
    """Return a function that runs the job through kills.

    It gives the rows, the number of batches, and the output of the job.
    """

    def run(name, num_kills, roles=ALL, *, end=None, sizes=SIZES, **variables):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "embedding_config.yml").write_text(counting.CONFIG)
        (folder / "global_config.yml").write_text("{}")
        if end is not None:
            (folder / "end").write_text(str(end))

        def num_sent():
            return numbers_of(folder, "sent").total()

        arguments = ["--data_loaders", str(sizes["loader"])]
        arguments += ["--nproc_per_node", str(sizes["trainer"])]
        with recovering_job(folder, *SCRIPTS, *arguments, **variables) as (job, book):
            wait_until(
                lambda: num_sent() > FIRST, "the training begins", details=job.output
            )
            if num_kills:
                killer = Killer(folder, job, book, draw, num_sent, roles, **sizes)
                killer.kill(kills(num_kills))
                record_property("measured", killer.summary())
            if end is None:
                end = max(numbers_of(folder, "sent")) + REST
                (folder / "some").write_text(str(end))
                (folder / "some").rename(folder / "end")
            ended = job.wait()
        assert ended.status == 0, ended.output
        assert "the job is finished" in ended.output
        return np.load(folder / "rows.npy"), end, ended.output

    return run


def count(times):
    """Return how often each id was trained whose batches were so often."""
    counts = np.zeros(len(counting.all_ids(len(times))))
    for number, num in enumerate(times):
        counts[counting.own_ids(number)] += num
        np.add.at(counts, counting.shared_ids(number), num)
    return counts


def counted_once(rows, end):
    return np.array_equal(rows, np.tile(count([1] * end)[:, None], 4))


def test_each_batch_counts_once_when_all_roles_are_killed(run):
    rows, end, _ = run("exact", 100, **SAVES_OFTEN)
    assert counted_once(rows, end)


def test_rows_ahead_have_what_was_acknowledged_and_nothing_twice(run, tmp_path):
    rows, end, _ = run("ahead", 100, **SAVES_OFTEN, PERSIA_RESUME="rows_ahead")
    folder = tmp_path / "ahead"
    sent, acknowledged = (numbers_of(folder, n) for n in ("sent", "acknowledged"))
    assert max(sent.values()) > 1  # some were trained again
    assert (rows == rows[:, :1]).all()
    slot = load_embedding_config(folder / "embedding_config.yml").slots["item"]
    ids = counting.all_ids(end).astype(np.uint64) + np.uint64(slot.index_prefix)
    for shard in range(2):  # each has its part of an update, as a whole
        is_here = is_of_shard(ids, shard, 2)
        times = []
        for number in range(end):
            own = counting.own_ids(number)
            [num] = set(rows[own[is_here[own]], 0])
            assert acknowledged[number] <= num <= sent[number]
            times.append(num)
        assert np.array_equal(rows[is_here, 0], count(times)[is_here])


@pytest.mark.parametrize("staleness", [0, 1])
def test_rows_equal_those_of_an_undisturbed_job_bit_by_bit(run, staleness):
    given = {"sizes": SIZES | {"loader": 1, "trainer": 1}, "LEARNS": str(staleness + 1)}
    rows, end, _ = run("killed", 20, ["server", "worker"], **given)
    expected, _, _ = run("undisturbed", 0, end=end, **given)
    assert len(np.unique(rows)) > 1000
    assert rows.tobytes() == expected.tobytes()


@pytest.mark.parametrize("how", ["trainer", RAISING])
def test_without_a_checkpoint_all_batches_are_trained_from_the_first(run, how):
    rows, end, output = run("early", 1, [how], PERSIA_CHECKPOINT_INTERVAL_S="600")
    assert "starts again without a checkpoint: all rows were dropped" in output
    assert counted_once(rows, end)


def test_an_nn_worker_is_not_started_again_when_its_script_has_ended(tmp_path):
    with Processes(tmp_path) as processes:
        job = Job(processes, "--heartbeat-s", "4", trainer=1)
        script = "print('trained')"
        torchrun = start_trainers(processes, job, script, 1, max_restarts=3)
        with contextlib.closing(AddressBook.join("localhost", job.port)) as book:
            record = MemberRecord(book, "trainer", 0)
            wait_until(
                lambda: record.read().is_done, "it is done", details=torchrun.output
            )
            process = record.process()
            os.kill(process.pid, signal.SIGSTOP)  # it learns of no end of the job
            job.coordinator.has_printed("the job is finished")
            assert process.kill()
        assert [p.status() for p in (torchrun, job.coordinator)] == [0, 0]
    assert torchrun.output().count("trained\n") == 1
