from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from persia_torchrec.errors import ConfigError
from persia_torchrec.parsing.command_line import (
    format_flags,
    given_flags,
    parse_flags,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    beat_s: float = 1.0
    """Seconds, 100 % of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Run it.

    More.
    """

    port: int
    """Port to listen on,
    ``0`` for a free one."""

    servers: tuple[str, ...] = ()
    engine: Literal["a", "b"] = "a"
    """Which engine."""

    standalone: bool = False
    config: Path | None = None
    """The file [CONFIG]"""

    capacity_rows: int = field(default=7, metadata={"flag": "--capacity"})
    hidden: object = field(default=None, metadata={"flag": None})
    times: Times = Times()

    def __post_init__(self):
        if self.port < 0:
            raise ConfigError("port must be >= 0.")


@dataclass(frozen=True, kw_only=True, slots=True)
class More(Settings):
    """Run more of it."""

    script: str = field(metadata={"positional": True})
    imports: tuple[int, ...] = field(
        default=(), metadata={"flag": "--import", "repeat": True}
    )


def parse(*argv, kind=Settings):
    return parse_flags(kind, argv, prog="it")


def test_each_field_is_a_flag_of_its_type():
    assert parse("--port", "3") == Settings(port=3)
    everything = (
        "--port 3 --servers x y --engine b --standalone --config c --capacity 9"
    )
    assert parse(*everything.split(), "--beat-s", "0.5") == Settings(
        port=3,
        servers=("x", "y"),
        engine="b",
        standalone=True,
        config=Path("c"),
        capacity_rows=9,
        times=Times(beat_s=0.5),
    )


def test_a_flag_may_be_repeated_and_a_value_may_have_no_flag():
    settings = parse(
        *["--port", "3", "a.py", "--import", "1", "--import", "2"], kind=More
    )
    assert (settings.script, settings.imports) == ("a.py", (1, 2))


def test_fields_that_are_not_given_are_left_to_others():
    assert given_flags(Settings, ["--port", "3"], prog="it") == {"port": 3}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: --port"),
        (["--port", "x"], "argument --port: invalid int value: 'x'"),
        (["--port", "1", "--engine", "c"], "invalid choice: 'c'"),
        (["--port", "1", "--hidden", "c"], "unrecognized arguments: --hidden"),
    ],
)
def test_a_mistake_ends_the_process_and_is_named(capsys, argv, message):
    with pytest.raises(SystemExit):
        parse(*argv)
    assert message in capsys.readouterr().err


def test_errors_of_the_class_are_passed_on():
    with pytest.raises(ConfigError, match="port must be >= 0"):
        parse("--port=-1")


def test_the_help_is_the_docstrings(capsys):
    with pytest.raises(SystemExit):
        parse("--help", kind=More)
    text = " ".join(capsys.readouterr().out.split())
    assert "Run more of it." in text
    assert "--port PORT Port to listen on, 0 for a free one. --servers" in text
    assert "--engine {a,b} Which engine. [a]" in text
    assert "The file [CONFIG]" in text
    assert "Seconds, 100 % of them. [1.0]" in text


def test_flags_that_are_formatted_are_parsed_again():
    values = {"port": 4, "engine": "b", "standalone": True, "config": Path("c")}
    assert parse(*format_flags(**values)) == Settings(**values)
    assert format_flags(config=None, standalone=False, import_=[]) == []
    assert format_flags(import_=["a", "b"]) == ["--import", "a", "--import", "b"]
