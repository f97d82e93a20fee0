import pytest
from torchrec import EmbeddingBagConfig
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import DataType

from persia_torchrec import Placement
from persia_torchrec.errors import ConfigError


def table(name="user", rows=1000, dim=8, data_type=DataType.FP32):
    return EmbeddingBagConfig(
        rows, dim, name=name, feature_names=[name], data_type=data_type
    )


def test_by_default_every_table_is_on_the_servers():
    assert Placement().is_remote(table(rows=1))


def test_tables_are_on_the_servers_from_a_number_of_rows_on():
    placement = Placement(min_rows=1000)
    assert placement.is_remote(table(rows=1000))
    assert not placement.is_remote(table(rows=999))


def test_tables_are_on_the_servers_from_a_number_of_bytes_on():
    placement = Placement(min_bytes=1000 * 8 * 4)
    assert placement.is_remote(table(rows=1000))
    assert not placement.is_remote(table(rows=999))
    assert not placement.is_remote(table(rows=1999, data_type=DataType.FP16))
    assert placement.is_remote(table(rows=2000, data_type=DataType.FP16))


def test_a_table_on_the_servers_is_as_large_as_both_sizes_ask():
    placement = Placement(min_rows=1000, min_bytes=1000 * 8 * 4)
    assert placement.is_remote(table(rows=1000, dim=8))
    assert not placement.is_remote(table(rows=1000, dim=4))
    assert not placement.is_remote(table(rows=500, dim=16))


def test_names_win_over_sizes():
    placement = Placement(min_rows=1000, remote={"small"}, local={"large"})
    assert placement.is_remote(table("small", rows=10))
    assert not placement.is_remote(table("large", rows=10_000))


@pytest.mark.parametrize(
    ("constraints", "is_remote"),
    [
        (ParameterConstraints(sharding_types=["data_parallel"]), False),
        (ParameterConstraints(compute_kernels=["fused"]), False),
        (ParameterConstraints(pooling_factors=[20.0]), True),
    ],
)
def test_a_table_that_is_constrained_to_a_sharding_of_torchrec_is_local(
    constraints, is_remote
):
    placement = Placement(constraints={"user": constraints})
    assert placement.is_remote(table("user")) is is_remote
    assert placement.is_remote(table("item"))


@pytest.mark.parametrize("name", ["min_rows", "min_bytes"])
def test_a_negative_size_is_rejected(name):
    with pytest.raises(ConfigError, match=rf"{name} must be >= 0. Received: -1"):
        Placement(**{name: -1})


@pytest.mark.parametrize(
    "local",
    [
        {"local": ["user"]},
        {"constraints": {"user": ParameterConstraints(["table_wise"])}},
    ],
)
def test_a_table_on_both_sides_is_rejected(local):
    with pytest.raises(ConfigError, match=r"not both. Received: \['user'\]"):
        Placement(remote=["user", "item"], **local)


def test_a_name_instead_of_names_is_rejected():
    with pytest.raises(ConfigError, match=r"Received: 'user'; is \{'user'\} meant"):
        Placement(local="user")
