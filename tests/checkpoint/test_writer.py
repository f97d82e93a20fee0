"""One writer a folder."""

import json
import subprocess
import sys
import time

import pytest

from persia_torchrec.checkpoint import writer
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.writer import WRITER_FILE, FolderWriter
from persia_torchrec.errors import CheckpointError, ConfigError
from tests.support.processes import wait_until


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path / "run")


def leave_behind(folder, **changes):
    """Write what another job's writer of another host has left."""
    folder.make()
    value = {"job": "first", "host": "elsewhere", "process": "", "beat": "1"} | changes
    folder.write_json(WRITER_FILE, value)


def test_a_second_job_is_rejected_with_both_ids(folder):
    first = FolderWriter(folder, "first", beat_s=0.02)
    said = r"must have one writer\. Received: job 'first' on host .*job 'second' on"
    with pytest.raises(ConfigError, match=said):
        FolderWriter(folder, "second")
    with pytest.raises(ConfigError, match=r"'first'.*'third'.*Save to another folder"):
        writer.require_free(folder, "third")
    writer.require_free(folder, "first")
    first.release()
    FolderWriter(folder, "second").release()
    assert folder.names() == []


def test_a_process_of_the_same_job_does_not_wait(folder):
    leave_behind(folder)
    FolderWriter(folder, "first", silent_s=100_000).release()


def test_a_silent_writer_is_replaced_with_a_line(folder, caplog):
    leave_behind(folder)
    second = FolderWriter(folder, "second", silent_s=0.3)
    assert "taken over by job 'second'" in caplog.text
    assert "from job 'first' on host elsewhere, which has sent no" in caplog.text
    second.release()


def test_a_writer_that_was_silent_for_long_is_not_waited_for(folder, monkeypatch):
    leave_behind(folder)
    monkeypatch.setattr(Folder, "age_s", lambda *_: 200_000.0)
    writer.require_free(folder, "second")
    FolderWriter(folder, "second", silent_s=100_000).release()


def test_a_writer_whose_process_has_ended_is_not_waited_for(folder, caplog):
    code = (
        "import sys; from persia_torchrec.checkpoint.folder import Folder; "
        "from persia_torchrec.checkpoint.writer import FolderWriter; "
        "import os; FolderWriter(Folder(sys.argv[1]), 'first'); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, folder.url], check=True)
    assert json.loads(folder.read(WRITER_FILE))["job"] == "first"
    FolderWriter(folder, "second", silent_s=100_000).release()
    assert "whose process has ended" in caplog.text


def test_a_folder_is_taken_over_by_take_over_and_the_other_stops_writing(folder):
    first = FolderWriter(folder, "first", beat_s=0.02)
    second = FolderWriter(folder, "second", takes_over=True, beat_s=0.02)
    wait_until(lambda: first.lost is not None, "the first one knows")
    with pytest.raises(
        CheckpointError, match=r"'second'.*has taken it over from.*'first"
    ):
        first.require()
    second.require()
    first.release()
    assert json.loads(folder.read(WRITER_FILE))["job"] == "second"
    second.release()


def test_a_folder_that_cannot_be_written_is_found_at_the_start(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=r"file/run must be a folder that this process"
    ):
        FolderWriter(Folder(tmp_path / "file" / "run"), "first")


def test_an_age_is_by_the_clock_of_the_file_system(folder):
    leave_behind(folder)
    began_s = time.monotonic()
    wait_until(lambda: folder.age_s(WRITER_FILE) > 0.1, "it becomes older")
    assert folder.age_s(WRITER_FILE) <= time.monotonic() - began_s + 1
    assert folder.names() == [WRITER_FILE]
    assert folder.age_s("missing") == 0
