"""``init_fn`` of a table, by which its weights begin, in the servers' terms.

Servers draw the weights of a row by its id when it is made. So what ``init_fn`` does to
a whole table must be a distribution of one weight:

    uniform_, normal_, trunc_normal_, constant_, ...   by their arguments
    xavier_*, kaiming_* of torch.nn.init               by formula, of (N, D)
    any other callable                                 sampled, once

A sample is called with tables of the shape, and looked at: where values depend on their
position, as in an identity, a row for padding or rows of length 1, no distribution says
what they are, and that is an error. Of a sample of 2**20 numbers, or a little more:

    at most 256 values    they, and how often each occurs
    others                minimum, maximum and quantiles, dense toward both ends, and
                          the bounds of what occurs often; uniform between two
"""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from persia_torchrec.arrays import Indices
from persia_torchrec.embedding.initializer import (
    Constant,
    Normal,
    Quantiles,
    TruncatedNormal,
    Uniform,
)
from persia_torchrec.embedding.setting import Initializer
from persia_torchrec.errors import ConfigError

Reals = npt.NDArray[np.floating[Any]]

_NUM_SAMPLED = 2**20
"""Weights that a sample has, unless its tables are too small; and those of the largest
table that is sampled as a whole."""

_NUM_LOOKED_AT = 2**15
"""Weights of several tables that are searched for what depends on the position."""

_MAX_CALLS = 512
_MAX_VALUES = 256
"""Of a distribution that is known by its values."""

_NUM_QUANTILES = 256
"""Intervals of equal probability."""

_PER_OCTAVE = 12
"""Quantiles of the tails, while the probability beyond them halves."""

_MAX_ATOMS = 32
"""Values that a quantile begins and ends, of those that occur most often."""

_BY_CHANCE = 1e-6
"""Of what is not by position, the probability to be rejected."""

_SIGNIFICANT = 2.7
"""Of the statistic of Kolmogorov and Smirnov: exceeded once in a million times."""


def _truncated(
    mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0
) -> Initializer:
    """Return what ``trunc_normal_`` draws; its ``a`` and ``b`` bound the weight."""
    below, above = float(mean) - float(a), float(b) - float(mean)
    if not (std > 0 and below > 0 and math.isclose(below, above, rel_tol=1e-6)):
        raise ValueError("a and b must be at the same distance from the mean")
    return TruncatedNormal(float(mean), float(std), above / float(std))


_BY_ARGUMENTS: dict[object, Callable[..., Initializer]] = {
    torch.nn.init.uniform_: lambda a=0.0, b=1.0: Uniform(float(a), float(b)),
    torch.nn.init.normal_: lambda mean=0.0, std=1.0: Normal(float(mean), float(std)),
    torch.nn.init.trunc_normal_: _truncated,
    torch.nn.init.constant_: lambda val: Constant(float(val)),
    torch.nn.init.zeros_: lambda: Constant(0.0),
    torch.nn.init.ones_: lambda: Constant(1.0),
}


def _kaiming_std(
    shape: tuple[int, int],
    a: float = 0.0,
    mode: str = "fan_in",
    nonlinearity: Any = "leaky_relu",
) -> float:
    fan = shape[1] if mode == "fan_in" else shape[0]
    return float(torch.nn.init.calculate_gain(nonlinearity, a)) / math.sqrt(fan)


def _xavier_std(shape: tuple[int, int], gain: float = 1.0) -> float:
    return float(gain) * math.sqrt(2.0 / sum(shape))


_STD_BY_SHAPE: dict[object, tuple[Callable[..., float], bool]] = {
    torch.nn.init.xavier_uniform_: (_xavier_std, True),
    torch.nn.init.xavier_normal_: (_xavier_std, False),
    torch.nn.init.kaiming_uniform_: (_kaiming_std, True),
    torch.nn.init.kaiming_normal_: (_kaiming_std, False),
}
"""The deviation by the shape (N, D), and whether weights are uniform within it."""


_OF_THE_WHOLE = (
    torch.nn.init.orthogonal_,
    torch.nn.init.eye_,
    torch.nn.init.dirac_,
    torch.nn.init.sparse_,
)
"""Of ``torch.nn.init``, what gives no single weight a distribution of its own."""


def initializer_of(config: BaseEmbeddingConfig) -> Initializer:
    """Return how rows start: by default TorchRec's +-sqrt(1 / num_embeddings).

    Raises:
        ConfigError: values of ``init_fn`` depend on their position.
    """
    # TorchRec itself fills init_fn with a uniform_ between the bounds.
    init: Any = config.init_fn
    is_partial = isinstance(init, functools.partial) and not init.args
    function, arguments = (init.func, init.keywords) if is_partial else (init, {})
    arguments = {k: v for k, v in arguments.items() if k != "generator"}
    # An argument that it does not have, or that has no formula here.
    with contextlib.suppress(TypeError, ValueError):
        if function in _BY_ARGUMENTS:
            return _BY_ARGUMENTS[function](**arguments)
        if function in _STD_BY_SHAPE:
            std_of, is_uniform = _STD_BY_SHAPE[function]
            std = std_of((config.num_embeddings, config.embedding_dim), **arguments)
            bound = math.sqrt(3.0) * std
            return Uniform(-bound, bound) if is_uniform else Normal(0.0, std)
    return _sampled(config)


def _sampled(config: BaseEmbeddingConfig) -> Initializer:
    """Return the distribution of a weight, or an error if there is not one."""
    shape = config.num_embeddings, config.embedding_dim
    init: Any = config.init_fn
    if getattr(init, "func", init) in _OF_THE_WHOLE:
        raise _by_position(config, "a matrix as a whole")
    num_rows = min(shape[0], max(_NUM_SAMPLED // shape[1], 1))
    num_calls = math.ceil(_NUM_SAMPLED / (num_rows * shape[1]))
    num_calls = min(max(num_calls, 2), _MAX_CALLS)
    tables_CND = _tables(config, num_calls, (num_rows, shape[1]))
    first = tables_CND[0]
    if (tables_CND == first).all():
        if (first != first[0, 0]).any():
            raise _by_position(config, "the same values twice, which differ")
        return Constant(float(first[0, 0]))
    if num_rows < shape[0]:
        shorter = _tables(config, 1, (num_rows // 2, shape[1]))
        _require_same(config, "tables of two lengths", first, shorter)
    ordered = np.sort(tables_CND, axis=None)
    values, starts = np.unique(ordered, return_index=True)
    counts = np.diff(starts, append=len(ordered))
    num_looked_at = max(math.ceil(_NUM_LOOKED_AT / first.size), 2)
    looked_at_CND = tables_CND[:num_looked_at]
    _require_no_fixed(config, looked_at_CND, counts / len(ordered))
    _require_no_position(config, looked_at_CND.reshape(-1, shape[1]), num_rows)
    if len(values) <= min(_MAX_VALUES, ordered.size // 8):
        return Quantiles(_shortest(values), True, tuple(counts.tolist()))
    knots = _knots(len(ordered), starts, counts)
    return Quantiles(_shortest(ordered[knots]), False, tuple(np.diff(knots).tolist()))


def _knots(num: int, starts: Indices, counts: Indices) -> Indices:
    """Return the indices of those of ``num`` values that a table of quantiles has.

    ``starts`` and ``counts`` tell where each value begins, and how often it occurs.
    """
    last = num - 1
    body = np.linspace(0, last, _NUM_QUANTILES + 1).astype(np.int64)
    octaves = math.log2(num / 2)
    powers = np.arange(math.ceil(octaves * _PER_OCTAVE)) / _PER_OCTAVE
    tail = np.exp2(powers).astype(np.int64)
    tail = tail[np.diff(tail, append=num) < num // _NUM_QUANTILES]
    often = np.argsort(counts)[-_MAX_ATOMS:]
    often = often[counts[often] >= 3]
    begin, end = starts[often], starts[often] + counts[often] - 1
    atoms = np.concatenate([begin - 1, begin, end, end + 1]).clip(0, last)
    return np.unique(np.concatenate([body, tail - 1, last - (tail - 1), atoms]))


def _shortest(values: Reals) -> tuple[float, ...]:
    """Return numbers as those of fewest digits that are the same float32."""
    return tuple([float(str(value)) for value in values.astype(np.float32)])


def _tables(
    config: BaseEmbeddingConfig, num_calls: int, shape: tuple[int, int]
) -> Reals:
    """Return what ``init_fn`` makes of new tables; torch's generator stays as it is."""
    init: Any = config.init_fn
    tables_CND = np.empty((num_calls, *shape), dtype=np.float32)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        for out_ND in tables_CND:
            table = torch.full(shape, torch.nan, device="cpu")
            try:
                made = init(table)
            except (TypeError, ValueError, AttributeError, RuntimeError) as exc:
                raise ConfigError(
                    f"Table {config.name!r}: init_fn must take a tensor {shape}. "
                    f"Received: {_named(config)}, which raised {exc!r:.200}."
                ) from exc
            table = made if isinstance(made, torch.Tensor) else table
            if tuple(table.shape) != shape or not torch.isfinite(table).all():
                raise ConfigError(
                    f"Table {config.name!r}: init_fn must fill a tensor {shape} in "
                    f"place, with finite numbers. Received: {_named(config)}."
                )
            out_ND[:] = table.numpy()
    return tables_CND


def _require_no_fixed(
    config: BaseEmbeddingConfig, tables_CND: Reals, probabilities: Reals
) -> None:
    """Reject values that several calls make equal, beyond what chance does.

    ``probabilities`` are those of all different values.
    """
    is_same_ND = (tables_CND == tables_CND[0]).all(axis=0)
    by_chance = float((probabilities ** len(tables_CND)).sum())
    num_rows, dim = is_same_ND.shape
    are_fixed = num_rows * by_chance**dim < _BY_CHANCE and is_same_ND.all(axis=1).any()
    deviation = math.sqrt(by_chance / is_same_ND.size)
    if are_fixed or is_same_ND.mean() > by_chance + max(6 * deviation, 1e-3):
        raise _by_position(config, "some values equal in two calls, and others not")


def _require_no_position(
    config: BaseEmbeddingConfig, values: Reals, num_rows: int
) -> None:
    """Reject values whose distribution changes with their place, or their row's."""
    in_table = np.arange(len(values)) % num_rows
    late = in_table >= num_rows // 2
    if num_rows > 1:
        _require_same(config, "the first and last rows", values[~late], values[late])
    if values.shape[1] > 1:
        half = values.shape[1] // 2
        _require_same(config, "columns", values[:, :half], values[:, half:])
        permuted = np.random.default_rng(0).permuted(values.reshape(-1))
        lengths, mixed = (
            np.square(of.reshape(values.shape).astype(np.float64)).sum(axis=1)
            for of in (values, permuted)
        )
        _require_same(config, "rows and permuted weights", lengths, mixed)


def _require_same(
    config: BaseEmbeddingConfig, what: str, left: Any, right: Any
) -> None:
    """Reject two samples that are very unlikely of one distribution."""
    both = [np.sort(sample, axis=None) for sample in (left, right)]
    points = np.concatenate(both)
    shares = [np.searchsorted(of, points, side="right") / len(of) for of in both]
    num = len(both[0]) * len(both[1]) / (len(both[0]) + len(both[1]))
    if np.abs(shares[0] - shares[1]).max() * math.sqrt(num) > _SIGNIFICANT:
        raise _by_position(config, f"{what} of different distributions")


def _by_position(config: BaseEmbeddingConfig, found: str) -> ConfigError:
    return ConfigError(
        f"Table {config.name!r}: weights that init_fn makes must not depend on their "
        "position, as servers draw each row by its id. Received: "
        f"{_named(config)}, which makes {found}. Give the sharder "
        "TableSettings(initializer=...), or the weights themselves: "
        "sharders.load_weights(state_dict)."
    )


def _named(config: BaseEmbeddingConfig) -> str:
    init: Any = config.init_fn
    named = inspect.unwrap(getattr(init, "func", init))
    return f"init_fn={getattr(named, '__qualname__', init)}"
