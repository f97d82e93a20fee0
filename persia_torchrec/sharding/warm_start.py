"""Tables on the servers from an ordinary checkpoint.

A table that was trained without servers is a tensor: row ``i`` has the id ``i``. So it
is in TorchRec, where ``EmbeddingBagCollection`` calls it ``embedding_bags.NAME.weight``
and ``EmbeddingCollection`` ``embeddings.NAME.weight``, and in ``nn.Embedding`` and
``nn.EmbeddingBag``. Here it goes to the servers; ``table_tensors.py`` is the way back.
With the state of its optimizer, training goes on as if nothing had happened. Tensors
are read block by block, so that those of ``torch.load(path, mmap=True)`` may be larger
than memory.

Which ids? If the lookups of before used the ids that those of now use, a row's number
is its id. A model that hashed raw ids to ``[0, num_embeddings)`` looked up hashed ids:
go on hashing, and all is as before; or stop hashing, and give with ``ids`` the raw id
that each row is to belong to.

Dimension key:
    N: rows of a table
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.client.transfer import (
    IdsOfRows,
    RowBlock,
    blocks_of,
    rows_per_block,
)
from persia_torchrec.errors import BatchError, ConfigError
from persia_torchrec.sharding.torchrec_api import ShardedTensor
from persia_torchrec.wire.precision import Floats

OptimizerState = Mapping[str, object]
"""``{"state": {key of a weight: {name: tensor}}}``, as the ``state_dict()`` of
TorchRec's fused optimizer has it, and of its ``KeyedOptimizerWrapper`` around any of
torch's."""

_PARENTS = ("embedding_bags", "embeddings")
"""What TorchRec's two kinds of collections call their tables together."""

_STEP = "step"


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
    ``DistributedModelParallel`` has them, each trainer writes its own shards, which
    must be of whole rows.

    Args:
        client: of the servers, which know the tables.
        state_dict: holds, among others, the weight of each table, under TorchRec's name
            behind any path, or as ``"NAME"`` or ``"NAME.weight"``; of any floating
            dtype, ``(N, D)``, on any device.
        tables: names of the tables to fill; the others are left alone.
        optimizer_state: of the same tables. The tensors of a table, ``(N,)`` or
            ``(N, k)``, are put side by side in their order and must be what the table's
            optimizer keeps: Adagrad's sum, Adam's ``exp_avg`` and ``exp_avg_sq``. A
            ``step`` among them is Adam's ``t``. Without it, new rows get the initial
            state, and rows that are there keep theirs.
        ids: of the rows of single tables, by name; by default a row's number.
        step: how many updates the tables have had, where the state does not tell, as
            that of TorchRec's fused optimizers does not.

    Returns:
        How many rows of each table were written.

    Raises:
        ConfigError: a table has no weight in ``state_dict``, or several, or no state;
            or the servers do not know it.
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
        state: list[torch.Tensor] = []
        step_of_table = step
        if optimizer_state is not None and spec.num_state_floats:
            state, step_of_table = _state_of(table, optimizer_state, step)
        blocks = _blocks(weight, state, (ids or {}).get(table), rows_per_block(spec))
        num_rows[table] = client.fill(table, blocks)
        if step_of_table is not None:
            client.step(table, step_of_table)
    return num_rows


@dataclass(frozen=True, slots=True)
class _TensorRows:
    """Tensors of the same rows, side by side, read as float32 slice by slice."""

    tensors: Sequence[torch.Tensor]

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, rows: slice, /) -> Floats:
        parts = [t[rows].detach().to("cpu", torch.float32) for t in self.tensors]
        parts = [part.reshape(len(part), -1) for part in parts]
        floats: Floats = torch.cat(parts, dim=1).numpy()
        return floats


def _blocks(
    weight: torch.Tensor,
    state: Sequence[torch.Tensor],
    ids: IdsOfRows,
    block_rows: int,
) -> Iterator[RowBlock]:
    pieces = [_pieces(tensor) for tensor in (weight, *state)]
    if len({len(of_tensor) for of_tensor in pieces}) > 1:
        raise BatchError(
            "Weights and optimizer state must be sharded alike. Received: "
            f"{[len(of_tensor) for of_tensor in pieces]} shards here."
        )
    for (first_row, weights), *of_state in zip(*pieces, strict=True):
        yield from blocks_of(
            _TensorRows([weights]),
            ids,
            _TensorRows([piece for _, piece in of_state]) if of_state else None,
            block_rows=block_rows,
            first_row=first_row,
        )


def _pieces(tensor: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Return the first row of each part that is here, and the part."""
    if not isinstance(tensor, ShardedTensor):
        return [(0, tensor)]
    pieces = []
    size = tuple(tensor.metadata().size)
    for shard in tensor.local_shards():
        if tuple(shard.tensor.shape[1:]) != size[1:]:
            raise BatchError(
                "Sharded tensors must be sharded by rows. Received: a shard of "
                f"{tuple(shard.tensor.shape)} of {size}. Gather it."
            )
        pieces.append((shard.metadata.shard_offsets[0], shard.tensor))
    return pieces


def _find(table: str, entries: Mapping[str, object], where: str) -> torch.Tensor:
    entry = entries[_key_of(table, entries, where)]
    if not isinstance(entry, torch.Tensor):
        raise ConfigError(
            f"Table {table!r}: {where} must hold a tensor. Received: {type(entry)}."
        )
    return entry


def _key_of(table: str, entries: Mapping[str, object], where: str) -> str:
    own = [f"{parent}.{table}.weight" for parent in _PARENTS]
    keys = [key for key in entries if key.endswith(tuple(f".{name}" for name in own))]
    keys += [key for key in (*own, f"{table}.weight", table) if key in entries]
    if len(keys) != 1:
        raise ConfigError(
            f"{where} must hold table {table!r} once, as {own[0]!r} or {own[1]!r} "
            f"behind any path, or as {table!r}. Received: "
            f"{keys or sorted(entries)[:20]}."
        )
    return keys[0]


def _state_of(
    table: str, optimizer_state: OptimizerState, step: int | None
) -> tuple[list[torch.Tensor], int | None]:
    """Return the tensors of a table's optimizer state, and its step."""
    entries = optimizer_state.get("state")
    if not isinstance(entries, Mapping):
        raise ConfigError(
            "optimizer_state must be the state_dict() of a keyed optimizer, with "
            f"'state'. Received: {sorted(optimizer_state)}."
        )
    state = entries[_key_of(table, entries, "optimizer_state")]
    tensors = []
    for name, value in state.items():
        if name.rpartition(".")[2] == _STEP:
            step = int(value) if step is None else step
        else:
            tensors.append(value)
    if not tensors:
        raise ConfigError(
            f"optimizer_state must hold the state of table {table!r}. Received: none. "
            "Leave it out to begin with the initial state."
        )
    return tensors, step
