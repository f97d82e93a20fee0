"""Tables on the servers as ordinary tensors, row by row.

The way back of ``warm_start.py``: a model that was trained on the servers is saved,
served or trained on as any other.

Dimension key:
    N: rows of a table
    D: embedding dim
    S: optimizer-state floats a row
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
)

from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.client.transfer import BLOCK_ROWS, IdsOfRows, ids_of_rows
from persia_torchrec.errors import BatchError
from persia_torchrec.routing.hashing import Ids
from persia_torchrec.store.initial_rows import initial_rows


@dataclass(frozen=True, slots=True)
class TableTensors:
    """A whole table, as an ordinary checkpoint has it.

    Attributes:
        weights: float32 ``(N, D)``, on the CPU.
        state: float32 ``(N, S)``: optimizer state, as ``embedding/optim.py`` lays it
            out.
        is_present: bool ``(N,)``: which rows were on the servers.
        step: how many updates the table has had.
    """

    weights: torch.Tensor
    state: torch.Tensor
    is_present: torch.Tensor
    step: int


def read_table(
    client: EmbeddingClient,
    table: str,
    num_rows: int,
    *,
    ids: IdsOfRows = None,
    missing: Literal["initial", "zeros"] = "initial",
) -> TableTensors:
    """Return a table of the servers as ordinary tensors, row by row.

    Flush the sharder first: updates on their way are not in it. Training may go on;
    what an export then holds says ``EmbeddingClient.export``.

    Args:
        client: of the servers, which know the table.
        table: its name.
        num_rows: N; a tensor has a length, which a table of the servers has not.
        ids: the id of each row; by default a row's number.
        missing: what a row is whose id the servers do not have, because it never came
            or was evicted: what it would start with, weights and state, or zeros.

    Raises:
        BatchError: the servers have an id that belongs to none of the rows, or ids
            repeat.
        ServerError: a server failed, refused, or did not answer in time.
    """
    spec = client.table(table)
    rows = _RowsOfIds(table, ids_of_rows(ids, 0, num_rows))
    width = spec.dim + spec.num_state_floats
    floats = np.zeros((num_rows, width), dtype=np.float32)
    is_present = np.zeros(num_rows, dtype=np.bool_)
    for block in client.export(table):
        places = rows.places_of(block.ids)
        floats[places, : spec.dim] = block.weights
        floats[places, spec.dim :] = block.state
        is_present[places] = True
    if missing == "initial":
        absent = np.flatnonzero(~is_present)
        for start in range(0, len(absent), BLOCK_ROWS):
            places = absent[start : start + BLOCK_ROWS]
            floats[places] = initial_rows(spec, rows.ids[places])
    weights, state = torch.from_numpy(floats).split([spec.dim, width - spec.dim], dim=1)
    present = torch.from_numpy(is_present)
    return TableTensors(
        weights.contiguous(), state.contiguous(), present, client.step(table)
    )


def plain_state_dict(
    client: EmbeddingClient,
    model: torch.nn.Module,
    *,
    ids: Mapping[str, IdsOfRows] | None = None,
    missing: Literal["initial", "zeros"] = "initial",
) -> dict[str, torch.Tensor]:
    """Return the weights of a model's tables, for its ``load_state_dict``.

    Args:
        client: of the servers, which know the tables.
        model: with TorchRec's ordinary collections, as it is before it is sharded; only
            their names and lengths are used, so it may be on the meta device.
        ids: of the rows of single tables, by name; by default a row's number.
        missing: as of :func:`read_table`.

    Returns:
        float32 ``(num_embeddings, D)`` a table, by its key in ``model.state_dict()``.

    Raises:
        BatchError: the servers have an id that belongs to none of the rows.
        ServerError: a server failed, refused, or did not answer in time.
    """
    tensors = {}
    for key, table, num_rows in _tables_of(model):
        of_table = (ids or {}).get(table)
        read = read_table(client, table, num_rows, ids=of_table, missing=missing)
        tensors[key] = read.weights
    return tensors


def _tables_of(model: torch.nn.Module) -> Iterator[tuple[str, str, int]]:
    """Yield key of the weight, name and length of each table of a model."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, EmbeddingBagCollection):
            for bags in module.embedding_bag_configs():
                key = f"{prefix}embedding_bags.{bags.name}.weight"
                yield key, bags.name, bags.num_embeddings
        elif isinstance(module, EmbeddingCollection):
            for config in module.embedding_configs():
                key = f"{prefix}embeddings.{config.name}.weight"
                yield key, config.name, config.num_embeddings


class _RowsOfIds:
    """Finds the rows of a table that ids belong to."""

    def __init__(self, table: str, ids: Ids) -> None:
        self.ids = ids
        self._table = table
        is_sorted = bool((ids[1:] > ids[:-1]).all())
        self._order = None if is_sorted else np.argsort(ids)
        self._sorted = ids if self._order is None else ids[self._order]
        repeated = self._sorted[1:][self._sorted[1:] == self._sorted[:-1]]
        if len(repeated):
            raise BatchError(
                f"Table {table!r}: each row must have an id of its own. "
                f"Received: {repeated[0]} for several."
            )

    def places_of(self, ids: Ids) -> npt.NDArray[np.int64]:
        """Return the row of each id.

        Raises:
            BatchError: an id has none.
        """
        places = np.searchsorted(self._sorted, ids)
        is_known = places < len(self._sorted)
        is_known[is_known] = self._sorted[places[is_known]] == ids[is_known]
        if not is_known.all():
            raise BatchError(
                f"Table {self._table!r}: every id on the servers must belong to one of "
                f"the {len(self.ids)} rows. Received: id {ids[~is_known][0]}. Give "
                "num_rows beyond the largest id, or with ids the id of each row."
            )
        return places if self._order is None else self._order[places]
