"""``init_fn`` of a table becomes a distribution, or an error says why not."""

import functools
import json
import math

import numpy as np
import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagConfig

from persia_torchrec import SGD, remote_sharders
from persia_torchrec.embedding.initializer import (
    Constant,
    Normal,
    Quantiles,
    TruncatedNormal,
    Uniform,
)
from persia_torchrec.errors import ConfigError
from persia_torchrec.sharding.init_functions import initializer_of
from persia_torchrec.store.row_copy import initial_rows
from persia_torchrec.table import TableSpec
from tests.support.remote_job import Bags, RemoteJob, ids_of

pytestmark = pytest.mark.slow

N, DIM = 500, 16
partial = functools.partial


def config(init, num_rows=N, dim=DIM):
    return EmbeddingBagConfig(num_rows, dim, "t", feature_names=["f"], init_fn=init)


def drawn(initializer, num=4000, dim=DIM):
    spec = TableSpec(name="t", dim=dim, optimizer=SGD(1.0), initializer=initializer)
    return initial_rows(spec, ids_of(range(num)))


FORMULAS = [
    nn.init.xavier_uniform_,
    nn.init.xavier_normal_,
    nn.init.kaiming_uniform_,
    nn.init.kaiming_normal_,
    partial(nn.init.xavier_uniform_, gain=2.0),
    partial(nn.init.xavier_normal_, gain=0.5),
    partial(nn.init.kaiming_uniform_, a=math.sqrt(5)),
    partial(nn.init.kaiming_normal_, mode="fan_out", nonlinearity="relu"),
    partial(nn.init.trunc_normal_, std=0.5, a=-1.0, b=1.0),
]


@pytest.mark.parametrize("init", FORMULAS)
def test_it_has_the_moments_that_torch_gives_the_table(init):
    initializer = initializer_of(config(init))
    assert isinstance(initializer, Uniform | Normal | TruncatedNormal)
    torch.manual_seed(0)
    expected = torch.empty(N, DIM)
    init(expected)
    weights = drawn(initializer)
    assert weights.std() == pytest.approx(float(expected.std()), rel=0.05)
    if isinstance(initializer, Uniform):
        assert np.abs(weights).max() == pytest.approx(
            float(expected.abs().max()), rel=0.01
        )


def exponential(tensor):
    return tensor.exponential_(2.0)


def two_values(tensor):
    return tensor.bernoulli_(0.25).mul_(3)


def shaped(tensor):
    """As dlrm has it: by the number of rows."""
    nn.init.uniform_(tensor, -1 / math.sqrt(len(tensor)), 1 / math.sqrt(len(tensor)))


def asymmetric(tensor):
    nn.init.trunc_normal_(tensor, a=-0.5, b=2.0)


@pytest.mark.parametrize("init", [exponential, two_values, shaped, asymmetric])
@pytest.mark.parametrize("num_rows", [7, N])
def test_another_callable_is_sampled_into_a_distribution(init, num_rows):
    initializer = initializer_of(config(init, num_rows))
    assert isinstance(initializer, Quantiles)
    assert initializer == initializer_of(config(init, num_rows))
    expected = torch.empty(num_rows, DIM)
    samples = []
    for _ in range(4000 // num_rows):
        init(expected)
        samples.append(expected.clone())
    expected = torch.stack(samples).numpy()
    weights = drawn(initializer)
    assert weights.mean() == pytest.approx(expected.mean(), rel=0.05, abs=0.02)
    assert weights.std() == pytest.approx(expected.std(), rel=0.05)
    for q in (0.1, 0.5, 0.9):
        assert np.quantile(weights, q) == pytest.approx(
            np.quantile(expected, q), rel=0.1, abs=0.03
        )


def test_a_discrete_distribution_has_its_values_only():
    weights = drawn(initializer_of(config(two_values)))
    assert set(np.unique(weights)) == {0.0, 3.0}
    assert (weights == 3).mean() == pytest.approx(0.25, abs=0.01)


def log_normal(tensor):
    return tensor.log_normal_(0, 1)


def student(tensor):
    return tensor.copy_(torch.distributions.StudentT(5.0).sample(tensor.shape))


def half_zeros(tensor):
    return nn.init.normal_(tensor).mul_(torch.rand_like(tensor) < 0.5)


def of_a_hundred_thousand(tensor):
    return tensor.bernoulli_(1e-5)


def of_100_values(tensor):
    return tensor.geometric_(0.1).clamp_(max=100)


def sample_of(init, num_rows):
    """Return the numbers of which ``initializer_of`` makes a distribution."""
    num_calls = max(math.ceil(2**20 / (num_rows * DIM)), 2)
    torch.manual_seed(1)
    tables = [init(torch.empty(num_rows, DIM)).numpy() for _ in range(num_calls)]
    return np.stack(tables).astype(np.float64)


def moments(found):
    """Return the mean and the deviation of what quantiles draw, by integration."""
    values, counts = np.array(found.values), np.array(found.counts)
    if found.is_discrete:
        firsts, seconds = values, values**2
    else:
        low, high = values[:-1], values[1:]
        firsts, seconds = (low + high) / 2, (low**2 + low * high + high**2) / 3
    mean = np.average(firsts, weights=counts)
    return mean, math.sqrt(np.average(seconds, weights=counts) - mean**2)


@pytest.mark.parametrize(
    ("init", "num_rows"),
    [(log_normal, N), (log_normal, 62_500), (student, N), (half_zeros, N)],
)
def test_mean_and_deviation_are_those_of_the_sample(init, num_rows):
    found = initializer_of(config(init, num_rows))
    sample = sample_of(init, num_rows)
    mean, deviation = moments(found)
    assert mean == pytest.approx(sample.mean(), abs=0.005 * sample.std())
    assert deviation == pytest.approx(sample.std(), rel=0.005)
    assert np.float32(found.values[0]) == sample.min()
    assert np.float32(found.values[-1]) == sample.max()
    spec = TableSpec(name="t", dim=DIM, optimizer=SGD(1.0), initializer=found)
    assert len(json.dumps(spec.to_json())) <= 16_384


@pytest.mark.parametrize(
    ("init", "num_rows"),
    [
        (two_values, N),
        (of_100_values, N),
        (of_a_hundred_thousand, N),
        (of_a_hundred_thousand, 62_500),
    ],
)
def test_each_of_a_few_values_is_as_frequent_as_in_the_sample(init, num_rows):
    found = initializer_of(config(init, num_rows))
    values, counts = np.unique(sample_of(init, num_rows), return_counts=True)
    assert found == Quantiles(tuple(values.tolist()), True, tuple(counts.tolist()))


def test_a_value_that_occurs_often_is_drawn_as_often():
    weights = drawn(initializer_of(config(half_zeros, 62_500)), 60_000)
    assert (weights == 0).mean() == pytest.approx(0.5, abs=0.003)
    assert weights.std() == pytest.approx(math.sqrt(0.5), rel=0.01)


def test_a_constant_callable_is_a_constant():
    assert initializer_of(config(lambda t: t.fill_(0.25))) == Constant(0.25)


def test_torchs_generator_stays_as_it_is():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    initializer_of(config(exponential))
    assert torch.equal(before, torch.get_rng_state())


def padded(tensor):
    nn.init.normal_(tensor)
    tensor[0].zero_()


def numbered(tensor):
    tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) / 100)


def growing(tensor):
    nn.init.normal_(tensor).mul_(torch.arange(1, len(tensor) + 1).unsqueeze(1))


def one_column(tensor):
    nn.init.normal_(tensor)
    tensor[:, DIM // 2 :].mul_(0.5)


def unit_rows(tensor):
    nn.init.normal_(tensor)
    tensor.copy_(nn.functional.normalize(tensor))


@pytest.mark.parametrize(
    "init",
    [
        padded,
        numbered,
        growing,
        one_column,
        unit_rows,
        nn.init.orthogonal_,
        nn.init.eye_,
        partial(nn.init.sparse_, sparsity=0.1),
    ],
)
def test_values_by_position_are_an_error_that_names_what_to_do(init):
    message = r"Table 't': weights that init_fn makes must not .*load_weights"
    with pytest.raises(ConfigError, match=message):
        initializer_of(config(init))


def test_a_callable_that_fills_nothing_is_an_error():
    with pytest.raises(ConfigError, match=r"must fill a tensor \(500, 16\) in place"):
        initializer_of(config(lambda t: None))


def test_a_long_table_is_sampled_by_a_part_of_it():
    long = config(exponential, 10**9, 64)
    assert isinstance(initializer_of(long), Quantiles)


def test_a_long_table_whose_length_matters_is_an_error():
    with pytest.raises(ConfigError, match="tables of two lengths"):
        initializer_of(config(shaped, 10**9, 64))


def test_rows_on_the_servers_begin_so():
    with RemoteJob() as job:
        tables = [config(exponential)]
        model = job.shard(Bags(tables), remote_sharders(job.client, SGD(1.0)))
        weights = model.state_dict()["bags.embedding_bags.t.weight"].whole()
        assert weights.min() >= 0
        assert float(weights.mean()) == pytest.approx(0.5, rel=0.1)
        spec = job.client.table("t")
        assert TableSpec.from_json(spec.to_json()) == spec
