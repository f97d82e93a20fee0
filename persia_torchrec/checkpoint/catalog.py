"""The checkpoints of a run: their names, manifests, deltas, and what each consists of.

    run-7/checkpoint-00000001/{manifest.json, shard-00000-of-00002.rows, ..., dense/}
    run-7/checkpoint-00000002/     without a manifest: not complete, never loaded

A dump takes a new number. A manifest names a position in each server's log of
increments (``increment_log.py``). docs/formats/checkpoint.md describes the files.
"""

import contextlib
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import msgspec

from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.errors import CheckpointError, ConfigError
from persia_torchrec.table import TableSpec

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints of a job, in that of the job."""

MANIFEST = "manifest.json"  # name of the file that makes a checkpoint complete
DELTA = "delta.json"  # name of the file that makes a delta complete
PINNED = "pinned"  # name of the file by which a checkpoint is kept
DENSE = "dense"  # folder of the dense half
RUNS_FILE = "runs.json"  # name of the file with the runs that a log's server dumped to
_NAME = r"checkpoint-(\d{8,})"
_PLAIN = re.compile(rf"({DENSE}/)?(?!\.\.?$)[^/\0]+")
_BLOCK_BYTES = 2**20
_ATTEMPTS = 100
_MAX_SHARDS = 2**16
_MAX_MANIFESTS = 16  # that are looked at for the jobs of a folder, the latest ones

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Tick = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Batches = Annotated[int, msgspec.Meta(ge=0, lt=2**47)]
"""Batches of a trainer, whose numbers have its rank from bit 47 on."""


class SavedTable(msgspec.Struct, frozen=True, dict=True):
    """A table in a file: its settings as JSON, its step, and the form of its rows."""

    description: dict[str, Any] = msgspec.field(name="spec")
    num_updates: Count
    has_metadata: bool
    thresholds: list[float] = []
    now_s: float = 0.0
    """The second of its rows then (see ``store/expiry.py``); 0: unknown."""

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.description.get("name"))

    @cached_property
    def spec(self) -> TableSpec:
        """Its settings; they are parsed once."""
        return TableSpec.from_json(self.description)


@dataclass(frozen=True, slots=True)
class LogPosition:
    """A position in the log of one server: before increment ``number``."""

    log: str
    number: Count


@dataclass(frozen=True, slots=True)
class SavedShard:
    """What one server wrote, for the manifest; ``checksum`` is ``Written``'s."""

    file: str
    num_rows: Count
    size_bytes: Count
    checksum: Count
    tick: Tick  # of the server's last request
    server: Mapping[str, Any]  # the server's settings, for people
    log: LogPosition | None = None
    """Where in the server's log of increments the dump began; None without a log."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.-]*", self.file):
            raise ValueError(f"file must be a plain name, not {self.file!r:.100}")


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A file beside those of the servers; ``checksum`` is the CRC-32 of its bytes."""

    size_bytes: Count
    checksum: Count


@dataclass(frozen=True, slots=True)
class DumpResult:
    """What one server has dumped: its entries of the manifest."""

    tables: tuple[SavedTable, ...]
    shard: SavedShard
    not_finite: Mapping[str, int] = field(default_factory=dict)
    """By table, how many rows have a NaN or an infinity."""


Missing = Literal["add", "error", "skip"]
"""What becomes of tables that the model lacks: they are added to the servers, they are
an error, or they are left out."""
OnChange = Literal["error", "reset state", "reset table"]
"""What becomes of a table with another dim or optimizer: it is an error; its optimizer
state begins again, if the dim is the same; or all of it does."""


class LoadRules(msgspec.Struct, frozen=True):
    """How a checkpoint is loaded whose tables are not those of the model.

    ``rename`` says by names of the checkpoint's tables what the model calls them.
    ``tables`` are those of the model; none: all that the servers have. ``job`` is the
    one whose latest checkpoint is meant, where a folder holds those of several.
    """

    missing: Missing = "add"
    on_change: OnChange = "error"
    rename: dict[str, str] = {}
    tables: tuple[str, ...] = ()
    job: str = ""

    def __post_init__(self) -> None:
        for name, kind in (("missing", Missing), ("on_change", OnChange)):
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(
                    f"{name} must be one of {get_args(kind)}. "
                    f"Received: {getattr(self, name)!r}."
                )


class Loaded(msgspec.Struct, frozen=True):
    """What a server has loaded: rows in its store, and increments applied to them.

    For ``num_left_out`` rows, those that would be evicted first, there was no room in
    the ``capacity_rows`` of the server; a row that increments make twice, and that is
    evicted twice, counts twice. The admissions of the tables in ``forgotten`` count
    from 0 again. In ``not_finite`` are the rows of tables that have a NaN or an
    infinity, or had one, where they begin again. ``notes`` tell which tables begin
    again, are left out, or are converted.
    """

    num_rows: int
    num_left_out: int
    num_increments: int
    forgotten: list[str] = []
    capacity_rows: int = 0
    not_finite: dict[str, int] = {}
    notes: list[str] = []


@dataclass(frozen=True, slots=True)
class EndedIncrement:
    """Where one server's log has all that had changed: folder of the logs, position."""

    folder: str
    position: LogPosition
    tables: tuple[SavedTable, ...]


@dataclass(frozen=True, slots=True)
class DenseEntries:
    """The dense half of a checkpoint: names of the optimizers that have state.

    ``shared`` are the tables that several collections of the model had.
    """

    begun: tuple[str, ...]
    shared: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """A complete checkpoint; ``created`` is ISO 8601, ``step`` as the user gave it.

    ``created`` is for people, and identifies it; nothing is ordered by it.

    ``num_batches`` says behind which number the batches of a trainer continue.
    """

    tables: tuple[SavedTable, ...]
    shards: tuple[SavedShard, ...]
    created: str
    step: int | None = None
    dense: DenseEntries | None = None
    lacks_rows_of: str | None = None
    """Name of a checkpoint beside it that has rows which this one lacks: they did not
    fit when it was loaded."""
    job: str = ""
    """Id of the job that has written it; empty: of a process of no job."""
    continues: tuple[str, ...] = ()
    """Ids of the jobs whose training that job has continued, the last one first."""
    format: Literal["persia_torchrec checkpoint"] = "persia_torchrec checkpoint"
    version: Literal[1] = 1
    num_batches: Batches = 0
    files: Mapping[str, SavedFile] = field(default_factory=dict)
    """The other files, by name, ``dense/NAME`` those of the dense half; empty: written
    by a version that kept no checksums of them."""

    def __post_init__(self) -> None:
        for table in self.tables:
            _ = table.spec  # a ConfigError if it is not valid
        _require_plain(self.files)

    @property
    def capacity_rows(self) -> int | None:
        """Rows that all servers together could hold; None if that is unknown."""
        capacities = [shard.server.get("capacity_rows") for shard in self.shards]
        known = [number for number in capacities if isinstance(number, int)]
        return sum(known) if len(known) == len(capacities) else None

    @property
    def num_rows(self) -> int:
        """Rows of all servers."""
        return sum(shard.num_rows for shard in self.shards)

    @property
    def size_bytes(self) -> int:
        """Bytes of the files of all servers."""
        return sum(shard.size_bytes for shard in self.shards)

    def write(self, folder: Folder) -> None:
        """Make the checkpoint in a folder complete."""
        for shard in self.shards:
            size_bytes = folder.file_size(shard.file)
            if size_bytes != shard.size_bytes:
                raise CheckpointError(
                    f"{folder.file_path(shard.file)} must have the {shard.size_bytes} "
                    f"bytes that a server wrote. Received: {size_bytes or 'no file'}. "
                    "Give a path that all servers and trainers share."
                )
        folder.write_json(MANIFEST, self)

    @classmethod
    def read(cls, folder: Folder) -> "Manifest":
        """Read the manifest of a checkpoint."""
        if folder.file_size(MANIFEST) is None:
            raise CheckpointError(
                f"{folder.file_path(MANIFEST)} is missing: its checkpoint is not "
                "complete, or does not exist."
            )
        manifest: Manifest = folder.read_json(MANIFEST, cls)
        return manifest


@dataclass(frozen=True, slots=True)
class Delta:
    """What follows a checkpoint, whose folder has that of the delta: both halves.

    Rows are the checkpoint's with the increments in the folder ``increments`` before a
    position in the log of each server; the dense half is whole.
    """

    increments: str
    positions: tuple[LogPosition, ...]
    tables: tuple[SavedTable, ...]
    dense: DenseEntries
    created: str
    step: int | None = None
    format: Literal["persia_torchrec delta"] = "persia_torchrec delta"
    version: Literal[1] = 1
    num_batches: Batches = 0
    files: Mapping[str, SavedFile] = field(default_factory=dict)
    """As of a manifest."""

    def __post_init__(self) -> None:
        _require_plain(self.files)


def sum_files(folder: Folder) -> dict[str, SavedFile]:
    """Return size and checksum of each file that is there, but those of the servers."""
    dense = folder.child(DENSE)
    found = {name: _sum(folder, name) for name in folder.names() if _is_summed(name)}
    names = dense.names() if DENSE in folder.names() else []
    return found | {f"{DENSE}/{name}": _sum(dense, name) for name in names}


def read_file(folder: Folder, name: str) -> bytes:
    """Return a file of a checkpoint or a delta, compared with its checksum, if any."""
    data = folder.read(name)
    saved = _files_of(folder).get(name)
    if saved is not None:
        _require_same(folder, name, saved, SavedFile(len(data), zlib.crc32(data)))
    return data


def require_files(folder: Folder, within: str = "") -> None:
    """Raise CheckpointError unless files whose names begin so are as they were written.

    Those of the servers have their own checksums; see ``row_file.py``.
    """
    for path, saved in _files_of(folder).items():
        if path.startswith(within):
            parent, _, name = path.rpartition("/")
            at = folder.child(parent) if parent else folder
            _require_same(folder, path, saved, _sum(at, name))


def note_replaced(folder: Folder, name: str) -> None:
    """Note the checksum of a file that has been replaced in a complete checkpoint."""
    if name in _files_of(folder) and folder.file_size(DELTA) is None:
        manifest = Manifest.read(folder)
        files = {**manifest.files, name: _sum(folder, name)}
        folder.write_json(MANIFEST, replace(manifest, files=files))


def _require_plain(files: Iterable[str]) -> None:
    for name in files:
        if not _PLAIN.fullmatch(name):
            raise ValueError(f"files must have plain names, not {name!r:.100}")


def _is_summed(name: str) -> bool:
    is_other = re.fullmatch(r"shard-.*\.rows|delta-\d+|.*\.unfinished|\..*", name)
    return name not in (MANIFEST, DELTA, PINNED, DENSE) and not is_other


def _files_of(folder: Folder) -> Mapping[str, SavedFile]:
    """Return what is known of files; nothing where the manifest cannot be read."""
    for name, kind in ((DELTA, Delta), (MANIFEST, Manifest)):
        if folder.file_size(name) is not None:
            with contextlib.suppress(CheckpointError):
                saved: Manifest | Delta = folder.read_json(name, kind)
                return saved.files
    return {}


def _sum(folder: Folder, name: str) -> SavedFile:
    size_bytes = checksum = 0
    with folder.opened(name) as file:
        while block := file.read(_BLOCK_BYTES):
            size_bytes += len(block)
            checksum = zlib.crc32(block, checksum)
    return SavedFile(size_bytes, checksum)


def _require_same(
    folder: Folder, name: str, saved: SavedFile, received: SavedFile
) -> None:
    if received != saved:
        raise CheckpointError(
            f"{folder.file_path(name)} must be the file of its manifest, {saved}. "
            f"Received: {received}. Load another checkpoint."
        )


class Saved(NamedTuple):
    """A state that can be loaded: a checkpoint, or a delta and its checkpoint."""

    folder: Folder
    checkpoint: Folder
    manifest: Manifest
    delta: Delta | None

    @property
    def dense(self) -> DenseEntries | None:
        """The dense half that belongs to it."""
        return self.manifest.dense if self.delta is None else self.delta.dense

    @property
    def num_batches(self) -> int:
        """How many batches of a trainer were trained then."""
        return (self.manifest if self.delta is None else self.delta).num_batches

    @property
    def step(self) -> int | None:
        """The step of the training then: the largest of a trainer."""
        return (self.manifest if self.delta is None else self.delta).step

    @property
    def tables(self) -> tuple[SavedTable, ...]:
        """The tables, as they were then."""
        return self.manifest.tables if self.delta is None else self.delta.tables

    @classmethod
    def read(cls, folder: Folder) -> "Saved":
        """Read what is in the folder of a checkpoint or a delta."""
        if folder.file_size(DELTA) is None:
            return cls(folder, folder, Manifest.read(folder), None)
        checkpoint = Folder(folder.url.rpartition("/")[0])
        delta: Delta = folder.read_json(DELTA, Delta)
        return cls(folder, checkpoint, Manifest.read(checkpoint), delta)


def renamed(
    tables: Iterable[SavedTable], rename: Mapping[str, str]
) -> tuple[SavedTable, ...]:
    """Return tables, and the parts of tables, under the model's names."""
    return tuple(
        msgspec.structs.replace(
            table,
            description={**table.description, "name": name_of(table.name, rename)},
        )
        for table in tables
    )


def name_of(name: str, rename: Mapping[str, str]) -> str:
    """Return what the model calls a table, or a part of one, of a checkpoint."""
    for old, new in rename.items():
        if name == old or name.startswith((f"{old}/shared", f"{old}/block ")):
            return new + name[len(old) :]
    return name


def merge_tables(servers: Iterable[Sequence[SavedTable]]) -> tuple[SavedTable, ...]:
    """Return the tables of all servers, each once, with its largest step.

    Every server gets every update: steps differ by those that are not applied yet.
    """
    tables: dict[str, SavedTable] = {}
    for table in chain.from_iterable(servers):
        if tables.setdefault(table.name, table).num_updates < table.num_updates:
            tables[table.name] = table
    return tuple(tables.values())


def begin_checkpoint(path: str | os.PathLike[str]) -> Folder:
    """Make the folder of the next checkpoint of a run."""
    return _begin(Folder(path), "checkpoint")


def begin_delta(checkpoint: Folder) -> Folder:
    """Make the folder of the next delta of a checkpoint, in that of the checkpoint."""
    return _begin(checkpoint, "delta")


def _begin(within: Folder, kind: str) -> Folder:
    begin = max(within.numbers(rf"{kind}-(\d{{8,}})"), default=0) + 1
    for number in range(begin, begin + _ATTEMPTS):
        folder = within.child(f"{kind}-{number:08d}")
        if folder.make():
            return folder
    raise CheckpointError(
        f"A new folder must be made in {within.url}. Received: {_ATTEMPTS} names that "
        "other processes took first. How many jobs write there?"
    )


def find_checkpoint(
    path: str | os.PathLike[str], *, job: str = "", own: str = ""
) -> Folder:
    """Return the complete checkpoint at a path, or the latest of a run.

    ``job`` and ``own`` are those of :func:`checkpoints_of_one`.
    """
    run = Folder(path)
    folder = next(checkpoints_of_one(run, job, own), None)
    if folder is None:
        raise CheckpointError(
            f"{run.url} must be a checkpoint, or hold one that is complete (that has a "
            f"{MANIFEST}). Received: {run.described()}."
        )
    return folder


def checkpoints_of_run(run: Folder) -> Folder:
    """Return the folder of a run in which its checkpoints are, or will be.

    It is ``checkpoints`` in that of a job, and the folder itself where it holds some.
    """
    is_holding = bool(run.numbers(_NAME)) or MANIFEST in run.names()
    return run if is_holding else run.child(CHECKPOINTS)


def run_of_checkpoint(checkpoint: Path) -> Path:
    """Return the folder of the run that has saved a checkpoint."""
    within = checkpoint.parent
    return within.parent if within.name == CHECKPOINTS else within


def complete_checkpoints(run: Folder) -> Iterator[Folder]:
    """Yield the complete checkpoints of a run, or the one itself; latest first."""
    if MANIFEST in run.names():
        yield run
        return
    run = checkpoints_of_run(run)
    for number in reversed(run.numbers(_NAME)):
        folder = run.child(f"checkpoint-{number:08d}")
        if MANIFEST in folder.names():
            yield folder


def checkpoints_of_one(run: Folder, job: str = "", own: str = "") -> Iterator[Folder]:
    """Yield the complete checkpoints of one job and of those that it has continued.

    It must be given where a folder holds the checkpoints of several that have not
    continued each other, unless it is one's ``own``. Those of no job are of any.

    Raises:
        CheckpointError: there are those of several jobs, or none of the given one.
    """
    if MANIFEST in run.names():
        yield run
        return
    lines: list[tuple[Folder, set[str]]] = []  # the latest of each, and its jobs
    job_of: dict[str, str] = {}
    for folder in complete_checkpoints(run):
        if len(job_of) == _MAX_MANIFESTS:
            break
        job_of[folder.url] = ""
        try:
            manifest = Manifest.read(folder)
        except CheckpointError:  # a load of it raises that
            continue
        job_of[folder.url] = manifest.job
        if manifest.job and not any(manifest.job in jobs for _, jobs in lines):
            lines.append((folder, {manifest.job, *manifest.continues}))
    wanted = [jobs for _, jobs in lines if (job or own) in jobs][:1]
    if len(lines) < 2 and not job:
        wanted = [jobs for _, jobs in lines] or [set()]
    if not wanted and job_of:
        told = (f"{folder.url} of job {job_of[folder.url]!r}" for folder, _ in lines)
        raise CheckpointError(
            f"{run.url} must be given with the job whose checkpoint is meant, as it "
            f"holds those of several. Received: {job or 'no job'!r}, and there are "
            f"{', '.join(told)}. Give the path of one of these to load it, or job= of "
            "load_checkpoint and of LoadRules; where checkpoints are saved, give a "
            "folder of its own."
        )
    for folder in complete_checkpoints(run):
        of = job_of.get(folder.url, "")
        if not of or of in wanted[0]:
            yield folder


def saved_states(
    path: str | os.PathLike[str], *, job: str = "", own: str = ""
) -> Iterator[Folder]:
    """Yield what is complete of a run, latest first: deltas, then their checkpoint.

    A path of one checkpoint, or of one delta, gives that alone. ``job`` and ``own`` are
    those of :func:`checkpoints_of_one`.
    """
    run = Folder(path)
    if DELTA in run.names():
        yield run
        return
    for checkpoint in checkpoints_of_one(run, job, own):
        if checkpoint.url != run.url:
            yield from complete_deltas(checkpoint)
        yield checkpoint


def complete_deltas(checkpoint: Folder) -> Iterator[Folder]:
    """Yield the complete deltas of a checkpoint, latest first."""
    for number in reversed(checkpoint.numbers(r"delta-(\d{8,})")):
        folder = checkpoint.child(f"delta-{number:08d}")
        if DELTA in folder.names():
            yield folder


def delete_older(run: Folder, num_kept: int) -> None:
    """Delete what is older than the ``num_kept`` latest complete checkpoints of a run.

    Call it once a newer one is complete. Each loses its manifest first, so that none
    that is half deleted is loaded. Dumps that were given up are deleted, too. One stays
    whose rows the latest lacks, as they did not fit when it was loaded.
    """
    complete = list(complete_checkpoints(run))
    kept = [folder.url for folder in complete[:num_kept]]
    if len(kept) < num_kept:
        return
    fuller = Manifest.read(complete[0]).lacks_rows_of
    for number in run.numbers(_NAME):
        folder = run.child(f"checkpoint-{number:08d}")
        if folder.url == kept[-1]:
            return
        if fuller == folder.url.rpartition("/")[2] or is_pinned(folder):
            continue
        delete(folder)


def delete(folder: Folder) -> None:
    """Delete a checkpoint and its deltas; first what makes it complete."""
    folder.remove(MANIFEST)
    folder.remove_all()


@contextlib.contextmanager
def discarding(
    folder: Folder,
    complete: str = MANIFEST,
    errors: type[BaseException] = BaseException,
) -> Iterator[None]:
    """Delete what a block has written to a folder if it fails, as far as possible.

    Other writers must have ended by then. Nothing is deleted if there is the file that
    makes it ``complete``, or if it is not known whether there is.
    """
    try:
        yield
    except errors:
        with contextlib.suppress(CheckpointError):
            if complete not in folder.names():
                folder.remove_all()
        raise


def pin(folder: Folder, is_kept: bool = True) -> None:
    """Have :func:`delete_older` keep a checkpoint, or no longer."""
    if is_kept:
        folder.write(PINNED, b"")
    else:
        folder.remove(PINNED)


def is_pinned(folder: Folder) -> bool:
    """Return whether a checkpoint is kept."""
    return PINNED in folder.names()


def require_shard(shard: int, num_shards: int) -> None:
    """Raise ValueError unless ``shard`` is in ``[0, num_shards)``."""
    if not 0 <= shard < num_shards <= _MAX_SHARDS:
        raise ValueError(f"shard must be in [0, {num_shards}), not {shard}")
