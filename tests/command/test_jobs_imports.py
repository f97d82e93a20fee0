"""What a verb imports, by ``sys.modules`` of a process of its own."""

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from persia_torchrec.command import _MODULES, main
from persia_torchrec.job.job_list import JobRecord
from persia_torchrec.job.process_identity import ProcessIdentity
from tests.support.processes import DEADLINE_S

pytestmark = pytest.mark.slow

HEAVY = "numpy", "zmq", "fsspec", "numba", "torch", "torchx", "prometheus_client"
RUN = f"""
import json, sys
from persia_torchrec.command import main
try:
    main(sys.argv[1:])
finally:
    heavy = [name for name in {HEAVY} if name in sys.modules]
    print(json.dumps(heavy), file=sys.stderr)
"""


def write_record(folder, log):
    """Write the record of a job that has ended, with a server's log."""
    JobRecord(
        job_id="census",
        host=os.uname().nodename,
        port=1,
        coordinator=ProcessIdentity.of_this_process(),
        began="2026-01-01T00:00:00+00:00",
        ended="2026-01-01T00:00:01+00:00",
        folder=str(folder),
        logs={"server 0": f"{os.uname().nodename} {log}"},
    ).write()


@pytest.mark.parametrize(
    ("words", "status", "shown"),
    [
        (["--help"], 0, "Stop a job; trainers save a last checkpoint before."),
        (["ps"], 0, "no job runs"),
        (["ps", "--all", "--json"], 0, '"job": "census"'),
        (["stop"], 1, "Received: none, and none runs. Ended are census."),
        (["stop", "cen"], 1, "Received: cen, and that has ended: census."),
        (["stop", "cus"], 1, "there is none such. Known are census."),
        (["stop", "--help"], 0, "--no-save"),
        (["logs", "server", "0"], 0, "the last line"),
        (["logs", "--help"], 0, "--follow"),
    ],
)
def test_verbs_that_read_files_import_no_numpy_zmq_or_torch(
    tmp_path, monkeypatch, words, status, shown
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    log = tmp_path / "server.log"
    log.write_text("the last line\n")
    write_record(tmp_path, log)
    ended = subprocess.run(
        [sys.executable, "-c", RUN, *words],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == status, ended.stderr
    assert shown in ended.stdout + ended.stderr
    imported = next(line for line in ended.stderr.splitlines() if line[0] == "[")
    assert json.loads(imported) == []


def test_a_log_that_torchx_did_not_complete_is_that_of_the_stream(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    write_record(tmp_path, tmp_path / "combined.log")
    for name, text in (("combined", "a\n"), ("stdout", ""), ("stderr", "a\n")):
        (tmp_path / f"{name}.log").write_text(text)
    words = ["logs", "server", "0"]
    assert CliRunner().invoke(main, words).output == "a\n"
    (tmp_path / "stderr.log").write_text("a\nthe cause\n")
    result = CliRunner().invoke(main, words)
    assert result.stdout == "a\nthe cause\n"
    assert "torchx ended before this process" in result.stderr
    (tmp_path / "combined.log").unlink()
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 1
    assert result.output.startswith("Error: [Errno 2] No such file or directory: ")


def test_the_list_of_verbs_has_the_first_sentence_of_each(capsys):
    main(["--help"], standalone_mode=False)
    listed = " ".join(capsys.readouterr().out.split())
    context = main.make_context("persia-torchrec", ["ps"])
    for name in _MODULES:
        command = main.get_command(context, name)
        assert f"{name} {command.get_short_help_str(200)[:30]}" in listed
