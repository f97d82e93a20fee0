"""A model that a TorchRec loop has trained, as a checkpoint that can be served."""

import inspect
import io
import os
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import torchrec
from torch import nn
from torch.fx.experimental import _config as shapes_config
from torchrec.distributed.types import ShardedModule

from persia_torchrec import timeouts
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.signature import (
    SERVED_MODEL,
    DenseInput,
    ModelSignature,
)
from persia_torchrec.client.checkpoint_client import SavedCheckpoint
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.errors import ConfigError
from persia_torchrec.job.member import JobMember
from persia_torchrec.sharding.dense_half import (
    Arguments,
    CollectionDescription,
    DenseHalf,
    ExportedModel,
    copy_dense,
    describe_sharded,
    make_by_factory,
    sharded_collections,
)
from persia_torchrec.sharding.exported_program import checked_program
from persia_torchrec.training.checkpoint import at_first, state_bytes

_NUM_LEAST = 2  # samples of an example: torch.export takes 1 for a constant


@JobMember.pausing()
def export_for_serving(
    model: nn.Module,
    path: str | os.PathLike[str],
    client: EmbeddingClient,
    example: Sequence[torch.Tensor | torchrec.KeyedJaggedTensor],
    *,
    factory: str | None = None,
    timeout_s: float = timeouts.CHECKPOINT_S,
) -> SavedCheckpoint:
    """Write a checkpoint that ``python -m persia_torchrec.serving`` predicts from.

    Every trainer calls it between two steps; the first one writes. Rows are those of
    the servers, the rest of the model is exported by ``torch.export`` with batches of
    any size.

    Args:
        model: the ``DistributedModelParallel``, or what it holds.
        path: of a folder that trainers and servers share, as of
            :func:`save_checkpoint`; the checkpoint is a new folder in it.
        client: of the servers.
        example: arguments of the model's ``forward``, in their order: tensors ``(B,
            ...)``, and one KeyedJaggedTensor without weights, of at least two samples
            and two ids of each feature. Names of tensors are those of ``forward``.
        factory: "module:function", which returns a new model, its collections on
            any device: for a model that ``torch.export`` does not take, as one that
            makes decisions by its inputs. Weights are loaded into it. The server must
            be able to import the module.
        timeout_s: seconds that the servers may take.

    Returns:
        The checkpoint. A prediction is what the model returns in evaluation mode; of
        several outputs each is a column.

    Raises:
        ConfigError: the model is of no kind that can be served, or torch.export does
            not take it; it says what to do.
        CheckpointError: ``path`` is a file, or a server failed; there is no new
            checkpoint.
    """
    Folder(path).names()  # an error comes before the export, which takes seconds
    data = _encode(model, example, factory)  # on each trainer, with the same error

    def write() -> SavedCheckpoint:
        task = client.checkpoints.start_dump(
            os.fspath(path), timeout_s=timeout_s, files={SERVED_MODEL: data}
        )
        return task.wait()

    limit_s = timeouts.exchange_s(client.recovery_s, timeout_s)
    return at_first(write, SavedCheckpoint, limit_s)


def _encode(
    model: nn.Module,
    example: Sequence[torch.Tensor | torchrec.KeyedJaggedTensor],
    factory: str | None,
) -> bytes:
    """Return the file of a model."""
    model, collections = _unwrapped(model)
    names, dense, kjt, position = _read_example(model, example)
    arguments = Arguments(tuple(kjt.keys()), position)
    half = DenseHalf(copy_dense(model), collections, arguments)
    lengths = kjt.lengths().cpu().to(torch.int32).view(len(kjt.keys()), -1)
    given = [kjt.values().cpu().to(torch.int64), lengths]
    given += _made_up_rows(collections, kjt)
    with torch.inference_mode():
        output = half(dense, given)
    inputs = tuple(
        DenseInput(name, str(t.dtype).removeprefix("torch."), (*t.shape[1:],))
        for name, t in zip(names, dense, strict=True)
    )
    signature = ModelSignature(arguments.keys, inputs, tuple(output.shape[1:]))
    about = ExportedModel(signature, collections, arguments, factory)
    state: dict[str, Any] = {"about": msgspec.json.encode(about).decode()}
    if factory is None:
        program = _export(half, dense, given)
        state["program"] = torch.frombuffer(bytearray(program), dtype=torch.uint8)
    else:
        make_by_factory(factory, collections, arguments).load_state_dict(
            half.state_dict()
        )
        state["weights"] = half.state_dict()
    return state_bytes(state)


def _unwrapped(
    model: nn.Module,
) -> tuple[nn.Module, tuple[CollectionDescription, ...]]:
    """Return a model without DMP and DDP around it, and what its collections are."""
    while isinstance(getattr(model, "module", None), nn.Module):  # DMP, DDP
        model = model.module  # type: ignore[assignment]
    sharded = sharded_collections(model)
    for name, module in model.named_modules():
        if isinstance(module, ShardedModule) and name not in sharded:
            raise ConfigError(
                "A model for serving must have all its tables on the servers. "
                f"Received: {name!r}, which has some on the trainers."
            )
    if not sharded:
        raise ConfigError(
            "A model for serving must have collections on the servers. Received: "
            f"{type(model).__name__} without any."
        )
    return model, tuple(describe_sharded(*item) for item in sharded.items())


def _read_example(
    model: nn.Module, example: Sequence[torch.Tensor | torchrec.KeyedJaggedTensor]
) -> tuple[list[str], list[torch.Tensor], torchrec.KeyedJaggedTensor, int]:
    """Return the tensors by name, the KeyedJaggedTensor, and its position."""
    at = [i for i, e in enumerate(example) if isinstance(e, torchrec.KeyedJaggedTensor)]
    dense = [e.detach().cpu() for e in example if isinstance(e, torch.Tensor)]
    names = list(inspect.signature(model.forward).parameters)[: len(example)]
    if len(at) != 1 or len(dense) + 1 != len(example):
        several = ", ".join(names[i] for i in at if i < len(names))
        how = (
            " Let forward take one, which collections take their own keys of: "
            f"KeyedJaggedTensor.concat([{several}])"
        )
        raise ConfigError(
            "example must have tensors and one KeyedJaggedTensor, as forward takes "
            f"them. Received: {[type(e).__name__ for e in example]}."
            f"{how if len(at) > 1 else ''}"
        )
    kjt: Any = example[at[0]]
    if kjt.weights_or_none() is not None:
        raise ConfigError("The KeyedJaggedTensor of example must have no weights.")
    del names[at[0]]
    if kjt.stride() < _NUM_LEAST:
        raise ConfigError(
            f"example must have at least {_NUM_LEAST} samples. Received: "
            f"{kjt.stride()}."
        )
    return names, dense, kjt, at[0]


def _made_up_rows(
    collections: Sequence[CollectionDescription], kjt: torchrec.KeyedJaggedTensor
) -> list[torch.Tensor]:
    """Return rows of the shapes that the collections give for an example."""
    rows, jagged = [], kjt.to_dict()
    for about in collections:
        if about.kind == "bags":
            rows.append(torch.rand(kjt.stride(), sum(about.dims)))
        else:
            pairs = zip(about.features, about.dims, strict=True)
            rows += [torch.rand(len(jagged[f.key].values()), dim) for f, dim in pairs]
    return rows


def _export(
    half: DenseHalf, dense: list[torch.Tensor], given: list[torch.Tensor]
) -> bytes:
    """Return a model as torch.export keeps it, for batches of any size."""
    dynamic = torch.export.Dim.DYNAMIC
    of_given = [{0: dynamic} for _ in given]
    of_given[1] = {1: dynamic}  # lengths
    sizes = [{0: dynamic} for _ in dense], of_given
    buffer = io.BytesIO()
    try:
        # Otherwise a size that is compared with one of the data is taken to be >= 2.
        config: Any = shapes_config
        with config.patch(backed_size_oblivious=True):
            program = torch.export.export(
                half, (dense, given), dynamic_shapes=sizes, strict=False
            )
        torch.export.save(program, buffer)
        return checked_program(buffer.getvalue())  # as servers will
    except Exception as exc:  # the exporter raises a class for each kind of mistake
        why = str(exc).strip().partition("\n")[0]
        raise ConfigError(
            "The model must be exportable by torch.export for any batch size "
            "(x.shape[0] is such a size, len(x) a number), or have a "
            'factory="module:function" that makes it. Received: '
            f"{type(half.model).__name__} ({type(exc).__name__}: {why})."
        ) from exc
