import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec.embedding.optim import SGD, Adagrad, Adam
from persia_torchrec.errors import ConfigError
from persia_torchrec.table import MAX_DIM, TableSpec

bounds = st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)).map(sorted)


@given(
    name=st.text(min_size=1),
    dim=st.integers(1, MAX_DIM),
    optimizer=st.sampled_from([SGD(0.1, 0.9), Adagrad(), Adam()]),
    bounds=bounds,
    seed=st.integers(0, 2**64 - 1),
    weight_bound=st.floats(0, 1e6),
)
def test_a_table_comes_back_from_json_as_it_was(
    name, dim, optimizer, bounds, seed, weight_bound
):
    table = TableSpec(
        name=name,
        dim=dim,
        optimizer=optimizer,
        lower=bounds[0],
        upper=bounds[1],
        seed=seed,
        weight_bound=weight_bound,
    )
    assert TableSpec.from_json(json.loads(json.dumps(table.to_json()))) == table


def test_the_state_beside_a_row_is_that_of_the_optimizer():
    assert TableSpec(name="item", dim=8, optimizer=Adam()).num_state_floats == 16


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("name", "", "name must not be empty"),
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
        ("lower", 0.02, r"lower must be <= upper \(0.01\)"),
        ("lower", -math.inf, "must be finite"),
        ("upper", math.nan, "must be finite"),
        ("weight_bound", -1, "weight_bound must be finite and >= 0"),
        ("weight_bound", math.inf, "weight_bound must be finite and >= 0"),
    ],
)
def test_a_field_out_of_its_range_is_refused(field, value, message):
    fields = {"name": "item", "dim": 8, "optimizer": SGD(0.1), field: value}
    with pytest.raises(ConfigError, match=message):
        TableSpec(**fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": None}, "A table needs an optimizer"),
        ({"optimizer": {"kind": "lion"}}, "optimizer's kind must be one of"),
        ({"num_rows": 3}, "Not a table: .*num_rows"),
        ({"dim": "8"}, "dim must be an integer"),
        ({"dim": 0}, "dim must be an integer"),
        ({"optimizer": {"kind": "sgd"}}, "arguments of SGD must be numbers"),
        ({"optimizer": {"kind": "sgd", "lr": "1"}}, "arguments of SGD must be"),
    ],
)
def test_a_description_of_no_table_is_refused(change, message):
    table = TableSpec(name="item", dim=8, optimizer=SGD(0.1))
    with pytest.raises(ConfigError, match=message):
        TableSpec.from_json(table.to_json() | change)


def test_a_description_without_a_name_is_refused():
    description = TableSpec(name="item", dim=8, optimizer=SGD(0.1)).to_json()
    del description["name"]
    with pytest.raises(ConfigError, match=r"Not a table: .*'name'"):
        TableSpec.from_json(description)
