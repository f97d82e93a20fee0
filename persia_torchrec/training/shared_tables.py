"""A checkpoint of a table that collections shared, for a model in which they do not.

    saved      "item"                       with shared={"item"}: one of both
    loaded     "bags.item", "rows.item"     each gets all rows

The servers load the rows into the first, and the client copies them to the others. A
dense half says which tables were shared: those of a model that had one collection of
the name are not meant, see ``rename`` of ``load_checkpoint``.
"""

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import msgspec

from persia_torchrec.checkpoint.catalog import LoadRules, Saved, name_of
from persia_torchrec.client.bulk import Blocks, RowBlock
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.errors import CheckpointError
from persia_torchrec.sharding.table_control import SharderApi

logger = logging.getLogger(__name__)

Parts = Mapping[str, list[str]]
"""By a table of a checkpoint, those of the model that get its rows."""


def shared_names(controls: Iterable[SharderApi]) -> tuple[str, ...]:
    """Return the tables that several collections of a model train, sorted."""
    shared = set[str]()
    for control in controls:
        seen = set[str]()
        for _, names in control.remote_tables.pipelines:
            shared |= seen & names
            seen |= names
    return tuple(sorted(shared))


def find_parts(found: Saved, client: EmbeddingClient, rules: LoadRules) -> Parts:
    """Return which tables of the model get the rows of shared ones.

    That is each of a collection, PATH.NAME, where neither the model has the shared one
    nor the checkpoint that of the collection.

    Raises:
        CheckpointError: one of them has another dim.
    """
    names = {name for name, table in client.tables.items() if table.is_own}
    saved = {name_of(table.name, rules.rename) for table in found.tables}
    dims = {  # without blocks of rows and rows that ids share, which are of no id
        table.name: table.spec.dim
        for table in found.tables
        if not table.spec.shared_rows and not table.spec.dynamic.is_on
    }
    parts = {}
    for name in dims.keys() & set(found.dense.shared if found.dense else ()):
        space, mark, table = name.rpartition("/")
        of_paths = sorted(
            other
            for other in names - saved
            if other.startswith(space + mark)
            and other.removeprefix(space + mark).endswith(f".{table}")
        )
        if name not in names and name not in rules.rename and of_paths:
            parts[name] = of_paths
            for other in of_paths:
                if (dim := client.table(other).dim) != dims[name]:
                    raise CheckpointError(
                        f"Table {other!r} must have the dim {dims[name]} of the table "
                        f"{name!r} of the checkpoint, which several collections had. "
                        f"Received: {dim}. Give it another name to begin it again."
                    )
    return parts


def load_first(rules: LoadRules, parts: Parts) -> LoadRules:
    """Return rules by which servers load shared tables into the first of each."""
    rename = {**rules.rename, **{name: first for name, (first, *_) in parts.items()}}
    return msgspec.structs.replace(rules, rename=rename)


def copy_rows(client: EmbeddingClient, parts: Parts) -> None:
    """Copy rows from the first table of each to the others, with a line for each.

    The state of the optimizer comes along where it has the same one.
    """
    for name, (first, *others) in parts.items():
        source = client.table(first)
        for other in others:
            target = client.table(other)
            rate = dataclasses.replace(target.optimizer, lr=source.optimizer.lr)
            keeps_state = rate == source.optimizer
            blocks = Blocks(partial(_blocks, client, first, keeps_state))
            client.fill(other, blocks)
            if keeps_state:
                client.step(other, client.step(first))
        logger.warning(
            "table %r of the checkpoint was one of several collections; %s of the "
            "model begin with its rows. Give the sharders shared={%r} for one table.",
            name,
            [first, *others],
            name,
        )


def _blocks(client: EmbeddingClient, table: str, has_state: bool) -> Iterator[RowBlock]:
    for block in client.export(table):
        yield dataclasses.replace(block, state=block.state if has_state else None)
