"""What a table can be asked for, from a model inside DMP to server processes."""

import logging
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import DataType, EmbeddingBagConfig
from torchrec.distributed import DistributedModelParallel

from persia_torchrec import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    AdmitFrequency,
    Constant,
    EmbeddingClient,
    EmbeddingCluster,
    Expiry,
    Normal,
    RemoteEmbeddingBagCollectionSharder,
    TableSettings,
)
from tests.support.optimizers import EVERY_OPTIMIZER
from tests.support.processes import wait_until
from tests.support.reference import Row, step
from tests.support.remote_job import Bags, ids_of, kjt_of, remote_modules
from tests.support.servers import DEADLINE_S

pytestmark = [pytest.mark.multiprocess]

DIM = 4


@contextmanager
def client_of(num_servers, **settings):
    with EmbeddingCluster.local(num_servers, **settings) as cluster:
        client = EmbeddingClient.connect(cluster.addresses, timeout_s=DEADLINE_S)
        yield client
        client.close()


@pytest.fixture(scope="module")
def two_servers():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    with client_of(2) as client:
        yield client
    dist.destroy_process_group()


@pytest.fixture
def client(two_servers):
    two_servers.clear()
    return two_servers


class Model:
    """Tables on the servers, each of one feature of its name, inside DMP."""

    def __init__(self, client, tables, *, data_type=DataType.FP32, staleness=1):
        self.client = client
        configs = [
            EmbeddingBagConfig(
                *(100, DIM, name), feature_names=[name], data_type=data_type
            )
            for name in tables
        ]
        self.sharder = RemoteEmbeddingBagCollectionSharder(
            client, SGD(1.0), staleness=staleness, tables=tables
        )
        self.dmp = DistributedModelParallel(Bags(configs), sharders=[self.sharder])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.sharder.close()

    @property
    def pipeline(self):
        return remote_modules(self.dmp)[0].pipeline

    def pooled(self, bags):
        return self.dmp(kjt_of(bags)).to_dict()

    def train(self, bags, grads=None):
        """Make the gradient of each table's pooled rows what is given; ones if not."""
        pooled = self.pooled(bags)
        grads = grads or {name: torch.ones_like(rows) for name, rows in pooled.items()}
        sum((pooled[name] * grads[name]).sum() for name in pooled).backward()

    def rows(self, table, ids):
        self.sharder.flush()
        return self.client.read(table, ids_of(ids), initial=False)


def total(client, counter):
    return sum(counters.get(counter, 0) for counters in client.counters())


def test_tables_of_one_collection_train_each_as_torch_does(client):
    torch_of = {
        "momentum": (SGD(0.1, 0.9), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        "adagrad": (
            *(Adagrad(0.1, 0.5), torch.optim.Adagrad),
            {"lr": 0.1, "initial_accumulator_value": 0.5},
        ),
        "adam": (Adam(0.1), torch.optim.Adam, {"lr": 0.1}),
        "adamw": (
            *(AdamW(0.1, weight_decay=0.1), torch.optim.AdamW),
            {"lr": 0.1, "weight_decay": 0.1},
        ),
    }
    settings = {
        name: TableSettings(optimizer=optimizer, initializer=Constant(0.5))
        for name, (optimizer, _, _) in torch_of.items()
    }
    twins = {
        name: nn.EmbeddingBag.from_pretrained(
            torch.full((6, DIM), 0.5), freeze=False, mode="sum"
        )
        for name in torch_of
    }
    optimizers = [
        cls(twins[name].parameters(), **arguments)
        for name, (_, cls, arguments) in torch_of.items()
    ]
    rng = np.random.default_rng(0)
    with Model(client, settings) as model:
        for _ in range(20):
            # Every id is in every batch: torch moves rows that are not, too.
            bags = [ids.tolist() for ids in rng.permutation(6).reshape(3, 2)]
            target = torch.from_numpy(rng.standard_normal((3, DIM)).astype("f4"))
            pooled = model.pooled(dict.fromkeys(torch_of, bags))
            local = {name: twin(torch.tensor(bags)) for name, twin in twins.items()}
            for found in (pooled, local):
                sum(
                    (rows - target).square().sum() for rows in found.values()
                ).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for name, twin in twins.items():
            found = model.rows(name, range(6))[:, :DIM]
            np.testing.assert_allclose(
                found, twin.weight.detach(), rtol=1e-4, atol=1e-5, err_msg=name
            )


def test_every_optimizer_moves_its_table_by_its_formula(client):
    settings = {
        name.replace(", ", "_").replace(" ", "_"): TableSettings(
            optimizer=optimizer, initializer=Normal(0, 0.5)
        )
        for name, optimizer in EVERY_OPTIMIZER.items()
    }
    rng = np.random.default_rng(1)
    ids = range(8)
    with Model(client, settings) as model:
        model.pooled({name: [list(ids)] for name in settings})  # makes all rows
        rows = {
            name: [
                Row(floats[:DIM].astype("f8"), floats[DIM:].astype("f8"))
                for floats in model.rows(name, ids)
            ]
            for name in settings
        }
        for t in range(1, 11):
            bags = [rng.choice(8, 3).tolist() for _ in range(4)]
            grads = {
                name: torch.from_numpy(rng.standard_normal((4, DIM)).astype("f4"))
                for name in settings
            }
            model.train(dict.fromkeys(settings, bags), grads)
            for name, setting in settings.items():
                summed = {}
                for bag, grad in zip(bags, grads[name].double().numpy(), strict=True):
                    for id_ in bag:
                        summed[id_] = summed.get(id_, 0) + grad
                for id_, grad in summed.items():
                    step(setting.optimizer, rows[name][id_], grad, t)
        for name in settings:
            expected = np.stack([row.floats() for row in rows[name]])
            np.testing.assert_allclose(
                model.rows(name, ids), expected, rtol=2e-3, atol=1e-4, err_msg=name
            )


def test_a_schedule_trains_as_torchs_does(client):
    settings = {"scheduled": TableSettings(initializer=Constant(0.5))}
    twin = nn.EmbeddingBag.from_pretrained(
        torch.full((20, DIM), 0.5), freeze=False, mode="sum"
    )
    rng = np.random.default_rng(2)
    with Model(client, settings, staleness=0) as model:
        optimizers = [
            model.sharder.optimizer,
            torch.optim.SGD(twin.parameters(), lr=1.0),
        ]
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.1
        schedules = [
            torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
            for optimizer in optimizers
        ]
        losses = []
        for _ in range(15):
            bags = rng.choice(20, (8, 2)).tolist()
            target = torch.from_numpy(rng.standard_normal((8, DIM)).astype("f4"))
            of_both = [model.pooled({"scheduled": bags})["scheduled"]]
            of_both.append(twin(torch.tensor(bags)))
            losses.append([])
            for rows, optimizer, schedule in zip(
                of_both, optimizers, schedules, strict=True
            ):
                optimizer.zero_grad()
                loss = (rows - target).square().sum()
                loss.backward()
                optimizer.step()
                schedule.step()
                losses[-1].append(loss.item())
        remote, local = np.array(losses).T
        np.testing.assert_allclose(remote, local, rtol=1e-5)
        assert optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 / 2**5)
        found = model.rows("scheduled", range(20))
        seen = found.any(axis=1)
        np.testing.assert_allclose(found[seen], twin.weight.detach()[seen], rtol=1e-4)


def test_an_id_is_admitted_at_the_threshold_of_lookups(client):
    settings = TableSettings(
        admission=AdmitFrequency(3, unadmitted_value=0.25), initializer=Constant(1.0)
    )
    with Model(client, {"rare": settings}) as model:
        # Three times in one batch; and once in each of three.
        first = model.pooled({"rare": [[7, 7], [7], [8]]})["rare"]
        assert first[:, 0].tolist() == [2.0, 1.0, 0.25]
        first.sum().backward()
        assert model.rows("rare", [7, 8])[:, 0].tolist() == [1.0 - 3, 0.0]
        num_missed = model.pipeline.tally.total.num_missed
        assert total(client, "gradients_missed") == num_missed == 1
        model.train({"rare": [[8], [], []]})
        assert client.num_rows() in ([1, 0], [0, 1])
        third = model.pooled({"rare": [[8]]})["rare"]
        assert third[:, 0].tolist() == [1.0]


@pytest.mark.parametrize("optimizer", [SGD(0.5), Adagrad(0.2)], ids=["sgd", "adagrad"])
def test_weights_of_half_precision_train_nearly_as_float32(client, optimizer):
    losses = {}
    for data_type in (DataType.FP32, DataType.FP16, DataType.BF16):
        name = f"{optimizer.kind}_{data_type.value}"
        settings = {name: TableSettings(optimizer=optimizer, initializer=Constant(0.0))}
        rng = np.random.default_rng(3)
        with Model(client, settings, data_type=data_type) as model:
            found = []
            for _ in range(60):
                bags = rng.choice(50, (32, 3))
                labels = torch.from_numpy((bags % 2).sum(axis=1) > 1).float()
                logits = model.pooled({name: bags.tolist()})[name].sum(dim=1)
                loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
                loss.backward()
                found.append(loss.item())
        losses[data_type] = np.array(found)
    full = losses.pop(DataType.FP32)
    assert full[-5:].mean() < 0.6 * full[:5].mean()
    for of_half in losses.values():
        assert not np.array_equal(of_half, full)
        np.testing.assert_allclose(of_half, full, rtol=0.02, atol=0.005)


def test_rows_expire_after_the_steps_to_live(client):
    settings = TableSettings(expiry=Expiry(steps_to_live=3), initializer=Constant(5.0))
    before = total(client, "expired_steps")
    with Model(client, {"fading": settings}) as model:
        model.train({"fading": [[1, 2]]})
        for _ in range(5):
            model.train({"fading": [[2]]})
        model.sharder.flush()
        wait_until(
            lambda: total(client, "expired_steps") == before + 1, "the row expires"
        )
        assert model.rows("fading", [1, 2])[:, 0].tolist() == [0.0, -1.0]
        # A new row is made at the next lookup.
        assert model.pooled({"fading": [[1]]})["fading"][0, 0].item() == 5.0


def test_a_full_lfu_cluster_keeps_the_most_frequent_rows(client):
    settings = {"item": TableSettings(initializer=Constant(9.0))}
    with client_of(1, capacity=4, eviction="lfu") as lfu, Model(lfu, settings) as model:
        for _ in range(3):
            model.train({"item": [[1, 2]]})
        for id_ in range(3, 10):  # each more recent than the frequent two
            model.train({"item": [[id_]]})
        has_row = model.rows("item", range(1, 10)).any(axis=1)
        assert has_row[:2].all()
        assert has_row.sum() == 4
        assert total(lfu, "evictions") == 5
        assert lfu.metadata("item", ids_of([1, 2])).frequency.tolist() == [3, 3]


def test_gradients_that_are_not_finite_are_dropped_and_the_others_applied(
    client, caplog
):
    settings = {"wild": TableSettings(initializer=Constant(0.0))}
    rejected = total(client, "gradients_refused")
    with Model(client, settings) as model:
        grads = torch.ones(3, DIM)
        grads[0, 1], grads[1, 2] = torch.nan, torch.inf
        with caplog.at_level(logging.WARNING, "persia_torchrec.pipeline.staleness"):
            model.train({"wild": [[1], [2], [3]]}, {"wild": grads})
            assert model.rows("wild", [1, 2, 3])[:, 0].tolist() == [0.0, 0.0, -1.0]
        of_tally = "persia_torchrec.pipeline.staleness"
        logged = [record for record in caplog.records if record.name == of_tally]
        assert [record.levelname for record in logged] == ["WARNING"]
        assert model.pipeline.tally.total.num_refused == 2
        assert total(client, "gradients_refused") == rejected + 2
        model.train({"wild": [[1], [2], [3]]})
        assert model.rows("wild", [1, 2, 3])[:, 0].tolist() == [-1.0, -1.0, -2.0]


def test_metadata_and_counters_match_the_training(client):
    settings = {"seen": TableSettings(keeps_metadata=True)}
    before = [total(client, name) for name in ("inserted", "hits", "requests_update")]
    rng = np.random.default_rng(4)
    seen = Counter()
    last_step = {}
    with Model(client, settings) as model:
        for t in range(1, 9):
            bags = rng.choice(10, (4, 3)).tolist()
            model.train({"seen": bags})
            for id_ in np.ravel(bags).tolist():
                seen[id_] += 1
                last_step[id_] = t
        model.sharder.flush()
    metadata = client.metadata("seen", ids_of(range(12)))
    assert metadata.frequency.tolist() == [seen[id_] for id_ in range(12)]
    assert metadata.last_step.tolist() == [last_step.get(id_, 0) for id_ in range(12)]
    after = [total(client, name) for name in ("inserted", "hits", "requests_update")]
    inserted, hits, updates = np.subtract(after, before)
    assert inserted == len(seen)
    assert hits > 0
    assert updates == 8 * 2  # each goes to both servers
