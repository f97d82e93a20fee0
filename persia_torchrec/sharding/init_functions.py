"""``init_fn`` of a table, by which its weights begin, in the servers' terms.

Servers draw the weights of a row by its id when it is made. So what ``init_fn`` does to
a whole table must be a distribution of one weight:

    uniform_, normal_, trunc_normal_, constant_, ...   by their arguments
    xavier_*, kaiming_* of torch.nn.init               by formula, of (N, D)
    any other callable                                 sampled, once

A sample is called with tables of the shape, and looked at: where values depend on their
position, as in an identity, a row for padding or rows of length 1, no distribution says
what they are, and that is an error.
"""

import contextlib
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from persia_torchrec.embedding.initializer import (
    Constant,
    Normal,
    Quantiles,
    TruncatedNormal,
    Uniform,
)
from persia_torchrec.embedding.setting import Initializer
from persia_torchrec.errors import ConfigError

Floats = npt.NDArray[np.float32]

_NUM_QUANTILES = 1025
_NUM_SAMPLED = 2**15
"""Weights that a sample has at least."""

_MAX_SAMPLED = 2**20
"""Weights of the largest table that is sampled as a whole."""

_MAX_CALLS = 512
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
    num_rows = min(shape[0], max(_MAX_SAMPLED // shape[1], 1))
    calls = _calls(config, (num_rows, shape[1]))
    first, second = next(calls), next(calls)
    is_same = first == second
    if is_same.all():
        if (first != first[0, 0]).any():
            raise _by_position(config, "the same values twice, which differ")
        return Constant(float(first[0, 0]))
    values = np.concatenate([first, second])
    discrete = len(np.unique(values[: 2**10])) <= min(256, values.size // 8)
    are_fixed = is_same.all(axis=1).any() and shape[1] > 3
    if not discrete and (are_fixed or is_same.mean() > 1e-3):  # some are by chance
        raise _by_position(config, "some values equal in two calls, and others not")
    if num_rows < shape[0]:
        shorter = next(_calls(config, (num_rows // 2, shape[1])))
        _require_same(config, "tables of two lengths", first, shorter)
    num_calls = min(math.ceil(_NUM_SAMPLED / first.size), _MAX_CALLS)
    more = itertools.islice(calls, max(num_calls - 2, 0))
    values = np.concatenate([values, *more])
    _require_no_position(config, values, num_rows)
    if discrete:
        ordered = np.sort(values, axis=None)
        at = np.linspace(0, len(ordered) - 1, _NUM_QUANTILES).astype(np.int64)
        return Quantiles(tuple(map(float, ordered[at])), is_discrete=True)
    quantiles = np.quantile(values, np.linspace(0, 1, _NUM_QUANTILES))
    return Quantiles(tuple(map(float, quantiles)))


def _calls(config: BaseEmbeddingConfig, shape: tuple[int, int]) -> Iterator[Floats]:
    """Yield what ``init_fn`` makes of new tables; torch's generator stays as it is."""
    init: Any = config.init_fn
    for seed in range(1, _MAX_CALLS + 3):
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            table = torch.full(shape, torch.nan)
            try:
                made = init(table)
            except (TypeError, ValueError, AttributeError, RuntimeError) as exc:
                raise ConfigError(
                    f"Table {config.name!r}: init_fn must take a tensor {shape}. "
                    f"Received: {_named(config)}, which raised {exc!r:.200}."
                ) from exc
        floats: Floats = (made if isinstance(made, torch.Tensor) else table).numpy()
        if floats.shape != shape or not np.isfinite(floats).all():
            raise ConfigError(
                f"Table {config.name!r}: init_fn must fill a tensor {shape} in place, "
                f"with finite numbers. Received: {_named(config)}."
            )
        yield floats


def _require_no_position(
    config: BaseEmbeddingConfig, values: Floats, num_rows: int
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
