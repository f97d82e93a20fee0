"""The pages of docs/reference/ that are made of the settings themselves.

    python docs/generate.py            writes them
    python docs/generate.py --errors   writes the list of errors to build/docs

A range is what a class says when a value outside of it is given: each field is set to
some values, and the error's text is read.
"""

import ast
import dataclasses
import functools
import inspect
import math
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import click
import msgspec
from persia_torchrec.components import jobs

import persia_torchrec as package
from persia_torchrec import ctx, data, env, errors, timeouts
from persia_torchrec.command import main as command
from persia_torchrec.command import start
from persia_torchrec.embedding import embedding_config, setting, usage
from persia_torchrec.errors import ConfigError
from persia_torchrec.job.coordinator import CoordinatorConfig
from persia_torchrec.job.requests import JobTimings
from persia_torchrec.job.supervisor import SupervisorConfig
from persia_torchrec.job.torchrun import AgentConfig
from persia_torchrec.launch.roles import JobSettings, RoleSettings, ServerSettings
from persia_torchrec.parsing import command_line, settings
from persia_torchrec.parsing.yaml_file import DIFFERENCES
from persia_torchrec.persia import global_config, launcher
from persia_torchrec.persia.convert import Conversion
from persia_torchrec.persia.worker.__main__ import WorkerFlags
from persia_torchrec.server.__main__ import ServerFlags
from persia_torchrec.serving.__main__ import ServingFlags
from persia_torchrec.table import TableSpec
from persia_torchrec.training.schedule import RecoveryConfig

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "persia_torchrec"
REFERENCE = ROOT / "docs/reference"
NAMES_OF_PERSIA = ROOT / "tests/architecture/persia_names.txt"

_PROBES = -1, 0, 2**80, math.nan
_UNITS = {
    "s": "s",
    "sec": "s",
    "seconds": "s",
    "bytes": "bytes",
    "rows": "rows",
    "ids": "ids",
    "batches": "batches",
    "samples": "samples",
    "steps": "steps",
    "ratio": "ratio",
    "port": "port",
    "dir": "path",
    "file": "path",
    "config": "path",
    "capacity": "rows",
    "restarts": "times",
    "retries": "times",
}


_MEANINGS = {
    "POLL_S": "between two polls",
    "LOOK_S": "between two looks",
    "CHECK_S": "between two checks",
    "PARENT_CHECK_S": "between two checks whether the parent lives",
    "RETRY_S": "until it is tried again",
    "CONNECT_RETRY_S": "until it is tried again",
    "FIRST_RETRY_S": "until it is tried again, at first",
    "LAST_RETRY_S": "until it is tried again, in the end",
    "FIRST_POLL_S": "between two polls, at first",
    "BEAT_S": "between two heartbeats",
    "LOG_S": "between two lines of a log",
    "PROGRESS_S": "between two reports of progress",
    "SHORT_WAIT_S": "of a wait that is hidden behind the training",
    "LONGEST_STEP_S": "that a clock advances at once",
    "WATCH_S": "between two views of a verb that watches",
    "JUMP_S": "by which a clock differs that jumped",
}


class Line(NamedTuple):
    """One setting."""

    name: str  # as it is written where it is set
    default: str
    unit: str
    limits: str  # its range
    meaning: str


def _code(value: object) -> str:
    return f"`{value}`".replace("|", "\\|")


def _cell(text: str) -> str:
    text = re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", text)
    text = re.sub(r"``(.+?)``", r"`\1`", " ".join(text.split()))
    # Brackets of a range, or of a default, are no link.
    return re.sub(r"\|", r"\\|", text).replace("<", "\\<") or "-"


def _table(lines: Iterable[Line]) -> str:
    head = "| name | default | unit | range | meaning |\n|---|---|---|---|---|"
    return "\n".join([head, *("| " + " | ".join(line) + " |" for line in lines)]) + "\n"


def _unit(name: str) -> str:
    words = name.strip("-").replace("-", "_").lower().split("_")
    if words[0] == "num" or words[0].endswith("replicas"):
        return "count"
    if words[0] == "on":  # what to do on other batches is no number of them
        return "-"
    return _UNITS.get(words[-1], "-")


def _shown(value: object, unit: str = "-") -> str:
    if value is None or value in ((), "", {}):
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, setting.Setting):
        return _code(value.describe())
    if isinstance(value, int) and unit == "bytes" and not value % 2**20:
        return _code(f"{value // 2**20} MiB")
    is_counted = isinstance(value, int) and unit != "port"
    return _code(f"{value:,}" if is_counted else f"{value}")


def _default(field: Any) -> str:
    default, factory = field.default, field.default_factory
    missing = dataclasses.MISSING, msgspec.NODEFAULT
    if default not in missing:
        return _shown(default, _unit(field.name))
    if factory in missing:
        return "must be given"
    module = inspect.getmodule(factory)
    if isinstance(factory, type):
        return _shown(factory())
    return "see the meaning" if module is not None else "-"


def _plain(kind: Any) -> Any:
    """Return a type without its None and its annotations."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) in (types.UnionType, Union):
        return _plain(get_args(kind)[0])
    return kind


def _limits(name: str, kind: Any, make: Callable[..., object] | None) -> str:
    """Return the range of a field: its choices, or what an error says of it."""
    plain = _plain(kind)
    if isinstance(kind, str):
        return "-"
    if get_origin(plain) is Literal:
        return ", ".join(map(_code, get_args(plain)))
    for part in get_args(kind) if get_origin(kind) is Annotated else ():
        if isinstance(part, msgspec.Meta) and part.ge is not None:
            return f"\\>= {part.ge}"
        if isinstance(part, setting.Rule):
            return _cell(part.must)
    if plain is bool:
        return "on, off"
    return "-" if plain not in (int, float) or make is None else _said(name, make)


def _said(name: str, make: Callable[..., object]) -> str:
    """Return what the error of a value outside of a range says that it is."""
    for value in _PROBES:
        try:
            make(**{name: value})
        except (ConfigError, ValueError, OverflowError) as exc:
            said = re.search(rf"{name}\b.*? must be (.+?)\. ", f"{exc} ")
            if said and "Received" not in said[1]:
                limits = said[1].replace("[0, 1)", "[0, num_shards)")
                return _cell(limits.replace(">", "\\>"))
        except Exception:  # noqa: BLE001, S110 - what only a bug would give
            pass
    return "-"


def _made(kind: type, **given: object) -> Callable[..., object]:
    return lambda **probe: kind(**{**given, **probe})


def _flags(kind: Any, **given: object) -> Iterator[Line]:
    """Yield the flags of a dataclass, those of its parts included."""
    kinds = get_type_hints(kind, include_extras=True)
    docs = command_line.field_docs(kind)
    for field in dataclasses.fields(kind):
        inner = _plain(kinds[field.name])
        if dataclasses.is_dataclass(inner) and isinstance(inner, type):
            yield from _flags(inner)
            continue
        flag = field.metadata.get("flag", "--" + field.name.replace("_", "-"))
        if "declared" in field.metadata:  # on a table of its own
            continue
        if flag is None or (not docs.get(field.name) and field.name.startswith("_")):
            continue
        name = field.name.upper() if "positional" in field.metadata else flag
        yield Line(
            _code(name),
            _default_of_flag(field, docs.get(field.name, "")),
            _unit(field.name),
            _limits(field.name, kinds[field.name], _made(kind, **given)),
            _cell(re.sub(r"\s*\[[^]]*\]$", "", docs.get(field.name, ""))),
        )


def _declared_of(kind: Any) -> Iterator[str]:
    """Yield the settings of several commands that a dataclass has."""
    kinds = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        inner = _plain(kinds[field.name])
        if dataclasses.is_dataclass(inner):
            yield from _declared_of(inner)
        elif "declared" in field.metadata:
            yield field.metadata["declared"]


def _taken_by() -> dict[str, list[str]]:
    """Return the commands that take each of the settings of several."""
    commands = {title: [*_declared_of(kind)] for title, (kind, _) in PROGRAMS.items()}
    for name in COMPONENTS:
        parameters = inspect.signature(getattr(jobs, name)).parameters
        commands[f"`persia.{name}`"] = [*parameters]
    commands["`persia-torchrec run`"] = [*start.OF_RUN]
    return {
        name: [title for title, names in commands.items() if name in names]
        for name in settings.SETTINGS
    }


def _several() -> str:
    """Return the table of the settings that several commands take."""
    head = "| name | default | unit | range | variable | meaning | taken by |"
    lines, taken = [head, "|---" * 7 + "|"], _taken_by()
    probe = _made(JobSettings, port=1, host="localhost")
    kinds = get_type_hints(JobSettings)
    for name, of in settings.SETTINGS.items():
        made = probe if name in kinds else None
        cells = (
            _code(name),
            "must be given" if of.default is ... else _shown(of.default, of.unit),
            of.unit,
            _limits(name, of.kind, made),
            _code(of.variable) if of.variable else "-",
            _cell(of.help),
            ", ".join(one.replace("python -m ", "") for one in taken[name]),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _default_of_flag(field: Any, doc: str) -> str:
    """Return a default; the docs have one in brackets where it is not a constant."""
    said = re.search(r"\[([^]]*)\]$", doc)
    variable = re.compile(r"\b([A-Z]+(?:_[A-Z]+)+)\b")
    return _cell(variable.sub(r"`\1`", said[1])) if said else _default(field)


def _comments(kind: type) -> dict[str, str]:
    """Return the comments of the fields of a struct, before them or behind."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not issubclass(base, msgspec.Struct) or base is msgspec.Struct:
            continue
        above: list[str] = []
        for line in inspect.getsource(base).splitlines():
            if said := re.match(r"    # (.*)", line):
                above.append(said[1])
                continue
            if field := re.match(r"    (\w+): [^#]*(?:# (.*))?$", line):
                found[field[1]] = " ".join([*above, field[2] or ""])
            if line.startswith("    def "):
                break
            above = []
    return found


def _keys(kind: Any, prefix: str = "", **given: object) -> Iterator[Line]:
    """Yield the keys of a YAML file."""
    kinds, comments = get_type_hints(kind, include_extras=True), _comments(kind)
    for field in msgspec.structs.fields(kind):
        path = f"{prefix}{field.encode_name}"
        inner = _plain(kinds[field.name])
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            yield from _keys(inner, f"{path}.")
            continue
        yield Line(
            _code(path),
            _default(field),
            _unit(field.name),
            _limits(field.name, kinds[field.name], _made(kind, **given)),
            _cell(comments.get(field.name, "")),
        )


def _arguments(function: Any, make: Callable[..., object] | None = None) -> list[Line]:
    """Return the arguments of a function, from its signature and its docstring."""
    docs = _described(inspect.getdoc(function) or "")
    lines = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in ("self", "cls") or parameter.kind in (2, 4):
            continue
        default = parameter.default
        empty = default is inspect.Parameter.empty
        lines.append(
            Line(
                _code(name),
                "must be given" if empty else _shown(default, _unit(name)),
                _unit(name),
                _limits(name, parameter.annotation, make),
                _cell(docs.get(name, "")),
            )
        )
    return lines


def _described(doc: str) -> dict[str, str]:
    """Return the arguments that a docstring of Google's style describes."""
    _, _, text = doc.partition("Args:\n")
    text = re.split(r"\n\n(?=\S)", text)[0]
    found: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if said := re.match(r" {4}(\w+): (.*)", line):
            name = said[1]
            found[name] = said[2]
        elif name and line.strip():
            found[name] += " " + line.strip()
    return found


def _settings_of(kind: Any) -> list[Line]:
    """Return the fields of a setting, as of an optimizer or an admission."""
    rules = dict(setting.rules_of(kind))
    docs = command_line.field_docs(kind)
    return [
        Line(
            _code(field.name),
            _default(field),
            _unit(field.name),
            _cell(rules[field.name].must.replace(">", "\\>"))
            if field.name in rules
            else "-",
            _cell(docs.get(field.name, "")),
        )
        for field in dataclasses.fields(kind)
    ]


PROGRAMS: Mapping[str, tuple[type, dict[str, object]]] = {
    "`python -m persia_torchrec.server`": (ServerFlags, {}),
    "`python -m persia_torchrec.worker`": (WorkerFlags, {}),
    "`python -m persia_torchrec.serving`": (ServingFlags, {"checkpoint": "runs/7"}),
    "`python -m persia_torchrec.job.coordinator`": (
        CoordinatorConfig,
        {"port": 0, "num_trainers": 1},
    ),
    "`python -m persia_torchrec.job.supervisor`": (SupervisorConfig, {}),
    "`python -m persia_torchrec.job.torchrun`": (AgentConfig, {}),
    "`python -m persia_torchrec.persia.convert`": (Conversion, {}),
    **{
        f"`persia-launcher {name}`": (kind, {})
        for name, kind in launcher.COMMANDS.items()
    },
}

COMPONENTS = (
    *("train", "train_torchrec", "serve", "coordinator"),
    *("embedding_server", "embedding_worker", "data_loader", "nn_worker"),
)

FILES: Mapping[str, tuple[type, dict[str, object]]] = {
    "`global_config.yml`": (global_config.GlobalSettings, {}),
    "`embedding_config.yml`, each slot": (
        embedding_config.SlotConfig,
        {"dim": 8, "name": "item"},
    ),
    "roles file, each role": (RoleSettings, {}),
    "roles file, `server` besides": (ServerSettings, {}),
}

CALLS: Mapping[str, Any] = {
    "`EmbeddingCluster.local`": package.EmbeddingCluster.local,
    "`EmbeddingCluster.of_checkpoint`": package.EmbeddingCluster.of_checkpoint,
    "`EmbeddingClient.connect`": package.EmbeddingClient.connect,
    "`remote_sharders`": package.remote_sharders,
    "`RemoteEmbeddingBagCollectionSharder`, `RemoteEmbeddingCollectionSharder`": (
        package.RemoteEmbeddingBagCollectionSharder
    ),
    "`recoverable`": package.recoverable,
    "`save_checkpoint`": package.save_checkpoint,
    "`load_checkpoint`": package.load_checkpoint,
    "`save_delta`": package.save_delta,
    "`export_for_serving`": package.export_for_serving,
    "`TrainCtx`": ctx.TrainCtx,
    "`DataLoader`": data.DataLoader,
    "`CsvDataset`": data.CsvDataset,
    "`ParquetDataset`": data.ParquetDataset,
}

SETTINGS = (
    *(package.SGD, package.Adagrad, package.AdagradDecay, package.Adam, package.AdamW),
    *(package.AdamAsync, package.RowwiseAdam, package.LAMB, package.RowwiseLAMB),
    *(package.LARS, package.FTRL),
    *(package.Constant, package.InverseSqrtDim, package.Normal),
    *(package.TruncatedNormal, package.Uniform),
    *(package.AdmitAll, package.AdmitFrequency, package.AdmitBloom),
    *(package.AdmitProbability, usage.Expiry, usage.DynamicDim),
)


@functools.cache
def settings_page() -> str:
    """Return the page of all settings."""
    parts = [
        "# Settings\n\n"
        "The settings of programs and components, with defaults, units and ranges. "
        "`docs/generate.py` writes this page from the settings, and a test compares "
        "both. [Tables and settings](../reference.md#settings) says how to choose the "
        "most important ones. [Variables](environment.md) and [times](times.md) have "
        "pages of their own.\n\n"
        "A range is the text of the error for a value outside of the range. `-` means: "
        "the type of the setting is its range. A default in plain text describes the "
        "value.\n",
        "## Settings of several commands\n\n"
        "A component of torchx has the argument `--run_dir`; a program has the flag "
        "`--run-dir`. A component can have another default than the table, if a file "
        "or the job gives the value. A program reads the variable if the flag is not "
        "given.\n",
        _several(),
        "## Programs\n\nFlags of one program each.\n",
    ]
    for title, (kind, given) in PROGRAMS.items():
        if lines := list(_flags(kind, **given)):
            parts.append(f"### {title}\n\n{_table(lines)}")
    parts.append("## Components of torchx\n")
    parts.append("Arguments of one component each: `torchx run persia.NAME`.\n")
    for name in COMPONENTS:
        lines = [
            line
            for line in _arguments(getattr(jobs, name))
            if line.name.strip("`") not in settings.SETTINGS
            and not line.meaning.startswith("previous name")
        ]
        if lines:
            parts.append(f"### `torchx run persia.{name}`\n\n{_table(lines)}")
    parts.append("## `persia-torchrec`\n")
    parts += [f"### `{title}`\n\n{_table(lines)}" for title, lines in _verbs(command)]
    parts.append("## Files\n")
    for title, (kind, given) in FILES.items():
        lines = list(_keys(kind, **given))
        if kind is ServerSettings:
            inherited = {line.name for line in _keys(RoleSettings)}
            lines = [line for line in lines if line.name not in inherited]
        parts.append(f"### {title}\n\n{_table(lines)}")
    parts.append("## Python\n")
    for title, function in CALLS.items():
        parts.append(f"### {title}\n\n{_table(_arguments(function))}")
    parts.append("### `recoverable`, what it and the environment set together\n")
    parts.append(_table(_flags(RecoveryConfig, folder="runs")))
    parts.append("### `JobTimings`, flags of the coordinator\n")
    parts.append(_table(_flags(JobTimings)))
    parts.append("### `TableSettings`, and the tables of servers\n")
    parts.append(_table(_settings_of(TableSpec)))
    parts.append("## Optimizers, initializers, admissions\n")
    for kind in SETTINGS:
        about = (kind.__doc__ or "").partition("\n")[0]
        lines = _settings_of(kind)
        body = _table(lines) if lines else "No settings.\n"
        parts.append(f"### `{kind.__name__}`\n\n{_cell(about)}\n\n{body}")
    return "\n".join(parts)


def _verbs(group: click.Group) -> Iterator[tuple[str, list[Line]]]:
    """Yield the verbs of the command line that have options, with these."""
    context = click.Context(group, info_name="persia-torchrec")
    for name in group.list_commands(context):
        verb = group.get_command(context, name)
        if isinstance(verb, click.Group):
            for inner, lines in _verbs(verb):
                yield f"{name} {inner}", lines
        elif verb is not None and (lines := list(map(_option, _options_of(verb)))):
            yield name, lines


def _options_of(verb: click.Command) -> list[click.Option]:
    return [
        one
        for one in verb.params
        if isinstance(one, click.Option)
        and not one.hidden
        and one.help
        and not (verb is start.run and one.name in start.OF_RUN)
    ]


def _option(option: click.Option) -> Line:
    default = option.default
    is_given = isinstance(default, bool | int | float | str) and default != ""
    limits = "on, off" if option.is_flag else "-"
    shown = _shown(
        bool(default is True) if option.is_flag else default if is_given else None
    )
    if isinstance(option.type, click.Choice):
        limits = ", ".join(map(_code, option.type.choices))
    return Line(
        ", ".join(map(_code, option.opts)),
        "must be given" if option.required else shown,
        _unit(option.name or ""),
        limits,
        _cell(option.help or ""),
    )


READERS: Mapping[str, Callable[[], object]] = {
    "RANK": env.get_rank,
    "LOCAL_RANK": env.get_local_rank,
    "WORLD_SIZE": env.get_world_size,
    "REPLICA_INDEX": env.get_replica_index,
    "REPLICA_SIZE": env.get_replica_size,
    "PERSIA_ENCRYPT": env.encrypts,
    "PERSIA_JOIN_TIMEOUT_S": env.join_timeout_s,
    "PERSIA_CHECKPOINT_INTERVAL_S": lambda: env.checkpoint_interval_s(
        timeouts.CHECKPOINT_INTERVAL_S
    ),
    "PERSIA_RESTARTS": env.num_restarts,
    "LOG_LEVEL": env.log_level,
    "PERSIA_JOB_TOKEN": env.job_token,
    "PERSIA_HTTP_TOKEN": env.http_token,
    "PERSIA_HTTP_ADMIN_TOKEN": env.http_admin_token,
    "PERSIA_METRICS_GATEWAY_ADDR": env.metrics_gateway,
}


def variables() -> list[tuple[str, str]]:
    """Return the variables of the environment, each with its meaning."""
    found: list[tuple[str, str]] = []
    for line in (env.__doc__ or "").splitlines():
        said = re.match(r"    ([A-Z_]+(?:, [A-Z_]+)*)(?: {2,}(.*))?$", line)
        if said:
            found.append((said[1], said[2] or ""))
        elif found and re.match(r" {8,}\S", line):
            names, meaning = found[-1]
            found[-1] = names, f"{meaning} {line.strip()}".strip()
    return found


def _probe(name: str) -> tuple[str, str]:
    """Return the default of a variable and its range."""
    if name not in READERS:
        return "unset", "-"
    cleared = {name: "", f"{name}_FILE": ""}
    with env.set_within(cleared):
        default = _shown(READERS[name]())
    for value in ("-1", "none of them"):
        try:
            with env.set_within({**cleared, name: value}):
                READERS[name]()
        except ConfigError as exc:
            said = re.search(rf"{name}.*? must be (.+?)\. (?=Received|$)", f"{exc} ")
            if said:
                return default, _cell(said[1].replace(">", "\\>"))
    return default, "-"


@functools.cache
def environment_page() -> str:
    """Return the page of all variables."""
    lines = []
    for names, meaning in variables():
        each = names.split(", ")
        default, limits = _probe(each[0])
        unit = "s" if each[0].endswith("_S") else "-"
        meaning, _, said = meaning.partition("; ")
        if default == "unset" and re.fullmatch(r"[\w./]+", said):
            default, said = _code(said), ""
        if default.strip("`").removesuffix(".0") == said:
            said = ""
        text = meaning + (f"; {said}" if said else "")
        name = ", ".join(map(_code, each))
        lines.append(Line(name, default, unit, limits, _cell(text)))
    return (
        "# Environment variables\n\n"
        "What the processes of a job read. Blanks around a value are not part of it; "
        "an empty variable counts as unset. A name in brackets is the launcher that "
        "sets one. `docs/generate.py` makes this page of `persia_torchrec/env.py`, "
        "which is the only module that reads the environment; a test compares both.\n\n"
        + _table(lines)
        + "\n`persia-launcher` rejects these variables of PERSIA, but for a value that "
        "asks for nothing:\n\n| name | accepted | reason |\n|---|---|---|\n"
        + "".join(
            f"| {_code(name)} | {_code(harmless) if harmless else 'empty'} | "
            f"{_cell(reason)} |\n"
            for name, (harmless, reason) in env.REJECTED.items()
        )
    )


def themes() -> dict[str, list[tuple[str, float, str]]]:
    """Return the constants of ``timeouts.py`` by theme: name, value, meaning."""
    found: dict[str, list[tuple[str, float, str]]] = {}
    theme = ""
    for line in inspect.getsource(timeouts).splitlines():
        if said := re.fullmatch(r"# (.+)", line):
            theme = said[1]
        elif constant := re.match(r"([A-Z_]+_S) = .*?# (.*)", line):
            value = getattr(timeouts, constant[1])
            found.setdefault(theme or "All", []).append(
                (constant[1], value, constant[2])
            )
    return found


def intervals() -> list[tuple[str, str, float, str]]:
    """Return the other constants of time: module, name, value, comment."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "timeouts.py":
            continue
        for line in path.read_text().splitlines():
            said = re.fullmatch(r"(_?[A-Z_]+_S) = ([0-9][0-9_.e-]*)(?:  # (.*))?", line)
            if said:
                module = path.relative_to(ROOT).as_posix()
                meaning = said[3] or _MEANINGS.get(said[1].strip("_"), "")
                found.append((module, said[1], float(said[2]), meaning))
    return found


def times_page() -> str:
    """Return the page of all constants of time."""
    parts = [
        "# Times\n\n"
        "Every default and limit of a wait, in seconds: `persia_torchrec/timeouts.py` "
        "has them, from which `docs/generate.py` makes this page. A wait whose end "
        "matters to a user has a setting: [settings](settings.md).\n"
    ]
    for theme, constants in themes().items():
        body = "".join(
            f"| {_code(name)} | {value:g} | {_cell(meaning)} |\n"
            for name, value, meaning in constants
        )
        parts.append(f"## {theme}\n\n| name | s | until |\n|---|---|---|\n{body}")
    body = "".join(
        f"| {_code(module)} | {_code(name)} | {value:g} | {_cell(meaning)} |\n"
        for module, name, value, meaning in intervals()
    )
    parts.append(
        "## Intervals that stand beside their code\n\n"
        "How often something is polled or tried again, and what a warning or a "
        "measurement takes.\n\n| module | name | s | meaning |\n|---|---|---|---|\n"
        + body
    )
    return "\n".join(parts)


def names_of_persia() -> dict[str, list[str]]:
    """Return PERSIA's public names by module, with arguments and defaults."""
    blocks = re.findall(r"^(\S+)\n((?: .*\n)*)", NAMES_OF_PERSIA.read_text(), re.M)
    return {module: [*map(str.strip, lines.splitlines())] for module, lines in blocks}


def _differences() -> dict[str, str]:
    """Return where the page for PERSIA's users says what differs, by name."""
    found = {}
    text = (ROOT / "docs/persia.md").read_text()
    for title, body in re.findall(r"^### (.*?)\n(.*?)(?=^##)", text, re.M | re.S):
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        table = body.partition("| name | ")[2].partition("\n\n")[0]
        for names in re.findall(r"^\| (`[^|]*`) \|", table, re.M):
            found.update(dict.fromkeys(re.findall(r"`([^`]*)`", names), anchor))
    return found


def persia_names_page() -> str:
    """Return the page of PERSIA's names, and of the keys that earlier versions had."""
    differ = _differences()
    parts = [
        "# PERSIA's names\n\n"
        "`docs/generate.py` makes this page of `tests/architecture/persia_names.txt`, "
        "of `persia_torchrec/parsing/differences.toml` and of "
        "[the page on differences](../persia.md); a test compares each name with the "
        "code. PERSIA's module `persia.ctx` is `persia_torchrec.ctx`, and so on.\n"
    ]
    for module, signatures in names_of_persia().items():
        body = ""
        for signature in signatures:
            name = signature.partition("(")[0]
            anchor = differ.get(f"{module}.{name}", differ.get(name))
            here = f"[what differs](../persia.md#{anchor})" if anchor else "the same"
            body += f"| {_code(signature)} | {here} |\n"
        parts.append(f"## persia.{module}\n\n| name | here |\n|---|---|\n{body}")
    for kind, title in ("renamed", "Other names of keys"), ("ignored", "Ignored keys"):
        body = "".join(
            f"| {_code(row.key_path)} of `{file}.yml` | "
            f"{_code(row.right_key) if row.right_key else 'none'} | "
            f"{_cell(row.reason)} |\n"
            for file, rows in DIFFERENCES.items()
            for row in rows
            if row.kind == kind
        )
        parts.append(f"## {title}\n\n| name | right key | why |\n|---|---|---|\n{body}")
    return "\n".join(parts)


PAGES: Mapping[str, Callable[[], str]] = {
    "persia_names.md": persia_names_page,
    "settings.md": settings_page,
    "environment.md": environment_page,
    "times.md": times_page,
}


def raised() -> dict[str, list[tuple[str, str]]]:
    """Return the messages of all errors by class: where, and the text."""
    found: dict[str, list[tuple[str, str]]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
                continue
            name = ast.unparse(node.exc.func).rpartition(".")[2]
            if hasattr(errors, name) and node.exc.args:
                text = _text_of(node.exc.args[0])
                if len(text) > 10:
                    found.setdefault(name, []).append((file, text))
    return found


def _text_of(node: ast.expr) -> str:
    """Return a text of the source, with what is filled in by its name."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text_of, node.values))
    if isinstance(node, ast.FormattedValue):
        words = re.findall(r"[A-Za-z_]\w*", ast.unparse(node.value))
        return "{" + (words[-1] if words else "...") + "}"
    return ""


def errors_list() -> str:
    """Return the list of all messages."""
    parts = []
    for name, messages in sorted(raised().items()):
        body = "".join(
            f"| {_cell(text).replace('*', chr(92) + '*')} | {_code(file)} |\n"
            for file, text in dict.fromkeys(messages)
        )
        parts.append(f"## {name}\n\n| message | raised in |\n|---|---|\n{body}")
    return "\n".join(parts)


def main() -> None:
    """Write the pages."""
    if "--errors" in sys.argv:
        folder = ROOT / "build/docs"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "errors.md").write_text(errors_list())
        return
    for name, make in PAGES.items():
        (REFERENCE / name).write_text(make())


if __name__ == "__main__":
    main()
