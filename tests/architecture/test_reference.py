"""The pages of docs/reference/ that are made of the settings are as they are made.

``python docs/generate.py`` writes them.
"""

import inspect
import re

import pytest

import persia_torchrec
from docs import generate
from persia_torchrec import env, timeouts
from persia_torchrec.embedding import usage
from persia_torchrec.embedding.admission import ADMISSIONS
from persia_torchrec.embedding.initializer import INITIALIZERS
from persia_torchrec.embedding.optim import OPTIMIZERS
from persia_torchrec.parsing.settings import SETTINGS
from tests.support.repository import ROOT

REGISTRIES = usage.DYNAMICS, usage.EXPIRIES, OPTIMIZERS, ADMISSIONS, INITIALIZERS
LINE = re.compile(r"^\| (`.*?`(?:, `.*?`)*) \| ", re.M)


@pytest.fixture(autouse=True)
def own_classes(monkeypatch):
    """Other tests of this process register classes of their own."""
    for registry in REGISTRIES:
        own = {
            kind: one
            for kind, one in registry.classes.items()
            if one.__module__.startswith("persia_torchrec")
        }
        monkeypatch.setattr(registry, "classes", own)


@pytest.mark.slow
@pytest.mark.parametrize("name", generate.PAGES)
def test_a_page_of_settings_is_what_is_made_of_them(name):
    page = (ROOT / "docs/reference" / name).read_text()
    assert page == generate.PAGES[name](), "run: python docs/generate.py"


def test_every_variable_that_is_read_is_on_the_page():
    page = generate.environment_page()
    source = inspect.getsource(env).partition('"""\n\nimport')[2]
    names = set(re.findall(r'"((?:PERSIA|TORCHELASTIC)_[A-Z_]+)"', source))
    others = {"PERSIA_DEFAULT"}
    not_settings = {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"}
    missing = {name for name in names if f"`{name}`" not in page}
    assert missing - others - not_settings == set()


def test_every_constant_of_timeouts_has_a_theme_and_a_meaning():
    shown = {name for theme in generate.themes().values() for name, _, _ in theme}
    constants = {name for name in vars(timeouts) if name.endswith("_S")}
    assert constants - shown == {"SAY_S"} - shown


def test_a_limit_of_a_wait_stands_in_timeouts():
    """Elsewhere are intervals of polls and repetitions, not what a wait ends by."""
    assert len(generate.intervals()) <= 60
    ends = ("TIMEOUT", "CLOSE", "GRACE", "RECOVERY", "DEADLINE", "_END_S")
    assert [
        (module, name)
        for module, name, *_ in generate.intervals()
        if any(word in name for word in ends)
    ] == []


def test_a_range_is_read_from_the_error_of_a_value_outside_of_it():
    page = generate.settings_page()
    assert "| `--increments-interval-s` | `2.0` | s | \\> 0 |" in page
    assert "| `--max-request-ids` | `16,777,216` | ids | \\>= 1 |" in page
    assert len(LINE.findall(page)) > 300


def test_a_setting_of_several_commands_is_on_one_line():
    page = generate.settings_page()
    names = [
        name for line in LINE.findall(page) for name in re.findall("`(.*?)`", line)
    ]
    for name in SETTINGS:
        flag = f"--{name.replace('_', '-')}"
        assert names.count(name) + names.count(flag) >= 1
    table = page.partition("## Settings of several commands")[2].partition("\n## ")[0]
    assert LINE.findall(table) == [f"`{name}`" for name in SETTINGS]
    assert "taken by | |" not in table
    assert "|  |" not in table


@pytest.mark.slow
def test_the_list_of_errors_has_the_messages_of_the_code():
    messages = generate.raised()
    assert {"ConfigError", "CheckpointError", "ServerError"} <= messages.keys()
    assert sum(map(len, messages.values())) > 300


def test_the_calculator_counts_the_state_of_the_optimizers():
    script = (ROOT / "docs/static/calculator.js").read_text()
    of_script = re.findall(r'"(.+?)": \[(\d), (\d)\]', script)
    assert len(of_script) == 6
    for name, slope, constant in of_script:
        kind, _, form = name.partition(", ")
        optimizer = getattr(persia_torchrec, kind)
        given = {"vectorwise_shared": True} if form == "rowwise" else {}
        given |= {"lr": 0.1} if kind == "SGD" else {}
        for dim in (8, 64):
            num_floats = len(optimizer(**given).initial_state(dim))
            assert num_floats == int(slope) * dim + int(constant), name
