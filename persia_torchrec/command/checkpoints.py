"""Verbs of checkpoints, of their files alone: no job need run."""

import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import numpy as np

from persia_torchrec.checkpoint import catalog
from persia_torchrec.checkpoint.catalog import Manifest, SavedShard, SavedTable
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.row_file import (
    RowFileReader,
    RowFileWriter,
    ShardHead,
    Written,
)
from persia_torchrec.command import console
from persia_torchrec.command.console import as_json
from persia_torchrec.command.rows import Id, print_rows, shown
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.errors import CheckpointError
from persia_torchrec.job.status import age_s
from persia_torchrec.store.memory import POSITION_BITS
from persia_torchrec.store.row_columns import RowColumns, RowShape
from persia_torchrec.table import TableSpec

_BLOCK_ROWS = 65_536
_LR = 0.01  # of tables from a file, whose optimizer is the model's
a_path = click.argument("path")


@click.group()
def checkpoint() -> None:
    """Look at checkpoints, compare, keep, delete and convert them.

    PATH is that of a checkpoint, or of a run, for its latest one; or a URL.
    """


@checkpoint.command()
@click.argument("run", default="runs")
@as_json
def ls(run: str, is_json: bool) -> None:
    """List the checkpoints of a RUN, or of all runs in a folder, latest first.

    persia-torchrec checkpoint ls runs
    """
    folder = Folder(run)
    if not folder.exists():
        raise click.ClickException(
            f"RUN must be a folder, with checkpoints or runs. Received: {folder.url}, "
            "which does not exist."
        )
    lines: list[dict[str, Any]] = []
    runs = [catalog.checkpoints_of_run(folder)]
    if not runs[0].numbers(r"checkpoint-(\d{8,})"):
        names = (folder.child(name) for name in sorted(folder.names()))
        runs = [catalog.checkpoints_of_run(one) for one in names if one.exists()]
    for one in runs:
        numbers = reversed(one.numbers(r"checkpoint-(\d{8,})"))
        lines += [_listed(one.child(f"checkpoint-{number:08d}")) for number in numbers]
    if is_json:
        console.show_json(lines)
    elif lines:
        console.show(lines)
    else:
        console.echo(f"no checkpoint in {folder.url}")


def _listed(folder: Folder) -> dict[str, Any]:
    line: dict[str, Any] = {"checkpoint": folder.url, "state": "incomplete"}
    if folder.file_size(catalog.MANIFEST) is None:
        return line
    manifest = Manifest.read(folder)
    deltas = len(list(catalog.complete_deltas(folder)))
    return line | {
        "state": "complete",
        "step": manifest.step,
        "age_s": age_s(manifest.created),
        "rows": manifest.num_rows,
        "bytes": manifest.size_bytes,
        "servers": len(manifest.shards),
        "deltas": deltas or None,
        "pinned": catalog.is_pinned(folder) or None,
    }


@checkpoint.command()
@a_path
@as_json
def info(path: str, is_json: bool) -> None:
    """Show what a checkpoint holds: its tables, step, servers and dense half.

    persia-torchrec checkpoint info runs/JOB
    """
    folder = catalog.find_checkpoint(path)
    manifest = Manifest.read(folder)
    tables = [
        {
            "table": one.name,
            "dim": one.spec.dim,
            "weights": one.spec.weight_dtype,
            "optimizer": type(one.spec.optimizer).__name__,
            "updates": one.num_updates,
        }
        for one in manifest.tables
    ]
    if is_json:
        console.show_json({**_listed(folder), "job": manifest.job, "tables": tables})
        return
    dense = None
    if manifest.dense is not None:
        names = ", ".join(manifest.dense.begun)
        dense = f"with the state of {names}" if names else "without optimizer state"
    console.show_pairs(
        {
            **_listed(folder),
            "created": manifest.created,
            "job": manifest.job,
            "continues": ", ".join(manifest.continues),
            "batches": manifest.num_batches,
            "dense_half": dense,
        }
    )
    console.show(tables)


@checkpoint.command()
@a_path
def verify(path: str) -> None:
    """Read all files of a checkpoint, and compare them with their checksums.

    The exit code is 1 where a file is missing, cut off or damaged.

    persia-torchrec checkpoint verify runs/JOB
    """
    folder = catalog.find_checkpoint(path)
    manifest = Manifest.read(folder)
    num_rows = sum(len(block) for _, block in _blocks(folder, manifest))
    for one in (folder, *catalog.complete_deltas(folder)):
        catalog.require_files(one)
    console.echo(f"{folder.url} is whole: {num_rows} rows")


def _blocks(folder: Folder, manifest: Manifest) -> Iterator[tuple[str, RowColumns]]:
    """Yield the rows of a checkpoint with their table; a damaged file is an error.

    A bar on stderr shows the bytes, where a person looks.
    """
    bar = click.progressbar(
        length=manifest.size_bytes,
        label=folder.url,
        file=sys.stderr,
        hidden=not sys.stderr.isatty(),
    )
    with bar:
        for shard in manifest.shards:
            seen = 0
            with folder.opened(shard.file) as file:
                where = folder.file_path(shard.file)
                reader = RowFileReader(file, where, ShardHead)
                for number, block in reader.blocks():
                    bar.update(reader.num_bytes - seen)
                    seen = reader.num_bytes
                    if isinstance(block, RowColumns):
                        yield reader.head.tables[number].name, block
            told = Written(shard.num_rows, shard.size_bytes, shard.checksum)
            if reader.written != told:
                raise CheckpointError(
                    f"{where} must be the file of its manifest, {told}. Received: "
                    f"{reader.written}."
                )


def _weights(block: RowColumns, dtype: str) -> Any:
    """Return the weights of rows, float32 ``(N, D)``."""
    if dtype == "fp32":
        return block.weights
    if dtype == "bf16":
        return (block.weights.astype(np.uint32) << 16).view(np.float32)
    return block.weights.view(np.float16).astype(np.float32)


@checkpoint.command()
@a_path
@click.argument("table")
@click.argument("ids", nargs=-1, type=Id())
@click.option(
    "-n", default=10, show_default=True, help="How many, where no id is given."
)
@as_json
def rows(path: str, table: str, ids: tuple[int, ...], n: int, is_json: bool) -> None:
    """Show rows of a TABLE in a checkpoint: of IDS, or the first ones.

    persia-torchrec checkpoint rows runs/JOB item 17 18
    """
    found = _read(path, table, np.array(ids, np.uint64) if ids else None, n)
    print_rows(found, is_json=is_json)
    lacking = sorted(set(ids) - {one["id"] for one in found})
    if lacking:
        raise click.ClickException(
            f"{table} must have a row of each id. Received: none of "
            f"{', '.join(map(str, lacking))}."
        )


def _read(path: str, table: str, ids: Any, most: int) -> list[dict[str, Any]]:
    folder = catalog.find_checkpoint(path)
    manifest = Manifest.read(folder)
    specs = {one.name: one.spec for one in manifest.tables}
    if table not in specs:
        raise click.ClickException(
            f"TABLE must be one of {', '.join(specs)}. Received: {table}."
        )
    found: list[dict[str, Any]] = []
    for name, block in _blocks(folder, manifest):
        if name == table:
            chosen = slice(None) if ids is None else np.isin(block.ids, ids)
            weights = _weights(block, specs[table].weight_dtype)[chosen]
            found += shown(block.ids[chosen], weights, block.state[chosen])
        if ids is None and len(found) >= most:
            return found[:most]
    return found


@checkpoint.command()
@click.argument("a")
@click.argument("b")
@as_json
def diff(a: str, b: str, is_json: bool) -> None:
    """Compare two checkpoints, a table a line: rows of one alone, and what moved.

    Weights are compared; the exit code is 1 where there is a difference.

    persia-torchrec checkpoint diff RUN/checkpoint-00000001 RUN
    """
    before, after = (_by_table(path) for path in (a, b))
    lines = [
        {"table": name, **_compared(before.get(name), after.get(name))}
        for name in sorted({*before, *after})
    ]
    console.show_json(lines) if is_json else console.show(lines)
    same = ("only_in_a", "only_in_b", "moved")
    sys.exit(any(line[name] for line in lines for name in same))


_Rows = tuple[Any, Any]


def _by_table(path: str) -> dict[str, _Rows]:
    """Return ids and weights of all rows, by table, in the order of ids."""
    folder = catalog.find_checkpoint(path)
    manifest = Manifest.read(folder)
    dtypes = {one.name: one.spec.weight_dtype for one in manifest.tables}
    parts: dict[str, list[_Rows]] = {name: [] for name in dtypes}
    for name, block in _blocks(folder, manifest):
        parts[name].append((block.ids, _weights(block, dtypes[name])))
    found = {}
    for name, blocks in parts.items():
        ids = np.concatenate([np.empty(0, np.uint64), *(one[0] for one in blocks)])
        order = np.argsort(ids)
        weights = np.concatenate([one[1] for one in blocks])[order] if blocks else None
        found[name] = ids[order], weights
    return found


def _compared(a: _Rows | None, b: _Rows | None) -> dict[str, Any]:
    none: _Rows = np.empty(0, np.uint64), None
    (ids_a, weights_a), (ids_b, weights_b) = a or none, b or none
    both, at_a, at_b = np.intersect1d(ids_a, ids_b, return_indices=True)
    line: dict[str, Any] = {
        "rows_a": len(ids_a),
        "rows_b": len(ids_b),
        "only_in_a": len(ids_a) - len(both),
        "only_in_b": len(ids_b) - len(both),
        "moved": 0,
        "largest_move": None,
    }
    if len(both):
        if weights_a.shape[1] != weights_b.shape[1]:
            return line | {"moved": len(both)}
        moves = np.abs(weights_a[at_a] - weights_b[at_b]).max(axis=1)
        line |= {"moved": int((moves > 0).sum()), "largest_move": float(moves.max())}
    return line


@checkpoint.command()
@a_path
@click.option("--undo", is_flag=True, help="Let it be deleted again.")
def pin(path: str, undo: bool) -> None:
    """Keep a checkpoint: a training does not delete it when it has newer ones.

    persia-torchrec checkpoint pin runs/JOB/checkpoints/checkpoint-00000010
    """
    folder = catalog.find_checkpoint(path)
    catalog.pin(folder, not undo)
    console.echo(f"{folder.url} {'may be deleted' if undo else 'is kept'}")


@checkpoint.command()
@a_path
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def rm(path: str, yes: bool) -> None:
    """Delete one checkpoint, with its deltas; not one that is pinned.

    persia-torchrec checkpoint rm runs/JOB/checkpoints/checkpoint-00000003
    """
    folder = Folder(path)
    has_name = folder.url.rstrip("/").rpartition("/")[2].startswith("checkpoint-")
    if not has_name or not folder.names():
        raise click.ClickException(
            f"PATH must be the folder of one checkpoint. Received: {path}, which is "
            f"{folder.described()}."
        )
    if catalog.is_pinned(folder):
        raise click.ClickException(
            f"{folder.url} is pinned. Run: persia-torchrec checkpoint pin --undo {path}"
        )
    if not yes:
        click.confirm(f"delete {folder.url}?", abort=True)
    catalog.delete(folder)
    console.echo(f"{folder.url} is deleted")


@checkpoint.command()
@click.argument("source")
@click.argument("target", type=click.Path(path_type=Path))
def convert(source: str, target: Path) -> None:
    """Convert a checkpoint to a file that torch.load reads, or such a file to one.

    The file holds {table: {"ids": int64 (N,), "weights": float32 (N, D)}}, in the order
    of ids, and loads with weights_only=True. A state dict will do, too: row i of
    "...TABLE.weight" is that of id i. What is made of a file has no optimizer state:
    load it with on_change="reset state". For PERSIA's checkpoints see
    python -m persia_torchrec.persia.convert.

    persia-torchrec checkpoint convert runs/JOB rows.pt

    persia-torchrec checkpoint convert rows.pt runs/8
    """
    import torch  # other verbs start without it

    if Path(source).is_file():
        try:
            state = torch.load(source, map_location="cpu", weights_only=True, mmap=True)
        except Exception as exc:  # what a file makes torch raise has no list
            raise click.ClickException(
                f"{source} must be a file of torch.save, of tensors. Received: {exc}."
            ) from exc
        given = _tables_of(state, source)
        made = catalog.begin_checkpoint(target)
        with catalog.discarding(made):
            _write(given, made)
        console.echo(f"{made.url}: {Manifest.read(made).num_rows} rows")
        return
    tables = {
        name: {
            "ids": torch.from_numpy(ids.view(np.int64)),
            "weights": torch.empty(0, 0) if weights is None else torch.tensor(weights),
        }
        for name, (ids, weights) in _by_table(source).items()
    }
    with Folder(target.parent).created(target.name) as file:
        torch.save(tables, file)
    console.echo(f"{target}: {sum(len(one['ids']) for one in tables.values())} rows")


def _tables_of(state: Any, source: str) -> dict[str, _Rows]:
    """Return ids and weights by table, of our form or of a state dict."""
    found: dict[str, _Rows] = {}
    for name, value in state.items() if isinstance(state, dict) else ():
        if isinstance(value, dict) and {"ids", "weights"} <= value.keys():
            found[name] = value["ids"].numpy().view(np.uint64), value["weights"].numpy()
        elif name.endswith(".weight") and getattr(value, "ndim", 0) == 2:
            table = name.removesuffix(".weight").rpartition(".")[2]
            rows = value.float().numpy()
            found[table] = np.arange(len(rows), dtype=np.uint64), rows
    if not found:
        raise click.ClickException(
            f"{source} must hold tables, or TABLE.weight of two dimensions. Received: "
            f"{', '.join(map(str, state)) if isinstance(state, dict) else type(state)}."
        )
    return found


def _write(tables: Mapping[str, _Rows], folder: Folder) -> None:
    """Write a checkpoint of one server."""
    specs = [
        TableSpec(name=name, dim=weights.shape[1], optimizer=SGD(lr=_LR))
        for name, (_, weights) in tables.items()
    ]
    saved = tuple(SavedTable(spec.to_json(), 0, False) for spec in specs)
    name, last_tick = "shard-00000-of-00001.rows", 0
    with folder.created(name) as file:
        head = ShardHead(shard=0, num_shards=1, tables=saved)
        writer = RowFileWriter(file, head)
        for number, (ids, weights) in enumerate(tables.values()):
            for start in range(0, len(ids), _BLOCK_ROWS):
                rows = slice(start, start + _BLOCK_ROWS)
                block = RowShape(specs[number], False).empty(len(ids[rows]))
                block.ids[:], block.weights[:] = ids[rows], weights[rows]
                # A tick is of one table.
                tick = 1 + number + start // _BLOCK_ROWS * len(specs)
                last_tick = max(last_tick, tick)
                block.uses[:] = (tick << POSITION_BITS) + np.arange(len(block))
                writer.write(number, block)
        written = writer.end()
    shard = SavedShard(name, *written, tick=last_tick, server={})
    Manifest(saved, (shard,), datetime.now(UTC).isoformat()).write(folder)
