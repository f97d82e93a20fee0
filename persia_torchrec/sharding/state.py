"""Tables on the servers and state dicts of torch: entries, and tensors both ways.

    model.state_dict()    holds a str in place of each table, see ``add_entries``
    load_tables           tensors of an ordinary checkpoint -> servers
    read_table            servers -> tensors, to save, serve or train as any other model

Tensors are read block by block: those of ``torch.load(path, mmap=True)`` may be larger
than memory. Row ``i`` of a tensor has the id ``i``. Where a model hashed raw ids to
``[0, num_embeddings)``, keep hashing; or stop, and give the raw id of each row.

Dimensions: N rows of a table, D embedding dim, S optimizer-state floats per row.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torchrec import EmbeddingBagCollection, EmbeddingCollection

from persia_torchrec.client import transfer
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.client.transfer import IdsOfRows
from persia_torchrec.errors import BatchError, ConfigError
from persia_torchrec.sharding.collection import table_configs
from persia_torchrec.sharding.torchrec_api import ShardedTensor
from persia_torchrec.store.row_moves import initial_rows
from persia_torchrec.wire.precision import Floats

OptimizerState = Mapping[str, object]
"""``{"state": {key of a weight: {name: tensor}}}``, as the ``state_dict()`` of
TorchRec's fused optimizer has it, and of a ``KeyedOptimizerWrapper``."""

_BEGINNING = "on the embedding servers, not in this state: "


def add_entries(
    module: Any, state_dict: dict[str, Any], prefix: str, *_: object
) -> None:
    """Put a str for each table into the state of a model; a hook for torch.

    torch saves and loads it as it is, and code that takes it for a tensor fails.
    """
    for key, table in module.tables_by_key.items():
        state_dict[prefix + key] = (
            f"{_BEGINNING}the rows of table {table!r}. save_checkpoint and "
            "load_checkpoint of persia_torchrec keep them with the dense half; "
            "plain_state_dict and read_table return them as tensors, load_weights of "
            "the sharder takes tensors."
        )


def is_state_entry(value: object) -> bool:
    """Return whether a value of a state dict stands for a table on the servers."""
    return isinstance(value, str) and value.startswith(_BEGINNING)


def take_entries(
    module: Any,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: object,
    strict: bool,
    missing_keys: list[str],
    *_: object,
) -> None:
    """Take these out of a state before the rest is loaded; refuse weights instead."""
    for key, table in module.tables_by_key.items():
        entry = state_dict.pop(prefix + key, None)
        if entry is None and strict:
            missing_keys.append(prefix + key)
        elif not isinstance(entry, str | None):
            raise ConfigError(
                f"{prefix + key!r} must not hold weights: the rows of this table are "
                f"on the embedding servers. Received: {type(entry).__name__}. Call "
                "load_weights(state_dict) of the sharder, or load_tables(client, "
                f"state_dict, [{table!r}]), to write them there; then load the dense "
                "half with strict=False, without the keys of such tables."
            )


def load_tables(
    client: EmbeddingClient,
    state_dict: Mapping[str, torch.Tensor],
    tables: Iterable[str],
    *,
    optimizer_state: OptimizerState | None = None,
    ids: Mapping[str, IdsOfRows] | None = None,
    step: int | None = None,
) -> dict[str, int]:
    """Fill tables on the servers from a checkpoint of ordinary tensors.

    Call it when the model is sharded and before it trains. Of ordinary tensors one
    trainer is enough, while the others wait at a barrier; of sharded ones, as
    ``DistributedModelParallel`` has them, each trainer writes its own whole rows.

    Args:
        client: of the servers, which know the tables.
        state_dict: holds, among others, the weight of each table, under TorchRec's name
            behind any path, or as ``"NAME"`` or ``"NAME.weight"``; of any floating
            dtype, ``(N, D)``, on any device.
        tables: names of the tables to fill.
        optimizer_state: of the same tables. The tensors of a table, ``(N,)`` or
            ``(N, k)``, are concatenated in their order and must be what the table's
            optimizer keeps: Adagrad's sum, Adam's ``exp_avg`` and ``exp_avg_sq``. A
            ``step`` among them is Adam's ``t``. By default new rows get the initial
            state, and existing rows keep theirs.
        ids: of the rows of single tables, by name; by default a row's number.
        step: how many updates the tables have had, where the state does not tell.

    Returns:
        How many rows of each table were written.

    Raises:
        ConfigError: a table is unknown to the servers, or has no weight or state in
            these, or several.
        BatchError: weights or state do not have the table's shape, or are not sharded
            by rows.
        ServerError: a server failed, refused, or did not answer in time.

    Example:
        ``load_tables(client, torch.load("model.pt", mmap=True), ["user", "item"])``
    """
    num_rows = {}
    for table in tables:
        spec = client.table(table)
        weight = _find(table, state_dict, "state_dict")
        if not isinstance(weight, torch.Tensor):
            raise ConfigError(
                f"Table {table!r}: state_dict must hold a tensor. "
                f"Received: {type(weight)}."
            )
        state: list[torch.Tensor] = []
        step_of_table = step
        if optimizer_state is not None and spec.num_state_floats:
            state, step_of_table = _find_state(table, optimizer_state, step)
        how = (ids or {}).get(table), transfer.rows_per_block(spec)
        cut = partial(_cut, weight, state, *how)
        num_rows[table] = client.fill(table, transfer.Blocks(cut))
        if step_of_table is not None:
            client.step(table, step_of_table)
    return num_rows


class _TensorRows:
    """Tensors of the same rows, concatenated, read as float32 slice by slice."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors[0])

    def __getitem__(self, rows: slice, /) -> Floats:
        slices = [t[rows].detach().to("cpu", torch.float32) for t in self._tensors]
        floats: Floats = torch.cat([s.reshape(len(s), -1) for s in slices], 1).numpy()
        return floats


def _cut(
    weight: torch.Tensor, state: Sequence[torch.Tensor], ids: IdsOfRows, block_rows: int
) -> Iterator[transfer.RowBlock]:
    shards = [_local_shards(tensor) for tensor in (weight, *state)]
    if len({len(of_tensor) for of_tensor in shards}) > 1:
        raise BatchError(
            "Weights and optimizer state must be sharded alike. Received: "
            f"{[len(of_tensor) for of_tensor in shards]} shards here."
        )
    for (first_row, weights), *of_state in zip(*shards, strict=True):
        yield from transfer.blocks_of(
            _TensorRows([weights]),
            ids,
            _TensorRows([shard for _, shard in of_state]) if of_state else None,
            block_rows=block_rows,
            first_row=first_row,
        )


def _local_shards(tensor: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Return each shard that is here, after the number of its first row."""
    if not isinstance(tensor, ShardedTensor):
        return [(0, tensor)]
    size, shards = tuple(tensor.metadata().size), tensor.local_shards()
    for shape in (tuple(shard.tensor.shape) for shard in shards):
        if shape[1:] != size[1:]:
            raise BatchError(
                "Sharded tensors must be sharded by rows. Received: a shard of "
                f"{shape} of {size}. Gather it."
            )
    return [(shard.metadata.shard_offsets[0], shard.tensor) for shard in shards]


def _find(table: str, entries: Mapping[str, Any], where: str) -> Any:
    """Return the only entry of a table, by any of the keys that it may have."""
    own = f"embedding_bags.{table}.weight", f"embeddings.{table}.weight"
    keys = [key for key in entries if key.endswith(tuple(f".{name}" for name in own))]
    keys += [key for key in (*own, f"{table}.weight", table) if key in entries]
    if len(keys) != 1:
        raise ConfigError(
            f"{where} must hold table {table!r} once, as {own[0]!r} or {own[1]!r} "
            f"behind any path, or as {table!r}. Received: "
            f"{keys or sorted(entries)[:20]}."
        )
    return entries[keys[0]]


def _find_state(
    table: str, optimizer_state: OptimizerState, step: int | None
) -> tuple[list[torch.Tensor], int | None]:
    """Return the tensors of a table's optimizer state, and its step."""
    entries = optimizer_state.get("state")
    if not isinstance(entries, Mapping):
        raise ConfigError(
            "optimizer_state must be the state_dict() of a keyed optimizer, with "
            f"'state'. Received: {sorted(optimizer_state)}."
        )
    tensors = []
    for name, value in _find(table, entries, "optimizer_state").items():
        if name.rpartition(".")[2] == "step":
            step = int(value) if step is None else step
        else:
            tensors.append(value)
    if not tensors:
        raise ConfigError(
            f"optimizer_state must hold the state of table {table!r}. Received: none. "
            "Leave it out to begin with the initial state."
        )
    return tensors, step


class TableTensors(NamedTuple):
    """A whole table, as an ordinary checkpoint has it, on the CPU."""

    weights: torch.Tensor  # float32 (N, D)
    state: torch.Tensor  # float32 (N, S): of the optimizer, in its layout
    is_present: torch.Tensor  # bool (N,): which rows were on the servers
    step: int  # how many updates the table has had


def read_table(
    client: EmbeddingClient,
    table: str,
    num_rows: int,
    *,
    ids: IdsOfRows = None,
    missing: Literal["initial", "zeros"] = "initial",
) -> TableTensors:
    """Return a table of the servers as ordinary tensors, row by row.

    Flush the sharder first: updates on their way are not in it. Training may continue,
    see ``EmbeddingClient.export``.

    Args:
        client: of the servers, which know the table.
        table: its name.
        num_rows: N, which a table of the servers does not have.
        ids: the id of each row; by default a row's number.
        missing: what stands for a row that the servers do not have: its initial weights
            and state, or zeros.

    Raises:
        BatchError: the servers have an id that belongs to none of the rows, or ids
            repeat.
        ServerError: a server failed, refused, or did not answer in time.
    """
    spec = client.table(table)
    ids_N = transfer.ids_of_rows(ids, 0, num_rows)
    order = np.argsort(ids_N, kind="stable")  # linear if they are sorted
    sorted_N = ids_N[order]
    repeated = sorted_N[1:][sorted_N[1:] == sorted_N[:-1]]
    if len(repeated):
        raise BatchError(
            f"Table {table!r}: each row must have an id of its own. "
            f"Received: {repeated[0]} for several."
        )
    weights, state = (
        np.zeros((num_rows, width), dtype=np.float32)
        for width in (spec.dim, spec.num_state_floats)
    )
    is_present = np.zeros(num_rows, dtype=np.bool_)
    for block in client.export(table):
        found = np.searchsorted(sorted_N, block.ids)
        is_unknown = found == np.searchsorted(sorted_N, block.ids, side="right")
        if is_unknown.any():
            raise BatchError(
                f"Table {table!r}: every id on the servers must belong to one of the "
                f"{num_rows} rows. Received: id {block.ids[is_unknown][0]}. Give "
                "num_rows beyond the largest id, or with ids the id of each row."
            )
        numbers = order[found]
        weights[numbers], state[numbers] = block.weights, block.state
        is_present[numbers] = True
    if missing == "initial":
        absent = np.flatnonzero(~is_present)
        for start in range(0, len(absent), transfer.BLOCK_ROWS):
            numbers = absent[start : start + transfer.BLOCK_ROWS]
            rows = initial_rows(spec, ids_N[numbers])
            weights[numbers], state[numbers] = np.split(rows, [spec.dim], axis=1)
    tensors = map(torch.from_numpy, (weights, state, is_present))
    return TableTensors._make([*tensors, client.step(table)])


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
        model: with TorchRec's ordinary collections, before it is sharded; on any
            device, also meta.
        ids: of the rows of single tables, by name; by default a row's number.
        missing: as of :func:`read_table`.

    Returns:
        float32 ``(num_embeddings, D)`` per table, by its key in ``model.state_dict()``.

    Raises:
        BatchError: the servers have an id that belongs to none of the rows.
        ServerError: a server failed, refused, or did not answer in time.
    """
    tensors = {}
    for path, module in model.named_modules():
        if not isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
            continue
        num_rows = {c.name: c.num_embeddings for c in table_configs(module)}
        for key, _ in module.named_parameters(prefix=path):
            table = key.split(".")[-2]  # "embedding_bags.TABLE.weight"
            given: Any = {"ids": (ids or {}).get(table), "missing": missing}
            tensors[key] = read_table(client, table, num_rows[table], **given).weights
    return tensors
