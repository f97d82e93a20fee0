"""Each option that an error names is one of the program in which the error appears."""

import argparse
import ast
import re

import pytest

from components import inference, job, torchrec_job
from persia_torchrec.job.coordinator import CoordinatorConfig
from persia_torchrec.job.supervisor import SupervisorConfig
from persia_torchrec.job.torchrun import AgentConfig
from persia_torchrec.parsing.command_line import add_flags
from persia_torchrec.persia import k8s_utils, launcher
from persia_torchrec.persia.convert import Conversion
from persia_torchrec.persia.worker.__main__ import WorkerFlags
from persia_torchrec.server.__main__ import ServerFlags
from persia_torchrec.serving.__main__ import ServingFlags
from tests.support.repository import ROOT

PACKAGE = ROOT / "persia_torchrec"
PROGRAMS = {
    "server": [ServerFlags],
    "store": [ServerFlags],
    "checkpoint": [ServerFlags],
    "embedding": [ServerFlags, WorkerFlags, ServingFlags],
    "serving": [ServingFlags],
    "persia/worker": [WorkerFlags],
    "persia/convert.py": [Conversion],
    "job/torchrun.py": [AgentConfig],
    "job/coordinator.py": [CoordinatorConfig],
    "job": [CoordinatorConfig, SupervisorConfig],
    "rpc": [CoordinatorConfig, SupervisorConfig, ServerFlags],
}
"""By room or file: the programs in which its errors appear; all others may name those
of components and launchers."""
ELSEWHERE = {"--shm-size"}  # of docker


def flags_of(kinds):
    known = set()
    for kind in kinds:
        parser = argparse.ArgumentParser()
        add_flags(parser, kind)
        known.update(parser._option_string_actions)
    return known


def flags_of_launchers():
    text = "".join(
        (ROOT / module.__file__).read_text()
        for module in (launcher, k8s_utils, inference, job, torchrec_job)
    )
    text += (PACKAGE / "launch/roles.py").read_text()
    arguments = set(re.findall(r"^\s+(\w+): ", text, re.MULTILINE))
    names = arguments | {word.replace("_", "-") for word in arguments}
    return {f"--{name}" for name in names} | set(re.findall(r'"(--[a-z-]+)"', text))


def named_flags():
    for path in sorted(PACKAGE.rglob("*.py")):
        file, text = path.relative_to(PACKAGE).as_posix(), path.read_text()
        for node in ast.walk(ast.parse(text if "--" in text else "")):
            if isinstance(node, ast.Raise):
                texts = [
                    one.value
                    for one in ast.walk(node)
                    if isinstance(one, ast.Constant) and isinstance(one.value, str)
                ]
                for flag in re.findall(r"--[a-z][a-z_-]+", "".join(texts)):
                    yield file, flag


NAMED = sorted(set(named_flags()))


@pytest.mark.parametrize(("file", "flag"), NAMED)
def test_an_error_names_options_of_its_own_program(file, flag):
    rooms = [name for name in PROGRAMS if file == name or file.startswith(f"{name}/")]
    known = flags_of_launchers()
    for room in rooms:
        known |= flags_of(PROGRAMS[room])
    assert flag in known | ELSEWHERE


def test_there_are_such_errors():
    assert len(NAMED) > 10
    assert "--no-such-flag" not in flags_of_launchers()
