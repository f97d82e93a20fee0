"""The example on Criteo's click logs: its data, and what the README says of it."""

import gzip
import re
from pathlib import Path

import numpy as np
import pytest

from examples.dlrm import criteo
from tests.support.processes import Processes, run_script

FOLDER = Path(criteo.__file__).parent
README = (FOLDER / "README.md").read_text()
COUNTS = ["1", "", "-2", *["0"] * 10]
CATEGORIES = ["05db9164", "", "ffffffff", *["0000000a"] * 23]


def line(label="1", counts=COUNTS, categories=CATEGORIES, end="\n"):
    return ("\t".join([label, *counts, *categories]) + end).encode()


def test_a_line_is_read_as_it_is_published():
    batch = criteo.parse([line(), line(label="0", end="\r\n")])
    expected = [np.log(2), *[0.0] * 12]
    np.testing.assert_allclose(batch.dense_features[0], expected, rtol=1e-6)
    assert batch.labels.tolist() == [1, 0]
    ids = batch.sparse_features.to_dict()
    assert list(ids) == list(criteo.CATEGORIES)
    values = [jagged.values().tolist() for jagged in ids.values()]
    assert values[:3] == [[0x05DB9164] * 2, [criteo.MISSING] * 2, [0xFFFFFFFF] * 2]
    assert values[3:] == [[10, 10]] * 23
    assert all(jagged.lengths().tolist() == [1, 1] for jagged in ids.values())


@pytest.mark.parametrize(
    "wrong",
    [
        line(counts=COUNTS[1:]),
        line(label=""),
        line(counts=["x", *COUNTS[1:]]),
        line(categories=["hello", *CATEGORIES[1:]]),
        b"\n",
    ],
)
def test_a_malformed_line_is_named(wrong):
    lines = [line()] * 5 + [wrong]
    with pytest.raises(ValueError, match=r"Line 6 must have .* Received: b'"):
        list(criteo.batches(lines, 2))


def test_plain_and_compressed_files_are_read_in_order(tmp_path):
    plain, packed = tmp_path / "train.txt", tmp_path / "day_0.gz"
    plain.write_bytes(line("0") + line("1", end=""))
    packed.write_bytes(gzip.compress(line("1") * 2))
    read = list(criteo.batches(criteo.read_lines([packed, plain]), 3))
    assert [batch.labels.tolist() for batch in read] == [[1, 1, 0], [1]]


def test_some_batches_can_be_held_out():
    lines = [line(label) for label in "0123456"]
    for wanted, expected in ((lambda n: n % 2, [2, 3, 6]), (lambda n: n == 3, [6])):
        read = criteo.batches(lines, 2, wanted)
        assert [x for batch in read for x in batch.labels.tolist()] == expected


def test_made_up_lines_are_the_same_each_time_and_can_be_read(tmp_path):
    lines = list(criteo.generate_lines(5000, seed=1))
    assert lines == list(criteo.generate_lines(5000, seed=1))
    assert lines[:100] != list(criteo.generate_lines(100, seed=2))
    assert lines[:100] == list(criteo.generate_lines(100, seed=1))
    [batch] = criteo.batches(lines, 5000)
    assert 0.2 < batch.labels.mean() < 0.4
    ids = batch.sparse_features.values().reshape(len(criteo.CATEGORIES), -1)
    assert 0.04 < (ids == criteo.MISSING).float().mean() < 0.06
    num_different = [len(of_column.unique()) for of_column in ids]
    assert min(num_different) == 4 + 1
    assert max(num_different) > 1000


@pytest.mark.slow
def test_made_up_lines_are_written_to_a_file(tmp_path):
    file = tmp_path / "made_up.tsv"
    with Processes(tmp_path) as processes:
        arguments = [str(file), "--rows", "30"]
        script = processes.start(
            "made_up", run_script, FOLDER / "criteo.py", *arguments
        )
        assert script.status() == 0, script.output()
    assert file.read_bytes().splitlines(keepends=True) == list(
        criteo.generate_lines(30, seed=0)
    )


def test_the_readme_shows_what_differs_from_plain_torchrec():
    [diff] = re.findall(r"```diff\n(.*?)```", README, flags=re.DOTALL)
    source = (FOLDER / "train.py").read_text()
    of_plain, of_ours = (
        re.search(rf"def {name}\(.*?\n(?=\n\ndef )", source, flags=re.DOTALL).group()
        for name in ("in_this_process", "on_servers")
    )
    of_plain += re.search(r"def within_tables.*?\n(?=\n\ndef )", source, re.S).group()
    of_ours += re.search(r"def with_ids_on_.*?\n(?=\n\ndef )", source, re.S).group()
    for changed in diff.splitlines():
        code = {"-": of_plain, "+": of_ours}.get(changed[0], of_plain)
        assert changed[1:].strip() in code, changed


def auc_of_training(folder, *arguments):
    """Run the example; return the AUC that it prints."""
    arguments = ["--batch-size", "256", "--lr", "0.2", *arguments]
    with Processes(folder) as processes:
        script = processes.start("train", run_script, FOLDER / "train.py", *arguments)
        assert script.status() == 0, script.output()
    printed = re.search(r"^test AUC ([0-9.]+)$", script.output(), re.MULTILINE)
    return float(printed.group(1))


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        [],
        pytest.param(["--dcn"], marks=pytest.mark.long),
        pytest.param(["--plain"], marks=pytest.mark.long),
    ],
)
def test_the_example_learns_from_made_up_data(settings, tmp_path):
    assert auc_of_training(tmp_path, "--rows", "12000", *settings) > 0.7


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.slow
def test_the_example_reads_files(tmp_path):
    file = tmp_path / "train.txt"
    file.write_bytes(b"".join(criteo.generate_lines(12_000, seed=3)))
    assert auc_of_training(tmp_path, "--train", str(file)) > 0.65
