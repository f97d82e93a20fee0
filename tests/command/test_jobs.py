"""The verbs of jobs and rows, of one job that runs; the last test stops it."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from persia_torchrec.command import main
from persia_torchrec.command.restart import _without_argument
from persia_torchrec.job import job_list
from tests.support.endless_script import SCRIPT
from tests.support.forked_jobs import ForkedJob
from tests.support.processes import wait_until

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    (folder / "train.py").write_text(SCRIPT)
    variables = {"PERSIA_CHECKPOINT_DIR": str(folder / "checkpoints")}
    arguments = ("--servers", "2", "--script", "train.py")
    command = ("train_torchrec", *arguments)
    with (
        ForkedJob(folder, *command, variables=variables) as job,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("XDG_STATE_HOME", str(folder / ".local/state"))
        job.has_printed("checkpoint-00000002")
        job.folder = folder
        yield job


def call(*words, status=0):
    """Return what the command prints on stdout."""
    result = CliRunner().invoke(main, [*map(str, words)])
    assert result.exit_code == status, result.output
    return result.stdout


def told(*words, status=0):
    """Return the value that the command prints as JSON."""
    return json.loads(call(*words, "--json", status=status))


def test_ps_has_the_jobs_that_run(job):
    [line] = told("ps")
    assert (line["job"], line["state"]) == (job.job_id, "running")
    assert line["pid"] == job.pid("coordinator 0")
    assert job.job_id in call("ps")


def test_status_has_a_line_for_each_process_and_the_newest_checkpoint(job):

    def is_known():  # servers tell their rows every 5 s, trainers their step
        found = told("status")
        rows = [one["rows"] for one in found["members"] if one["role"] == "server"]
        steps = [one["step"] for one in found["members"] if one["role"] == "trainer"]
        are_told = sum(row or 0 for row in rows) == 4 and (steps[0] or 0) >= 10
        return found["checkpoint_is_whole"] and are_told

    wait_until(is_known, "the checkpoint is looked at, rows and step are told")
    found = told("status")
    members = {(one["role"], one["index"]): one for one in found["members"]}
    assert list(members) == [
        ("coordinator", 0),
        ("server", 0),
        ("server", 1),
        ("trainer", 0),
    ]
    for (role, index), one in members.items():
        assert one["state"] == "running"
        assert one["pid"] == job.pid(f"{role} {index}")
        assert one["memory_bytes"] > 10**6
        assert 0 < one["since_s"] < 10_000
    servers = [members["server", index] for index in range(2)]
    assert sum(one["rows"] for one in servers) == 4
    assert 0 <= servers[0]["idle"] <= 1
    assert servers[0]["port"] > 0
    assert members["trainer", 0]["step"] >= 10
    assert found["checkpoint_is_whole"]
    assert found["checkpoint_age_s"] < 10_000
    assert found["problems"] == []
    shown = call("status", job.job_id[:9])
    assert "newest checkpoint: " in shown
    assert "whole" in shown


def test_status_has_what_a_server_does_in_a_second(job):
    def is_busy():
        server = told("status")["members"][1]
        rates = "updates_a_second", "lookups_a_second", "lookup_us"
        return all(server[name] for name in rates)

    wait_until(is_busy, "a server applies updates")


def test_status_of_a_coordinator_by_its_address(job):
    assert told("status", f"127.0.0.1:{job.port}")["job"] == job.job_id


def test_a_job_that_is_not_there_learns_which_are(job):
    assert job.job_id in CliRunner().invoke(main, ["status", "other"]).output
    call("status", "other", status=1)
    by_a_name = CliRunner().invoke(main, ["status", "localhost:http"])
    assert "HOST:PORT of a coordinator. Received: localhost:http." in by_a_name.output


def test_top_has_the_tables_with_their_updates(job):
    [line] = told("top")["tables"]
    assert line["table"] == "item"

    def is_busy():
        found = told("top")
        [table], [feature] = found["tables"], found["features"]
        assert (feature["feature"], feature["table"]) == ("item", "item")
        has_more = table["updates"] > line["updates"] and feature["ids"] > 6
        return has_more and table["updates_a_second"] > 0 < feature["ids_a_second"]

    wait_until(is_busy, "the job trains")
    assert "ids/s" in call("top")


def test_logs_equal_those_of_a_process(job):
    assert "the address book of job" in call("logs", "coordinator")
    assert "must have a log" in CliRunner().invoke(main, ["logs", "worker"]).output


def test_get_has_the_rows_of_ids_in_their_order(job):
    rows = told("get", "item", "9", "7", "12345")
    assert [one["id"] for one in rows] == [9, 7, 12345]
    assert np.abs(rows[2]["weights"]).max() <= 1000**-0.5  # what TorchRec begins with
    assert len(rows[0]["weights"]) == 4
    wrong = CliRunner().invoke(main, ["get", "user", "7"])
    assert "TABLE must be one of the job: item" in wrong.output


def test_hot_has_the_ids_that_were_seen_most(job):
    first, *others = told("hot", "item")
    assert first["id"] == "7"
    assert {one["id"] for one in others} == {"8", "9", "10"}
    assert first["frequency"] > others[0]["frequency"]


def test_processes_are_named_by_role_index_and_job(job):
    for member in ("coordinator 0", "server 1", "trainer 0"):
        process = Path("/proc", str(job.pid(member)))
        name = (process / "comm").read_text().strip()
        words = (process / "cmdline").read_text()
        named = f"{member} of {job.job_id}" in words  # by setproctitle
        assert named or name.startswith(member.replace(" ", "-"))


def test_scale_and_rollback_need_the_command_that_has_started_a_job(job):
    for words in (["scale", "--servers", "3"], ["rollback", "", str(job.folder)]):
        wrong = CliRunner().invoke(main, words)
        assert wrong.exit_code == 1
        assert "must have been started by persia-torchrec run" in wrong.output


def test_the_command_that_starts_a_job_again_leaves_out_an_argument():
    command = ["python", "run", "persia.train", "--servers", "2", "--a=1"]
    left = _without_argument(command, "servers")
    assert left == ["python", "run", "persia.train", "--a=1"]
    assert _without_argument(command, "a") == command[:-1]


def test_stop_has_a_job_save_and_end(job):
    assert "its last checkpoint: " in call("stop")
    assert told("ps") == []
    [record] = job_list.find_jobs()
    assert record.outcome == "failed"
    assert "checkpoint-" in record.checkpoint
    assert "server 1" in record.logs
    [line] = told("ps", "--all")
    assert (line["job"], line["state"]) == (job.job_id, "stopped")
    assert line["told"] == "SIGTERM to persia-torchrec stop"
    assert "the address book" in call("logs", "coordinator", "--job", job.job_id)
    assert f"{job.job_id}: stopped, since" in call("status")
    wait_until(lambda: not job._is_running(), "the job's processes end")
