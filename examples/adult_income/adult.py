"""The Adult data set: who earns more than 50,000 dollars a year.

The rows come from the first of these that applies:

1. a folder: ``adult.data`` and ``adult.test``, plain or ``.gz``, in the folder that the
   user names or in its subfolder ``adult``; files that lack there are an error;
2. the files of an earlier download;
3. UCI's server, checked by SHA-256;
4. without a network, made-up rows of the same columns and row counts, so that the
   example runs anywhere. ``AdultData.source`` says so in one line.

Each categorical column has one vocabulary, sorted, over train and test together: an id
means the same in both. ``?``, UCI's mark for a missing value, is a value as any other.

Data: Becker and Kohavi, "Adult", UCI Machine Learning Repository, 1996, CC BY 4.0.
"""

import gzip
import hashlib
import http.client
import tempfile
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.uint64]

# Name of a column, and its index in a line of UCI's files.
DENSE_COLUMNS = {
    "age": 0,
    "education_num": 4,
    "capital_gain": 10,
    "capital_loss": 11,
    "hours_per_week": 12,
}
ID_COLUMNS = {
    "workclass": 1,
    "education": 3,
    "marital_status": 5,
    "occupation": 6,
    "relationship": 7,
    "race": 8,
    "gender": 9,
    "native_country": 13,
}
NUM_FIELDS = 15
LABELS = {"<=50K": 0.0, ">50K": 1.0}
CACHE_DIR = Path("~/.cache/persia_torchrec/adult")


@dataclass(frozen=True, slots=True)
class AdultRows:
    """Rows of the data set, in file order.

    Attributes:
        dense: float32 ``(N, 5)``, the columns of ``DENSE_COLUMNS``, as in the file.
        ids: uint64 ``(N, 8)``, the columns of ``ID_COLUMNS``; each counts from 0.
        labels: float32 ``(N, 1)``, 1 for an income above 50,000 dollars, else 0.
    """

    dense: Floats
    ids: Ids
    labels: Floats

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, slots=True)
class AdultData:
    """Both parts of the data set, and one line that says where they come from."""

    train: AdultRows
    test: AdultRows
    source: str
    is_made_up: bool = False


@dataclass(frozen=True, slots=True)
class Download:
    """A server that has the files, and the SHA-256 that each must have."""

    base_url: str
    sha256: Mapping[str, str]


UCI = Download(
    "https://archive.ics.uci.edu/ml/machine-learning-databases/adult",
    {
        "adult.data": (
            "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d"
        ),
        "adult.test": (
            "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05"
        ),
    },
)


class DownloadError(Exception):
    """A server was reached, but the file that it should have was not to be had."""


class NoNetworkError(Exception):
    """No server was reached."""


def obtain_adult(
    data_dir: str | Path | None = None,
    *,
    download: Download = UCI,
    cache_dir: Path = CACHE_DIR,
) -> AdultData:
    """Load the data set from a folder, a download, or the generator.

    Args:
        data_dir: folder of the files, or the folder above ``adult``; None to download.
        download: where from.
        cache_dir: where downloaded files are kept.

    Returns:
        Both parts. ``source`` says when they are made up.

    Raises:
        FileNotFoundError: ``data_dir`` was given and lacks a file.
        ValueError: a line of a file is malformed.
        DownloadError: the server answered, but not with the right file.
    """
    if data_dir is not None:
        return AdultData(*load_adult(data_dir), f"UCI Adult in {data_dir}")
    cache_dir = cache_dir.expanduser()
    try:
        for name, sha256 in download.sha256.items():
            fetch(f"{download.base_url}/{name}", cache_dir / name, sha256)
    except NoNetworkError as exc:
        return AdultData(
            *generate_adult(),
            "made-up rows, on which a logistic regression reaches test AUC 0.902; "
            f"there is no network to download UCI Adult: {exc}",
            is_made_up=True,
        )
    return AdultData(*load_adult(cache_dir), f"UCI Adult in {cache_dir}")


def load_adult(data_dir: str | Path) -> tuple[AdultRows, AdultRows]:
    """Read ``adult.data`` and ``adult.test``, plain or ``.gz``.

    Args:
        data_dir: their folder, or the folder above ``adult``.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a line is malformed; the message names file and line.
    """
    train = _read_lines(_find(Path(data_dir), "adult.data"))
    rows = train + _read_lines(_find(Path(data_dir), "adult.test"))
    columns = [
        # The inverse of the sorted unique values is the vocabulary's number of each.
        np.unique([row[index] for row in rows], return_inverse=True)[1]
        for index in ID_COLUMNS.values()
    ]
    data = AdultRows(
        dense=np.array(
            [[float(row[index]) for index in DENSE_COLUMNS.values()] for row in rows],
            dtype=np.float32,
        ),
        ids=np.stack(columns, axis=1).astype(np.uint64),
        labels=np.array([[LABELS[row[-1]]] for row in rows], dtype=np.float32),
    )
    return _split(data, len(train))


def fetch(url: str, path: Path, sha256: str, *, timeout_s: float = 10.0) -> None:
    """Download a file, unless it is there already, and check it.

    The bytes go to a temporary file, renamed to ``path`` when it is complete and right:
    several processes may fetch the same file at once.

    Args:
        url: what to download.
        path: where it belongs; the folder is made.
        sha256: what the file's SHA-256 must be, in hexadecimal.
        timeout_s: how long the server may be silent; 30 times that for all of it.

    Raises:
        NoNetworkError: no server was reached.
        DownloadError: the server did not send the file, or ``path`` has another
            SHA-256; such a file is deleted.
    """
    if path.exists():
        _check_sha256(path, sha256, origin=str(path))
        return
    with _open_url(url, timeout_s) as response:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            part = Path(file.name)
            try:
                _copy(response, file, url, time.monotonic() + 30 * timeout_s)
                file.flush()
                _check_sha256(part, sha256, origin=url)
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)


def generate_adult() -> tuple[AdultRows, AdultRows]:
    """Make up rows with the columns and the row counts of the data set.

    Categories are drawn from Zipf's law, numbers from laws that resemble the real ones.
    The label is drawn from a logistic model: a planted weight per category and per
    number. On the test rows the planted model itself reaches AUC 0.9025, a logistic
    regression on one-hot columns 0.902 and the example's network about 0.878.

    Returns:
        32,561 rows to train on and 16,281 to test with, 24 % positive; always the same.
    """
    num_train, num_rows = 32_561, 32_561 + 16_281
    rng = np.random.default_rng(1994)
    zipf = [np.arange(1, n + 1) ** -1.2 for n in (9, 16, 7, 15, 6, 5, 2, 42)]
    columns = [rng.choice(len(p), num_rows, p=p / p.sum()) for p in zipf]
    # How many years of school each kind of education means, the commonest first.
    years = np.array([9, 10, 13, 14, 11, 7, 12, 6, 4, 15, 5, 8, 16, 3, 2, 1])
    has_gain, has_loss = rng.random(num_rows) < 0.083, rng.random(num_rows) < 0.047
    dense = np.stack(
        [
            np.clip(17 + rng.gamma(2.6, 8.3, num_rows), 17, 90),
            years[columns[list(ID_COLUMNS).index("education")]],
            has_gain * rng.lognormal(8.6, 0.8, num_rows),
            has_loss * rng.normal(1870, 370, num_rows),
            np.clip(rng.normal(40, 12, num_rows), 1, 99),
        ],
        axis=1,
    ).round()
    logits = dense @ np.array([0.035, 0.3, 2.5e-4, 5e-4, 0.035])
    for column, p in zip(columns, zipf, strict=True):
        logits += rng.normal(0, 0.85, len(p))[column]
    # A quantile of the noisy logits as the bound gives the positive rate exactly.
    logits += rng.logistic(size=num_rows)
    data = AdultRows(
        dense=dense.astype(np.float32),
        ids=np.stack(columns, axis=1).astype(np.uint64),
        labels=(logits > np.quantile(logits, 1 - 0.24))[:, None].astype(np.float32),
    )
    return _split(data, num_train)


def _split(data: AdultRows, num_train: int) -> tuple[AdultRows, AdultRows]:
    parts = slice(None, num_train), slice(num_train, None)
    train, test = (
        AdultRows(data.dense[part], data.ids[part], data.labels[part]) for part in parts
    )
    return train, test


def _find(data_dir: Path, name: str) -> Path:
    for folder in (data_dir, data_dir / "adult"):
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return path
    raise FileNotFoundError(
        f"The data folder must hold {name} or {name}.gz, itself or in its subfolder "
        f"adult. Received: {data_dir}. Name no folder to download the files."
    )


def _read_lines(path: Path) -> list[list[str]]:
    """Split the lines of a file into checked fields; header and end are left out."""
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("ascii")
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as exc:
        raise ValueError(f"{path}: cannot be read as text: {exc}") from exc
    # UCI's adult.test starts with "|1x3 Cross validator"; copies of the files may start
    # with the names of the columns.
    rows = [
        _split_line(line, f"{path}, line {number}")
        for number, line in enumerate(text.rstrip().split("\n"), start=1)
        if number > 1 or not line.startswith(("|", "age,"))
    ]
    if not rows:
        raise ValueError(f"{path}: the file must hold at least one row.")
    return rows


def _split_line(line: str, where: str) -> list[str]:
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != NUM_FIELDS:
        raise ValueError(
            f"{where}: there must be {NUM_FIELDS} fields, separated by commas. "
            f"Received: {len(fields)} in {line!r}."
        )
    fields[-1] = fields[-1].removesuffix(".")  # adult.test ends its labels so
    for column, index in DENSE_COLUMNS.items():
        _require(fields[index].isdigit(), where, column, "a whole number", fields)
    for column, index in ID_COLUMNS.items():
        _require(fields[index] != "", where, column, "a word or ?", fields)
    _require(fields[-1] in LABELS, where, "label", f"in {list(LABELS)}", fields)
    return fields


def _require(holds: bool, where: str, column: str, must: str, row: list[str]) -> None:
    if not holds:
        raise ValueError(f"{where}: {column} must be {must}. Received: {row}.")


def _open_url(url: str, timeout_s: float) -> http.client.HTTPResponse:
    try:
        response: http.client.HTTPResponse = urlopen(url, timeout=timeout_s)
    except HTTPError as exc:
        with exc:
            raise DownloadError(
                f"{url}: the server answered {exc.code} {exc.reason}. Download the "
                "file by hand and name its folder with --data-dir."
            ) from exc
    except http.client.BadStatusLine as exc:
        raise DownloadError(f"{url}: the answer is not HTTP: {exc!r}") from exc
    except (URLError, TimeoutError, ConnectionError) as exc:
        raise NoNetworkError(f"{url}: {getattr(exc, 'reason', exc)}") from exc
    return response


def _copy(
    response: http.client.HTTPResponse, file: IO[bytes], url: str, deadline: float
) -> None:
    """Copy the body to ``file`` with a progress bar, all of it or an error."""
    total = response.length  # None when the server does not say
    num_bytes = 0
    with tqdm(total=total, unit="B", unit_scale=True, desc=url) as progress:
        while chunk := _read_chunk(response, url):
            file.write(chunk)
            num_bytes += len(chunk)
            progress.update(len(chunk))
            if time.monotonic() > deadline:
                raise DownloadError(f"{url}: too slow, {num_bytes} bytes came in time.")
    if total is not None and num_bytes != total:
        raise DownloadError(f"{url}: only {num_bytes} of {total} bytes came.")


def _read_chunk(response: http.client.HTTPResponse, url: str) -> bytes:
    try:
        return response.read1(1 << 16)
    except (OSError, http.client.HTTPException) as exc:
        raise DownloadError(f"{url}: the download broke off: {exc!r}") from exc


def _check_sha256(path: Path, sha256: str, *, origin: str) -> None:
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        path.unlink(missing_ok=True)
        raise DownloadError(
            f"{origin}: the file's SHA-256 must be {sha256}. Received: {found}. The "
            "file was deleted; try again, or name a folder with --data-dir."
        )
