"""The data sets of the PLE example: Taobao's display ads, and Census-Income.

    python examples/ple/data.py --to_parquet --dataset taobao --data_location data

writes the CSV files of a data set as Parquet files, which give the same batches.

Files are plain or ``.gz``, in the folder that the user names or in its subfolder:

    taobao   taobao/          taobao_train_data, taobao_test_data
    census   census-income/   census-income.data, census-income.test

Where only the test file is there, 70 % of its rows are for training and the others for
the test, by a random split that is always the same.

Data: Tianchi, "Ad Display/Click Data on Taobao.com", data set 56; and "Census-Income
(KDD)", UCI Machine Learning Repository, 2000, CC BY 4.0.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from persia_torchrec.data import (
    CsvDataset,
    IdColumn,
    LabelColumn,
    ParquetDataset,
    WorkQueue,
    row_group_slices,
    write_parquet,
)
from persia_torchrec.errors import DataError

Column = IdColumn | LabelColumn | str

TRAIN_SHARE, SPLIT_SEED = 0.7, 2021
CENSUS_BUCKETS = 10_000
"""More than six times the values of the column that has the most."""


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """A data set: the columns of its CSV files, in their order, and their names."""

    name: str
    folder: str
    train: str
    test: str
    source: str
    columns: tuple[Column, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the two tasks."""
        return tuple(c.name for c in self.columns if isinstance(c, LabelColumn))

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features, in the order of the file."""
        return tuple(column.name for column in self._id_columns())

    @property
    def num_buckets(self) -> dict[str, int]:
        """Rows of each feature's table, where ids are taken modulo it."""
        return {c.name: c.num_buckets for c in self._id_columns() if c.num_buckets}

    @property
    def list_features(self) -> tuple[str, ...]:
        """Names of the features with several tokens in a row."""
        return tuple(c.name for c in self._id_columns() if c.separator)

    def columns_read(self, *, ev: bool) -> tuple[Column, ...]:
        """Return the columns; with ``ev`` ids are all 64 bits."""
        return tuple(
            dataclasses.replace(column, num_buckets=None)
            if ev and isinstance(column, IdColumn)
            else column
            for column in self.columns
        )

    def _id_columns(self) -> list[IdColumn]:
        return [column for column in self.columns if isinstance(column, IdColumn)]


TAOBAO = DatasetSpec(
    name="taobao",
    folder="taobao",
    train="taobao_train_data",
    test="taobao_test_data",
    source="https://github.com/AlibabaPAI/Modelzoo-Data/tree/main/csv/taobao",
    columns=(
        LabelColumn("clk"),
        LabelColumn("buy"),
        IdColumn("pid", 10),
        IdColumn("adgroup_id", 100_000),
        IdColumn("cate_id", 10_000),
        IdColumn("campaign_id", 100_000),
        IdColumn("customer", 100_000),
        IdColumn("brand", 100_000),
        IdColumn("user_id", 100_000),
        IdColumn("cms_segid", 100),
        IdColumn("cms_group_id", 100),
        "final_gender_code",
        IdColumn("age_level", 10),
        IdColumn("pvalue_level", 10),
        IdColumn("shopping_level", 10),
        IdColumn("occupation", 10),
        IdColumn("new_user_class_level", 10),
        IdColumn("tag_category_list", 100_000, separator="|"),
        IdColumn("tag_brand_list", 100_000, separator="|"),
        IdColumn("price", 50, is_text=False),
    ),
)

# As UCI's census-income.names has them; instance weight is that of the survey.
_BEFORE = "age class_of_worker industry_code occupation_code education wage_per_hour"
_BEFORE += " enrolled_in_education"
_BETWEEN = "major_industry major_occupation race hispanic_origin sex labor_union"
_BETWEEN += " unemployment_reason employment_status capital_gains capital_losses"
_BETWEEN += " dividends tax_filer previous_region previous_state household_family"
_BETWEEN += " household_summary"
_AFTER = "migration_msa migration_region migration_within_region same_house_last_year"
_AFTER += " migration_sunbelt persons_worked_for family_members_under_18"
_AFTER += " father_birth_country mother_birth_country birth_country citizenship"
_AFTER += " self_employed veterans_questionnaire veterans_benefits weeks_worked year"


def _census_columns(names: str) -> tuple[IdColumn, ...]:
    return tuple(IdColumn(name, CENSUS_BUCKETS) for name in names.split())


CENSUS = DatasetSpec(
    name="census",
    folder="census-income",
    train="census-income.data",
    test="census-income.test",
    source="https://archive.ics.uci.edu/dataset/117/census+income+kdd",
    columns=(
        *_census_columns(_BEFORE),
        LabelColumn("never_married", positive="Never married"),
        *_census_columns(_BETWEEN),
        "instance_weight",
        *_census_columns(_AFTER),
        LabelColumn("income", positive="50000+."),
    ),
)

SPECS = {spec.name: spec for spec in (TAOBAO, CENSUS)}


@dataclass(frozen=True)
class Files:
    """The files of a data set; without one for training, the other's rows are split."""

    train: Path | None
    test: Path


@dataclass(frozen=True)
class Data:
    """Batches to train on, in epochs, and all rows of the test, in the file's order."""

    train: CsvDataset | ParquetDataset
    test: CsvDataset | ParquetDataset


def find_files(
    spec: DatasetSpec, data_location: str | Path, *, parquet: bool = False
) -> Files:
    """Find the files of a data set; DataError says where to get one that is missing."""
    train, test = (
        _find(spec, Path(data_location), name, parquet=parquet)
        for name in (spec.train, spec.test)
    )
    if test is not None:
        return Files(train, test)
    name = f"{spec.test}.parquet" if parquet else spec.test
    advice = (
        "`python examples/ple/data.py --to_parquet "
        f"--dataset {spec.name} --data_location {data_location}` writes it."
        if parquet
        else f"Get {spec.train} and {spec.test} from {spec.source}, or name their "
        "folder by --data_location."
    )
    raise DataError(
        f"{name} must be in {Path(data_location).absolute()}, or in its subfolder "
        f"{spec.folder}. Received: no such file. {advice}"
    )


def _find(spec: DatasetSpec, at: Path, name: str, *, parquet: bool) -> Path | None:
    names = [f"{name}.parquet"] if parquet else [name, f"{name}.gz"]
    places = [folder / name for folder in (at, at / spec.folder) for name in names]
    return next((path for path in places if path.is_file()), None)


def open_data(
    spec: DatasetSpec,
    data_location: str | Path,
    batch_size: int,
    *,
    ev: bool = True,
    parquet: bool = False,
    queue_epochs: int = 0,
    **train_settings: Any,
) -> Data:
    """Open the files of a data set.

    Args:
        spec: one of ``SPECS``.
        data_location: the folder of the files.
        batch_size: rows of a batch, at least 2.
        ev: whether ids are all 64 bits; else they are taken modulo the buckets.
        parquet: whether Parquet files are read, instead of CSV.
        queue_epochs: of a ``WorkQueue`` that trainers take the rows to train on from:
            the CSV file, or slices of the Parquet file. 0: there is none.
        **train_settings: of the dataset to train on, as ``CsvDataset`` has them.

    All batches have at least two rows, for batch norm.

    Raises:
        DataError: a file is missing, or malformed.
    """
    files = find_files(spec, data_location, parquet=parquet)
    kind = ParquetDataset if parquet else CsvDataset
    columns = spec.columns_read(ev=ev)
    settings = {"min_batch_size": 2, **train_settings}
    train: Any = files.train or files.test
    if queue_epochs:
        items = row_group_slices([train]) if parquet else [train]
        train = WorkQueue(items, queue_epochs, seed=settings.get("seed", 0))
    test = kind(files.test, batch_size, columns, min_batch_size=2)
    if files.train is not None:
        return Data(kind(train, batch_size, columns, **settings), test)
    order = np.random.default_rng(SPLIT_SEED).permutation(test.num_rows)
    train_rows, test_rows = np.split(order, [int(TRAIN_SHARE * test.num_rows)])
    return Data(
        kind(train, batch_size, columns, rows=train_rows, **settings),
        kind(files.test, batch_size, columns, rows=test_rows, min_batch_size=2),
    )


def convert(spec: DatasetSpec, data_location: Path, output_dir: Path) -> list[Path]:
    """Write the files of a data set as Parquet; return their paths."""
    files = find_files(spec, data_location)
    output_dir.mkdir(parents=True, exist_ok=True)
    written = []
    for path, name in ((files.train, spec.train), (files.test, spec.test)):
        if path is not None:
            written.append(output_dir / f"{name}.parquet")
            write_parquet(path, written[-1], spec.columns)
    return written


def main(argv: Sequence[str] | None = None) -> None:
    """Convert, as the command line says."""
    parser = argparse.ArgumentParser(description="Prepare the data of the PLE example.")
    add = parser.add_argument
    add("--to_parquet", action="store_true", required=True, help="write Parquet files")
    add("--dataset", choices=SPECS, default="taobao", help="[taobao]")
    add("--data_location", type=Path, default=Path("data"), help="of the CSV [./data]")
    add("--output_dir", type=Path, help="where Parquet files go [--data_location]")
    arguments = parser.parse_args(argv)
    location = arguments.data_location
    try:
        paths = convert(
            SPECS[arguments.dataset], location, arguments.output_dir or location
        )
    except DataError as exc:
        parser.error(str(exc))
    for path in paths:
        print(path)


if __name__ == "__main__":
    main()
