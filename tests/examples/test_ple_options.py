"""What the command line of the PLE example may say, and what is rejected."""

import importlib
import json
import math
import re
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.ple import options
from examples.ple.options import Options
from persia_torchrec.errors import ConfigError
from tests.support.dense_twins import move_both

FOLDER = Path(options.__file__).parent
README_FILE = FOLDER / "README.md"


@pytest.fixture
def optimizers(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    return importlib.import_module("optimizers")


def test_the_defaults_equal_those_of_the_original():
    given = Options.parse([])
    assert (given.dataset, given.model, given.optimizer) == ("taobao", "ple", "adam")
    assert (given.batch_size, given.seed, given.steps) == (512, 2021, 0)
    assert {given.emb_fusion, given.op_fusion, given.smartstaged} == {True}
    assert {given.ev, given.bf16, given.tf, given.corrected} == {False}
    assert (given.learning_rate, given.keep_checkpoint_max) == (0.001, 1)
    assert given.staleness_of_rows == 8


@pytest.mark.parametrize("words", [["--ev"], ["--ev", "true"], ["--ev", "True"]])
def test_a_flag_may_have_a_value_as_in_the_original(words):
    assert Options.parse(words).ev is True
    assert Options.parse(["--smartstaged", "false"]).staleness_of_rows == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--ev_filter counter", r"--ev_filter must come with --ev or --adaptive_emb"),
        ("--ev_elimination l2 --dynamic_ev", "--ev_elimination must come with --ev"),
        ("--adaptive_emb --dynamic_ev", "--adaptive_emb and --dynamic_ev"),
        ("--adaptive_emb --multihash add", "--adaptive_emb and --multihash"),
        ("--dynamic_ev --multihash mul", "--dynamic_ev and --multihash"),
        ("--multihash add --ev", "ids below the number of buckets"),
        ("--tf --ev", "--tf is plain TorchRec.*--ev"),
        ("--tf --smartstaged true --save_steps 5", "--save_steps, --smartstaged"),
        ("--tf --optimizer adagrad", r"Adam.*--optimizer adagrad"),
        ("--micro_batch 3", r"equal parts.*3 parts of 512"),
        ("--micro_batch 4 --batch_size 4", "at least two samples"),
        ("--batch_size 1", r"--batch_size must be >= 2\. Received: 1"),
        ("--steps -1", "--steps must be >= 0"),
        ("--keep_checkpoint_max 0", "--keep_checkpoint_max must be >= 1"),
        ("--steps 5 --epochs 2", "--steps and --epochs both"),
    ],
)
def test_invalid_arguments_are_rejected_with_the_reason(words, message):
    with pytest.raises(ConfigError, match=message):
        Options.parse(words.split())


@pytest.mark.parametrize(
    ("words", "combine"),
    [
        ("--multihash", "add"),
        ("--multihash True", "add"),
        ("--multihash mul", "mul"),
        ("--multihash false", None),
        ("--multihash None", None),
    ],
)
def test_multihash_may_be_a_flag_as_in_the_original(words, combine):
    assert Options.parse([*words.split(), "--seed", "1"]).multihash == combine


@pytest.mark.parametrize("name", ["ev_filter", "ev_elimination", "schedule"])
def test_none_leaves_an_option_out(name):
    assert getattr(Options.parse([f"--{name}", "None"]), name) is None


def test_a_choice_that_is_none_of_them_is_an_error_that_lists_them(capsys):
    with pytest.raises(SystemExit):
        Options.parse(["--multihash", "max"])
    told = capsys.readouterr().err
    assert all(f"'{one}'" in told for one in ("max", "add", "mul", "concat"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--protocol star_server", r"--protocol star_server has no effect: .*ZeroMQ"),
        ("--input_layer_partitioner 8", "8 has no effect: rows are always spread"),
        ("--dense_layer_partitioner 16", "16 has no effect: the dense .* replicated"),
    ],
)
def test_settings_without_effect_give_a_warning(words, message):
    (line,) = Options.parse(words.split()).warnings()
    assert re.match(f".*{message}", line)
    assert list(Options.parse([]).warnings()) == []


def test_plain_torchrec_compiles_only_what_it_is_asked_to():
    assert Options.parse([]).compiles
    assert not Options.parse(["--tf"]).compiles
    assert Options.parse(["--tf", "--op_fusion"]).compiles
    assert not Options.parse(["--op_fusion", "false"]).compiles


def test_plain_torchrec_needs_no_option_switched_off():
    assert Options.parse(["--tf"]).pulls_ahead is False
    assert Options.parse(["--tf", "--smartstaged", "false", "--bf16"]).bf16


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["adam", "adamasync", "adagraddecay", "adagrad", "gradientdescent"]
)
def test_both_halves_step_alike(name, optimizers):
    given = Options.parse(["--optimizer", name, "--learning_rate", "0.1"])
    dense = partial(optimizers.dense_optimizer, given)
    move_both(optimizers.row_optimizer(given), dense)


def test_a_run_is_resumed_with_its_options_only(tmp_path):
    Options.parse(["--seed", "5"]).require_same_as(tmp_path)
    Options.parse(["--seed", "3", "--steps", "9"]).require_same_as(tmp_path)
    (tmp_path / "checkpoint-00000001").mkdir()
    noted = json.loads((tmp_path / "options.json").read_text())
    assert noted["seed"] == 3
    Options.parse(["--seed", "3", "--steps", "12"]).require_same_as(tmp_path)
    other = Options.parse(["--seed", "4", "--batch_size", "64"])
    with pytest.raises(ConfigError, match=r"--batch_size 512 -> 64, --seed 3 -> 4\."):
        other.require_same_as(tmp_path)


def test_the_readme_has_each_option_and_no_other():
    named = re.findall(r"^\| `--(\w+)", README_FILE.read_text(), flags=re.MULTILINE)
    declared = [f.name for f in fields(Options) if f.name != "given"]
    assert sorted(named) == sorted(declared)


def test_every_option_is_read_somewhere():
    source = "".join(path.read_text() for path in sorted(FOLDER.glob("*.py")))
    for name in (f.name for f in fields(Options)):
        assert re.search(rf"\b(options|self)\.{name}\b|\"{name}\"", source), name


def test_a_schedule_lets_the_rates_of_both_halves_fall_along_a_cosine(optimizers):
    both = [torch.optim.SGD([torch.zeros(1)], lr=lr) for lr in (1.0, 2.0)]
    options = Options.parse(["--schedule", "cosine"])
    schedules = optimizers.make_schedules(options, both, 4)
    steps, rates = optimizers.Steps(both, 2, schedules.values()), []
    for _ in range(2 * 5):
        steps.step()
        rates.append([one.param_groups[0]["lr"] for one in both])
    expected = [
        (1 + math.cos(math.pi * n / 4)) / 2 for n in (0, 1, 1, 2, 2, 3, 3, 4, 4, 4)
    ]
    np.testing.assert_allclose(rates, np.outer(expected, (1, 2)), atol=1e-12)
    assert optimizers.make_schedules(Options.parse([]), both, 4) == {}
