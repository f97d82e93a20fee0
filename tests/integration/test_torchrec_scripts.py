"""What TorchRec's and DLRM's example scripts do, with one sharder added.

Each script runs in plain TorchRec and with its tables on the servers, from the same
checkpoint of an unsharded model, and must have the same losses.
"""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingType
from torchrec.inference.modules import quantize_embeddings
from torchrec.inference.state_dict_transform import (
    state_dict_gather,
    state_dict_to_device,
)
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from persia_torchrec import (
    MixedSharder,
    Placement,
    RemoteEmbeddingBagCollectionSharder,
    remote_sharders,
)
from tests.integration.twins import FUSED
from tests.support.remote_job import CPU, META

NUM_ROWS, NUM_STEPS, NUM_SAMPLES = 40, 30, 16


def both(job, script, sharders=None):
    """Run a script in plain TorchRec, and with tables on the servers.

    Its DistributedModelParallel is made by ``sharded(model)``.
    """
    sharders = remote_sharders(job.client) if sharders is None else sharders

    def remote(model, **settings):
        sharded = DistributedModelParallel(
            model, device=CPU, sharders=sharders, **settings
        )
        job.adopt(sharded)
        return sharded

    def plain(model, **settings):
        # The planner would replicate tables as short as these, with a dense optimizer.
        settings.setdefault("plan", planned(model, fused(model)))
        return DistributedModelParallel(model, device=CPU, **settings)

    results = []
    for sharded in (plain, remote):
        torch.manual_seed(0)
        results.append(script(sharded))
    losses = [np.array(of_script[0]) for of_script in results]
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-4)
    # It would not mean much if nothing were learnt.
    assert losses[0][-10:].mean() < 0.98 * losses[0][:10].mean()
    return [of_script[1] for of_script in results]


def fused(model):
    """Return constraints by which tables are trained in the backward pass."""
    kinds = EmbeddingBagCollection, EmbeddingCollection
    tables = [
        name.split(".")[-2]
        for module in model.modules()
        if isinstance(module, kinds)
        for name, _ in module.named_parameters()
    ]
    return dict.fromkeys(tables, FUSED)


def planned(model, constraints, *sharders):
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cpu"), constraints=constraints
    )
    return planner.collective_plan(model, *sharders, pg=dist.group.WORLD)


def kjt(generator, keys, *, dtype=torch.int64, hot=3):
    lengths = torch.randint(hot + 1, (len(keys) * NUM_SAMPLES,), generator=generator)
    ids = torch.randint(NUM_ROWS, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(keys, ids.to(dtype), lengths=lengths.to(torch.int32))


def batches(keys, **settings):
    """Return batches whose labels follow from the ids."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for _ in range(NUM_STEPS):
        sparse = kjt(generator, keys, **settings)
        score = torch.zeros(NUM_SAMPLES)
        for key in keys:
            jagged = sparse[key]
            of_ids = (jagged.values() % 3 - 1).float()
            samples = torch.repeat_interleave(
                torch.arange(NUM_SAMPLES), jagged.lengths()
            )
            score.index_add_(0, samples, of_ids)
        dense = torch.rand(NUM_SAMPLES, 5, generator=generator)
        made.append(Batch(dense, sparse, (score > 0).float()))
    return made


def bags(keys, dim=8):
    return [
        EmbeddingBagConfig(NUM_ROWS, dim, name=f"t_{k}", feature_names=[k])
        for k in keys
    ]


def meta(tables):
    return EmbeddingBagCollection(tables=tables, device=META)


def start_of(model):
    """Return the state of an unsharded model with all of its weights."""
    model = copy.deepcopy(model).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) / 3)
    return model.state_dict()


def pipelined(model, optimizer, data):
    pipeline = TrainPipelineSparseDist(model, optimizer, CPU)
    iterator, losses = iter(data), []
    for _ in data:
        result = pipeline.progress(iterator)
        losses.append(float(result[0]))
    pipeline.detach()
    return losses


class TwoTower(nn.Module):
    """A tower for the query and one for the candidate, of one collection."""

    def __init__(self, ebc):
        super().__init__()
        self.ebc = ebc
        self.query_proj, self.candidate_proj = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, ids):
        pooled = self.ebc(ids)
        return self.query_proj(pooled["user"]), self.candidate_proj(pooled["movie"])


class TwoTowerTask(nn.Module):
    def __init__(self, two_tower):
        super().__init__()
        self.two_tower = two_tower
        self.loss_fn = nn.BCEWithLogitsLoss()

    def forward(self, batch):
        query, candidate = self.two_tower(batch.sparse_features)
        logits = (query * candidate).sum(dim=1)
        loss = self.loss_fn(logits, batch.labels)
        return loss, (loss.detach(), logits.detach(), batch.labels)


@pytest.mark.slow
def test_two_towers_are_trained_and_exported_for_retrieval(job, tmp_path):
    tables = bags(["user", "movie"])

    def script(sharded):
        task = TwoTowerTask(TwoTower(meta(tables)))
        start = start_of(task)
        _apply_optimizer_in_backward(
            RowWiseAdagrad, task.two_tower.ebc.parameters(), {"lr": 0.1}
        )
        model = sharded(task)
        model.load_state_dict(start)
        optimizer = KeyedOptimizerWrapper(
            dict(model.named_parameters()),
            lambda params: torch.optim.Adam(params, lr=0.01),
        )
        losses = pipelined(model, optimizer, batches(["user", "movie"]))
        group = dist.new_group(backend="gloo")
        on_cpu = state_dict_to_device(model.state_dict(), pg=group, device=CPU)
        exported = TwoTowerTask(TwoTower(meta(tables))).to_empty(device="cpu")
        state_dict_gather(on_cpu, exported.state_dict())
        ids = torch.arange(NUM_ROWS)
        lengths = torch.tensor([0] * NUM_ROWS + [1] * NUM_ROWS)
        with torch.no_grad():
            pooled = exported.two_tower.ebc(
                KeyedJaggedTensor(["user", "movie"], ids, lengths=lengths)
            )
            items = exported.two_tower.candidate_proj(pooled["movie"])
        quantised = quantize_embeddings(model, torch.qint8, inplace=True)
        torch.save(quantised.state_dict(), tmp_path / "model.pt")
        return losses, items

    plain, remote = both(job, script)
    torch.testing.assert_close(remote, plain, rtol=1e-3, atol=1e-4)
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert saved["two_tower.ebc.embedding_bags.t_movie.weight"].shape == (NUM_ROWS, 8)


class Bert(nn.Module):
    """A transformer over the history of items, which predicts those that are masked."""

    def __init__(self):
        super().__init__()
        config = EmbeddingConfig(
            num_embeddings=NUM_ROWS,
            embedding_dim=8,
            name="item",
            feature_names=["item"],
        )
        self.history = EmbeddingCollection(tables=[config], device=META)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, NUM_ROWS)

    def forward(self, ids):
        items = self.history(ids)["item"].to_padded_dense(6)
        return self.out(self.block(items))


@pytest.mark.slow
def test_a_transformer_learns_the_masked_items_of_a_history(job):
    generator = torch.Generator().manual_seed(3)
    data = []
    for _ in range(NUM_STEPS):
        items = (
            torch.arange(6) + torch.randint(30, (NUM_SAMPLES, 1), generator=generator)
        ) + 1
        masked = items.where(torch.rand(items.shape, generator=generator) < 0.8, 0)
        lengths = torch.full((NUM_SAMPLES,), 6)
        data.append(
            (KeyedJaggedTensor(["item"], masked.ravel(), lengths=lengths), items)
        )

    def script(sharded):
        bert = Bert()
        start = start_of(bert)
        _apply_optimizer_in_backward(
            torch.optim.Adagrad, bert.history.parameters(), {"lr": 0.1}
        )
        model = sharded(bert)
        model.load_state_dict(start)
        dense = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(model.named_parameters())),
            lambda params: torch.optim.Adam(params, lr=0.01),
        )
        optimizer, losses = CombinedOptimizer([model.fused_optimizer, dense]), []
        for ids, items in data:
            optimizer.zero_grad()
            logits = model(ids)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), items.ravel())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        with torch.no_grad():
            ranks = model(data[0][0]).argsort(dim=-1, descending=True)
        return losses, ranks[..., 0]

    plain, remote = both(job, script)
    assert (plain == remote).float().mean() > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_dlrm_trains_on_several_ids_a_feature(job, tmp_path, dtype):
    keys = ["c0", "c1", "c2"]

    def script(sharded):
        dlrm = DLRM(meta(bags(keys)), 5, [8, 8], [8, 1], dense_device=CPU)
        train = DLRMTrain(dlrm)
        start = start_of(train)
        _apply_optimizer_in_backward(
            torch.optim.Adagrad,
            train.model.sparse_arch.parameters(),
            {"lr": 0.05, "eps": 1e-8},
        )
        model = sharded(train)
        model.load_state_dict(start)
        dense = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(model.named_parameters())),
            lambda params: torch.optim.SGD(params, lr=0.1),
        )
        optimizer = CombinedOptimizer([model.fused_optimizer, dense])
        data = batches(keys, dtype=dtype, hot=6)
        losses = pipelined(model, optimizer, data)
        folder = tmp_path / sharded.__name__
        state = {"model": model, "optimizer": model.fused_optimizer}
        dcp.save(state, checkpoint_id=folder)
        return losses, (model, folder)

    (plain, plain_folder), (remote, remote_folder) = both(job, script)
    # Each loads the other's checkpoint.
    for model, folder in ((plain, remote_folder), (remote, plain_folder)):
        state = {"model": model, "optimizer": model.fused_optimizer}
        dcp.load(state, checkpoint_id=folder)
    batch = batches(keys, dtype=dtype)[0]
    with torch.no_grad():
        losses = [model(batch)[0] for model in (plain, remote)]
    torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_dlrm_trains_with_data_parallel_tables_beside_those_on_the_servers(job):
    keys = ["c0", "c1", "c2"]
    constraints = {
        "t_c1": ParameterConstraints(
            sharding_types=[ShardingType.DATA_PARALLEL.value],
            compute_kernels=[EmbeddingComputeKernel.DENSE.value],
        )
    }
    sharder = MixedSharder(
        RemoteEmbeddingBagCollectionSharder(job.client),
        Placement(constraints=constraints),
    )

    def script(sharded):
        dlrm = DLRM(meta(bags(keys)), 5, [8, 8], [8, 1], dense_device=CPU)
        train = DLRMTrain(dlrm)
        start = start_of(train)
        of_tables = train.model.sparse_arch.embedding_bag_collection.embedding_bags
        for name, table in of_tables.items():
            if name != "t_c1":
                _apply_optimizer_in_backward(
                    RowWiseAdagrad, table.parameters(), {"lr": 0.3}
                )
        if sharded.__name__ == "remote":
            plan = planned(train, constraints, [sharder])
        else:
            plan = planned(train, fused(train) | constraints)
        model = sharded(train, plan=plan)
        model.load_state_dict(start)
        dense = dict(in_backward_optimizer_filter(model.named_parameters()))
        assert any("t_c1" in name for name in dense)
        optimizer = KeyedOptimizerWrapper(
            dense, lambda params: torch.optim.Adagrad(params, lr=0.1)
        )
        return pipelined(model, optimizer, batches(keys)), None

    both(job, script, [sharder])
