"""The files of the Adult data set: who earns more than 50,000 dollars a year.

An id is the place of a word among the sorted words of its column, over both files;
``?``, UCI's mark for a missing value, is a word as any other.

Data: Becker and Kohavi, "Adult", UCI Machine Learning Repository, 1996, CC BY 4.0.
"""

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FILES, LABELS = ("adult.data", "adult.test"), ("<=50K", ">50K")
DENSE_COLUMNS = [0, 4, 10, 11, 12]  # age, education, gain, loss, hours a week
ID_COLUMNS = {"workclass": 1, "education": 3, "marital_status": 5, "occupation": 6}
ID_COLUMNS |= {"relationship": 7, "race": 8, "gender": 9, "native_country": 13}


@dataclass(frozen=True)
class AdultRows:
    """Rows in file order: float32 ``(N, 5)``, uint64 ``(N, 8)``, float32 ``(N, 1)``."""

    dense: np.ndarray
    ids: np.ndarray
    labels: np.ndarray


def load_adult(folder: Path) -> tuple[AdultRows, AdultRows]:
    """Read both files, plain or ``.gz``, of a folder or its subfolder ``adult``."""
    train, test = (read(folder, name) for name in FILES)
    rows = np.array([*train, *test])
    words = (rows[:, column] for column in ID_COLUMNS.values())
    ids = [np.unique(column, return_inverse=True)[1] for column in words]
    columns = rows[:, DENSE_COLUMNS], np.stack(ids, axis=1), rows[:, -1:] == LABELS[1]
    return split(columns, len(train))


def read(folder: Path, name: str) -> list[list[str]]:
    """Return the fields of the lines; ValueError names one that is malformed."""
    paths = [parent / name for parent in (folder, folder / "adult")]
    paths += [path.with_name(f"{name}.gz") for path in paths]
    path = next((path for path in paths if path.is_file()), paths[0])
    rows = []
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
        for number, line in enumerate(file, 1):
            fields = line.rstrip(".\n").split(", ")
            if len(fields) == 15 and fields[-1] in LABELS:
                rows.append(fields)
            elif line.strip() and number > 1:  # else it has the columns' names
                raise ValueError(f"{path}, line {number}: 15 fields, not {line!r}.")
    return rows


def split(columns: tuple[np.ndarray, ...], at: int) -> tuple[AdultRows, AdultRows]:
    """Return the rows before a number, and those from it on."""
    typed = map(np.ndarray.astype, columns, (np.float32, np.uint64, np.float32))
    train, test = zip(*((column[:at], column[at:]) for column in typed), strict=True)
    return AdultRows(*train), AdultRows(*test)
