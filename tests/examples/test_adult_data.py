import gzip
import hashlib
import importlib
import os
import threading
from functools import partial
from http.client import IncompleteRead
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import HTTPError

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import binary_auroc

from examples.adult_income import adult
from tests.support.adult_income import TEST, TRAIN, write
from tests.support.repository import ROOT

HEADER = (
    "age, workclass, fnlwgt, education, education-num, marital-status, occupation, "
    "relationship, race, sex, capital-gain, capital-loss, hours-per-week, "
    "native-country, Y"
)


def sums(folder):
    return {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in ("adult.data", "adult.test")
    }


@pytest.fixture
def real_dir():
    if not os.environ.get("PERSIA_DATA_DIR"):
        pytest.skip("PERSIA_DATA_DIR does not name a folder with UCI's files")
    return Path(os.environ["PERSIA_DATA_DIR"])


@pytest.fixture
def obtain(tmp_path, monkeypatch):
    """The module, as its scripts import it, with a cache of its own."""
    monkeypatch.syspath_prepend(ROOT / "examples/adult_income")
    module = importlib.import_module("obtain")
    monkeypatch.setattr(module, "CACHE_DIR", tmp_path / "cache" / "adult")
    return module


class Handler(SimpleHTTPRequestHandler):
    def do_GET(self):
        self.server.paths.append(self.path)
        if self.server.answer is None:
            super().do_GET()
        else:
            self.server.answer(self)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path):
    """An HTTP server on loopback whose files are those of ``tmp_path / "www"``."""
    www = tmp_path / "www"
    www.mkdir()
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Handler, directory=www)
    ) as server:
        server.www, server.paths, server.answer = www, [], None
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def assert_equal(rows, others):
    np.testing.assert_array_equal(rows.dense, others.dense)
    np.testing.assert_array_equal(rows.ids, others.ids)
    np.testing.assert_array_equal(rows.labels, others.labels)


# Reading


def test_numbers_and_labels_are_as_in_the_file(tmp_path):
    train, test = adult.load_adult(write(tmp_path))
    assert train.dense.tolist() == [[39, 13, 2174, 0, 40], [52, 9, 0, 1902, 45]]
    assert test.dense.tolist() == [[25, 7, 0, 0, 40], [28, 13, 7688, 0, 16]]
    assert train.labels.tolist() == test.labels.tolist() == [[0], [1]]
    assert train.dense.dtype == train.labels.dtype == np.float32
    assert len(train.labels) == len(test.labels) == 2


def test_an_id_means_the_same_in_both_files(tmp_path):
    train, test = adult.load_adult(write(tmp_path))
    assert train.ids.dtype == test.ids.dtype == np.uint64
    # workclass: ?, Private, State-gov.
    assert train.ids[:, 0].tolist() == [2, 0]
    assert test.ids[:, 0].tolist() == [1, 2]
    # education: 11th, Bachelors, HS-grad.
    assert train.ids[:, 1].tolist() == [1, 2]
    assert test.ids[:, 1].tolist() == [0, 1]
    # native_country: ?, Cuba, United-States.
    assert train.ids[:, 7].tolist() == [2, 1]
    assert test.ids[:, 7].tolist() == [2, 0]


@pytest.mark.parametrize("first", [[], [HEADER], ["|1x3 Cross validator"]])
@pytest.mark.parametrize("ending", ["", "\n", "\n\n", "\r\n"])
def test_a_header_and_trailing_empty_lines_are_skipped(tmp_path, first, ending):
    expected = adult.load_adult(write(tmp_path / "plain"))
    folder = write(
        tmp_path / "other", train=first + TRAIN, test=first + TEST, ending=ending
    )
    for rows, others in zip(adult.load_adult(folder), expected, strict=True):
        assert_equal(rows, others)


def test_gzipped_files_and_a_subfolder_named_adult_are_found(tmp_path):
    expected = adult.load_adult(write(tmp_path / "plain"))
    folder = write(tmp_path / "data" / "adult")
    for path in list(folder.iterdir()):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    for rows, others in zip(adult.load_adult(tmp_path / "data"), expected, strict=True):
        assert_equal(rows, others)


@pytest.mark.parametrize(
    ("old", "new"), [(", Cuba", ""), (", >50K", ", >50K, 1"), (">50K", "rich")]
)
def test_a_malformed_line_is_named(tmp_path, old, new):
    assert old in TRAIN[1]
    folder = write(tmp_path, train=[HEADER, TRAIN[0], TRAIN[1].replace(old, new)])
    with pytest.raises(ValueError, match=r"adult\.data, line 3: 15 fields, not '52, "):
        adult.load_adult(folder)


def test_a_number_that_is_none_is_an_error(tmp_path):
    folder = write(tmp_path, train=[TRAIN[0], TRAIN[1].replace("52,", "old,")])
    with pytest.raises(ValueError, match=r"could not convert string to float: .*old"):
        adult.load_adult(folder)


@pytest.mark.parametrize("line", [HEADER, "|1x3 Cross validator"])
def test_a_header_between_rows_is_malformed(tmp_path, line):
    folder = write(tmp_path, test=[TEST[0], line, TEST[1]])
    with pytest.raises(ValueError, match=r"adult\.test, line 2: 15 fields"):
        adult.load_adult(folder)


def test_a_truncated_gzip_file_is_an_error(tmp_path):
    path = write(tmp_path) / "adult.data"
    path.with_name("adult.data.gz").write_bytes(gzip.compress(path.read_bytes())[:-9])
    path.unlink()
    with pytest.raises(EOFError):
        adult.load_adult(tmp_path)


@pytest.mark.slow
def test_the_real_files_hold_what_uci_says(obtain, real_dir):
    data = obtain.obtain_adult(str(real_dir))
    assert (len(data.train.labels), len(data.test.labels)) == (32_561, 16_281)
    assert data.train.labels.mean() == pytest.approx(0.2408, abs=1e-4)
    assert data.test.labels.mean() == pytest.approx(0.2362, abs=1e-4)
    ids = np.concatenate([data.train.ids, data.test.ids])
    assert ids.max(axis=0).tolist() == [8, 15, 6, 14, 5, 4, 1, 41]
    assert not data.is_made_up
    assert data.source == f"UCI Adult in {real_dir}"


# Where the data comes from


def test_a_folder_without_the_files_is_an_error_rather_than_made_up_rows(
    tmp_path, obtain
):
    write(tmp_path)
    (tmp_path / "adult.test").unlink()
    with pytest.raises(FileNotFoundError, match=r"adult\.test"):
        obtain.obtain_adult(str(tmp_path))


@pytest.fixture
def served(server, obtain, monkeypatch):
    """The module, whose server has two small files."""
    write(server.www)
    monkeypatch.setattr(obtain, "URL", server.url)
    monkeypatch.setattr(obtain, "SHA256", sums(server.www))
    return obtain


def test_files_are_downloaded_once_and_checked(served, server):
    cache = served.CACHE_DIR
    for _ in range(2):
        data = served.obtain_adult()
        assert_equal(data.train, adult.load_adult(server.www)[0])
        assert data.source == f"UCI Adult in {cache}"
    assert server.paths == ["/adult.data", "/adult.test"]
    assert sums(cache) == sums(server.www)
    assert len(list(cache.iterdir())) == 2


def test_a_file_with_a_wrong_checksum_is_an_error_and_is_not_kept(served, server):
    served.SHA256["adult.test"] = "0" * 64
    with pytest.raises(ValueError, match=r"http.*/adult\.test must be UCI's.*SHA-256"):
        served.obtain_adult()
    assert [path.name for path in served.CACHE_DIR.iterdir()] == ["adult.data"]
    (served.CACHE_DIR / "adult.data").write_text(TRAIN[0])
    with pytest.raises(ValueError, match=r"cache/adult/adult\.data must be UCI's"):
        served.obtain_adult()


def test_a_server_without_the_file_is_an_error(served, server, monkeypatch):
    monkeypatch.setattr(served, "URL", f"{server.url}/moved")
    with pytest.raises(HTTPError, match="404"):
        served.obtain_adult()


def test_a_download_that_breaks_off_leaves_nothing(served, server):
    def answer(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(b"x" * 10)

    server.answer = answer
    with pytest.raises(IncompleteRead):
        served.obtain_adult()
    assert not served.CACHE_DIR.exists()


def test_without_a_network_rows_are_made_up_and_the_source_reports_it(
    obtain, monkeypatch
):
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as closed:
        port = closed.server_port
    monkeypatch.setattr(obtain, "URL", f"http://127.0.0.1:{port}")
    data = obtain.obtain_adult()
    assert data.is_made_up
    assert data.source.startswith("made-up rows")
    assert "\n" not in data.source
    assert "Connection refused" in data.source
    assert (len(data.train.labels), len(data.test.labels)) == (32_561, 16_281)
    assert not obtain.CACHE_DIR.exists()


@pytest.mark.slow
def test_the_checksums_equal_those_of_the_files_as_uci_serves_them(
    server, obtain, real_dir, monkeypatch
):
    folder = real_dir if (real_dir / "adult.data.gz").exists() else real_dir / "adult"
    for name, first in (("adult.data", b""), ("adult.test", b"|1x3 Cross validator\n")):
        lines = gzip.decompress((folder / f"{name}.gz").read_bytes()).rstrip(b"\n")
        (server.www / name).write_bytes(first + lines.partition(b"\n")[2] + b"\n\n")
    monkeypatch.setattr(obtain, "URL", server.url)
    data = obtain.obtain_adult()
    for rows, others in zip(data[:2], adult.load_adult(real_dir), strict=True):
        assert_equal(rows, others)


# The generator


def test_made_up_rows_are_the_same_at_every_call(obtain):
    for rows, others in zip(obtain.make_up(), obtain.make_up(), strict=True):
        assert_equal(rows, others)


def test_made_up_rows_look_like_the_real_ones(obtain):
    train, test = obtain.make_up()
    assert (train.dense.shape, train.ids.shape) == ((32_561, 5), (32_561, 8))
    assert (test.dense.dtype, test.ids.dtype) == (np.float32, np.uint64)
    assert train.labels.mean() == pytest.approx(0.24, abs=0.005)
    assert test.labels.mean() == pytest.approx(0.24, abs=0.005)
    assert train.dense.min(axis=0).tolist() == [17, 1, 0, 0, 1]
    ids = np.concatenate([train.ids, test.ids])
    assert ids.max(axis=0).tolist() == [8, 15, 6, 14, 5, 4, 1, 41]
    # Skewed: the commonest category is much more frequent than the average.
    for column in ids.T:
        shares = np.bincount(column.astype(np.int64)) / len(column)
        assert shares.max() > 1.3 / len(shares)


def test_a_logistic_regression_finds_the_signal_in_made_up_rows(obtain):
    train, test = obtain.make_up()
    mean, spread = train.dense.mean(axis=0), train.dense.std(axis=0)
    widths = train.ids.max(axis=0).astype(np.int64) + 1

    def design(rows):
        one_hot = [
            np.eye(width)[column.astype(np.int64)]
            for width, column in zip(widths, rows.ids.T, strict=True)
        ]
        numbers = (rows.dense - mean) / spread
        ones = np.ones((len(rows.labels), 1))
        return np.concatenate([ones, numbers, *one_hot], axis=1)

    features, labels = design(train), train.labels[:, 0]
    weights = np.zeros(features.shape[1])
    for _ in range(6):  # Newton's steps
        chance = 1 / (1 + np.exp(-features @ weights))
        gradient = features.T @ (labels - chance) - weights
        curvature = (features * (chance * (1 - chance))[:, None]).T @ features
        weights += np.linalg.solve(curvature + np.eye(len(weights)), gradient)
    scores = torch.from_numpy(design(test) @ weights)
    auc = binary_auroc(scores, torch.from_numpy(test.labels[:, 0]).int()).item()
    assert auc == pytest.approx(0.902, abs=0.001)
