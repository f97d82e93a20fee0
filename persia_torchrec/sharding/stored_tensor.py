"""Tables on the servers as tensors of a state dict, read and written when used.

    model.state_dict()["bags.embedding_bags.item.weight"]     a StoredTensor
      .copy_, .zero_(), t[5:9] = ..., .local_shards()         change the servers' rows
      torch.distributed.checkpoint                            goes block by block
      torch.save, copy.deepcopy, any other operator           take the rows as they are

A table is one tensor of ``num_embeddings`` rows, whose numbers are their ids; or, where
it has other ids, a tensor of its rows beside one of their ids. The optimizer's state is
tensors of the same rows.

Dimensions: N rows, D embedding dim, S optimizer-state floats per row.
"""

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import metadata, planner
from torch.utils._pytree import tree_map_only
from torchrec.distributed.types import EnumerableShardingSpec

from persia_torchrec.arrays import Floats, Ids
from persia_torchrec.client import bulk
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.errors import BatchError, ConfigError
from persia_torchrec.sharding import torchrec_api
from persia_torchrec.sharding.torchrec_api import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
)
from persia_torchrec.table import TableSpec, WeightDtype

logger = logging.getLogger(__name__)

_DTYPES: dict[WeightDtype, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}

_MAX_ROWS = 2**40
"""More rows than any checkpoint has; of a tensor that is loaded into, its length."""


@dataclass
class StoredTable:
    """The rows of a table on the servers by number, for one state dict.

    Attributes:
        client: of the servers, which know the table.
        name: of the table.
        num_rows: N.
        ids: of the rows, uint64 ``(N,)``, sorted; None where a row's number is its id.
        rank: of this trainer, which saves and loads a part of the rows.
        num_trainers: that save and load together.
        group: of these.
        flush: waits for the updates of this trainer on their way.
        is_on_gpu: whether the model is. A tensor of its rows that a script moves to the
            CPU is then a copy, as one from a GPU is, and no view of the servers.
    """

    client: EmbeddingClient
    name: str
    num_rows: int
    ids: Ids | None = None
    rank: int = 0
    num_trainers: int = 1
    group: ProcessGroup | None = None
    flush: Callable[[], None] = lambda: None
    is_on_gpu: bool = False
    # Of a checkpoint that is loaded: ids by the number of the first, and rows before
    # their ids have come.
    _loaded_ids: dict[int, Ids] = field(default_factory=dict)
    _waiting: list[tuple[int, Floats, slice]] = field(default_factory=list)

    @property
    def spec(self) -> TableSpec:
        """The table, with its current settings."""
        return self.client.table(self.name)

    @property
    def block_rows(self) -> int:
        """How many rows are read or written at once, at most."""
        return bulk.rows_per_block(self.spec)

    def own_rows(self) -> tuple[int, int]:
        """Return the first row that this trainer saves and loads, and the end.

        Where rows have ids, the first trainer takes all: another may see more of them.
        """
        if self.ids is not None:
            return (0, self.num_rows if self.rank == 0 else 0)
        bounds = [self.num_rows * (self.rank + r) // self.num_trainers for r in (0, 1)]
        return bounds[0], bounds[1]

    def read(self, start: int, stop: int, columns: slice) -> Floats:
        """Return columns of rows; of those not on the servers, what their ids read.

        State is what a row begins with.
        """
        self.flush()
        initial = True if columns.start >= self.spec.dim else None
        width = len(range(*columns.indices(self.spec.dim + self.spec.num_state_floats)))
        floats = np.empty((stop - start, width), dtype=np.float32)
        for a, b in blocks(start, stop, self.block_rows):
            ids = bulk.ids_of_rows(self.ids, a, b)
            rows = self.client.read(self.name, ids, initial=initial)
            floats[a - start : b - start] = rows[:, columns]
        return floats

    def write(self, start: int, rows: Floats, columns: slice) -> None:
        """Set columns of rows from a number on, at most ``block_rows`` at once."""
        if self.ids is None:
            ids = np.arange(start, start + len(rows), dtype=np.uint64)
        elif self._loaded_ids:
            found = self._find_loaded(start, len(rows))
            if found is None:
                self._waiting.append((start, rows.copy(), columns))
                return
            ids = found
        else:
            ids = self.ids[start : start + len(rows)]
        self.flush()
        dim, state = self.spec.dim, None
        if columns.start >= dim:
            whole = self.client.read(self.name, ids, initial=True)
            whole[:, columns] = rows
            rows, state = np.split(whole, [dim], axis=1)
        self.client.write(self.name, ids, np.ascontiguousarray(rows), state)

    def load_ids(self, start: int, ids: Ids) -> None:
        """Note the ids of the rows that a checkpoint has from a number on."""
        self._loaded_ids[start] = ids
        waiting, self._waiting = self._waiting, []
        for of_rows in waiting:
            self.write(*of_rows)

    def _find_loaded(self, start: int, num: int) -> Ids | None:
        """Return the ids that a checkpoint has for some rows; None if not all came."""
        found = [np.empty(0, dtype=np.uint64)]
        for first, ids in sorted(self._loaded_ids.items()):
            if first <= start < first + len(ids):
                part = ids[start - first : start - first + num]
                found.append(part)
                start, num = start + len(part), num - len(part)
        return None if num else np.concatenate(found)


def blocks(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut a range; yield the first number of each block, and its end."""
    for first in range(start, stop, size):
        yield first, min(first + size, stop)


class Stored(ABC):
    """What a tensor has for each row of a table: some floats, or the id."""

    table: StoredTable
    dtype: torch.dtype
    row_shape: tuple[int, ...]

    @abstractmethod
    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return what the rows in ``[start, stop)`` have."""

    @abstractmethod
    def write(self, start: int, values: torch.Tensor) -> None:
        """Set what the rows from ``start`` on have; at most a block of them."""

    def in_checkpoint(self) -> "Stored":
        """Return it with the shape that ``torch.distributed.checkpoint`` saves."""
        return self


class StoredColumns(Stored):
    """Weights, or one part of the optimizer's state: ``(N, D)``, or of one float (N,).

    Columns begin with the weights, as the servers have them.
    """

    def __init__(self, table: StoredTable, columns: slice, *, is_flat: bool) -> None:
        self.table, self._columns = table, columns
        self.row_shape = () if is_flat else (columns.stop - columns.start,)
        is_weight = columns.start == 0
        self.dtype = _DTYPES[table.spec.weight_dtype] if is_weight else torch.float32

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return the floats of rows."""
        floats = torch.from_numpy(self.table.read(start, stop, self._columns))
        return floats.reshape(stop - start, *self.row_shape).to(self.dtype)

    def write(self, start: int, values: torch.Tensor) -> None:
        """Set the floats of rows."""
        floats = values.detach().to("cpu", torch.float32).reshape(len(values), -1)
        self.table.write(start, floats.numpy(), self._columns)

    def in_checkpoint(self) -> Stored:
        """Return it with one dimension more where rows have ids.

        By that no tensor whose rows' numbers are their ids takes these rows, which a
        checkpoint tells apart by nothing but the shape.
        """
        if self.table.ids is None:
            return self
        saved = copy.copy(self)
        saved.row_shape = *self.row_shape, 1
        return saved


class StoredIds(Stored):
    """The ids of a table whose rows have others than their numbers, int64 ``(N,)``."""

    dtype = torch.int64
    row_shape = ()

    def __init__(self, table: StoredTable) -> None:
        self.table = table

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return the ids of rows."""
        ids = bulk.ids_of_rows(self.table.ids, start, stop)
        return torch.from_numpy(ids.view(np.int64).copy())

    def write(self, start: int, values: torch.Tensor) -> None:
        """Note the ids of rows that are loaded."""
        ids = values.detach().to("cpu", torch.int64).numpy()
        self.table.load_ids(start, ids.view(np.uint64).copy())


class _Size(list[int]):
    """The shape of rows with ids; that of any number of them in a checkpoint equals it.

    torch compares sizes before it loads: there may be more rows now, or fewer.
    """

    def __init__(self, shape: Iterable[int], of_row: tuple[int, ...]) -> None:
        super().__init__(shape)
        self._of_row = of_row

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list | tuple):
            return False
        return tuple(other) == tuple(self) or tuple(other[1:]) == self._of_row

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # as of any list


class TensorView(NamedTuple):
    """An operator whose result shares memory with its argument, or one of several."""

    function: Any
    args: Any
    kwargs: Any
    number: int | None = None


class StoredTensor(torch.Tensor):
    """A tensor whose memory is on the embedding servers.

    Views of it are such tensors too, and what is assigned to them goes to the servers.
    Any other operator reads the rows, all of them, into this process. It has
    torch's protocol for tensors that checkpoints save and load piece by piece.
    """

    stored: Stored
    start: int
    stop: int
    # Of the rows from start to stop, each of the one before.
    views: tuple[TensorView, ...]
    _is_loading = False

    def __new__(  # noqa: D102  # torch makes tensors here
        cls,
        stored: Stored,
        start: int = 0,
        stop: int | None = None,
        views: tuple[TensorView, ...] = (),
    ) -> "StoredTensor":
        stop = stored.table.num_rows if stop is None else stop
        shape = stop - start, *stored.row_shape
        if views:
            shape = _viewed(torch.empty(shape, device="meta"), views).shape
        return torchrec_api.make_tensor(cls, shape, stored.dtype)

    def __init__(
        self,
        stored: Stored,
        start: int = 0,
        stop: int | None = None,
        views: tuple[TensorView, ...] = (),
    ) -> None:
        if isinstance(stored, torch.Tensor):  # as of torch.Tensor(t): it is made
            return
        torch.Tensor.__init__(self)
        self.stored, self.start, self.views = stored, start, views
        self.stop = stored.table.num_rows if stop is None else stop

    def whole(self) -> torch.Tensor:
        """Return what there is as an ordinary tensor."""
        return _viewed(self.stored.read(self.start, self.stop), self.views)

    def part(self, start: int, stop: int) -> "StoredTensor":
        """Return some of the rows, which stay on the servers."""
        return StoredTensor(self.stored, self.start + start, self.start + stop)

    def fill_from(self, values: torch.Tensor, start: int = 0) -> None:
        """Set the rows from ``start`` on, block by block; each trainer has its shards.

        Raises:
            BatchError: the values do not have the shape, or are not sharded by rows.
        """
        if self.views:
            rows = self.stored.read(self.start, self.stop)
            _viewed(rows, self.views).copy_(values)
            StoredTensor(self.stored, self.start, self.stop).fill_from(rows)
            return
        if is_sharded(values):
            for first, shard in local_shards(values):
                self.fill_from(shard, first)
            return
        fits = values.shape[1:] == self.shape[1:] or values[:1].numel() == 1
        if not fits or start + len(values) > len(self):
            raise BatchError(
                f"Table {self.stored.table.name!r}: the rows must have the shape "
                f"{tuple(self.shape)}. Received: {tuple(values.shape)}."
            )
        for a, b in blocks(0, len(values), self.stored.table.block_rows):
            of_rows = values[a:b]
            if isinstance(of_rows, StoredTensor):
                of_rows = of_rows.whole()
            self.stored.write(self.start + start + a, of_rows)

    def local_shards(self) -> list[Shard]:
        """Return this trainer's part of the rows, as a ShardedTensor does."""
        a, b = self.stored.table.own_rows()
        offsets = [a, *[0] * (self.dim() - 1)]
        part = self.part(a, b)
        rank = self.stored.table.rank
        return [Shard.from_tensor_and_offsets(part, offsets, rank)]

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or one of its numbers."""
        shape: Any = self.shape
        if self.stored.table.ids is not None and self.start == 0 and not self.views:
            shape = _Size(shape, self.stored.in_checkpoint().row_shape)
        return shape if dim is None else shape[dim]

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return a storage without memory: torch copies before it writes a tensor."""
        return torch.UntypedStorage(0)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return (
            f"StoredTensor({type(self.stored).__name__} of table "
            f"{self.stored.table.name!r}, {tuple(self.shape)}, {self.dtype})"
        )

    def __reduce_ex__(self, proto: Any) -> Any:
        return self._warned("torch.save or pickle").__reduce_ex__(proto)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self._warned("copy.deepcopy")

    def _warned(self, what: str) -> torch.Tensor:
        logger.warning(
            "%s takes %.1f MB of table %r from the servers into memory. "
            "torch.distributed.checkpoint goes by blocks; save_checkpoint lets the "
            "servers write.",
            what,
            self.numel() * self.itemsize / 1e6,
            self.stored.table.name,
        )
        return self.whole()

    # torch's protocol of checkpoints for tensors that write themselves.

    def __create_write_items__(self, key: str, _: object) -> list[planner.WriteItem]:
        """Return this trainer's blocks of the rows."""
        self._is_loading = False
        table, of_row = self.stored.table, self.stored.in_checkpoint().row_shape
        cuts = list(blocks(*table.own_rows(), table.block_rows))
        if not table.num_rows and table.rank == 0:
            cuts = [(0, 0)]  # of an empty tensor, too, a checkpoint knows the size
        return [
            planner.WriteItem(
                index=metadata.MetadataIndex(key, _offsets(a, of_row)),
                type=planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(
                    chunk=_chunk(a, b, of_row),
                    properties=metadata.TensorProperties(dtype=self.dtype),
                    size=torch.Size([table.num_rows, *of_row]),
                ),
            )
            for a, b in cuts
        ]

    def __create_chunk_list__(self) -> list[metadata.ChunkStorageMetadata]:
        """Return this trainer's part of the rows, for a checkpoint to be loaded."""
        self._is_loading = True
        a, b = self._loaded_rows()
        of_row = self.stored.in_checkpoint().row_shape
        return [_chunk(a, b, of_row)] if b > a else []

    def __get_tensor_shard__(self, index: metadata.MetadataIndex) -> torch.Tensor:
        """Return what a block is read from, or a checkpoint is loaded into."""
        saved, table = self.stored.in_checkpoint(), self.stored.table
        if self._is_loading:
            return StoredTensor(saved, *self._loaded_rows())
        start, (_, end) = int((index.offset or [0])[0]), table.own_rows()
        return StoredTensor(saved, start, min(start + table.block_rows, end))

    def _loaded_rows(self) -> tuple[int, int]:
        table = self.stored.table
        if table.ids is None:
            return table.own_rows()
        return 0, _MAX_ROWS if table.rank == 0 else 0

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.data_ptr:
            raise BatchError(
                f"Table {args[0].stored.table.name!r}: its rows are on the servers and "
                "have no memory here. Received: a call of data_ptr, for example by "
                "safetensors. Give tensor.clone() instead, which takes the rows into "
                "memory."
            )
        if func in _ON_HOST:
            args = tree_map_only(StoredTensor, StoredTensor.whole, args)
            return func(*args, **kwargs)
        if _is_move_to_host(func, args, kwargs) and args[0].stored.table.is_on_gpu:
            return func(args[0].whole(), *args[1:], **kwargs)
        if func is torch.Tensor.copy_ and is_sharded(args[1]):
            args[0].fill_from(args[1])
            return args[0]
        return torchrec_api.call_operator(func, *args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own has no signature
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, first = kwargs or {}, args[0]
        is_own = isinstance(first, StoredTensor)
        if is_own and torchrec_api.is_view(func):
            return first.view_of(func, args[1:], kwargs)
        if func is torch.ops.aten.copy_.default and (is_own or first.is_meta):
            if is_own:
                first.fill_from(args[1].expand(first.shape))
            return first
        read = tree_map_only(StoredTensor, StoredTensor.whole, (args, kwargs))
        result = func(*read[0], **read[1])
        if not (is_own and torchrec_api.is_mutable(func)):
            return result
        first.fill_from(read[0][0])
        return first

    def view_of(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Return a view, or several, of what stays on the servers."""
        if function in _ALIASES and not self.views:
            return type(self)(self.stored, self.start, self.stop)
        if function is torch.ops.aten.slice.Tensor and not self.views:
            given: list[Any] = [*args, *(0, None, None, 1)[len(args) :]]
            dim, rows = given[0], slice(*given[1:])
            a, b, by = rows.indices(self.shape[dim])
            if (dim, by) == (0, 1):
                return self.part(a, max(a, b))
        of_rows = self.stored, self.start, self.stop
        made = function(torch.empty(self.shape, device="meta"), *args, **kwargs)
        if isinstance(made, torch.Tensor):
            view = TensorView(function, args, kwargs)
            return StoredTensor(*of_rows, (*self.views, view))
        views = [
            TensorView(function, args, kwargs, number) for number in range(len(made))
        ]
        return [StoredTensor(*of_rows, (*self.views, view)) for view in views]


class StoredShardedTensor(StoredTensor, torchrec_api.ShardedTensorFields):
    """A whole table as a state dict has it, where plain TorchRec has a ShardedTensor.

    So are the tensors of an optimizer's state. It passes the checks of code that saves
    and loads those by themselves, and has the fields that such code reads. What a
    ShardedTensor does in another way than any tensor, as ``cpu``, is a tensor's here.
    Parts of it, ``local_shards`` too, are tensors as any.
    """

    def metadata(self) -> ShardedTensorMetadata:
        """Return which rows each trainer saves and loads."""
        table, of_row = self.stored.table, list(self.stored.row_shape)
        shards = []
        for rank in range(table.num_trainers):
            a, b = replace(table, rank=rank).own_rows()
            offsets, where = [a, *[0] * len(of_row)], f"rank:{rank}/cpu"
            shards.append(ShardMetadata(offsets, [b - a, *of_row], placement=where))
        properties = TensorProperties(dtype=self.dtype)
        return ShardedTensorMetadata(shards, torch.Size(self.shape), properties)

    def sharding_spec(self) -> EnumerableShardingSpec:
        """Return the same as a spec."""
        return EnumerableShardingSpec(self.metadata().shards_metadata)

    @property
    def process_group(self) -> ProcessGroup | None:
        """The trainers that save and load together."""
        return self.stored.table.group

    def reshard(self, _: object) -> NoReturn:
        """Reject, as the sharded module does."""
        raise ConfigError(
            f"Table {self.stored.table.name!r} cannot be resharded: every server holds "
            "the ids that hash to it. Received: a new sharding spec. Start more "
            "servers, and load a checkpoint into them."
        )

    def load_state_dict(self, values: torch.Tensor) -> None:
        """Set the rows; TorchRec's keyed optimizers ask for it, and load tensors."""
        self.detach().copy_(values)

    def local_tensor(self) -> torch.Tensor:
        """Return this trainer's rows, which stay on the servers."""
        return self.local_shards()[0].tensor

    def gather(  # type: ignore[override]  # a ShardedTensor's, or a tensor's
        self, dst: int = 0, out: torch.Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Read all rows into ``out`` on the trainer ``dst``; or gather by an index."""
        index = kwargs.pop("index", out)
        if isinstance(index, torch.Tensor) and not index.is_floating_point():
            return self.whole().gather(kwargs.pop("dim", dst), index, *args, **kwargs)
        if out is not None and self.stored.table.rank == dst:
            for a, b in blocks(0, len(self), self.stored.table.block_rows):
                out[a:b].copy_(self.part(a, b).whole())
        return None

    def is_pinned(self, *_: Any) -> bool:
        """Return False: no memory is here."""
        return False

    cpu: Any = torch.Tensor.cpu
    cuda: Any = torch.Tensor.cuda
    to: Any = torch.Tensor.to


def is_sharded(tensor: Any) -> bool:
    """Return whether a tensor is one of TorchRec's, of shards that trainers hold."""
    return isinstance(tensor, ShardedTensor) and not isinstance(tensor, StoredTensor)


def _viewed(tensor: torch.Tensor, views: tuple[TensorView, ...]) -> torch.Tensor:
    """Return what a tensor is under views, which share its memory."""
    for view in views:
        made = view.function(tensor, *view.args, **view.kwargs)
        tensor = made if view.number is None else made[view.number]
    return tensor


def _is_move_to_host(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    given = [*args[1:], *kwargs.values()]
    is_to = func is torch.Tensor.to and "cpu" in map(str, given)
    return is_to or func is torch.Tensor.cpu


_ALIASES = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}

_ON_HOST = {
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.__array__,
    torch.Tensor.item,
}
"""What reads a tensor's memory without any operator."""


def local_shards(tensor: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Return each shard that is here, after the number of its first row.

    Raises:
        BatchError: the tensor is not sharded by rows.
    """
    if not is_sharded(tensor):
        return [(0, tensor)]
    assert isinstance(tensor, ShardedTensor)
    size, shards = tuple(tensor.metadata().size), tensor.local_shards()
    for shape in (tuple(shard.tensor.shape) for shard in shards):
        if shape[1:] != size[1:]:
            raise BatchError(
                "Sharded tensors must be sharded by rows. Received: a shard of "
                f"{shape} of {size}. Gather it."
            )
    return [(shard.metadata.shard_offsets[0], shard.tensor) for shard in shards]


def _offsets(start: int, of_row: tuple[int, ...]) -> torch.Size:
    return torch.Size([start, *[0] * len(of_row)])


def _chunk(
    start: int, stop: int, of_row: tuple[int, ...]
) -> metadata.ChunkStorageMetadata:
    sizes = torch.Size([stop - start, *of_row])
    return metadata.ChunkStorageMetadata(_offsets(start, of_row), sizes)
