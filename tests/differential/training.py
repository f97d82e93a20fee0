"""A drawn model trained on servers, by plain TorchRec, and by formulas.

The formulas are a dense model in double precision over all rows of all tables, whose
gradients ``tests/support/reference.py`` applies once a step: the sum of the trainers'.
"""

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fused_embedding import FusedEmbeddingCollectionSharder
from torchrec.distributed.fused_embeddingbag import FusedEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from persia_torchrec import EmbeddingClient, TableSettings, remote_sharders
from persia_torchrec.sharding.training_blocks import join
from tests.differential.drawing import HALVES, SHARDER, TABLES, Collection, Drawn, Table
from tests.differential.model import (
    DENSE_LR,
    Batch,
    Net,
    Over,
    fused_params_of,
    loss_of,
    make_batches,
)
from tests.support.reference import Row, step
from tests.support.remote_job import CPU, ids_of, remote_modules, shard

WHOLE = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
FALL = 0.3
"""What rates are multiplied by, where they fall."""


@dataclass
class Outcome:
    """What a training gave, by names: losses of trainers, tables, states, the rest."""

    numbers: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, name: str, numbers: Any) -> None:
        if isinstance(numbers, torch.Tensor):
            numbers = numbers.detach().double().numpy()
        self.numbers[name] = np.array(numbers, dtype=np.float64)


def name_of(collection: Collection, table: Table) -> str:
    """Return a table's name in outcomes: its path in the model."""
    return f"{collection.path}.{table.name}"


def train_on_servers(
    drawn: Drawn, rank: int, addresses: list[str], start: dict[str, torch.Tensor]
) -> Outcome:
    """Train on the servers; ``start`` gets the weights that all begin with."""
    with contextlib.closing(EmbeddingClient.connect(addresses)) as client:
        sharders = _remote_sharders(drawn, client)
        wrapper = DefaultDataParallelWrapper(static_graph=False)
        model = shard(
            _net(drawn, in_plain=False), *sharders, data_parallel_wrapper=wrapper
        )
        if drawn.is_loaded:
            model.load_state_dict(_drawn_weights(drawn), strict=False)
            dist.barrier()
        state = model.state_dict()
        start |= {name: whole(state[key]) for name, key in _keys(drawn).items()}
        dist.barrier()
        names = _names_on_servers(drawn)

        def freeze(number: int) -> None:
            at = [(c, t) for c, t in drawn.tables if t.frozen_at == number]
            if at:
                sharders.freeze([names[name_of(c, t)] for c, t in at])

        outcome = Outcome()
        block = join(model) if drawn.is_uneven else contextlib.nullcontext()
        batches = make_batches(drawn, rank)
        with block, _planted(drawn, model, batches, rank):
            losses = _train(drawn, model, batches, freeze)
        sharders.flush()
        dist.barrier()
        outcome.add(f"losses of {rank}", losses)
        _add_learnt(outcome, drawn, model, in_plain=False)
        if not drawn.runs_in_plain:
            for collection, table in drawn.tables:
                name = name_of(collection, table)
                rows = client.read(names[name], ids_of(range(table.num_rows)))
                outcome.add(f"{name}: state", rows[:, table.dim :])
        dist.barrier()
        for module in remote_modules(model):
            module.pipeline.close()
    return outcome


def train_in_plain(drawn: Drawn, rank: int, start: dict[str, torch.Tensor]) -> Outcome:
    """Train by TorchRec's own sharders, each table whole on a trainer."""
    given = {"fused_params": fused_params_of(drawn)}
    sharders = [
        EmbeddingBagCollectionSharder(**given),
        EmbeddingCollectionSharder(**given),
        FusedEmbeddingBagCollectionSharder(),
        FusedEmbeddingCollectionSharder(),
    ]
    constraints = {table.name: WHOLE for _, table in drawn.tables}
    model = shard(_net(drawn, in_plain=True), *sharders, constraints=constraints)
    state = model.state_dict()
    for name, key in _keys(drawn).items():
        for _, piece in _pieces(state[key]):
            piece.copy_(start[name])
    outcome = Outcome()
    losses = _train(
        replace(drawn, is_pipelined=False), model, make_batches(drawn, rank)
    )
    outcome.add(f"losses of {rank}", losses)
    _add_learnt(outcome, drawn, model, in_plain=True)
    return outcome


def _net(drawn: Drawn, *, in_plain: bool) -> Net:
    torch.manual_seed(drawn.seed)
    return Net(drawn, in_plain=in_plain)


def _remote_sharders(drawn: Drawn, client: EmbeddingClient) -> Any:
    tables = {}
    names = _names_on_servers(drawn)
    for collection, table in drawn.tables:
        given: dict[str, Any] = {}
        if table.dtype in HALVES:
            given["stochastic_rounding"] = False
        if drawn.way == TABLES:
            given["optimizer"] = table.choice.formula
        if given:
            tables[names[name_of(collection, table)]] = TableSettings(**given)
    optimizer = None
    if drawn.way == SHARDER:
        optimizer = drawn.common.formula
    more = {"fused_params": fused_params_of(drawn), "tables": tables}
    return remote_sharders(client, optimizer, **more)


def _names_on_servers(drawn: Drawn) -> dict[str, str]:
    """Return the name of each table on the servers: its path where two have one."""
    all_names = [table.name for _, table in drawn.tables]
    return {
        name_of(c, t): name_of(c, t) if all_names.count(t.name) > 1 else t.name
        for c, t in drawn.tables
    }


def _keys(drawn: Drawn) -> dict[str, str]:
    """Return the key of each table in state dicts."""
    kinds = "embeddings", "embedding_bags"
    return {
        name_of(c, t): f"{c.path}.{kinds[c.has_bags]}.{t.name}.weight"
        for c, t in drawn.tables
    }


def _drawn_weights(drawn: Drawn) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(drawn.seed)
    return {
        key: torch.randn(table.num_rows, table.dim, generator=generator)
        for key, (_, table) in zip(_keys(drawn).values(), drawn.tables, strict=True)
    }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all rows of a table on servers; all trainers call it together."""
    rows = torch.zeros(tuple(tensor.size()))
    for first, piece in _pieces(tensor):
        rows[first : first + len(piece)] = piece.float()
    dist.all_reduce(rows)
    return rows


def _pieces(tensor: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Return the rows that this trainer has, beside the number of the first."""
    if not hasattr(tensor, "local_shards"):
        return [(0, tensor.clone())] if dist.get_rank() == 0 else []
    shards = tensor.local_shards()
    return [(piece.metadata.shard_offsets[0], piece.tensor) for piece in shards]


def _add_learnt(
    outcome: Outcome, drawn: Drawn, model: DistributedModelParallel, *, in_plain: bool
) -> None:
    """Add tables, their optimizers' states by TorchRec's names, and the dense half.

    In plain TorchRec each table is whole on one trainer.
    """

    def add(name: str, tensor: torch.Tensor) -> None:
        if not in_plain:
            outcome.add(name, whole(tensor))
        for _, piece in _pieces(tensor) if in_plain else []:
            outcome.add(name, piece)

    state, fused = model.state_dict(), model.fused_optimizer.state_dict()["state"]
    for name, key in _keys(drawn).items():
        add(name, state[key])
        for kind, tensor in fused.get(key, {}).items() if drawn.runs_in_plain else []:
            add(f"{name}: {kind}", tensor)
    for key, tensor in state.items():
        if key.startswith("over."):
            outcome.add(key, tensor)


def _optimizers(drawn: Drawn, model: nn.Module) -> Any:
    """Return what steps the dense half, with the tables' rates or without."""
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = {name: weight for name, weight in dense.items() if "over." in name}
    given = {"lr": DENSE_LR, "momentum": drawn.momentum}
    if not drawn.has_groups:
        return torch.optim.SGD(dense.values(), **given)
    own = KeyedOptimizerWrapper(dense, lambda params: torch.optim.SGD(params, **given))
    return CombinedOptimizer([model.fused_optimizer, own])


def _train(
    drawn: Drawn,
    model: DistributedModelParallel,
    batches: list[Batch],
    before: Any = lambda _: None,
) -> list[float]:
    """Return the loss of each step."""
    optimizer = _optimizers(drawn, model)
    pipeline = data = None
    if drawn.is_pipelined:
        pipeline = TrainPipelineSparseDist(model, optimizer, CPU)
        data = iter(batches)
    losses = []
    for number, batch in enumerate(batches):
        before(number)
        if number == drawn.falls_at:
            for group in optimizer.param_groups:
                group["lr"] *= FALL
        if pipeline is not None:
            loss = loss_of(pipeline.progress(data), batch.labels)
        else:
            optimizer.zero_grad()
            loss, _ = model(batch)
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@contextlib.contextmanager
def _planted(
    drawn: Drawn, model: nn.Module, batches: list[Batch], rank: int
) -> Iterator[None]:
    """Move an id of a batch of the first trainer, or double a gradient in it."""
    if drawn.plant is None or rank:
        yield
        return
    at, column, collection, key = next(
        (at, column, collection, key)
        for at, batch in enumerate(batches)
        for column, (collection, key) in enumerate(_columns(drawn))
        if len(_ids_of(batch, collection)[key].values())
    )
    ids = _ids_of(batches[at], collection)
    feature = ids[key]
    if drawn.plant == "id":
        feature.values()[0] = int(feature.values()[0]) ^ 1
        yield
        return
    num_calls, lengths = itertools.count(), _of_samples(ids, key, feature.lengths())

    def double(grad: torch.Tensor) -> torch.Tensor:
        sizes = grad.abs().sum(1) * lengths.ne(0)
        doubled = grad.clone()
        doubled[sizes.argmax()] *= 2
        return doubled

    def hook(_: nn.Module, __: object, output: torch.Tensor) -> None:
        if next(num_calls) == at:
            output.register_hook(double)

    handle = model.module.taken[column].register_forward_hook(hook)
    yield
    handle.remove()


def _columns(drawn: Drawn) -> list[tuple[Collection, str]]:
    return [(c, key) for c in drawn.collections for _, key in c.features]


def _ids_of(batch: Batch, collection: Collection) -> KeyedJaggedTensor:
    ids: KeyedJaggedTensor = getattr(batch, collection.path)
    return ids


def train_by_formulas(drawn: Drawn, start: dict[str, torch.Tensor]) -> Outcome:
    """Train one model with the batches of all trainers, step by step."""
    tables = {name_of(c, t): _Rows(t, start[name_of(c, t)]) for c, t in drawn.tables}
    torch.manual_seed(drawn.seed)
    over = Over(drawn).double()
    optimizer = torch.optim.SGD(over.parameters(), DENSE_LR, momentum=drawn.momentum)
    batches = [make_batches(drawn, rank) for rank in range(len(drawn.num_steps))]
    losses: list[list[float]] = [[] for _ in batches]
    for number in range(max(drawn.num_steps)):
        if number == drawn.falls_at:
            optimizer.param_groups[0]["lr"] *= FALL
            for table in tables.values():
                table.factor = FALL
        given = [
            (rank, of[number]) for rank, of in enumerate(batches) if number < len(of)
        ]
        weights = {name: table.weights() for name, table in tables.items()}
        optimizer.zero_grad()
        for rank, batch in given:
            loss = _loss(drawn, over, weights, batch)
            (loss / len(batches)).backward()
            losses[rank].append(float(loss.detach()))
        optimizer.step()
        for collection, table in drawn.tables:
            name = name_of(collection, table)
            ids = {i for _, b in given for i in _ids_in(b, collection, table)}
            tables[name].step(sorted(ids), weights[name].grad, number)
    outcome = Outcome()
    for rank, of_rank in enumerate(losses):
        outcome.add(f"losses of {rank}", of_rank)
    for name, table in tables.items():
        outcome.add(name, table.weights().detach())
        outcome.add(f"{name}: state", [row.state for row in table.rows])
    for name, weight in over.named_parameters():
        outcome.add(f"over.{name}", weight.detach())
    return outcome


class _Rows:
    """The rows of a table in double precision; 16 bits hold what they can."""

    def __init__(self, table: Table, start: torch.Tensor) -> None:
        self._table, self.factor, self._num_steps = table, 1.0, 0
        state = table.choice.formula.initial_state(table.dim)
        self.rows = [
            Row(weights, state.astype(np.float64).copy())
            for weights in start.double().numpy().copy()
        ]

    def weights(self) -> torch.Tensor:
        rows = np.stack([row.weights for row in self.rows])
        return torch.from_numpy(rows).requires_grad_()

    def step(self, ids: list[int], grad: torch.Tensor | None, number: int) -> None:
        """Apply the gradient of a step to the rows that were looked up in it."""
        frozen_at = self._table.frozen_at
        self._num_steps += 1
        if frozen_at is not None and number >= frozen_at:
            return
        optimizer = self._table.choice.scaled(self.factor)
        for id_ in ids:
            of_row = np.zeros(self._table.dim) if grad is None else grad[id_].numpy()
            row = self.rows[id_]
            step(optimizer, row, of_row.copy(), self._num_steps)
            if self._table.dtype in HALVES:
                half = torch.from_numpy(row.weights).to(HALVES[self._table.dtype])
                row.weights[:] = half.double().numpy()


def _loss(
    drawn: Drawn, over: Over, weights: dict[str, torch.Tensor], batch: Batch
) -> torch.Tensor:
    parts = [batch.dense.double()]
    for collection in drawn.collections:
        ids = _ids_of(batch, collection)
        for table, key in collection.features:
            rows = weights[name_of(collection, table)]
            column = _column(collection, table, ids[key], rows)
            parts.append(_of_samples(ids, key, column))
    return loss_of(over(torch.cat(parts, dim=1)), batch.labels.double())


def _of_samples(
    ids: KeyedJaggedTensor, key: str, of_kept: torch.Tensor
) -> torch.Tensor:
    """Return what each sample has of those that are kept once."""
    if ids.inverse_indices_or_none() is None:
        return of_kept
    keys, samples = ids.inverse_indices()
    return of_kept[samples[keys.index(key)]]


def _column(
    collection: Collection, table: Table, feature: Any, rows: torch.Tensor
) -> torch.Tensor:
    """Return what the dense half gets of a feature, per bag."""
    lengths = feature.lengths()
    bag = torch.arange(len(lengths)).repeat_interleave(lengths)
    values = rows[feature.values().long()]
    zeros = torch.zeros(len(lengths), table.dim, dtype=torch.float64)
    if not collection.has_bags:
        return zeros.index_add(0, bag, torch.tanh(_clipped(table, values)))
    if collection.is_weighted:
        values = values * feature.weights().double().unsqueeze(1)
    pooled = zeros.index_add(0, bag, values)
    if table.pooling == "MEAN":
        pooled = pooled / lengths.clamp(min=1).unsqueeze(1)
    return torch.tanh(_clipped(table, pooled))


def _clipped(table: Table, output: torch.Tensor) -> torch.Tensor:
    """Clip the gradient of each element of an output, where the table does."""
    if most := table.choice.max_gradient:
        output.register_hook(lambda grad: grad.clamp(-most, most))
    return output


def _ids_in(batch: Batch, collection: Collection, table: Table) -> set[int]:
    ids = _ids_of(batch, collection)
    return {id_ for key in table.features for id_ in ids[key].values().tolist()}
