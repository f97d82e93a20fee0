"""Everything private of torch and TorchRec that this package relies on.

No other file reaches into these libraries: a new release of theirs is fitted here.
Checked with torch 2.11 to 2.14 and TorchRec 1.6 to 1.9; ``tests/sharding/
test_torchrec_api.py`` names each attribute, and fails with a sentence where one is
missing.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter, methodcaller
from typing import Any, TypeVar

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import (
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torchrec import EmbeddingCollection
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_types import BaseEmbeddingSharder
from torchrec.optim.fused import EmptyFusedOptimizer

from persia_torchrec.errors import ConfigError

__all__ = [
    "Shard",
    "ShardMetadata",
    "ShardedTensor",
    "ShardedTensorMetadata",
    "TensorProperties",
]

T = TypeVar("T", bound=torch.Tensor)

MIXES_SEQUENCES = hasattr(EmbeddingCollection, "use_gather_select_per_sharding")
"""Whether a part of a sharded ``EmbeddingCollection`` is one: from TorchRec 1.8 on."""

GROWTH_TRACKER = "_growth_tracker"
"""The key of a ``GradScaler``'s state that counts steps since the scale changed."""


def make_tensor(cls: type[T], shape: tuple[int, ...], dtype: torch.dtype) -> T:
    """Make a tensor of a subclass, without memory; it has ``__torch_dispatch__``."""
    tensor: T = cls._make_wrapper_subclass(cls, shape, dtype=dtype)
    return tensor


class _EqualsShardedTensor(torch._C._TensorMeta):
    """The type of a class that equals ``ShardedTensor``, its base.

    torchsnapshot restores tensors whose type equals it, and rejects subclasses.
    """

    def __eq__(self, other: object) -> bool:
        return other is self or other is ShardedTensor

    __hash__ = type.__hash__


class ShardedTensorFields(ShardedTensor, metaclass=_EqualsShardedTensor):
    """A ``ShardedTensor`` whose fields are made by its methods when they are read.

    Its own ones read them, and so does code that saves and loads.
    """

    _init_rrefs = False  # there are no remote references to its shards
    _sharded_tensor_id = None

    def __getattr__(self, name: str) -> Any:
        """Return a field that a ``ShardedTensor`` sets when it is made."""
        if name not in _FIELDS:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return _FIELDS[name](self)


_FIELDS: dict[str, Callable[[Any], Any]] = {
    "_metadata": methodcaller("metadata"),
    "_sharding_spec": methodcaller("sharding_spec"),
    "_local_shards": methodcaller("local_shards"),
    "_process_group": attrgetter("process_group"),
    "_remote_shards": lambda _: {},
}


def has_iterator(loader: "torch.utils.data.DataLoader[Any]") -> bool:
    """Return whether a loader has an iterator, which persistent workers keep."""
    return loader._iterator is not None


def end_iterator(loader: "torch.utils.data.DataLoader[Any]") -> None:
    """Drop the iterator that a loader keeps, and so end its persistent workers."""
    loader._iterator = None


def call_operator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of torch's with tensors of a subclass, which it may return."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def is_mutable(operator: Any) -> bool:
    """Return whether an operator of torch's changes an argument."""
    return bool(operator._schema.is_mutable)


def arguments_of(operator: Any) -> list[str] | None:
    """Return the names of an operator's arguments; None if it is no operator."""
    if not isinstance(operator, torch._ops.OpOverload):
        return None
    return [argument.name for argument in operator._schema.arguments]


def is_view(operator: Any) -> bool:
    """Return whether an operator of torch's returns a view of its argument."""
    returned = [value.alias_info for value in operator._schema.returns]
    return bool(returned) and all(info and not info.is_write for info in returned)


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Return the shape of a tensor, which may be sharded: of the whole."""
    is_sharded = isinstance(tensor, ShardedTensor)
    return tuple(tensor.metadata().size if is_sharded else tensor.shape)


def backward_pass() -> int:
    """Return the number of the backward pass that runs in this thread; -1 if none."""
    return torch._C._current_graph_task_id()


def after_backward(call: Callable[[], None]) -> None:
    """Call when the backward pass that runs in this thread has run all its nodes.

    All-reduces of DistributedDataParallel have begun by then, and need not have ended.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)


def weights_gradient(
    grads: torch.Tensor,
    rows_UD: torch.Tensor,
    rows_L: torch.Tensor,
    offsets: torch.Tensor,
    bag_of_L: torch.Tensor,
) -> torch.Tensor:
    """Return the gradient of each weight of bags that were summed; needs no sort."""
    operator = torch.ops.aten._embedding_bag_per_sample_weights_backward
    of_ids: torch.Tensor = operator(grads, rows_UD, rows_L, offsets, bag_of_L, 0)
    return of_ids


def optimizers_in_backward(
    parameter: nn.Parameter,
) -> list[tuple[type[torch.optim.Optimizer], Mapping[str, Any]]]:
    """Return what ``apply_optimizer_in_backward`` gave a parameter, with arguments."""
    classes = getattr(parameter, "_optimizer_classes", [])
    arguments = getattr(parameter, "_optimizer_kwargs", [])
    return list(zip(classes, arguments, strict=True))


def mark_in_backward(parameter: nn.Parameter) -> None:
    """Let a parameter look like one whose optimizer runs in the backward pass."""
    parameter._in_backward_optimizers = [EmptyFusedOptimizer()]  # type: ignore[attr-defined]


def set_device(collection: Any, device: torch.device) -> None:
    """Change which device a collection says it is on."""
    collection._device = device


feature_processors = attrgetter("_feature_processors")
"""The processors of a ``FeatureProcessedEmbeddingBagCollection``."""

table_configs = attrgetter("_table_name_to_config")
"""The configs of a sharded collection's tables, by name."""


def sharded_settings(sharder: BaseEmbeddingSharder[Any]) -> dict[str, Any]:
    """Return the keyword arguments that a sharder of TorchRec's gives its modules."""
    settings = {
        "fused_params": sharder.fused_params,
        "qcomm_codecs_registry": sharder.qcomm_codecs_registry,
    }
    if isinstance(sharder, EmbeddingCollectionSharder):
        return settings | {"use_index_dedup": sharder._use_index_dedup}
    order = sharder._sharded_module_order_overwrite
    return settings | {"sharded_module_order_overwrite": order}


def embedding_kernels(sharded: Any) -> list[BaseEmbedding]:
    """Return what holds the tables of a sharded collection on this trainer."""
    modules = (m for lookup in sharded._lookups for m in lookup.modules())
    return [module for module in modules if isinstance(module, BaseEmbedding)]


def require_no_capture() -> None:
    """Reject a wait for rows while the current stream captures a CUDA graph."""
    if torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            "Rows of tables on the servers must be looked up outside of a CUDA graph: "
            "other threads bring them, others each time. Received: a lookup while the "
            "current stream is captured. Capture the dense half alone, by "
            'torch.cuda.graph(..., capture_error_mode="thread_local").'
        )


def require_no_trace() -> None:
    """Reject a lookup while a model is traced: its rows would be those of an example.

    Called where one of ``TRACES`` holds; modes of dispatch, as of profilers, are none.
    """
    if torch._C._is_tracing():
        how = "torch.jit.trace, as by torch.onnx.export(dynamo=False)"
    elif torch.compiler.is_exporting():
        how = "torch.export"
    elif not (
        torch._C._len_torch_dispatch_stack()
        or torch._ops._len_torch_dispatch_stack_pre_dispatch()
    ):
        return
    elif get_proxy_mode() is not None:
        how = "make_fx"
    elif detect_fake_mode() is not None:
        how = "a FakeTensorMode, in which ids have no numbers"
    else:
        return
    raise ConfigError(
        "Rows of tables on the servers must be looked up outside of a trace, which "
        "would answer every batch with the rows of its example. Received: a lookup in "
        f"{how}. export_for_serving(model, path, client, example) of persia_torchrec "
        "exports such a model, and its lookups; or trace the dense half alone, with "
        "embeddings as its inputs."
    )


TRACES: tuple[Callable[[], object], ...] = (
    torch._C._is_tracing,
    torch.compiler.is_exporting,
    torch._C._len_torch_dispatch_stack,
    torch._ops._len_torch_dispatch_stack_pre_dispatch,
)
"""What holds in a trace, or where it may be one; looked at before each lookup."""

NOT_IN_GRAPHS = (
    "rows of tables on the servers are looked up outside of graphs; to export the "
    "model, use export_for_serving of persia_torchrec"
)
"""Why Dynamo breaks its graph at a lookup; it says so where it may not."""


def traced_call(
    module: nn.Module,
    given: torch.fx.Proxy,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.fx.Proxy:
    """Return the call of a module in a trace of torch.fx, whose value is ``given``.

    The module is a leaf of the graph, whatever the names of a tracer's leaf modules.
    """
    tracer: Any = given.tracer
    path = tracer.path_of_module(module)
    return tracer.create_proxy("call_module", path, args, kwargs)


def replace_trackers(model: Any, tracker: Callable[..., Any]) -> None:
    """Let a ``DistributedModelParallel`` make its trackers of rows by a function."""
    model._init_delta_tracker = model._init_raw_id_tracker = tracker


class QConfig:
    """The attribute ``qconfig`` of modules with tables on servers.

    ``quantize_inference_model`` asks each module for it, and swaps those whose type it
    knows. A sharded one it would leave as it is, without a word. So does
    ``quantize_embeddings``, which scripts call for the layers that are left.
    """

    def __get__(self, module: Any, owner: type) -> Any:
        """Return what was set; reject, where tables are about to be quantized."""
        frame = inspect.currentframe()
        while frame and frame.f_code.co_name != "quantize_inference_model":
            frame = frame.f_back
        if frame is not None:
            raise ConfigError(
                "A model to quantize must have its tables in memory. Received: one "
                "with tables on the embedding servers. Make a plain copy first: build "
                "the model with TorchRec's collections on the CPU, do not shard it, "
                "load the dense half and plain_state_dict(client, copy) into it, and "
                "quantize that."
            )
        try:
            return vars(module)["qconfig"]
        except KeyError:
            raise AttributeError("qconfig") from None

    def __set__(self, module: Any, value: object) -> None:
        """Keep it, as a module without tables does."""
        vars(module)["qconfig"] = value

    def __delete__(self, module: Any) -> None:
        """Forget it."""
        del vars(module)["qconfig"]


class ParametersInTurn(dict[str, nn.Parameter]):
    """Parameters by table that say whose turn it is, and None at the end.

    A planner asks a sharder once per table for sharding types and kernels, but does not
    say for which table: it asks while it iterates over ``items()``.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        begin_turn: Callable[[str | None], None],
    ) -> None:
        super().__init__(parameters)
        self._begin_turn = begin_turn

    def items(self) -> Iterator[tuple[str, nn.Parameter]]:  # type: ignore[override]
        """Yield tables and parameters, each in its turn."""
        try:
            for name, parameter in super().items():
                self._begin_turn(name)
                yield name, parameter
        finally:
            self._begin_turn(None)
