import numpy as np
import pytest

from persia_torchrec import AdmitAll, AdmitProbability, Uniform
from persia_torchrec.embedding.embedding_config import load_embedding_config
from persia_torchrec.embedding.optim import SGD, Adam
from persia_torchrec.embedding.table_defaults import EmbeddingConfig
from persia_torchrec.lookup.bags import FeatureSpec, check_bags
from persia_torchrec.persia.batch import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    PersiaBatch,
)
from persia_torchrec.persia.slots import build_features, build_tables
from persia_torchrec.table import TableSpec
from tests.support.servers import ids_of

YAML = """
feature_index_prefix_bit: 4
slots_config:
  user: {dim: 16}
  item: {dim: 8, sqrt_scaling: true}
  basket: {dim: 8, hash_stack_config: {hash_stack_rounds: 2, embedding_size: 9}}
feature_groups:
  things: [item, basket]
"""


@pytest.fixture
def schema(tmp_path):
    path = tmp_path / "embedding_config.yml"
    path.write_text(YAML)
    return load_embedding_config(path)


def test_every_slot_is_a_feature_of_its_groups_table(schema):
    things = {"table": "things", "prefix": 1 << 60, "prefix_bits": 4}
    user = {"table": "user", "prefix": 2 << 60, "prefix_bits": 4}
    assert build_features(schema) == (
        FeatureSpec(name="user", key="user", pooling="sum", **user),
        FeatureSpec(name="item", key="item", pooling="sqrt", **things),
        FeatureSpec(
            **{"name": "basket", "key": "basket", "pooling": "sum", **things},
            hash_stack_rounds=2,
            hash_stack_size=9,
        ),
    )


def test_every_group_is_a_table(schema):
    config = EmbeddingConfig((-1, 2), admit_probability=0.5, weight_bound=3)
    start = {
        "initializer": Uniform(-1, 2),
        "admission": AdmitProbability(0.5),
        "weight_bound": 3,
        "seed": 0,
    }
    assert build_tables(schema, config, Adam()) == (
        TableSpec(name="things", dim=8, optimizer=Adam(), **start),
        TableSpec(name="user", dim=16, optimizer=Adam(), **start),
    )


def test_the_defaults_are_persias(schema):
    (things, _) = build_tables(schema, EmbeddingConfig(), SGD(0.1))
    assert things.initializer == Uniform(-0.01, 0.01)
    assert things.admission == AdmitAll()
    assert things.weight_bound == 10


def test_features_become_bags_without_a_copy():
    one = IDTypeFeatureWithSingleID("user", ids_of(5, 2**64 - 1))
    many = IDTypeFeature("item", [ids_of(7, 7), ids_of()])
    bags = PersiaBatch([one, many], requires_grad=False).bags()
    assert list(bags) == ["user", "item"]
    assert bags["user"].lengths.tolist() == [1, 1]
    assert bags["item"].ids.tolist() == [7, 7]
    assert bags["item"].lengths.tolist() == [2, 0]
    for feature in (one, many):
        assert np.shares_memory(bags[feature.name].ids, feature.ids)
    assert check_bags(bags) == 2
