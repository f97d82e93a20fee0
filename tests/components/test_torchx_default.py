"""What ``torchx run persia.NAME`` starts with, where nothing names a scheduler."""

import argparse

import pytest
from torchx.cli.cmd_run import CmdRun

from persia_torchrec.launch.torchx_run import Run

OURS = ("persia.train_torchrec", "--script", "train.py")


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Return scheduler and options that torchx would start a job by."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCHXCONFIG", raising=False)
    monkeypatch.setattr("torchx.runner.config.DEFAULT_CONFIG_DIRS", [str(tmp_path)])
    monkeypatch.setattr("torchx.cli.argparse_util.torchxconfig._subcmd_configs", {})
    monkeypatch.setattr("torchx.cli.argparse_util.torchxconfig.called_args", set())
    monkeypatch.setattr("torchx.cli.argparse_util.ArgOnceAction.called_args", set())
    started = []
    monkeypatch.setattr(CmdRun, "run", lambda _, args: started.append(args))

    def start(*words, config=""):
        (tmp_path / ".torchxconfig").write_text(config)
        parser = argparse.ArgumentParser()
        command = Run()
        command.add_arguments(parser)
        command.run(parser.parse_args(words))
        return started[-1].scheduler, started[-1].scheduler_args

    return start


def test_ours_start_on_this_machine_with_logs_that_stay(start):
    assert start(*OURS) == ("local_cwd", "log_dir=runs")
    configured = "[cli:run]\ncomponent = persia.train\n"
    assert start(config=configured) == ("local_cwd", "log_dir=runs")
    assert start("--", "--script", "a", config=configured)[0] == "local_cwd"


def test_others_start_as_before(start):
    assert start("dist.ddp", "--script", "train.py") == ("local_docker", None)
    assert start("-s", "local_cwd", "dist.ddp") == ("local_cwd", None)


def test_what_a_command_line_names_wins(start):
    options = ("-s", "slurm", "-cfg", "partition=debug")
    assert start(*options, *OURS) == ("slurm", "partition=debug")


def test_options_of_a_command_line_are_kept(start):
    given = "auto_set_cuda_visible_devices=True"
    assert start("-cfg", given, *OURS) == ("local_cwd", f"{given},log_dir=runs")


def test_a_folder_of_logs_of_a_command_line_wins(start):
    assert start("-cfg", "log_dir=mine", *OURS) == ("local_cwd", "log_dir=mine")


def test_what_a_torchxconfig_names_wins(start):
    docker = "[cli:run]\nscheduler = local_docker\n"
    assert start(*OURS, config=docker) == ("local_docker", None)
    logs = "[local_cwd]\nlog_dir = mine\n"
    assert start(*OURS, config=logs)[1] in (None, "")
