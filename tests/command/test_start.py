import inspect
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from persia_torchrec.components import jobs
from torchx.runner.config import get_config

from persia_torchrec.checkpoint.catalog import MANIFEST
from persia_torchrec.checkpoint.signature import SERVED_MODEL
from persia_torchrec.command import main
from persia_torchrec.command.start import OF_RUN
from persia_torchrec.parsing.command_line import parse_flags
from persia_torchrec.parsing.settings import SETTINGS
from persia_torchrec.serving.__main__ import ServingFlags
from persia_torchrec.version import __version__
from tests.support.repository import ROOT


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Return the command lines that the process becomes, beside ``train.py``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    commands = []
    monkeypatch.setattr(os, "execv", lambda _, command: commands.append(command))
    return commands


def test_run_is_a_component_of_a_script_with_its_own_arguments(started):
    words = [
        "run",
        "--servers",
        "2",
        "--capacity",
        "5",
        "train.py",
        "--epochs",
        "3",
    ]
    assert CliRunner().invoke(main, words).exit_code == 0
    [command] = started
    assert command[:3] == [sys.executable, "-m", "persia_torchrec.launch.local_run"]
    assert command[3:] == [
        *("persia.train_torchrec", "--script", "train.py --epochs 3"),
        *("--servers", "2", "--capacity", "5"),
    ]


def test_trainers_of_this_machine_are_of_one_torchrun(started):
    for given in (["--trainers", "2"], ["--trainers", "4", "--nproc-per-node", "2"]):
        words = ["run", *given, "train.py"]
        assert CliRunner().invoke(main, words).exit_code == 0
    assert [command[6:] for command in started] == [
        ["--trainers", "2", "--nproc_per_node", "2"],
        ["--trainers", "4", "--nproc_per_node", "2"],
    ]


def test_run_has_an_option_for_each_argument_of_its_component():
    names = inspect.signature(jobs.train_torchrec).parameters
    previous = {old for one in OF_RUN for old in SETTINGS[one].previous} | {"recover"}
    assert names.keys() - previous - {"script", "nn_workers"} == set(OF_RUN)


@pytest.mark.parametrize("name", ["--run-dir", "--run_dir", "--resume_dir"])
def test_run_continues_from_its_folder(started, name):
    assert CliRunner().invoke(main, ["run", name, "runs/7", "train.py"]).exit_code == 0
    [command] = started
    assert command[-2:] == ["--run_dir", "runs/7"]


def test_an_option_that_run_does_not_have_is_named(started):
    result = CliRunner().invoke(main, ["run", "--serverss", "2", "train.py"])
    assert (result.exit_code, started) == (2, [])
    assert "No such option '--serverss'." in result.output
    result = CliRunner().invoke(main, ["rum", "train.py"])
    assert (result.exit_code, started) == (2, [])
    assert "No such command 'rum'. Did you mean 'run'?" in result.output
    module = ["run", "-m", "train", "--epochs", "3"]
    assert CliRunner().invoke(main, module).exit_code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian.py"], "The script must exist. Received: 'trian.py', looked for in"),
        (["-m", "trian"], "The module must exist. Received: 'trian', looked for in"),
        (["-m"], "or -m and the name of a module, and arguments after it."),
        (["."], "a folder with a __main__.py. Received: the folder '.'."),
        (["a.ipynb"], "the notebook 'a.ipynb'. Convert it into a script"),
        (["bad.py"], "Received: '(' was never closed (bad.py, line 2): print("),
        (["-s", "slurm", "-m"], "or -m and the name of a module, and arguments after"),
    ],
)
def test_no_job_starts_for_a_script_that_cannot_run(started, words, said):
    Path("bad.py").write_text("import os\nprint(\n")
    Path("a.ipynb").write_text("{}")
    result = CliRunner().invoke(main, ["run", *words])
    assert (result.exit_code, started) == (2, [])
    assert said in result.output


def test_a_script_that_another_python_may_find_is_looked_for_by_the_job(started):
    words = ["-m", "of_an_image"]
    for given in (["-s", "slurm"], ["--python", "python3"], ["--env", "PYTHONPATH=b"]):
        assert CliRunner().invoke(main, ["run", *given, *words]).exit_code == 0
    assert len(started) == 3


def test_serve_of_an_exported_model_is_one_process(started, tmp_path):
    (tmp_path / SERVED_MODEL).touch()
    words = ["serve", "--port", "9000", str(tmp_path), "--device", "cpu"]
    assert CliRunner().invoke(main, words).exit_code == 0
    [command] = started
    assert command[:3] == [sys.executable, "-m", "persia_torchrec.serving"]
    assert command[3:] == [
        *("--checkpoint", str(tmp_path), "--port", "9000"),
        *("--servers", "1", "--device", "cpu"),
    ]
    parse_flags(ServingFlags, command[3:], prog="serving")


def test_another_scheduler_is_for_torchx(started):
    words = ["run", "-s", "slurm", "train.py"]
    assert CliRunner().invoke(main, words).exit_code == 0
    [command] = started
    assert command[1:6] == ["-m", "torchx.cli.main", "run", "-s", "slurm"]


def test_serve_is_a_component_of_a_checkpoint(started):
    words = ["serve", "--port", "9000", "runs/7", "--global_config", "g.yml"]
    Path("runs/7").mkdir(parents=True)
    missing = CliRunner().invoke(main, words)
    assert (missing.exit_code, started) == (1, [])
    assert "runs/7 must be a checkpoint, or hold one" in missing.output
    Path("runs/7", MANIFEST).touch()
    assert CliRunner().invoke(main, words).exit_code == 0
    [command] = started
    assert command[3:] == [
        *("persia.serve", "--checkpoint", "runs/7", "--http_port", "9000"),
        *("--servers", "1", "--global_config", "g.yml"),
    ]


def test_a_checkout_has_the_examples_too(tmp_path):
    assert CliRunner().invoke(main, ["examples", str(tmp_path / "a")]).exit_code == 0
    assert (tmp_path / "a/quickstart.py").is_file()
    again = CliRunner().invoke(main, ["examples", str(tmp_path / "a")])
    assert "FOLDER must be a new folder" in again.output
    within_a_file = CliRunner().invoke(main, ["examples", f"{__file__}/a"])
    assert within_a_file.exit_code == 1
    assert within_a_file.output.startswith("Error: [Errno 20] Not a directory: ")


def test_beside_the_examples_torchx_starts_jobs_on_this_machine(tmp_path):
    config = tmp_path / ".torchxconfig"
    folder = tmp_path / "examples"
    assert CliRunner().invoke(main, ["examples", str(folder)]).exit_code == 0
    assert get_config("cli", "run", "scheduler", [str(tmp_path)]) == "local_cwd"

    def settings(text):
        return [line for line in text.splitlines() if not line.startswith("#")]

    of_a_checkout = (ROOT / ".torchxconfig").read_text()
    assert settings(config.read_text()) == settings(of_a_checkout)
    config.write_text("")
    assert CliRunner().invoke(main, ["examples", str(tmp_path / "b")]).exit_code == 0
    assert config.read_text() == ""


@pytest.mark.slow
def test_data_describes_files(tmp_path):
    pytest.importorskip("pyarrow", reason="needs the extra data")
    (tmp_path / "a.csv").write_text("label,item\n1,7\n0,8\n")
    shown = CliRunner().invoke(main, ["data", str(tmp_path / "a.csv")])
    assert shown.exit_code == 0, shown.output
    assert "item" in shown.output


def test_every_verb_has_an_example_in_its_help():
    root = CliRunner().invoke(main, ["--help"]).output
    verbs = [
        line.split()[0] for line in root.partition("Commands:")[2].splitlines()[1:]
    ]
    assert len(verbs) == 17
    for verb in verbs:
        shown = CliRunner().invoke(main, [verb, "--help"]).output
        assert f"persia-torchrec {verb}" in shown or verb == "checkpoint", verb
    assert __version__ in CliRunner().invoke(main, ["--version"]).output


@pytest.mark.parametrize("verb", ["status", "stop", "report"])
def test_without_a_job_the_command_that_starts_one_is_told(tmp_path, monkeypatch, verb):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    result = CliRunner().invoke(main, [verb])
    assert result.exit_code == 1
    assert "Received: none. Start one by persia-torchrec run," in result.output


def test_a_word_that_is_no_verb_is_an_error_of_the_command_line():
    assert CliRunner().invoke(main, ["stats"]).exit_code == 2
