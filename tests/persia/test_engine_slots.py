from types import SimpleNamespace

import pytest
import torch
from torchrec.distributed.types import ShardingEnv

from persia_torchrec.client.codec import BatchCount
from persia_torchrec.embedding.embedding_config import load_embedding_config
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.embedding.table_defaults import EmbeddingConfig
from persia_torchrec.errors import RemoteError
from persia_torchrec.persia.engine import SlotsSharder, make_collection
from persia_torchrec.persia.slots import build_features, build_tables
from persia_torchrec.persia.worker_client import RemoteWorkers
from persia_torchrec.sharding.collection import CollectionSpec
from tests.support.local_job import LocalJob

CPU = torch.device("cpu")
PLAIN_SGD = SGD(1.0)
ENV = ShardingEnv.from_local(1, 0)
CLIENT = SimpleNamespace(lost={}, batches=BatchCount())  # what a sharder needs of it
YAML = """
slots_config:
  user: {dim: 4}
  item: {dim: 3, sqrt_scaling: true}
  basket: {dim: 3}
feature_groups:
  things: [item, basket]
"""


@pytest.fixture
def schema(tmp_path):
    path = tmp_path / "embedding_config.yml"
    path.write_text(YAML)
    return load_embedding_config(path)


@pytest.fixture
def job(tmp_path, monkeypatch):
    with LocalJob(tmp_path, monkeypatch, YAML, num_workers=2) as job:
        yield job


@pytest.fixture
def workers(job):
    workers = RemoteWorkers([worker.address for worker in job.workers])
    yield workers
    workers.close()


def spec_of(schema, optimizer=PLAIN_SGD):
    tables = build_tables(schema, EmbeddingConfig(), optimizer)
    return CollectionSpec(tables, build_features(schema))


def test_every_group_is_a_table_without_memory(schema):
    collection = make_collection(spec_of(schema))
    configs = collection.embedding_bag_configs()
    assert [(c.name, c.embedding_dim, c.feature_names) for c in configs] == [
        ("things", 3, ["item", "basket"]),
        ("user", 4, ["user"]),
    ]
    assert all(weight.is_meta for weight in collection.parameters())


def test_the_columns_have_the_order_of_the_file(schema, workers):
    sharder = SlotsSharder(workers, spec_of(schema), CLIENT)
    spec = sharder.describe(make_collection(spec_of(schema)), ENV, "")
    assert [f.name for f in spec.features] == ["user", "item", "basket"]
    dim_of = {table.name: table.dim for table in spec.tables}
    assert [dim_of[f.table] for f in spec.features] == [4, 3, 3]


def test_a_pipeline_makes_the_tables_known_everywhere(schema, job, workers):
    sharder = SlotsSharder(workers, spec_of(schema), CLIENT)
    pipeline = sharder.make_pipeline(
        sharder.describe(make_collection(spec_of(schema)), ENV, ""), ENV, CPU
    )
    assert job.read("user", 1).tolist() == [[0.0] * 4]
    pipeline.close()


def test_a_table_that_is_another_one_already_is_rejected(schema, job, workers):
    sharder = SlotsSharder(workers, spec_of(schema), CLIENT)
    spec = sharder.describe(make_collection(spec_of(schema)), ENV, "")
    sharder.make_pipeline(spec, ENV, CPU).close()
    other = SlotsSharder(
        *(workers, spec_of(schema, optimizer=SGD(1.0, momentum=0.5))), CLIENT
    )
    message = r"embedding worker 0 at .*embedding server 0 at .*'things'"
    spec = other.describe(make_collection(spec_of(schema)), ENV, "")
    with pytest.raises(RemoteError, match=message):
        other.make_pipeline(spec, ENV, CPU)
