"""A model without its collections: it is given what they would return.

Where a model is served, one part looks rows up, and this one does the rest, on the same
inputs by the same code. It can be exported, as no collection is left in it.
"""

import copy
import io
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, Literal

import msgspec
import torch
import torchrec
from torch import nn

from persia_torchrec.checkpoint.signature import ModelSignature
from persia_torchrec.errors import CheckpointError, ConfigError
from persia_torchrec.lookup.bags import FeatureSpec
from persia_torchrec.parsing.decoding import decoder_of
from persia_torchrec.sharding.exported_program import read_program
from persia_torchrec.sharding.sharded_module import (
    ShardedRemoteCollection,
    ShardedRemoteEmbeddingBagCollection,
    ShardedRemoteEmbeddingCollection,
)

Tensors = Sequence[torch.Tensor]


class CollectionDescription(msgspec.Struct, frozen=True):
    """A collection of a model.

    Attributes:
        path: of the module in the model.
        kind: "bags" gives a KeyedTensor ``(B, T)``; "sequences" a JaggedTensor
            ``(L, D)`` of each feature.
        features: in the order of the columns; their tables have the servers' names.
        dims: of each feature.
        needs_ids: whether sequences come with their ids.
    """

    path: str
    kind: Literal["bags", "sequences"]
    features: tuple[FeatureSpec, ...]
    dims: tuple[int, ...]
    needs_ids: bool = False

    @property
    def num_tensors(self) -> int:
        """How many tensors of rows the collection is given."""
        return 1 if self.kind == "bags" else len(self.features)


class Arguments(msgspec.Struct, frozen=True):
    """How a model takes its arguments: one is the KeyedJaggedTensor, others tensors.

    Attributes:
        keys: of the KeyedJaggedTensor.
        kjt_at: its position among the arguments.
    """

    keys: tuple[str, ...]
    kjt_at: int


class ExportedModel(msgspec.Struct, frozen=True):
    """What a file says of a model.

    Attributes:
        signature: its inputs by name.
        collections: whose rows it is given.
        arguments: which it takes.
        factory: "module:function" that makes it; None: it was exported.
    """

    signature: ModelSignature
    collections: tuple[CollectionDescription, ...]
    arguments: Arguments
    factory: str | None = None


class _Batch(threading.local):
    """What this thread's batch has: rows of each collection, lengths of each key."""

    rows: Mapping[str, Tensors]
    lengths: Mapping[str, torch.Tensor]


class _Given(nn.Module):
    """In the place of a collection: returns what :class:`DenseHalf` was given."""

    def __init__(self, description: CollectionDescription, batch: _Batch) -> None:
        super().__init__()
        self.description = description
        self._batch = batch

    def forward(self, features: torchrec.KeyedJaggedTensor) -> Any:
        """Return the collection's output for the features of this batch."""
        about, batch = self.description, self._batch
        rows_of = batch.rows[about.path]
        names = [feature.name for feature in about.features]
        if about.kind == "bags":
            return torchrec.KeyedTensor(names, list(about.dims), rows_of[0])
        jagged = features.to_dict() if about.needs_ids else {}
        found: dict[str, torchrec.JaggedTensor] = {}
        for feature, rows in zip(about.features, rows_of, strict=True):
            if feature.name in found:
                rows = torch.cat([found[feature.name].values(), rows], dim=1)
            found[feature.name] = torchrec.JaggedTensor(
                values=rows,
                lengths=batch.lengths[feature.key],
                weights=jagged[feature.key].values() if jagged else None,
            )
        return found


class DenseHalf(nn.Module):
    """A model that is given the rows of its collections.

    Args:
        model: whose collections are replaced, in place.
        collections: of the model.
        arguments: of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        collections: Sequence[CollectionDescription],
        arguments: Arguments,
    ) -> None:
        super().__init__()
        self._batch, self._collections = _Batch(), tuple(collections)
        for about in self._collections:
            parent, _, name = about.path.rpartition(".")
            if not name:
                raise ConfigError("A model must hold its collections, not be one.")
            setattr(model.get_submodule(parent), name, _Given(about, self._batch))
        self.model = model
        self._arguments = arguments

    def forward(self, dense: list[torch.Tensor], given: list[torch.Tensor]) -> Any:
        """Run the model.

        Args:
            dense: arguments that are tensors, in their order.
            given: ids of the KeyedJaggedTensor, int64 ``(N,)``, and lengths, int32
                ``(F, B)``; then the rows of each collection: ``(B, T)`` of bags, and
                ``(L, D)`` of each feature of sequences.

        Returns:
            What the model returns, as one tensor: several ones are columns.
        """
        ids, lengths, *rows = given
        keys, position = self._arguments.keys, self._arguments.kjt_at
        rows_of: dict[str, Tensors] = {}
        for about in self._collections:
            rows_of[about.path], rows = (
                rows[: about.num_tensors],
                rows[about.num_tensors :],
            )
        self._batch.rows = rows_of
        self._batch.lengths = dict(zip(keys, lengths.unbind(), strict=True))
        kjt = torchrec.KeyedJaggedTensor(list(keys), ids, lengths=lengths.reshape(-1))
        return _one_tensor(self.model(*dense[:position], kjt, *dense[position:]))


def _one_tensor(output: Any) -> Any:
    """Return several outputs, of which each has a row for each sample, as columns."""
    if isinstance(output, dict):
        output = tuple(output.values())
    if not isinstance(output, tuple | list):
        return output
    parts = [part.flatten(1) if part.ndim > 1 else part.unsqueeze(1) for part in output]
    return torch.cat(parts, dim=1)


def sharded_collections(model: nn.Module) -> dict[str, ShardedRemoteCollection]:
    """Return the collections of a model that are on the servers, by path."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, ShardedRemoteCollection)
    }


def describe_sharded(
    path: str, module: ShardedRemoteCollection
) -> CollectionDescription:
    """Return what a collection gives; ConfigError if it is of no kind known here."""
    kinds: dict[type[nn.Module], Literal["bags", "sequences"]] = {
        ShardedRemoteEmbeddingBagCollection: "bags",
        ShardedRemoteEmbeddingCollection: "sequences",
    }
    if type(module) not in kinds or module.spec.is_weighted:
        raise ConfigError(
            "A model for serving must have EmbeddingBagCollections without weights, "
            f"and EmbeddingCollections. Received: {path!r}, {type(module).__name__}."
        )
    dim_of = {table.name: table.dim for table in module.spec.tables}
    return CollectionDescription(
        path,
        kinds[type(module)],
        module.spec.features,
        tuple(dim_of[feature.table] for feature in module.spec.features),
        module.spec.needs_ids,
    )


def copy_dense(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the CPU, with nothing in its collections' places."""
    empty = {id(module): nn.Module() for module in sharded_collections(model).values()}
    copied: nn.Module = copy.deepcopy(model, dict(empty))
    return copied.to("cpu").eval()


def load_served(
    data: bytes, file: str, factories: Sequence[str] = ()
) -> tuple[nn.Module, ExportedModel]:
    """Return what runs on rows, :meth:`DenseHalf.forward`, and what the file says.

    Args:
        data: of the file.
        file: its path, for errors.
        factories: "module:function" of each that may be called.

    Raises:
        CheckpointError: it is no file of :func:`export_for_serving`.
        ConfigError: the factory is not listed, cannot be imported, or makes another
            model.
    """
    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        about = decoder_of(ExportedModel).decode(state["about"])
        if about.factory is None:
            return read_program(state["program"].numpy().tobytes()), about
    except Exception as exc:  # what a damaged file makes the readers raise has no list
        why = str(exc).strip().partition("\n")[0].removesuffix(".")
        raise CheckpointError(
            f"{file} must be a file of export_for_serving. Received: "
            f"{type(exc).__name__}: {why}."
        ) from exc
    if about.factory not in factories:
        raise ConfigError(
            f"A server must be told the factory that makes the model of {file}, "
            f"as it runs its code. Received: {about.factory!r:.200} in the file, and "
            f"{', '.join(factories) or 'none'}. If you know it, add --factory "
            f"{shlex.quote(about.factory[:200])}."
        )
    half = make_by_factory(about.factory, about.collections, about.arguments)
    half.load_state_dict(state["weights"])
    return half.eval(), about


def make_by_factory(
    factory: str, collections: Sequence[CollectionDescription], arguments: Arguments
) -> DenseHalf:
    """Return the model of a factory, without collections, or raise ConfigError."""
    try:
        make: Callable[[], nn.Module] = resolve_name(factory)
        return DenseHalf(make(), collections, arguments)
    except Exception as exc:  # it is a user's code
        raise ConfigError(
            f"factory must name a function that returns the model, as "
            f"'module:function'. Received: {factory!r} ({type(exc).__name__}: {exc})."
        ) from exc
