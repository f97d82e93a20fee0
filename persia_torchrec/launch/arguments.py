"""Arguments of components: of a command line, of ``.torchxconfig`` and of variables.

torchx merges the first two before it calls a component, and knows no variables. Those
of PERSIA's launchers stand between: a word of the command line wins over a variable,
and that over ``.torchxconfig``. Where something else than torchx's command line calls
a component, what it gives wins, as nothing tells the two apart.
"""

import functools
import inspect
import logging
import re
import shlex
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, get_origin

from torchx.schedulers import get_scheduler_factories

from persia_torchrec import env
from persia_torchrec.errors import ConfigError
from persia_torchrec.parsing.yaml_file import parse_yaml

logger = logging.getLogger(__name__)
Component = TypeVar("Component", bound=Callable[..., Any])

_FILES = {
    "embedding_config": "PERSIA_EMBEDDING_CONFIG",
    "global_config": "PERSIA_GLOBAL_CONFIG",
}
_SCRIPTS = ("PERSIA_NN_WORKER_ENTRY", "PERSIA_DATALOADER_ENTRY")
_CFG = ("-cfg", "--scheduler_args")
_MODULE = ("torchx", "cli", "main.py")
_NAME = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*=", re.ASCII)
_INSTEAD = {
    "slurm": " sbatch reads its other options in variables, as SBATCH_ACCOUNT, "
    "SBATCH_QOS and SBATCH_RESERVATION: export these.",
    "kubernetes": " Pull secrets, tolerations and what else a pod has are in the roles "
    "file, under pod.",
}


def reads_variables(**variables: str) -> Callable[[Component], Component]:
    """Have a component take arguments of variables, by the name of each argument.

    Paths of PERSIA's two files are of their variables in every component that has them.
    Variables of processes, ``NAME=value,NAME=value``, may have ``=`` in their values.
    """

    def extend(component: Component) -> Component:
        signature = inspect.signature(component)
        parameters = signature.parameters
        named = {n: v for n, v in {**_FILES, **variables}.items() if n in parameters}
        found = {name: text for name, v in named.items() if (text := _read(v))}
        pairs = {
            n for n, one in parameters.items() if get_origin(one.annotation) is dict
        }

        @functools.wraps(component)
        def call(**given: Any) -> Any:
            for name, text in found.items():
                given[name] = _choose(name, named[name], text, given.get(name, text))
            for name in pairs & given.keys():
                if isinstance(given[name], str):
                    given[name] = parse_pairs(name, given[name])
            return component(**given)

        def change(one: inspect.Parameter) -> inspect.Parameter:
            one = one.replace(kind=inspect.Parameter.KEYWORD_ONLY)  # in any order
            if one.name in pairs:
                return one.replace(annotation=str, default="")
            return one.replace(default=found.get(one.name, one.default))

        described: Any = call  # to mypy, not every callable has a signature
        described.__signature__ = signature.replace(
            parameters=[change(one) for one in parameters.values()]
        )
        extended: Component = described
        return extended

    return extend


def parse_pairs(name: str, text: str) -> dict[str, str]:
    """Parse ``NAME=value,NAME=value``; a comma is of a value where no name follows."""
    pairs: dict[str, str] = {}
    last = ""
    for delimiter, piece in re.findall(r"(^|[,;])([^,;]*)", text.strip()):
        if match := _NAME.match(piece):
            last = match[1]
            pairs[last] = piece[match.end() :].strip()
        elif last and "=" not in piece:
            pairs[last] += delimiter + piece.rstrip()
        elif text.strip():
            raise ConfigError(
                f"{name} must be NAME=value,NAME=value, of names with letters, digits "
                f"and _. Received: {piece!r} in {text!r}. Give a value that has such "
                f"words after a comma by --set, as all.{name}.NAME=value."
            )
    return {one: "" if v in ("''", '""') else v for one, v in pairs.items()}


def require_rules(missing: str, on_change: str, rename: str) -> None:
    """Reject what a resume cannot do with a model that has changed; empty: unset."""
    rules = {
        "missing": (missing, ("error", "skip")),
        "on_change": (on_change, ("error", "reset state", "reset table")),
    }
    for name, (given, known) in rules.items():
        if given and given not in known:
            raise ConfigError(f"{name} must be one of {known}. Received: {given!r}.")
    env.resume_rename(rename)


def require_known_options(scheduler: str) -> None:
    """Reject an option of ``-cfg`` that a scheduler does not have; torchx drops it."""
    words = _words() or []
    given = [
        *(after for word, after in pairwise(words) if word in _CFG),
        *(word.partition("=")[2] for word in words if word.partition("=")[0] in _CFG),
    ]
    pieces = [piece for text in given for piece in re.split("[,;]", text)]
    keys = {piece.partition("=")[0].strip() for piece in pieces if "=" in piece}
    if not keys:
        return
    known: list[str] = []
    for name, make in get_scheduler_factories().items():
        if name.partition("_")[0] == scheduler:  # "local" is of several
            known += [option for option, _ in make("").run_opts()]
    if known and (unknown := sorted(keys - set(known))):
        raise ConfigError(
            f"-cfg must name options of {scheduler}: {', '.join(dict.fromkeys(known))}."
            f" Received: {', '.join(unknown)}.{_INSTEAD.get(scheduler, '')}"
        )


def parse_words(text: str) -> dict[str, dict[str, Any]]:
    """Parse ``server.cpu=8 all.env.NAME=x`` into what a file would say."""
    content: dict[str, dict[str, Any]] = {}
    for word in split_words("set", "words as server.cpu=8", text):
        key, is_given, value = word.partition("=")
        role, _, name = key.partition(".")
        if not (is_given and role and name):
            raise ConfigError(
                "set must be words as server.cpu=8 or all.env.NAME=value. "
                f"Received: {word!r}."
            )
        section = content.setdefault(role, {})
        kind, _, variable = name.partition(".")
        if kind in ("env", "secrets") and variable:
            section.setdefault(kind, {})[variable] = value
        elif kind == "pod" and variable:
            _parse_pod(section.setdefault("pod", {}), variable, value)
        elif name == "volumes":
            section[name] = value.split(",")
        else:
            section[name] = int(value) if value.isdecimal() else value
    return content


def _parse_pod(section: dict[str, Any], path: str, value: str) -> None:
    """Parse ``labels.NAME`` as text, others, as ``affinity.podAffinity``, as YAML."""
    name, _, rest = path.partition(".")
    is_text = name in ("labels", "annotations", "nodeSelector") and rest
    parsed = value if is_text else parse_yaml(value, f"set: pod.{path}")
    *outer, last = [name, rest] if is_text else path.split(".")
    for key in outer:
        section = section.setdefault(key, {})
        if not isinstance(section, dict):
            raise ConfigError(f"set must give pod.{path} once, in one form.")
    section[last] = parsed


def split_words(name: str, kind: str, text: str) -> list[str]:
    """Split the text of a setting into words, as a shell does."""
    try:
        return shlex.split(text)
    except ValueError as exc:
        raise ConfigError(
            f"{name} must be {kind}, as in a shell. Received: {text!r} ({exc})."
        ) from exc


def _read(variable: str) -> str | None:
    text = env.text(variable)
    # The argument is words, of which the variable is one.
    return shlex.quote(text) if text and variable in _SCRIPTS else text


def _choose(name: str, variable: str, text: str, given: Any) -> Any:
    """Return what an argument is that a variable, or something else, gives."""
    words = _words()
    if given == text:
        logger.info("%s is %s, as %s says", name, text, variable)
        return text
    if words is not None and not any(_is_flag(word, name) for word in words):
        line = "%s is %s, as %s says, and not that of .torchxconfig, %s"
        logger.warning(line, name, text, variable, given)
        return text
    where = "is given" if words is None else "is on the command line"
    line = "%s=%s is ignored, as %s %s: %s"
    logger.warning(line, variable, text, name, where, given)
    return given


def _is_flag(word: str, name: str) -> bool:
    """Return whether a word is the flag of an argument, or the beginning of it."""
    flag = word.partition("=")[0]
    return len(flag) > len("--") and f"--{name}".startswith(flag)


def _words() -> list[str] | None:
    """Return the words of torchx's command line; None if another program runs."""
    program = Path(sys.argv[0])
    is_torchx = program.name == "torchx" or program.parts[-3:] == _MODULE
    return sys.argv[1:] if is_torchx else None
