"""Tables on the servers and state dicts of torch: tensors both ways.

    model.state_dict()    holds a StoredTensor for each table, see ``CollectionState``
    load_state_dict       tensors of an ordinary checkpoint, or of such -> servers
    load_tables           the same of single tables, with ids and optimizer state
    read_table            servers -> tensors, to save, serve or train as any other model

Tensors are read block by block: those of ``torch.load(path, mmap=True)`` may be larger
than memory. Row ``i`` of a tensor has the id ``i``. Where a model hashed raw ids to
``[0, num_embeddings)``, keep hashing; or stop, and give the raw id of each row.

Dimensions: N rows of a table, D embedding dim, S optimizer-state floats per row.
"""

import contextlib
import contextvars
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias
from weakref import ref

import numpy as np
import torch
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed.types import ShardingEnv

from persia_torchrec.arrays import Floats, Ids
from persia_torchrec.client import bulk
from persia_torchrec.client.bulk import IdsOfRows
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.errors import BatchError, ConfigError
from persia_torchrec.sharding import torchrec_api
from persia_torchrec.sharding.collection import table_configs
from persia_torchrec.sharding.names import (
    OptimizerState,
    find_entry,
    find_state,
    relative,
)
from persia_torchrec.sharding.stored_tensor import (
    StoredColumns,
    StoredIds,
    StoredShardedTensor,
    StoredTable,
    StoredTensor,
    blocks,
    is_sharded,
    local_shards,
)
from persia_torchrec.sharding.torchrec_api import ShardedTensor
from persia_torchrec.store.row_copy import initial_rows
from persia_torchrec.table import TableSpec

StateDictRows: TypeAlias = Literal["auto", "ids", "none"]
"""How ``state_dict()`` has the rows of tables on the servers: see ``RemoteSharder``."""

logger = logging.getLogger(__name__)

_BEGINNING = "on the embedding servers, not in this state: "

_leaves_rows_out = contextvars.ContextVar("rows are left out", default=False)


@contextlib.contextmanager
def without_rows() -> Iterator[None]:
    """Let state dicts of this thread leave rows out: the servers save them."""
    token = _leaves_rows_out.set(True)
    try:
        yield
    finally:
        _leaves_rows_out.reset(token)


class CollectionState:
    """The rows of a collection, for the state dicts of model and optimizer.

    Called by the thread that trains.

    Args:
        client: of the servers, which know the tables.
        tables: ``num_embeddings`` by table.
        env: of the trainers that save and load together.
        rows: as of ``RemoteSharder``.
        flush: waits for this trainer's updates of a table on their way.
        meet: returns when all trainers have called it.

    Attributes:
        own_name: returns what the collection, and tensors, call a table of the servers.
        has_prefixes: whether ids have prefixes: rows are then beside their ids always.
        is_on_gpu: whether the collection is.
    """

    own_name: Callable[[str], str] = staticmethod(str)
    has_prefixes = False
    is_on_gpu = False

    def __init__(
        self,
        client: EmbeddingClient,
        tables: Mapping[str, int],
        env: ShardingEnv,
        rows: StateDictRows,
        *,
        flush: Callable[[str], None],
        meet: Callable[[], None],
    ) -> None:
        self._client = client
        self._num_rows = dict(tables)
        self._env = env
        self._rows = rows
        self._flush = flush
        self.meet = meet

    def is_left_out(self) -> bool:
        """Return whether state dicts have no rows now."""
        return self._rows == "none" or _leaves_rows_out.get()

    def table(self, name: str) -> StoredTable:
        """Return a table as a state dict has it; ids are read where it has others."""
        spec = self._client.table(name)
        if spec.shared_rows or spec.dynamic.is_on:
            raise _more_than_rows(spec)
        self._flush(name)
        num_rows, ids = self._num_rows[name], None
        if (
            self._rows == "ids"
            or self.has_prefixes
            or len(self._client.count_ids(name, num_rows)[1])
        ):
            _, ids = self._client.count_ids(name)
            ids.sort()
            num_rows = len(ids)
        return self._stored(name, num_rows, ids)

    def tensors(self, name: str, key: str) -> dict[str, torch.Tensor]:
        """Return what stands for the weights of a table, by keys beside its own."""
        table = self.table(name)
        columns = slice(0, table.spec.dim)
        tensors: dict[str, torch.Tensor] = {}
        if table.ids is not None:
            tensors[ids_key(key)] = StoredTensor(StoredIds(table))
        stored = StoredColumns(table, columns, is_flat=False)
        tensors[key] = StoredShardedTensor(stored)
        return tensors

    def optimizer_tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Return the state of a table's optimizer, with TorchRec's names and shapes."""
        if not self._client.table(name).num_state_floats:
            return {}
        table, name = self.table(name), self.own_name(name)
        tensors: dict[str, torch.Tensor] = {}
        if table.ids is not None:
            tensors[f"{name}.ids"] = StoredTensor(StoredIds(table))
        parts = zip(_STATE_NAMES, _state_parts(table.spec), strict=False)
        for of_state, (columns, is_flat) in parts:
            stored = StoredColumns(table, columns, is_flat=is_flat)
            tensors[f"{name}.{of_state}"] = StoredShardedTensor(stored)
        return tensors

    def load(
        self, name: str, key: str, weights: torch.Tensor, ids: torch.Tensor | None
    ) -> None:
        """Write this trainer's part of a table's rows."""
        own = isinstance(weights, StoredTensor) and weights.stored.table
        if own and own.name == name and own.client is self._client:
            return  # what was loaded into it is on the servers
        spec = self._client.table(name)
        if spec.dynamic.is_on:
            raise _more_than_rows(spec)
        if ids is None and self.has_prefixes:
            raise ConfigError(
                f"{key!r}: rows of a table with an embedding_config have ids with the "
                f"prefix of their feature group. Received: weights without "
                f"{ids_key(key)!r}. Give load_weights(..., ids=...) of the sharder the "
                "ids of the rows."
            )
        if ids is not None and weights.dim() == 3:  # as distributed checkpoints have it
            weights = weights[..., 0]
        shape = torchrec_api.shape_of(weights)
        dim, num_rows = spec.dim, shape[0]
        must = (num_rows if ids is not None else self._num_rows[name]), dim
        num_ids = None if ids is None else len(ids)
        if shape != must or num_ids not in (None, num_rows):
            raise BatchError(
                f"{key!r} must have the shape {must}, or come with the id of each row "
                f"as {ids_key(key)!r}. Received: {shape}, ids: {num_ids}. "
                "Tensors of other rows are for load_weights(..., ids=...) of the "
                "sharder."
            )
        given = None
        if ids is not None:
            whole = ids.whole() if isinstance(ids, StoredTensor) else ids
            given = whole.to("cpu", torch.int64).numpy().view(np.uint64)
        table = self._stored(name, num_rows, given)
        target = StoredTensor(StoredColumns(table, slice(0, dim), is_flat=False))
        if is_sharded(weights):
            target.fill_from(weights)
            return
        start, stop = table.own_rows()
        target.fill_from(weights[start:stop], start)

    def reset(self, names: Iterable[str]) -> None:
        """Give the rows that tables have their initial weights, and state.

        Rows that ids share stay; those of ids get the weights that they began with.
        """
        for name in names:
            self._flush(name)
            _, ids = self._client.count_ids(name)
            table = self._stored(name, len(ids), ids)
            spec = table.spec
            for a, b in blocks(*table.own_rows(), table.block_rows):
                rows = initial_rows(spec, ids[a:b], has_all=True)
                self._client.write(name, ids[a:b], *np.split(rows, [spec.dim], axis=1))
        self.meet()

    def begin(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Fill tables that have no rows with weights, which a collection has already.

        The first trainer does, block by block; all return when it has.
        """
        for name in sorted(weights) if self._env.rank == 0 else ():
            if self.has_prefixes or self._client.count_ids(name, 2**63 - 1)[0]:
                continue
            servers = self._client.counters()
            room = sum(of["capacity_rows"] - of["rows"] for of in servers)
            num_rows = len(weights[name])
            logger.info("table %r begins with the %d rows of the model", name, num_rows)
            if room < num_rows:
                logger.warning(
                    "table %r: %d of the %d rows of the model fit on the servers; the "
                    "others begin again. Raise --capacity, or add servers.",
                    name,
                    room,
                    num_rows,
                )
            load_tables(self._client, {name: weights[name][:room]}, [name])
        if weights:
            self.meet()

    def set_step(self, name: str, step: int) -> None:
        """Continue counting the steps of a table's optimizer from a number."""
        self._client.step(name, step)

    def _stored(self, name: str, num_rows: int, ids: Ids | None) -> StoredTable:
        env, how = self._env, (partial(self._flush, name), self.is_on_gpu)
        return StoredTable(
            self._client,
            name,
            num_rows,
            ids,
            env.rank,
            env.world_size,
            env.process_group,
            *how,
        )


def _more_than_rows(spec: TableSpec) -> ConfigError:
    """Return the error of a table whose rows tensors cannot hold."""
    what = f"shared_rows={spec.shared_rows}" if spec.shared_rows else "dynamic"
    return ConfigError(
        f"Table {spec.name!r}: tensors must hold all that a table has. Received: "
        f"{what}, which they would lose. save_checkpoint and load_checkpoint of "
        "persia_torchrec keep it, plain_state_dict returns what ids read, and "
        'state_dict_rows="none" of the sharder leaves rows out of state dicts.'
    )


_STATE_NAMES = ("momentum1", "exp_avg_sq", "momentum3", "momentum4")
"""How TorchRec calls the tensors of fbgemm's optimizers, behind the table's name."""


def _state_parts(spec: TableSpec) -> Iterator[tuple[slice, bool]]:
    """Yield the columns of each tensor of an optimizer's state, and if it is (N,)."""
    width, start = spec.dim + spec.num_state_floats, spec.dim
    optimizer: Any = spec.optimizer
    of_row = getattr(optimizer, "vectorwise_shared", False)
    of_row = of_row or getattr(optimizer, "is_rowwise", False)
    while start < width:
        fits = start + spec.dim <= width
        stop = start + (spec.dim if fits else spec.dynamic.blocks)
        is_last = stop == width
        is_of_row = stop - start < spec.dim or (of_row and is_last)
        yield slice(start, stop), is_of_row and stop - start == 1
        start = stop


def ids_key(key: str) -> str:
    """Return the key of the ids that belong to weights: ``NAME.ids`` of NAME.weight."""
    return key.removesuffix("weight") + "ids"


def add_entries(
    module: Any, state_dict: dict[str, Any], prefix: str, *_: object
) -> None:
    """Put each table into the state of a model; a hook for torch.

    Where rows are left out, a str says so: torch saves and loads it as it is, and code
    that takes it for a tensor fails.
    """
    rows = module.collection_state
    for key, table in module.tables_by_key.items():
        if rows is not None and not rows.is_left_out():
            tensors = rows.tensors(table, prefix + key)
            if len(tensors) > 1:  # a checkpoint has the ids first, and loads them first
                del state_dict[prefix + key]
            state_dict.update(tensors)
            continue
        state_dict[prefix + key] = (
            f"{_BEGINNING}the rows of table {table!r}. save_checkpoint and "
            "load_checkpoint of persia_torchrec keep them with the dense half; "
            "plain_state_dict and read_table return them as tensors, load_weights of "
            "the sharder takes tensors."
        )


def is_state_entry(value: object) -> bool:
    """Return whether a value of a state dict is of a table on the servers."""
    is_text = isinstance(value, str) and value.startswith(_BEGINNING)
    return is_text or isinstance(value, StoredTensor)


def take_entries(
    module: Any,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: object,
    strict: bool,
    missing_keys: list[str],
    *_: object,
) -> None:
    """Write the rows of a state to the servers before the rest is loaded.

    Each trainer writes a part; all return when all rows are there.
    """
    placeholders, loaded = dict(module.named_parameters()), dict[str, Any]()
    for key, table in module.tables_by_key.items():
        entry = state_dict.pop(prefix + key, None)
        ids = state_dict.pop(ids_key(prefix + key), None)
        if entry is not None and key in placeholders:
            state_dict[prefix + key] = placeholders[key]  # as torch wants it
        elif entry is None and strict and key not in placeholders:
            missing_keys.append(prefix + key)
        if entry is None or isinstance(entry, str):
            continue
        if module.collection_state is None or not isinstance(entry, torch.Tensor):
            raise ConfigError(
                f"{prefix + key!r} must be a tensor of the rows of table {table!r}, "
                f"of a model whose sharder has a client. Received: {type(entry)}."
            )
        _require_same(module, table, entry)
        loaded[table] = entry
        module.collection_state.load(table, prefix + key, entry, ids)
    if loaded:
        module.remote_tables.tell_of_order(loaded)
        module.collection_state.meet()


def _require_same(module: Any, table: str, weights: torch.Tensor) -> None:
    """Reject other weights of a table than another collection has just loaded.

    Plain collections whose tables have one name have rows of their own; here the last
    ones would stay.
    """
    loaded = module.remote_tables.loaded
    other, before = loaded.get(table, (module.spec, lambda: None))
    loaded[table], held = (module.spec, ref(weights)), before()
    if other is module.spec or held is None or held is weights:
        return
    are_plain = not isinstance(weights, ShardedTensor | StoredTensor)
    if are_plain and type(held) is type(weights) and not torch.equal(held, weights):
        keys = [
            [f.key for f in s.features if f.table == table]
            for s in (other, module.spec)
        ]
        raise ConfigError(
            f"All weights that are loaded into table {table!r} must be equal: on the "
            "servers a table is its name. Received: others for the collection with the "
            f"features {keys[0]} than for that with {keys[1]}. Give the tables other "
            "names in the model, and in the state."
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
            these, or several; or its settings have ``dynamic``.
        BatchError: weights or state do not have the table's shape, or are not sharded
            by rows.
        ServerError: a server failed, rejected, or did not answer in time.

    Example:
        ``load_tables(client, torch.load("model.pt", mmap=True), ["user", "item"])``
    """
    num_rows = {}
    for table in tables:
        spec = client.table(table)
        if spec.dynamic.is_on:
            raise _more_than_rows(spec)
        weight = find_entry(table, state_dict, "state_dict")
        if not isinstance(weight, torch.Tensor):
            raise ConfigError(
                f"Table {table!r}: state_dict must hold a tensor. "
                f"Received: {type(weight)}."
            )
        state: list[torch.Tensor] = []
        step_of_table = step
        if optimizer_state is not None and spec.num_state_floats:
            state, step_of_table = find_state(table, optimizer_state, step)
        cut = partial(
            _cut, weight, state, (ids or {}).get(table), bulk.rows_per_block(spec)
        )
        num_rows[table] = client.fill(table, bulk.Blocks(cut))
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
) -> Iterator[bulk.RowBlock]:
    shards = [local_shards(tensor) for tensor in (weight, *state)]
    if len({len(of_tensor) for of_tensor in shards}) > 1:
        raise BatchError(
            "Weights and optimizer state must be sharded alike. Received: "
            f"{[len(of_tensor) for of_tensor in shards]} shards here."
        )
    for (first_row, weights), *of_state in zip(*shards, strict=True):
        yield from bulk.blocks_of(
            _TensorRows([weights]),
            ids,
            _TensorRows([shard for _, shard in of_state]) if of_state else None,
            block_rows=block_rows,
            first_row=first_row,
        )


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
    missing: Literal["initial", "zeros"] | None = None,
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
            and state, or zeros; by default as the table's ``ids_without_row``.

    Raises:
        BatchError: the servers have an id that belongs to none of the rows, or ids
            repeat.
        ServerError: a server failed, rejected, or did not answer in time.
    """
    spec = client.table(table)
    ids_N = bulk.ids_of_rows(ids, 0, num_rows)
    order = np.argsort(ids_N, kind="stable")  # linear if they are sorted
    sorted_N = ids_N[order]
    repeated = sorted_N[1:][sorted_N[1:] == sorted_N[:-1]]
    if len(repeated):
        raise BatchError(
            f"Table {table!r}: each row must have a distinct id. "
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
    reads = "initial" if spec.shared_rows else spec.ids_without_row
    if (missing or reads) == "initial":
        absent = np.flatnonzero(~is_present)
        for start in range(0, len(absent), bulk.BLOCK_ROWS):
            numbers = absent[start : start + bulk.BLOCK_ROWS]
            rows = initial_rows(spec, ids_N[numbers])
            weights[numbers], state[numbers] = np.split(rows, [spec.dim], axis=1)
            if spec.shared_rows:
                split = client.split(ids_N[numbers], table)
                [rows] = client.pull([(table, split)])
                weights[numbers] = rows[split.inverse]
    tensors = map(torch.from_numpy, (weights, state, is_present))
    return TableTensors._make([*tensors, client.step(table)])


def plain_state_dict(
    client: EmbeddingClient,
    model: torch.nn.Module,
    *,
    ids: Mapping[str, IdsOfRows] | None = None,
    missing: Literal["initial", "zeros"] | None = None,
    namespace: str = "",
) -> dict[str, torch.Tensor]:
    """Return the weights of a model's tables, for its ``load_state_dict``.

    Args:
        client: of the servers, which know the tables.
        model: with TorchRec's ordinary collections, before it is sharded; on any
            device, also meta.
        ids: of the rows of single tables, by name; by default a row's number.
        missing: as of :func:`read_table`.
        namespace: that of the sharder, if it has one.

    Returns:
        float32 ``(num_embeddings, D)`` per table, by its key in ``model.state_dict()``.

    Raises:
        BatchError: the servers have an id that belongs to none of the rows.
        ServerError: a server failed, rejected, or did not answer in time.
    """
    tensors = {}
    for path, module in model.named_modules():
        if not isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
            continue
        num_rows = {c.name: c.num_embeddings for c in table_configs(module)}
        for key, _ in module.named_parameters(prefix=path):
            table = key.split(".")[-2]  # "embedding_bags.TABLE.weight"
            prefix = f"{namespace}/" if namespace else ""
            name, of_path = f"{prefix}{table}", f"{prefix}{relative(path)}.{table}"
            name = of_path if of_path in client.tables else name
            of_table = (ids or {}).get(of_path.removeprefix(prefix))
            of_table = (ids or {}).get(table) if of_table is None else of_table
            given: Any = {"ids": of_table, "missing": missing}
            tensors[key] = read_table(client, name, num_rows[table], **given).weights
    return tensors
