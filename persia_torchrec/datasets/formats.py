"""The datasets of each format of files; :class:`RowDataset` is what they share."""

from collections.abc import Sequence
from typing import Unpack

from persia_torchrec.datasets.columns import AnyColumn
from persia_torchrec.datasets.dataset import RowDataset
from persia_torchrec.datasets.files import CsvFile, CsvFormat
from persia_torchrec.datasets.json_files import JsonFile
from persia_torchrec.datasets.sources import Files
from persia_torchrec.datasets.steps import RowSettings
from persia_torchrec.datasets.tables import ArrowFile, NpyFile, ParquetFile
from persia_torchrec.datasets.work_queue import WorkQueue


class CsvDataset(RowDataset):
    """Batches of CSV files, plain or packed by gzip, zstd or bz2; see RowDataset.

    Without ``header``, ``columns`` are all of a line, in their order; those with
    ``column=`` are read from the field of another one, or a hive partition, and have
    none. Groups of rows are ranges of about 1 MiB; a packed file is one group. The
    first block of each file is checked when the dataset is made, the others when they
    are read.

    Args:
        files: as of ``RowDataset``.
        batch_size: rows of a step.
        columns: what is read.
        header: whether the first line has the columns' names, by which they are found.
            None: it has not, and is an error if it has exactly them.
        delimiter: between fields, any text, as ``","``, TAB, ``"::"``.
        quotes: whether fields may be quoted by ``"``, within a line. False: that is
            text. None: so too, but a field that begins with one is an error.
        skip_lines: lines at the start that are not read.
        encoding: of the text, as Python names it.
        **settings: as of ``RowDataset``.

    Raises:
        ConfigError: an argument is out of range.
        DataError: a file is missing, empty, malformed, or of other columns.
    """

    _opener = CsvFile

    def __init__(
        self,
        files: Files | WorkQueue,
        batch_size: int,
        columns: Sequence[AnyColumn],
        *,
        header: bool | None = None,
        delimiter: str = ",",
        quotes: bool | None = None,
        skip_lines: int = 0,
        encoding: str = "utf-8",
        **settings: Unpack[RowSettings],
    ) -> None:
        self._format = CsvFormat(
            header=header,
            delimiter=delimiter,
            quotes=quotes,
            skip_lines=skip_lines,
            encoding=encoding,
        )
        super().__init__(files, batch_size, columns, **settings)


class JsonDataset(RowDataset):
    """Batches of files of JSON objects, one a line; see :class:`RowDataset`.

    Files are plain or packed by gzip, zstd or bz2. Columns are found by their names,
    fields of objects by dotted paths. A column that a line lacks is a missing value.
    """

    _opener = JsonFile


class ParquetDataset(RowDataset):
    """Batches of Parquet files; see :class:`RowDataset`.

    Columns are found by their names, fields of structs by dotted paths. Text is a
    string or bytes of any kind; several tokens are a list, or text with the separator.
    Groups of rows are the row groups.
    """

    _opener = ParquetFile


class ArrowDataset(RowDataset):
    """Batches of Arrow IPC files (Feather) or streams; see :class:`ParquetDataset`.

    Groups of rows are the record batches of a file; a stream is one group.
    """

    _opener = ArrowFile


class NpyDataset(RowDataset):
    """Batches of Criteo's logs as NumPy arrays of TorchRec's scripts; see RowDataset.

    ``files`` are ``NAME_dense.npy``; ``NAME_sparse.npy`` and ``NAME_labels.npy`` are
    beside. Columns are ``label``, ``int_0`` to ``int_12`` and ``cat_0`` to ``cat_25``.
    """

    _opener = NpyFile
