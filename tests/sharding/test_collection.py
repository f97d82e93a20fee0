import dataclasses
import functools
import math

import pytest
import torch
from torchrec import DataType, EmbeddingBagCollection, EmbeddingBagConfig, PoolingType

from persia_torchrec import (
    Adagrad,
    Adam,
    AdmitFrequency,
    Constant,
    DynamicDim,
    Expiry,
    Normal,
    TableSettings,
    TruncatedNormal,
    Uniform,
)
from persia_torchrec.errors import ConfigError
from persia_torchrec.sharding.collection import describe_collection
from tests.support.models import META


def collection(*tables, **settings):
    return EmbeddingBagCollection(list(tables), **settings, device=META)


def describe(*tables, **settings):
    return describe_collection(collection(*tables, **settings), Adagrad(lr=0.5))


def table(name="term", *, num=100, dim=8, features=("ad",), **settings):
    return EmbeddingBagConfig(
        num, dim, name=name, feature_names=list(features), **settings
    )


def test_every_table_has_its_dim_and_the_optimizer():
    spec = describe(table("term", dim=8), table("user", dim=16, features=["user"]))
    assert [(t.name, t.dim) for t in spec.tables] == [("term", 8), ("user", 16)]
    assert {t.optimizer for t in spec.tables} == {Adagrad(lr=0.5)}


def test_features_have_the_order_of_the_tables():
    spec = describe(
        table("term", features=["query", "ad"]),
        table("user", features=["user"], pooling=PoolingType.MEAN),
    )
    assert [(f.name, f.key, f.table, f.pooling) for f in spec.features] == [
        ("query", "query", "term", "sum"),
        ("ad", "ad", "term", "sum"),
        ("user", "user", "user", "mean"),
    ]


def test_a_feature_of_two_tables_has_a_column_name_for_each():
    spec = describe(table("term", features=["ad", "query"]), table("topic"))
    assert [(f.name, f.key, f.table) for f in spec.features] == [
        ("ad@term", "ad", "term"),
        ("query", "query", "term"),
        ("ad@topic", "ad", "topic"),
    ]


def test_weights_start_in_torchrecs_range():
    (spec,) = describe(table(num=100)).tables
    assert spec.initializer == Uniform(-math.sqrt(1 / 100), math.sqrt(1 / 100))


def test_the_range_of_the_config_is_kept():
    (spec,) = describe(table(weight_init_min=-0.5, weight_init_max=0.25)).tables
    assert spec.initializer == Uniform(-0.5, 0.25)


@pytest.mark.parametrize(
    ("init", "initializer"),
    [
        (functools.partial(torch.nn.init.uniform_, a=-0.5), Uniform(-0.5, 1.0)),
        (torch.nn.init.normal_, Normal(0.0, 1.0)),
        (functools.partial(torch.nn.init.normal_, std=0.1), Normal(0.0, 0.1)),
        (torch.nn.init.trunc_normal_, TruncatedNormal(0.0, 1.0, 2.0)),
        (
            functools.partial(
                torch.nn.init.trunc_normal_, mean=1.0, std=0.25, a=0.5, b=1.5
            ),
            TruncatedNormal(1.0, 0.25, 2.0),
        ),
        (functools.partial(torch.nn.init.constant_, val=3), Constant(3.0)),
        (torch.nn.init.zeros_, Constant(0.0)),
        (torch.nn.init.ones_, Constant(1.0)),
    ],
)
def test_an_init_fn_of_torch_reports_how_rows_start(init, initializer):
    (spec,) = describe(table(init_fn=init)).tables
    assert spec.initializer == initializer


def test_tables_of_two_names_start_with_other_numbers_and_of_one_with_the_same():
    first = describe(table("term"), table("topic"))
    again = describe(table("topic"), table("user"))
    seeds = {t.name: t.seed for t in first.tables}
    assert seeds["term"] != seeds["topic"]
    assert again.tables[0].seed == seeds["topic"]


@pytest.mark.parametrize(
    ("data_type", "weight_dtype"),
    [(DataType.FP32, "fp32"), (DataType.FP16, "fp16"), (DataType.BF16, "bf16")],
)
def test_the_data_type_reports_what_weights_are_kept_in(data_type, weight_dtype):
    (spec,) = describe(table(data_type=data_type)).tables
    assert spec.weight_dtype == weight_dtype


ALL_SETTINGS = TableSettings(
    optimizer=Adam(0.25),
    initializer=Normal(1, 2),
    admission=AdmitFrequency(3),
    expiry=Expiry(steps_to_live=7),
    weight_dtype="bf16",
    keeps_metadata=True,
    weight_bound=2.0,
    is_frozen=True,
    shared_rows=5,
    dynamic=DynamicDim(period=7),
    stochastic_rounding=False,
    ids_without_row="zeros",
    seed=2**63,
)


def test_settings_of_a_table_win_over_the_collection_and_touch_no_other_table():
    module = collection(table("term", init_fn=torch.nn.init.zeros_), table("user"))
    term, user = describe_collection(module, Adagrad(), {"term": ALL_SETTINGS}).tables
    for field in dataclasses.fields(ALL_SETTINGS):
        assert getattr(term, field.name) == getattr(ALL_SETTINGS, field.name)
    assert term.dim == 8
    assert user == describe_collection(module, Adagrad()).tables[1]


def test_settings_left_out_are_the_collections():
    module = collection(table(data_type=DataType.FP16, init_fn=torch.nn.init.zeros_))
    settings = {"term": TableSettings(keeps_metadata=True)}
    (spec,) = describe_collection(module, Adagrad(lr=0.5), settings).tables
    (plain,) = describe_collection(module, Adagrad(lr=0.5)).tables
    assert spec == dataclasses.replace(plain, keeps_metadata=True)


def test_an_initializer_in_the_settings_replaces_a_custom_init_fn():
    module = collection(table(init_fn=torch.nn.init.xavier_uniform_))
    settings = {"term": TableSettings(initializer=Constant(2.0))}
    (spec,) = describe_collection(module, Adagrad(), settings).tables
    assert spec.initializer == Constant(2.0)


INIT = r"init_fn must take a tensor .*Received: init_fn=.*raised"


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        ({"init_fn": torch.nn.init.constant_}, {}, INIT),
        ({"init_fn": functools.partial(torch.nn.init.uniform_, c=1.0)}, {}, INIT),
        ({"data_type": DataType.INT8}, {}, "data_type must be FP32, FP16 or B"),
        ({"data_type": DataType.INT4}, {}, "data_type must be FP32, FP16 or B"),
        ({"dim": 4097}, {}, r"dim must be .*\[1, 4096\]"),
        ({}, {"weight_dtype": "fp8"}, "weight_dtype must be one of"),
        ({}, {"weight_bound": -1.0}, "weight_bound must be finite and >= 0"),
        ({}, {"optimizer": torch.optim.SGD}, "optimizer must be one of Adagrad"),
        ({}, {"admission": 3}, "admission must be one of AdmitAll, "),
    ],
)
def test_what_cannot_work_is_rejected_by_table(config, settings, message):
    module = collection(table(**config))
    with pytest.raises(ConfigError, match=f"Table 'term': {message}"):
        describe_collection(module, Adagrad(), {"term": TableSettings(**settings)})


def test_a_pooling_that_the_servers_do_not_know_is_rejected():
    module = collection(table())
    module.embedding_bag_configs()[0].pooling = PoolingType.NONE
    with pytest.raises(ConfigError, match=r"'term': pooling must be SUM or MEAN"):
        describe_collection(module, Adagrad())


@pytest.mark.parametrize("is_weighted", [True, False])
def test_whether_bags_are_weighted_is_kept(is_weighted):
    assert describe(table(), is_weighted=is_weighted).is_weighted == is_weighted
