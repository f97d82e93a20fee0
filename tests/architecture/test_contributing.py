"""The walk-throughs of CONTRIBUTING.md: each block works as it stands."""

import importlib
import re
import subprocess
import textwrap
from pathlib import Path

import numpy as np
import pytest

from persia_torchrec.embedding.admission import ADMISSIONS
from persia_torchrec.embedding.initializer import INITIALIZERS
from persia_torchrec.embedding.optim import OPTIMIZERS, SGD
from persia_torchrec.embedding.setting import Registry, Setting
from persia_torchrec.server.handlers import KINDS
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.table import TableSpec
from tests.support.repository import ROOT
from tests.support.servers import ids_of

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
BLOCKS = {
    Path(path): textwrap.dedent(text)
    for text in re.findall(r"^   ```python\n(.*?)^   ```", PAGE, re.S | re.M)
    for path in re.findall(r"^ *# (persia_torchrec/\S+)$", text, re.M)
}


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Import the block of a file by the file's name."""
    monkeypatch.syspath_prepend(tmp_path)

    def load(name):
        (text,) = (text for path, text in BLOCKS.items() if path.name == name)
        (tmp_path / name).write_text(text)
        return importlib.import_module(Path(name).stem)

    return load


def registered(registry, cls, **arguments):
    """Return a setting as a registry reads it, which knows one more class."""
    more = Registry(Setting, *registry.classes.values(), cls)
    setting = cls(**arguments)
    assert more.from_json(setting.to_json()) == setting
    return setting


def test_every_block_is_a_file_in_an_existing_folder_and_every_list_exists():
    assert len(BLOCKS) == 4
    for path in BLOCKS:
        assert (ROOT / path.parent).is_dir()
        assert not (ROOT / path).exists()
    for name, file in re.findall(r"Its name in `(\w+)` of `(\S+)`", PAGE):
        assert f"\n{name}" in (ROOT / "persia_torchrec" / file).read_text()


@pytest.mark.slow
def test_a_store_trains_with_the_optimizer_the_initializer_and_the_admission(load):
    sign_sgd = load("optim_sign.py").SignSGD
    alternating = load("initializer_alternating.py").Alternating
    admit_below = load("admission_range.py").AdmitBelow
    spec = TableSpec(
        name="item",
        dim=3,
        optimizer=registered(OPTIMIZERS, sign_sgd, lr=0.5),
        initializer=registered(INITIALIZERS, alternating, value=0.25),
        admission=registered(ADMISSIONS, admit_below, bound=5),
    )
    store, ids, rows = EmbeddingStore(10), ids_of(4, 5), np.empty((2, 3), np.float32)
    store.add_tables([spec])
    store.lookup(0, ids, rows, training=True)
    assert rows.tolist() == [[0.25, -0.25, 0.25], [0, 0, 0]]
    store.update(0, ids, np.float32([[2, -3, 0], [1, 1, 1]]))
    assert store.read(0, ids).tolist() == [[-0.25, 0.25, 0.25], [0, 0, 0]]


def test_the_kind_of_request_is_answered(load, servers, monkeypatch):
    module = load("norms.py")
    monkeypatch.setitem(KINDS, module.NORMS, module.ANSWER_NORMS)
    client = servers.client(servers.start(2))
    client.add_tables([TableSpec(name="item", dim=2, optimizer=SGD(1.0))])
    client.write("item", ids_of(5, 6), np.float32([[3, 4], [0, 1]]))
    found = client.read_numbers(module.NORMS, "item", ids_of(6, 7, 5), 1)
    assert found.tolist() == [[1], [0], [5]]


def test_the_files_that_the_page_names_exist():
    for path in re.findall(r"`((?:tests|persia_torchrec)/[\w/.]+)`", PAGE):
        assert (ROOT / path).exists() or Path(path) in BLOCKS, path
    for name in re.findall(r"^\| `([\w/]+\.py)` \|", PAGE, re.M):
        assert (ROOT / "tests" / name).exists(), name


def test_every_target_of_make_is_listed():
    targets = re.findall(r"^([\w-]+):.*##", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"^\| `make ([\w-]+)` \|", PAGE, re.M)) == {*targets} - {
        "help"
    }


def test_a_theme_of_the_makefile_is_one_screen():
    themes = (ROOT / "Makefile").read_text().split("\n##@ ")
    assert len(themes) > 3
    assert all(theme.count("\n") <= 50 for theme in themes)


def test_no_file_hides_a_target_of_make():
    words = ["make", "--print-data-base", "--dry-run", "help"]
    shown = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    phony = re.findall(r"^\.PHONY: (.*)$", shown, re.M)[0].split()
    targets = re.findall(r"^([\w-]+):.*##", (ROOT / "Makefile").read_text(), re.M)
    assert {*targets} <= {*phony}
