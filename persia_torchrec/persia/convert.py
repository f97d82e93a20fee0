"""Convert a checkpoint of PERSIA's into one of this package.

    python -m persia_torchrec.persia.convert SOURCE DESTINATION \
        --embedding-config embedding_config.yml

PERSIA's folder, written by R servers of K internal shards::

    embedding_dump_done               written last; YAML: num_shards R, and K
    s0/embedding_dump_done            the same, of one server
    s0/replica_0_shard_0.emb          rows, see ``stored_rows.py``
    s0/replica_0_shard_1.emb
    s1/...
    dense.pt, opt.pt, jit_dense.pt    what torch wrote, if the model was saved too

Ids and floats stay as they are: ids have the prefix of their group in both, the same
hash spreads them over servers, and the state has the same order. So server r becomes
shard r of R, which any number of servers can load.

The rows of a file are in the order of eviction. How far down its list a row stands is
taken for its age, and the lists are merged by age: in 65536 steps, within which each
table keeps the order of a file.

A file is read twice, first for its links, then for its rows. In memory are 9 bytes per
slot of one file, which is less than the file, and 8 bytes per row of one server, by
which an id that comes twice is found.
"""

import io
import itertools
import logging
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Literal

import msgspec
import numpy as np
import torch
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from tqdm import tqdm

from persia_torchrec.arrays import Words
from persia_torchrec.checkpoint.catalog import (
    Manifest,
    SavedShard,
    SavedTable,
    begin_checkpoint,
    discarding,
    sum_files,
)
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.row_file import RowFileWriter, ShardHead
from persia_torchrec.embedding.embedding_config import load_embedding_config
from persia_torchrec.embedding.optim import SGD, Adagrad, Adam, Optimizer
from persia_torchrec.errors import CheckpointError, ConfigError, PersiaError
from persia_torchrec.logger import get_default_logger
from persia_torchrec.parsing.command_line import parse_flags
from persia_torchrec.parsing.decoding import KeyPath, convert
from persia_torchrec.parsing.yaml_file import parse_yaml
from persia_torchrec.persia.stored_rows import Chunk, Form, Ranks, RowFile
from persia_torchrec.store.memory import POSITION_BITS
from persia_torchrec.table import TableSpec

_NAME = "persia_torchrec.persia.convert"
logger = logging.getLogger(_NAME)

_OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": SGD(1e-2),
    "adagrad": Adagrad(),
    "adagrad_vectorwise_shared": Adagrad(vectorwise_shared=True),
    "adam": Adam(),
}
_DONE = "embedding_dump_done"
_IN_AGE_BITS = 16
_NUM_AGES = 2**16
_MAX_SHOWN = 8  # of the files that an error names


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """Convert a checkpoint of PERSIA's into one of persia_torchrec."""

    source: str = field(metadata={"positional": True})
    """Folder, or URL, to which PERSIA dumped."""
    destination: str = field(metadata={"positional": True})
    """Another folder, or URL, in which the new checkpoint gets a folder."""
    embedding_config: str
    """embedding_config.yml of the job that dumped."""
    optimizer: Literal[
        "auto", "sgd", "adagrad", "adagrad_vectorwise_shared", "adam"
    ] = "auto"
    """Optimizer of the embeddings; auto goes by how much state the rows have."""
    adam_step: int = 1_000_000
    """Updates that Adam counts as done, as PERSIA does not keep how many. With the
    default, its bias correction is over."""

    def __post_init__(self) -> None:
        if not 0 <= self.adam_step < 2**63:
            raise ConfigError(
                f"adam_step must be in [0, 2**63). Received: {self.adam_step}."
            )


@dataclass(frozen=True, slots=True)
class _Marker:
    """What the last file of a dump says."""

    num_shards: Annotated[int, msgspec.Meta(ge=1)]
    num_internal_shards: Annotated[int, msgspec.Meta(ge=1)]


def convert_checkpoint(settings: Conversion) -> Folder:
    """Convert a checkpoint; return the folder of the new one.

    Raises:
        CheckpointError: PERSIA's is not complete, is damaged, or does not fit the
            config or the optimizer. There is no new checkpoint then.
        ConfigError: the config cannot be read, the optimizer must be given, or the
            destination is a folder of PERSIA's.
    """
    source, run = Folder(settings.source), Folder(settings.destination)
    if _DONE in run.names():
        raise ConfigError(
            "destination must be a separate folder: writing into a dump of PERSIA "
            "would lose its dense files"
            f". Received: {run.url}, which has {_DONE}."
        )
    servers = _find_files(source)
    form, tables = _find_form(settings, servers)
    dense = _read_dense(source)
    target = begin_checkpoint(run.url)
    with discarding(target):
        manifest = _convert(servers, form, tables, dense, target)
    _write(dense, run)
    logger.info("converted path=%s rows=%d", target.url, manifest.num_rows)
    return target


def _convert(
    servers: Sequence[Sequence[RowFile]],
    form: Form,
    tables: tuple[SavedTable, ...],
    dense: Mapping[str, bytes],
    target: Folder,
) -> Manifest:
    """Write all files of the new checkpoint, its manifest last."""
    _write(dense, target)
    total = 2 * sum(file.size_bytes for files in servers for file in files)
    shards = []
    with tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:
        for server, files in enumerate(servers):
            head = ShardHead(shard=server, num_shards=len(servers), tables=tables)
            shards.append(_convert_server(files, form, head, target, bar.update))
    created, others = datetime.now(UTC).isoformat(), sum_files(target)
    manifest = Manifest(tables, tuple(shards), created, files=others)
    manifest.write(target)
    return manifest


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the process's exit status."""
    try:
        get_default_logger()
        convert_checkpoint(parse_flags(Conversion, argv, prog=f"python -m {_NAME}"))
    except PersiaError as exc:
        logger.error("%s: %s", type(exc).__name__, exc)
        return 1
    return 0


def _read_marker(folder: Folder) -> _Marker:
    path, names = folder.file_path(_DONE), folder.names()
    if _DONE not in names:
        raise CheckpointError(
            f"{path} must exist: PERSIA writes it when a dump is complete. "
            f"Received: {folder.described()}."
        )
    content = parse_yaml(folder.read(_DONE).decode(errors="replace"), path)
    return convert(content, _Marker, KeyPath(path), CheckpointError)


def _find_files(source: Folder) -> list[list[RowFile]]:
    """Return the files of each server: all that must be there, and no others are."""
    num_servers = _read_marker(source).num_shards
    numbers = source.numbers(r"s(\d+)")
    if len(numbers) != num_servers or numbers != list(range(num_servers)):
        raise CheckpointError(
            f"{source.url} must have the folders s0 to s{num_servers - 1}, as its "
            f"{_DONE} says. Received: {[f's{number}' for number in numbers]}."
        )
    servers = []
    for server in numbers:
        folder = source.child(f"s{server}")
        marker = _read_marker(folder)
        found = {name for name in folder.names() if name.endswith(".emb")}
        shards = range(marker.num_internal_shards)  # of any length, as the marker says
        names = (f"replica_{server}_shard_{shard}.emb" for shard in shards)
        expected = list(itertools.islice(names, len(found) + _MAX_SHOWN))
        if found != set(expected) or marker.num_shards != num_servers:
            missing = [name for name in expected if name not in found]
            raise CheckpointError(
                f"{folder.url} must have the files replica_{server}_shard_0.emb to "
                f"replica_{server}_shard_{shards[-1]}.emb, of {num_servers} servers. "
                f"Received: {marker}, without {missing[:_MAX_SHOWN]}, "
                f"with {sorted(found.difference(expected))[:_MAX_SHOWN]}."
            )
        servers.append([RowFile(folder, n, server, num_servers) for n in expected])
    return servers


def _find_form(
    settings: Conversion, servers: Sequence[Sequence[RowFile]]
) -> tuple[Form, tuple[SavedTable, ...]]:
    """Return what rows must be, and the tables, by the first rows or the settings.

    Of a table, a trainer's other settings win over those that it has here.
    """
    schema = load_embedding_config(settings.embedding_config)
    dims = [(name, schema.slots[slots[0]].dim) for name, slots in schema.groups.items()]
    choices = {
        name: [TableSpec(name=n, dim=dim, optimizer=optimizer) for n, dim in dims]
        for name, optimizer in _OPTIMIZERS.items()
        if settings.optimizer in (name, "auto")
    }
    form = Form(choices, schema.feature_index_prefix_bit)
    files = (file for of_server in servers for file in of_server if file.num_rows)
    if settings.optimizer == "auto":
        for _ in (chunk for file in files for chunk in file.chunks(form)):
            if len(form.fitting) == 1:
                break
        if len(form.fitting) == len(choices):
            raise ConfigError(
                "optimizer must be given for a checkpoint that has no rows. "
                "Received: auto."
            )
    tables = choices[form.fitting[0]]
    is_adam = isinstance(tables[0].optimizer, Adam)
    step = settings.adam_step if is_adam else 0
    logger.info("optimizer=%s adam_step=%d", form.fitting[0], step)
    saved = tuple(SavedTable(spec.to_json(), step, False) for spec in tables)
    return form, saved


def _convert_server(
    files: Sequence[RowFile],
    form: Form,
    head: ShardHead,
    target: Folder,
    progress: Callable[[int], object],
) -> SavedShard:
    """Write the rows of one of PERSIA's servers as a shard."""
    name = f"shard-{head.shard:05d}-of-{head.num_shards:05d}.rows"
    ids = np.empty(sum(file.num_rows for file in files), dtype=np.uint64)
    num_done = 0
    with target.created(name) as opened:
        writer = RowFileWriter(opened, head)
        for file in files:
            ranks_S = file.ranks(form, progress)
            for chunk in file.chunks(form):
                uses_N = _uses(chunk, ranks_S, file.num_rows, len(head.tables))
                for table, rows in form.split(chunk, uses_N):
                    writer.write(table, rows)
                ids[num_done : num_done + len(uses_N)] = chunk.ids
                num_done += len(uses_N)
                progress(chunk.num_bytes)
        written = writer.end()
    ids.sort()
    for id_ in ids[1:][ids[1:] == ids[:-1]][:1].tolist():
        found = [where for file in files for where in file.find_id(id_, form)]
        raise CheckpointError(
            f"An id must have one row. Received: id {id_} at {' and at '.join(found)}."
        )
    capacity = sum(file.num_slots - 1 for file in files)  # PERSIA has one to spare
    last_tick = _NUM_AGES * len(head.tables)
    return SavedShard(name, *written, last_tick, {"capacity_rows": capacity})


def _uses(chunk: Chunk, ranks_S: Ranks, num_rows: int, num_tables: int) -> Words:
    """Return when each row was used, by its rank in the file.

    A tick is of one table: within an age, each table has its own.
    """
    ranks_N = ranks_S[chunk.slots].astype(np.uint64)
    fractions_N = (ranks_N << np.uint64(32)) // np.uint64(max(num_rows, 1))
    ages_N = fractions_N >> np.uint64(_IN_AGE_BITS)
    ticks_N = ages_N * np.uint64(num_tables) + chunk.tables + np.uint64(1)
    positions_N = fractions_N & np.uint64(2**_IN_AGE_BITS - 1)
    return (ticks_N << np.uint64(POSITION_BITS)) | positions_N


def _read_dense(source: Folder) -> dict[str, bytes]:
    """Return the files of torch by name, as ``load_checkpoint`` wants them."""
    files = {
        name: _without_ddp(source.read(name), source.file_path(name))
        for name in source.names()
        if name.endswith(".pt")
    }
    if files:  # what PERSIA does not keep: the trainer's own holds
        files["training.pt"] = _saved({"learning_rates": {}, "grad_scaler": None})
    return files


def _write(files: Mapping[str, bytes], folder: Folder) -> None:
    for name, data in files.items():
        folder.write(name, data)


def _without_ddp(data: bytes, path: str) -> bytes:
    """Return a file without the prefix that DDP puts before names of parameters."""
    file = io.BytesIO(data)
    try:
        if any("/code/" in name for name in zipfile.ZipFile(file).namelist()):
            return data  # TorchScript
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as exc:  # what a damaged file makes the reader raise has no list
        raise CheckpointError(
            f"{path} must be a state_dict or TorchScript, as torch writes it. "
            f"Received: {exc}. Move it away to convert the rest."
        ) from exc
    names = list(state) if isinstance(state, dict) else []
    if not names or not all(str(name).startswith("module.") for name in names):
        return data
    consume_prefix_in_state_dict_if_present(state, "module.")
    return _saved(state)


def _saved(state: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


if __name__ == "__main__":
    sys.exit(main())
