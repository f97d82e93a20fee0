"""Each setting of each command does something, and is as it is declared."""

import ast
import dataclasses
import inspect
import os
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

import persia_torchrec
from persia_torchrec import env
from persia_torchrec.errors import ConfigError
from persia_torchrec.job.coordinator import CoordinatorConfig
from persia_torchrec.job.supervisor import SupervisorConfig
from persia_torchrec.job.torchrun import AgentConfig
from persia_torchrec.parsing.command_line import parse_flags
from persia_torchrec.parsing.settings import SETTINGS, declared, renamed
from persia_torchrec.persia import launcher
from persia_torchrec.persia.worker.__main__ import WorkerFlags
from persia_torchrec.server.__main__ import ServerFlags
from persia_torchrec.serving.__main__ import ServingFlags
from tests.support.components import COMPONENTS, load

pytestmark = pytest.mark.slow

PROGRAMS = (
    *(CoordinatorConfig, SupervisorConfig, AgentConfig),
    *(ServerFlags, WorkerFlags, ServingFlags),
)
VALUES = {  # other ones than those that are given below, and the defaults
    "env": "NAME=value",
    "optimizer_engine": "fbgemm",
    "eviction": "lfu",
    "device": "cpu",
    "nproc_per_node": 2,
    "trainers": 2,
    "host": "10.0.0.8",
    "http_host": "localhost",
}


def other(name, default):
    """Return a value that is not the default."""
    if name in VALUES:
        return VALUES[name]
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + 1
    return "other.py"


def rendered(name, **changes):
    """Return all that a component asks torchx for."""
    roles = load(name)(**{**COMPONENTS[name], **changes}).roles
    return [dataclasses.asdict(role) for role in roles]


@pytest.mark.parametrize("name", COMPONENTS)
def test_each_argument_of_a_component_changes_a_role(tmp_path, name):
    roles_file = tmp_path / "roles.yml"
    roles_file.write_text("all: {cpu: 3}")
    before = rendered(name)
    for argument in inspect.signature(load(name)).parameters.values():
        is_own = argument.name in ("http_host", "http_port", "script")
        if argument.name not in SETTINGS and not is_own:  # a previous name
            continue
        value = other(
            argument.name, COMPONENTS[name].get(argument.name, argument.default)
        )
        if argument.name == "roles_file":
            value = str(roles_file)
        if argument.name == "restarts" and "host" in COMPONENTS[name]:
            value = 0  # the coordinator counts
        assert rendered(name, **{argument.name: value}) != before, argument.name


class Became(Exception):  # noqa: N818  # not an error
    """Raised where a command would turn into a process."""


def becomes(monkeypatch, *words):
    """Return the command that one of the launcher's turns into, and the variables."""

    def become(_, command):
        raise Became(command)

    monkeypatch.setattr(os, "execv", become)
    monkeypatch.setattr(os, "environ", {"PERSIA_STORE_PORT": "29400"})
    with pytest.raises(Became) as became:
        launcher.main(words)
    return became.value.args[0], dict(os.environ)


@pytest.mark.parametrize("name", launcher.COMMANDS)
def test_each_flag_of_the_launcher_changes_the_process(monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    kind = launcher.COMMANDS[name]
    for file in ("script.py", "other.py", "g.yml", "global.yml"):
        (tmp_path / file).touch()
    for file in ("e.yml", "embedding.yml"):
        (tmp_path / file).write_text("slots_config: {item: {dim: 4}}")
    given = {"embedding_config": "e.yml", "global_config": "g.yml"}
    fields = {one.name: one for one in dataclasses.fields(kind)}
    words = [name]
    for one in given.keys() & fields.keys():
        words += [f"--{one.replace('_', '-')}", given[one]]
    words += ["--replica-size", "3"] if "replica_size" in fields else []
    words += ["--nnodes", "3"] if "nnodes" in fields else []
    if "file" in fields:
        words.append("script.py")
    before = becomes(monkeypatch, *words)
    kinds = get_type_hints(kind)
    for one, field in fields.items():
        if one in ("file", "replica_size", "nnodes"):
            continue
        flag = field.metadata.get("flag", f"--{one.replace('_', '-')}")
        value = {
            "embedding_config": "embedding.yml",
            "global_config": "global.yml",
            "optimizer_engine": "fbgemm",
        }.get(one, "7" if "int" in str(kinds[one]) else "1")
        value = "2" if one in ("replica_index", "node_rank") else value
        value = "7.5" if one == "join_timeout_s" else value
        added = [flag] if kinds[one] is bool else [flag, value]
        if one == "memory_dir":
            words_before, added = (
                becomes(monkeypatch, *words, "--restarts"),
                [
                    *added,
                    "--restarts",
                ],
            )
        else:
            words_before = before
        assert becomes(monkeypatch, *words, *added) != words_before, flag


def read_names():
    """Return the attributes, and names in quotes, that the package reads."""
    names = set()
    for path in Path(persia_torchrec.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
    return names


def test_each_flag_of_a_program_is_read():
    known = read_names()
    for kind in PROGRAMS:
        names = {field.name for field in dataclasses.fields(kind)}
        assert names - known == set(), kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Run it."""

    servers: int = declared("servers", also="They are here")
    restarts: int = declared("restarts", default=0)
    memory_dir: str = declared("memory_dir")


def parsed(*words):
    return parse_flags(Flags, words, prog="it")


def test_a_declared_flag_has_help_default_and_previous_names(capsys, caplog):
    with pytest.raises(SystemExit):
        parsed("--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{SETTINGS['servers'].help}. They are here [1]" in shown
    assert "num-servers" not in shown
    assert parsed() == Flags(servers=1)
    assert parsed("--num-servers", "3") == parsed("--servers=3") == Flags(servers=3)
    assert "--num-servers is called --servers now" in caplog.text


def test_a_flag_without_effect_is_an_error():
    must = "memory_dir must be left out, as it has no effect without restarts"
    with pytest.raises(ConfigError, match=must):
        parsed("--memory-dir", "/fast")
    assert parsed("--memory-dir", "/fast", "--restarts", "1").memory_dir == "/fast"


def test_an_inference_server_rejects_what_has_no_effect():
    words = ["--checkpoint", "a", "--batch-samples", "9"]
    with pytest.raises(ConfigError, match="no effect without batch_window_s"):
        parse_flags(ServingFlags, words, prog="it")
    assert parse_flags(ServingFlags, [*words, "--batch-window-s", "1"], prog="it")


def test_a_role_by_itself_counts_no_restarts():
    with pytest.raises(ConfigError, match="which its coordinator restarts"):
        rendered("embedding_server", restarts=7)


def test_arguments_of_functions_have_previous_names(caplog):
    @renamed(num_servers="servers")
    def start(servers=1):
        return servers

    assert (start(), start(2), start(servers=3), start(num_servers=4)) == (1, 2, 3, 4)
    assert "num_servers is called servers now" in caplog.text
    with pytest.raises(TypeError, match="num_servers is servers, which is given, too"):
        start(num_servers=1, servers=2)


def test_a_setting_has_a_default_of_its_kind_and_a_variable_that_is_read():
    source = inspect.getsource(env)
    for name, of in SETTINGS.items():
        assert of.help[0].islower() or of.help.startswith(("TCP", "GPU")), name
        assert not of.help.endswith(".")
        if of.default is not ... and get_origin(of.kind) is not Literal:
            assert isinstance(of.default, of.kind), name
        elif of.default is not ...:
            assert of.default in get_args(of.kind)
        assert of.needs in ("", *SETTINGS)
        assert of.variable in source
