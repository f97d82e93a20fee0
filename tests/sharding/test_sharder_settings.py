"""Settings of single tables, from the sharder to the servers."""

import pytest
import torch
from torchrec import EmbeddingBagConfig
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

from persia_torchrec import (
    SGD,
    Adagrad,
    Constant,
    RemoteEmbeddingBagCollectionSharder,
    TableSettings,
    timeouts,
)
from persia_torchrec.errors import ConfigError
from tests.sharding.two_towers import IDS, TABLES, TwoTowers, train
from tests.support.remote_job import CPU, Bags, kjt_of, remote_modules

UNKNOWN = r"tables must name .*\['term', 'user'\].* Received: 'usr'\. Is 'user' meant"


def test_each_table_trains_by_its_own_settings(job):
    model = job.put_on_servers(
        Bags(TABLES),
        SGD(1.0),
        tables={
            "term": TableSettings(initializer=Constant(3.0), weight_bound=2.5),
            "user": TableSettings(optimizer=SGD(10.0), initializer=Constant(0.0)),
        },
    )
    model(kjt_of(IDS)).values().sum().backward()
    # In "term" id 1 is in one bag, 2 in two; "user" takes means: -1 is alone.
    assert job.read("term", [1, 2])[:, 0].tolist() == [2.0, 1.0]
    assert job.read("user", [-1, 7])[:, 0].tolist() == [-10.0, -10.0]


def test_settings_of_an_unknown_table_are_rejected_when_the_model_is_planned(job):
    sharder = RemoteEmbeddingBagCollectionSharder(
        job.client, tables={"usr": TableSettings(keeps_metadata=True)}
    )
    with pytest.raises(ConfigError, match=UNKNOWN):
        DistributedModelParallel(Bags(TABLES), sharders=[sharder])
    with pytest.raises(ConfigError, match="unknown to this client"):
        job.client.table("user")  # nothing was made


def test_settings_of_an_unknown_table_are_rejected_without_a_planner(job):
    sharder = RemoteEmbeddingBagCollectionSharder(
        job.client, tables={"usr": TableSettings(keeps_metadata=True)}
    )
    env = ShardingEnv.from_local(1, 0)
    module = sharder.put_on_servers(Bags(TABLES).bags, env, CPU)
    with pytest.raises(ConfigError, match=UNKNOWN):
        module(kjt_of(IDS))
    sharder.close()


def test_settings_may_be_of_tables_in_several_collections(job):
    model = job.put_on_servers(
        TwoTowers(),
        SGD(0.1),
        tables={
            "term": TableSettings(optimizer=Adagrad(0.1)),
            "user": TableSettings(optimizer=Adagrad(0.2, vectorwise_shared=True)),
        },
    )
    losses = train(model, 5)
    assert losses[-1] < losses[0]
    assert job.client.table("term").optimizer == Adagrad(0.1)
    assert job.client.table("user").optimizer.vectorwise_shared
    assert len(remote_modules(model)) == 2


def test_collections_without_a_planner_may_be_sharded_one_after_the_other(job):
    settings = {
        "term": TableSettings(weight_bound=1.0),
        "user": TableSettings(weight_bound=2.0),
    }
    sharder = RemoteEmbeddingBagCollectionSharder(job.client, tables=settings)
    env = ShardingEnv.from_local(1, 0)
    modules = [sharder.put_on_servers(Bags([table]).bags, env, CPU) for table in TABLES]
    modules[0](kjt_of(IDS))
    assert job.client.table("user").weight_bound == 2.0
    sharder.close()


def test_a_table_config_of_half_precision_keeps_weights_in_half(job):
    tables = [
        EmbeddingBagConfig(
            *(10, 4, "thin"), feature_names=["ad"], data_type=TABLES[0].data_type.FP16
        )
    ]
    model = job.put_on_servers(Bags(tables), SGD(1.0))
    pooled = model(kjt_of({"ad": [[1], [2]]})).values()
    assert (pooled.half().float() == pooled).all()
    assert job.client.table("thin").weight_dtype == "fp16"


def test_timeouts_exceed_the_failover_time():
    assert timeouts.TRAINING_REQUEST_S < timeouts.RECOVERY_S < timeouts.JOINT_UPDATE_S
    least_s = timeouts.CHECKPOINT_S + timeouts.RECOVERY_S
    assert least_s < timeouts.exchange_s()
    assert timeouts.exchange_s(recovery_s=7200, checkpoint_s=9000) > 16_200


def test_a_joint_timeout_below_the_time_that_a_server_may_be_away_is_rejected(
    job, monkeypatch
):
    monkeypatch.setattr(job.client, "recovery_s", 600.0)
    must = r"joint_timeout_s must be finite and > 600\. Received: 600"
    with pytest.raises(ConfigError, match=must):
        RemoteEmbeddingBagCollectionSharder(job.client, joint_timeout_s=600.0)


@pytest.mark.parametrize("kind", ["mps", "xpu", "hpu", "meta"])
def test_a_device_that_is_neither_the_cpu_nor_a_gpu_is_rejected(job, kind):
    sharder = RemoteEmbeddingBagCollectionSharder(job.client, SGD(1.0))
    env, device = ShardingEnv.from_local(1, 0), torch.device(kind)
    must = rf"must be on the CPU or on a CUDA device\. Received: device {kind}\."
    with pytest.raises(ConfigError, match=must):
        sharder.put_on_servers(Bags(TABLES).bags, env, device)
    sharder.close()
