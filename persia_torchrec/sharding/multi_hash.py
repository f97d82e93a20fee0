"""Multi-hash embeddings: two short tables in place of one of N rows.

An id has the row of its quotient in one table, and of its remainder in the other:

    m = ceil(sqrt(N))      id -> id // m, id mod m      so that no two ids share both

The module splits the ids, and an ordinary collection of TorchRec's looks them up, which
``DistributedModelParallel`` shards like any other. Three children, of which only the
collection has tables, so that TorchRec's train pipelines can trace the module.

Shi et al., "Compositional Embeddings Using Complementary Partitions for
Memory-Efficient Recommendation Systems", KDD 2020.

Dimensions: B samples, L ids of one feature, D embedding dim.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torchrec
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    PoolingType,
)
from torchrec.modules.embedding_modules import get_embedding_names_by_table

from persia_torchrec.device.batches import require_batch, require_keys
from persia_torchrec.device.transfer import ToHost
from persia_torchrec.errors import BatchError, ConfigError

Combine = Literal["add", "mul", "concat"]

_HALVES = "quotient", "remainder"


@dataclass(frozen=True, slots=True)
class _Feature:
    """A column: its name, the key of its ids, and those of its halves."""

    name: str
    key: str
    table: str
    num_ids: int
    divisor: int
    dim: int
    pooling: PoolingType

    def half(self, which: str) -> str:
        return f"{self.key}@{self.table}_{which}"


class MultiHashEmbeddingBagCollection(nn.Module):
    """An ``EmbeddingBagCollection`` whose tables have about ``2 * sqrt(N)`` rows each.

    It takes a ``KeyedJaggedTensor`` and returns a ``KeyedTensor``, with the keys and in
    the order of an ``EmbeddingBagCollection`` of the same configs. Weights of a batch
    are not used. With a train pipeline, ``pipeline_postproc=True`` pulls ahead.

    Args:
        tables: ``num_embeddings`` is N, ids are in ``[0, N)``; ``embedding_dim`` is
            that of the output. Table NAME becomes the tables ``NAME_quotient`` and
            ``NAME_remainder``, which ``TableSettings`` may name. Both start as
            ``init_fn`` says, by default in the range of N rows.
        combine: what makes one vector of two, for each id: their sum, their product,
            or one behind the other, each with half of the dim.
        device: of the tables; "meta" where others hold them.

    Raises:
        ConfigError: no tables, another ``combine``, no rows, an odd dim for "concat",
            or a pooling that is neither SUM nor MEAN.
        BatchError: by a batch, an id outside of ``[0, N)``; of a GPU's ids, by a later
            batch.

    Example:
        ``MultiHashEmbeddingBagCollection([EmbeddingBagConfig(10**12, 16, name="user",
        feature_names=["user"])], combine="mul", device=torch.device("meta"))``
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        combine: Combine = "add",
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        tables = list(tables)
        if combine not in get_args(Combine) or not tables:
            raise ConfigError(
                "There must be tables, and combine must be one of "
                f"{get_args(Combine)}. Received: {len(tables)} tables, {combine!r}."
            )
        self.combine = combine
        names = get_embedding_names_by_table(tables)
        features = [
            _describe(config, name, key, combine)
            for config, of_table in zip(tables, names, strict=True)
            for name, key in zip(of_table, config.feature_names, strict=True)
        ]
        self.split_ids = _SplitIds(features)
        self.collections = nn.ModuleList(
            _make_collections(tables, features, combine, device)
        )
        self.join_rows = _JoinRows(features, combine)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return the pooled embeddings, ``(B, sum of dims)``."""
        halves = self.split_ids(features)
        found = [collection(halves) for collection in self.collections]
        joined: KeyedTensor = self.join_rows(found)
        return joined


def _describe(
    config: EmbeddingBagConfig, name: str, key: str, combine: Combine
) -> _Feature:
    pools = config.pooling in (PoolingType.SUM, PoolingType.MEAN)
    if not pools or config.num_embeddings < 1:
        raise ConfigError(
            f"Table {config.name!r}: pooling must be SUM or MEAN, and num_embeddings "
            f"at least 1. Received: {config.pooling}, {config.num_embeddings}."
        )
    if combine == "concat" and config.embedding_dim % 2:
        raise ConfigError(
            f"Table {config.name!r}: embedding_dim must be even, since each half of "
            f'"concat" has half of it. Received: {config.embedding_dim}.'
        )
    num_ids = config.num_embeddings
    divisor = math.isqrt(num_ids - 1) + 1  # the ceiling of the root, in integers
    return _Feature(
        name, key, config.name, num_ids, divisor, config.embedding_dim, config.pooling
    )


def _make_collections(
    tables: Sequence[EmbeddingBagConfig],
    features: Sequence[_Feature],
    combine: Combine,
    device: torch.device | None,
) -> list[nn.Module]:
    """Return one collection of bags; or, for products, one of rows for each dim."""
    halves = [
        (config, which, [f for f in features if f.table == config.name])
        for config in tables
        for which in _HALVES
    ]
    settings: list[dict[str, Any]] = [
        {
            "name": f"{config.name}_{which}",
            "num_embeddings": _num_rows(config.num_embeddings, which),
            "embedding_dim": config.embedding_dim // (1 + (combine == "concat")),
            "feature_names": [feature.half(which) for feature in of_table],
            "init_fn": config.init_fn,
            "data_type": config.data_type,
        }
        for config, which, of_table in halves
    ]
    if combine != "mul":
        bags = [
            EmbeddingBagConfig(**of_half, pooling=config.pooling)
            for (config, _, _), of_half in zip(halves, settings, strict=True)
        ]
        return [EmbeddingBagCollection(tables=bags, device=device)]
    rows = [EmbeddingConfig(**of_half) for of_half in settings]
    return [
        EmbeddingCollection(
            tables=[config for config in rows if config.embedding_dim == dim],
            device=device,
        )
        for dim in dict.fromkeys(config.embedding_dim for config in rows)
    ]


def _num_rows(num_ids: int, which: str) -> int:
    divisor = math.isqrt(num_ids - 1) + 1
    return divisor if which == "remainder" else -(-num_ids // divisor)


class _SplitIds(nn.Module):
    """Ids to quotients and remainders, in integers.

    Ids of a GPU are checked there, for which no thread waits: the error comes with a
    later batch. Until then a wrong id has a row on servers, and in a table of the GPU's
    torch's own assertion.
    """

    def __init__(self, features: Sequence[_Feature]) -> None:
        super().__init__()
        self._features = features
        self._checks: deque[tuple[ToHost, Sequence[_Feature]]] = deque()

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the halves of every feature, in its bags."""
        require_keys(require_batch([features]), [f.key for f in self._features])
        bags: Mapping[str, JaggedTensor] = features.to_dict()
        self._check({key: of_key.values() for key, of_key in bags.items()})
        keys, values, lengths = [], [], []
        for feature in self._features:
            of_key = bags[feature.key]
            ids = of_key.values()
            quotients = torch.div(ids, feature.divisor, rounding_mode="floor")
            halves = quotients, ids - quotients * feature.divisor
            for which, half in zip(_HALVES, halves, strict=True):
                keys.append(feature.half(which))
                values.append(half)
                lengths.append(of_key.lengths())
        return KeyedJaggedTensor(keys, torch.cat(values), lengths=torch.cat(lengths))

    def _check(self, ids: Mapping[str, torch.Tensor]) -> None:
        """Look at the ids of a batch; raise what is known of it and earlier ones."""
        seen = [feature for feature in self._features if ids[feature.key].numel()]
        if seen:
            of_keys = {f.key: torch.aminmax(ids[f.key]) for f in seen}
            bounds = [bound for f in seen for bound in of_keys[f.key]]
            check = ToHost(torch.stack(bounds), until_then=0)
            self._checks.append((check, seen))
        while self._checks and self._checks[0][0].is_here():
            bounds_F2, of_batch = self._checks.popleft()
            for feature, (low, high) in zip(
                of_batch, bounds_F2.read().reshape(-1, 2).tolist(), strict=True
            ):
                _require_known(feature, low, high)


def _require_known(feature: _Feature, low: int, high: int) -> None:
    if low < 0 or high >= feature.num_ids:
        raise BatchError(
            f"Feature {feature.key!r}: ids must be in [0, {feature.num_ids}), the "
            f"num_embeddings of table {feature.table!r}. Received: "
            f"{low if low < 0 else high}."
        )


class _JoinRows(nn.Module):
    """Rows of quotients and remainders to embeddings."""

    def __init__(self, features: Sequence[_Feature], combine: Combine) -> None:
        super().__init__()
        self._features = features
        self._combine = combine

    def forward(self, found: Sequence[Any]) -> KeyedTensor:
        """Return a column for each feature."""
        halves: dict[str, Any] = {}
        for of_collection in found:  # what comes later, where the rows are elsewhere
            is_dict = self._combine == "mul"
            of_keys = of_collection if is_dict else of_collection.to_dict()
            halves.update(of_keys.items())
        columns = []
        for feature in self._features:
            quotient, remainder = (halves[feature.half(which)] for which in _HALVES)
            if self._combine == "mul":
                columns.append(_pool_products(quotient, remainder, feature.pooling))
            elif self._combine == "add":
                columns.append(quotient + remainder)
            else:
                columns.append(torch.cat([quotient, remainder], dim=1))
        return torchrec.KeyedTensor(
            [feature.name for feature in self._features],
            [feature.dim for feature in self._features],
            torch.cat(columns, dim=1),
        )


def _pool_products(
    quotient: JaggedTensor, remainder: JaggedTensor, pooling: PoolingType
) -> torch.Tensor:
    """Return the pooled products of the rows of each id, ``(B, D)``."""
    rows_LD = quotient.values() * remainder.values()
    lengths_B = quotient.lengths().to(torch.int64)
    bags_L = torch.repeat_interleave(
        torch.arange(len(lengths_B), device=lengths_B.device),
        lengths_B,
        output_size=len(rows_LD),  # else a GPU is asked for the sum
    )
    pooled_BD = rows_LD.new_zeros(len(lengths_B), rows_LD.shape[1])
    pooled_BD = pooled_BD.index_add(0, bags_L, rows_LD)
    if pooling is PoolingType.MEAN:
        pooled_BD = pooled_BD / lengths_B.clamp(min=1).unsqueeze(1)
    return pooled_BD
