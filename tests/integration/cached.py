"""A model whose rows are cached, the same one in plain TorchRec, and their batches."""

import contextlib
import threading
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.streamable import Pipelineable

from persia_torchrec import (
    SGD,
    Adagrad,
    Cache,
    EmbeddingClient,
    env,
    recoverable,
    remote_sharders,
)
from persia_torchrec.training import schedule as schedule_module
from tests.integration.twins import WithLoss, plain_rows, shard_plain, train
from tests.support.faults import kill_self
from tests.support.groups import alone
from tests.support.processes import DEADLINE_S
from tests.support.remote_job import CPU, META, Bags, kjt_of, shard
from tests.support.two_trainers import Case

NUM_IDS, NUM_SAMPLES, START = 3000, 48, 1e-8
FEATURES = {"ad": "term", "query": "term", "user": "user", "place": "place"}
DIMS = {"term": 16, "user": 16, "place": 8}
ARGUMENTS = {"learning_rate": 0.05, "eps": 1e-8}


def case_of(kind, optimizer, *marks, **arguments):
    case = Case(optimizer, kind, arguments)
    return pytest.param(case, id=kind.value, marks=marks)


def adagrad(*, rowwise):
    settings = {"initial_accumulator_value": START, "eps": 1e-8}
    return Adagrad(lr=0.05, vectorwise_shared=rowwise, **settings)


ROWWISE = adagrad(rowwise=True)
CASES = [
    case_of(EmbOptimType.EXACT_SGD, SGD(1.0), pytest.mark.long, learning_rate=1.0),
    case_of(
        EmbOptimType.EXACT_ADAGRAD,
        adagrad(rowwise=False),
        pytest.mark.long,
        **ARGUMENTS,
    ),
    case_of(EmbOptimType.EXACT_ROWWISE_ADAGRAD, ROWWISE, **ARGUMENTS),
]
ROWWISE_CASE = CASES[2].values[0]


@dataclass(frozen=True)
class Batch(Pipelineable):
    dense: torch.Tensor
    ids: KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device, non_blocking=False):
        return self

    def record_stream(self, stream):
        pass

    def pin_memory(self):
        return self


class Model(nn.Module):
    def __init__(self, *, each_id=False) -> None:
        super().__init__()
        self.each_id = each_id
        names = {t: [f for f, of in FEATURES.items() if of == t] for t in DIMS}
        if each_id:
            configs = [
                EmbeddingConfig(NUM_IDS, dim, name=t, feature_names=names[t])
                for t, dim in DIMS.items()
            ]
            del configs[2]  # all of one dim
            self.embeddings = EmbeddingCollection(tables=configs, device=META)
        else:
            poolings = {"place": PoolingType.MEAN}
            configs = [
                EmbeddingBagConfig(
                    *(NUM_IDS, dim),
                    name=table,
                    feature_names=names[table],
                    pooling=poolings.get(table, PoolingType.SUM),
                )
                for table, dim in DIMS.items()
            ]
            self.embeddings = EmbeddingBagCollection(tables=configs, device=META)
        width = 16 if each_id else sum(DIMS[table] for table in FEATURES.values())
        self.over = nn.Sequential(nn.Linear(width + 3, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense, ids):
        given = self.embeddings(ids)
        if self.each_id:
            bags = [given[f].to_padded_dense().sum(1) for f in ("ad", "query", "user")]
            values = torch.stack(bags).sum(0)
        else:
            values = given.values()
        return self.over(torch.cat([values, dense], dim=1)).squeeze(1)


def make_model(**settings):
    return WithLoss(Model(**settings))


def make_batches(num, *, features=tuple(FEATURES), seed=0):
    rng, batches = np.random.default_rng(seed), []
    for _ in range(num):
        lengths = rng.integers(0, 4, len(features) * NUM_SAMPLES)
        ids = rng.zipf(1.3, lengths.sum()) * 7919 % NUM_IDS
        kjt = KeyedJaggedTensor(
            list(features), torch.from_numpy(ids), lengths=torch.from_numpy(lengths)
        )
        dense = torch.from_numpy(rng.standard_normal((NUM_SAMPLES, 3))).float()
        bags = kjt.to_dict()[features[0]].to_padded_dense(2).sum(1)
        batches.append(Batch(dense, kjt, ((bags % 3 > 0) ^ (dense[:, 0] > 0)).float()))
    return batches


def touched(batches):
    """Return the ids of each table that batches have."""
    found = {table: [] for table in DIMS}
    for batch in batches:
        for feature, jagged in batch.ids.to_dict().items():
            found[FEATURES[feature]].append(jagged.values().numpy())
    return {t: np.unique(np.concatenate(ids)) for t, ids in found.items() if ids}


def one_table(client, **settings):
    """Return bags of a table whose rows are zeros, and their sharders."""
    config = EmbeddingBagConfig(NUM_IDS, 16, name="user", feature_names=["user"])
    sharders = remote_sharders(client, SGD(0.5), **settings)
    return shard(Bags([config]), *sharders), sharders


def write_zeros(client):
    ids, zeros = np.arange(99, dtype="u8"), np.zeros((99, 16), dtype=np.float32)
    client.write("user", ids, zeros)


def step(model, *ids, grad=1.0):
    output = model(kjt_of({"user": [[id_] for id_ in ids]})).values()
    output.backward(torch.full_like(output, grad))
    return output


class Twins:
    """A model whose rows are cached, and the same one in plain TorchRec."""

    def __init__(self, job, case=ROWWISE_CASE, *, rows=600, each_id=False, **settings):
        self.job = job
        torch.manual_seed(0)
        model, plain = make_model(each_id=each_id), make_model(each_id=each_id)
        plain.model.over.load_state_dict(model.model.over.state_dict())
        cache = Cache(rows=rows) if isinstance(rows, int) else rows
        self.sharders = remote_sharders(
            job.client, case.optimizer, cache=cache, **settings
        )
        self.remote = job.shard(model, self.sharders)
        arguments = {"optimizer": case.kind, **case.arguments}
        made = EmbeddingCollectionSharder if each_id else EmbeddingBagCollectionSharder
        tables = list(DIMS)[:2] if each_id else list(DIMS)
        self.plain = shard_plain(plain, made(arguments), tables)
        generator = torch.Generator().manual_seed(0)
        for table in tables:
            rows_ND = torch.randn(NUM_IDS, DIMS[table], generator=generator) / 4
            plain_rows(self.plain, table).copy_(rows_ND)
            ids = np.arange(NUM_IDS, dtype=np.uint64)
            job.client.write(table, ids, rows_ND.numpy())
        for state in self.plain.fused_optimizer.state_dict()["state"].values():
            for tensor in state.values():
                (piece,) = tensor.local_shards()
                piece.tensor.fill_(START)

    @property
    def cache(self):
        return self.sharders.remote_tables.cache

    def dense_optimizer(self, model):
        return torch.optim.SGD(model.module.model.over.parameters(), lr=0.1)

    def losses(self, model, batches):
        return train(model, batches, self.dense_optimizer(model))

    def piped(self, batches):
        pipeline = TrainPipelineSparseDist(
            self.remote, self.dense_optimizer(self.remote), CPU
        )
        given, losses = iter(batches), []
        with contextlib.suppress(StopIteration):
            while True:
                losses.append(pipeline.progress(given).item())
        return np.array(losses)

    def require_equal(self, batches, losses, expected, *, atol=1e-5):
        np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-6)
        assert len(losses) == len(batches)
        self.sharders.flush()
        states = {}
        for state in self.plain.fused_optimizer.state_dict()["state"].values():
            for name, tensor in state.items():
                (piece,) = tensor.local_shards()
                states[name.split(".")[0]] = piece.tensor.reshape(NUM_IDS, -1)
        for table, ids in touched(batches).items():
            plain = plain_rows(self.plain, table)
            if table in states:
                plain = torch.cat([plain, states[table]], dim=1)
            rows = self.job.client.read(table, ids.astype(np.uint64))
            np.testing.assert_allclose(rows, plain[ids], rtol=0, atol=atol)


def train_and_die(addresses, folder, dies_at):
    """Train within ``recoverable``, once to a kill; leave the rows in the folder."""
    schedule_module._LEAST_INTERVAL = 0  # it saves after every step
    batches, life = make_batches(24), env.num_group_restarts()
    with alone(), closing(EmbeddingClient.connect(addresses)) as client:
        torch.manual_seed(0)
        sharders = remote_sharders(client, ROWWISE, cache=Cache(rows=600))
        model = shard(make_model(), *sharders)
        dense = torch.optim.SGD(model.module.model.over.parameters(), lr=0.1)
        state = {"model": model, "dense": dense}
        where = folder / f"run {dies_at}"
        with recoverable(where, state, client, sharders, interval_s=1e-9) as run:
            for number, batch in enumerate(run.skip(batches)):
                loss, _ = model(batch)
                dense.zero_grad()
                loss.backward()
                if number + 1 == dies_at and not life:
                    sharders.flush()  # so that rows are ahead of the checkpoint
                    kill_self()
                dense.step()
                run.step()
        rows = {
            t: client.read(t, ids.astype("u8")) for t, ids in touched(batches).items()
        }
    np.savez(folder / f"{dies_at}.npz", loss=loss.item(), **rows)


def train_and_wait(addresses, folder):
    """Train, leave rows and states as they are in the cache, and end by a signal."""
    batches = make_batches(3)
    with alone():
        client = EmbeddingClient.connect(addresses)
        sharders = remote_sharders(client, ROWWISE, cache=Cache(rows=6000))
        model = shard(make_model(), *sharders)
        train(model, batches, torch.optim.SGD(model.parameters(), lr=0.1))
        for table, ids in touched(batches).items():
            pool = sharders.remote_tables.cache.pool_of(table)
            slots_N = pool.map.slots_of(table, ids.astype("u8"))
            np.save(folder / f"{table}.npy", pool.gather(slots_N))
        print("trained", flush=True)
        threading.Event().wait(DEADLINE_S)
