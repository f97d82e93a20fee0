import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec import (
    AdmitAll,
    AdmitBloom,
    AdmitFrequency,
    AdmitProbability,
    Constant,
    Expiry,
    Normal,
    Uniform,
)
from persia_torchrec.embedding.limits import MAX_DIM
from persia_torchrec.embedding.optim import SGD, Adagrad, Adam
from persia_torchrec.errors import ConfigError
from persia_torchrec.table import TableSpec, describe_tables

initializers = st.sampled_from([Uniform(-1, 2), Normal(), Constant(0.5)])
admissions = st.sampled_from(
    [AdmitAll(unadmitted_value=1.5), AdmitFrequency(3), AdmitBloom(2, 1000)]
)


@given(
    name=st.text(min_size=1),
    dim=st.integers(1, MAX_DIM),
    optimizer=st.sampled_from([SGD(0.1, 0.9), Adagrad(), Adam()]),
    initializer=initializers,
    seed=st.integers(0, 2**64 - 1),
    admission=admissions,
    expiry=st.sampled_from([Expiry(), Expiry(4000, 60.0, 0.5, 100)]),
    weight_dtype=st.sampled_from(["fp32", "fp16", "bf16"]),
    keeps_metadata=st.booleans(),
    weight_bound=st.floats(0, 1e6),
)
def test_a_table_comes_back_from_json_as_it_was(**fields):
    table = TableSpec(**fields)
    for name, value in fields.items():
        assert getattr(table, name) == value
    assert TableSpec.from_json(json.loads(json.dumps(table.to_json()))) == table


def test_the_state_beside_a_row_is_that_of_the_optimizer():
    assert TableSpec(name="item", dim=8, optimizer=Adam()).num_state_floats == 16


def test_the_defaults_are_persias():
    table = TableSpec(name="item", dim=8, optimizer=Adam())
    assert table.initializer == Uniform(-0.01, 0.01)
    assert table.admission == AdmitAll(unadmitted_value=0.0)
    assert not table.expiry.is_on
    assert (table.weight_dtype, table.has_metadata) == ("fp32", False)


@pytest.mark.parametrize(
    ("keeps_metadata", "expiry", "has_metadata"),
    [
        (False, Expiry(), False),
        (True, Expiry(), True),
        (False, Expiry(steps_to_live=1), True),
    ],
)
def test_rows_carry_metadata_where_it_is_wanted_or_needed(
    keeps_metadata, expiry, has_metadata
):
    table = TableSpec(
        name="item",
        dim=8,
        optimizer=SGD(0.1),
        expiry=expiry,
        keeps_metadata=keeps_metadata,
    )
    assert table.has_metadata is has_metadata


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("name", "", "name must be a string that is not empty"),
        (
            "dim",
            0,
            r"Table 'item': dim must be an integer in \[1, 4096\]\. Received: 0",
        ),
        ("dim", MAX_DIM + 1, r"dim must be an integer in \[1, 4096\]"),
        ("dim", 8.5, "dim must be an integer"),
        ("seed", -1, "seed must be an integer in"),
        ("seed", 1.5, "seed must be an integer in"),
        ("seed", 2**64, "seed must be an integer in"),
        ("initializer", 0.01, "initializer must be one of Constant, Inverse.*Uniform"),
        ("initializer", AdmitAll(), "initializer must be one of"),
        ("admission", "all", "admission must be one of AdmitAll, AdmitBloom, Admit"),
        ("expiry", 4000, r"expiry must be one of Expiry\. Received: 4000"),
        (
            "weight_dtype",
            "fp8",
            r"weight_dtype must be one of \('fp32', 'fp16', 'bf16'",
        ),
        ("weight_dtype", None, "weight_dtype must be one of"),
        ("keeps_metadata", 1, "keeps_metadata must be True or False"),
        ("weight_bound", -1, "weight_bound must be finite and >= 0"),
        ("weight_bound", math.inf, "weight_bound must be finite and >= 0"),
    ],
)
def test_a_field_out_of_its_range_is_rejected(field, value, message):
    fields = {"name": "item", "dim": 8, "optimizer": SGD(0.1), field: value}
    with pytest.raises(ConfigError, match=message):
        TableSpec(**fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": None}, "An optimizer must be an object whose kind"),
        ({"initializer": {"kind": "zipf"}}, "An initializer must be an object whose"),
        ({"initializer": None}, "An initializer must be an object whose kind is one"),
        ({"admission": {"kind": "none"}}, "An admission must be an object whose kind"),
        (
            {"expiry": {"kind": "expiry", "ttl": 1}},
            "Expiry .*unexpected keyword argument 'ttl'",
        ),
        (
            {"optimizer": {"kind": "lion"}},
            "An optimizer must be an object whose kind",
        ),
        ({"num_rows": 3}, "Not a table: .*num_rows"),
        ({"dim": "8"}, "dim must be an integer"),
        ({"dim": 0}, "dim must be an integer"),
        ({"optimizer": {"kind": "sgd"}}, "arguments of SGD must be complete"),
        ({"optimizer": {"kind": "sgd", "lr": "1"}}, "SGD: lr must be finite and >= 0"),
    ],
)
def test_a_description_of_no_table_is_rejected(change, message):
    table = TableSpec(name="item", dim=8, optimizer=SGD(0.1))
    with pytest.raises(ConfigError, match=message):
        TableSpec.from_json(table.to_json() | change)


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        ("resets_non_finite", True, "TableSpec: resets_non_finite"),
        (
            "admission",
            {"kind": "probability", "probability": 0.5, "once": True},
            "AdmitProbability: once",
        ),
    ],
)
def test_a_field_of_an_earlier_version_is_left_out_with_one_warning(
    field, value, name, caplog
):
    table = TableSpec(
        name="t", dim=2, optimizer=SGD(0.1), admission=AdmitProbability(0.5)
    )
    for _ in range(2):
        assert TableSpec.from_json(table.to_json() | {field: value}) == table
    [record] = caplog.records
    assert f"{name} must be False" in record.getMessage()
    caplog.clear()
    as_now = {"resets_non_finite": False}
    as_now["admission"] = AdmitProbability(0.5).to_json() | {"once": False}
    assert TableSpec.from_json(table.to_json() | as_now) == table
    assert caplog.text == ""


def test_a_description_without_a_name_is_rejected():
    description = TableSpec(name="item", dim=8, optimizer=SGD(0.1)).to_json()
    del description["name"]
    with pytest.raises(ConfigError, match=r"Not a table: .*'name'"):
        TableSpec.from_json(description)


def test_tables_that_differ_in_their_names_only_are_one_line():
    alike = {"dim": 8, "optimizer": Adagrad(), "weight_bound": 10}
    tables = [
        TableSpec(name="workclass", **alike),
        TableSpec(name="education", **alike),
        TableSpec(
            name="gender",
            dim=16,
            optimizer=SGD(0.5, 0.9),
            admission=AdmitFrequency(3),
        ),
    ]
    head, first, second = describe_tables(tables).splitlines()
    assert head.split() == [
        *("tables", "dim", "optimizer", "initializer", "further", "settings", "names")
    ]
    columns = [head.index(word) for word in ("dim", "optimizer", "initial", "further")]
    assert [first[at:].split("  ")[0] for at in columns] == [
        "8",
        "Adagrad(lr=0.01)",
        "Uniform(lower=-0.01, upper=0.01)",
        "weight_bound=10",
    ]
    assert first.endswith("workclass, education")
    assert [second[at:].split("  ")[0] for at in columns] == [
        "16",
        "SGD(lr=0.5, momentum=0.9)",
        "Uniform(lower=-0.01, upper=0.01)",
        "admission=AdmitFrequency(threshold=3)",
    ]
