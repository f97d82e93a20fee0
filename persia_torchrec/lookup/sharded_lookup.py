"""Lookup and gradient of a whole batch, over all servers.

    bags of every feature
      -> prefix, unique ids per table, by dim and server    (route)
      -> rows of the unique ids, from the servers           (source.begin_pull)
      -> what the model is given                            (outputs_of)
    gradients of that
      -> gradient of each unique id, summed over the batch  (row_gradients)
      -> to the servers, which apply the optimizer          (client.push)

An id in two features of a table is pulled once and updated once.

Dimensions: B samples, L ids of one feature, U unique ids of one table, D embedding dim,
T sum of the dims of all features.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Counts, Floats, Ids, Lengths, Positions
from persia_torchrec.client.client import BatchNumber, EmbeddingClient, Reply
from persia_torchrec.client.codec import KnownTables
from persia_torchrec.errors import BatchError, ConfigError
from persia_torchrec.jit.compiled import report_compilation
from persia_torchrec.lookup import pooling
from persia_torchrec.lookup.bags import (
    POOLINGS,
    Bags,
    FeatureSpec,
    JaggedIds,
    check_bags,
)
from persia_torchrec.routing.route import (
    FeatureColumns,
    IdGroup,
    ShardedIds,
    route_features,
    sum_by_id,
)
from persia_torchrec.rpc.messages import Precision
from persia_torchrec.table import TableChange, TableSpec, changed_tables

Outputs = tuple[Floats, ...]
"""What a lookup gives for a batch; it takes back gradients of the same shapes."""


class _Rows(Protocol):
    """Rows that were asked for."""

    def pieces(self) -> Sequence[Sequence[Floats]]:
        """Wait for the rows of each group, float32 arrays ``(N, D)`` in their order."""


class RowSource(Protocol):
    """Where a lookup reads rows: an ``EmbeddingClient``, or memory of this process.

    Any thread may call any method.

    Attributes:
        is_local: whether a lookup waits for no server.
        timeout_s: seconds that a lookup may take, where it waits for servers.
    """

    is_local: ClassVar[bool]
    timeout_s: float

    @property
    def tables(self) -> KnownTables:
        """The tables by name."""

    @property
    def num_servers(self) -> int:
        """How many shards ids are grouped by."""

    @property
    def serves(self) -> str:
        """The checkpoint whose rows stay as they are, or ""."""

    def table(self, name: str) -> TableSpec:
        """Return a table; ConfigError if it is unknown."""

    def learn_tables(self) -> Sequence[TableSpec]:
        """Know the tables that there are, and return them."""

    def counters(self, timeout_s: float | None = None) -> Sequence[Mapping[str, int]]:
        """Return the counters of each server, see ``docs/metrics.md``."""

    def begin_pull(
        self,
        tables: Sequence[IdGroup],
        batch: BatchNumber | None,
        precision: Precision,
        counts: Sequence[Counts | None] | None,
    ) -> _Rows:
        """Ask for rows, see ``EmbeddingClient.pull``."""


class GroupFeatures(NamedTuple):
    """Of the features of one group, int64: index, key, pooling, and rounds or 1."""

    indices: npt.NDArray[np.int64]
    keys: npt.NDArray[np.int64]
    poolings: npt.NDArray[np.int64]
    rounds: npt.NDArray[np.int64]

    @property
    def has_scales(self) -> bool:
        """Whether a bag may be more than the sum of its rows."""
        return bool((self.poolings != POOLINGS.index("sum")).any())


class RoutePlan(NamedTuple):
    """How the ids of features become those of groups: of tables of one dim and pool.

    Attributes:
        version: of what the client knew of the tables.
        groups: the tables of each; all of them have this order in arrays.
        dims: of each group.
        group_of: of each feature.
        columns: what the compiled call needs of features; ``keys`` are those of
            ``positions``.
        table_groups: int64, the group of each table.
        table_shared_rows: uint64, the shared rows of each table.
        feature_groups: int64 ``(F,)``, as ``group_of``; ``keys`` and ``poolings``, of
            ``POOLINGS``, likewise.
        hashed: features whose ids have several buckets.
        of_groups: the features of each group, in their order.
    """

    version: int
    positions: Mapping[str, int]
    groups: tuple[tuple[str, ...], ...]
    dims: tuple[int, ...]
    group_of: tuple[int, ...]
    columns: FeatureColumns
    table_groups: npt.NDArray[np.int64]
    table_shared_rows: Ids
    feature_groups: npt.NDArray[np.int64]
    keys: npt.NDArray[np.int64]
    poolings: npt.NDArray[np.int64]
    hashed: tuple[int, ...]
    of_groups: tuple[GroupFeatures, ...]


class BatchFeatures:
    """The features of a batch, in the order of its outputs and of their columns."""

    def __init__(
        self, specs: Sequence[FeatureSpec], outputs: Sequence[Sequence[int]] = ()
    ) -> None:
        self.specs = tuple(specs)
        self.names = [(spec.table, spec.name) for spec in specs]
        self.outputs = outputs  # indices of the features in each
        # Tables that stay apart from others of their dim, by what they have in common.
        self.pools: Mapping[str, int] = {}
        self._plan: RoutePlan | None = None

    def plan(self, tables: KnownTables, positions: Mapping[str, int]) -> RoutePlan:
        """Return how to route a batch whose keys have these positions."""
        plan = self._plan
        if plan is None or (plan.version, plan.positions) != (
            tables.version,
            positions,
        ):
            plan = _make_plan(self.specs, tables, positions, self.pools)
            self._plan = plan
        return plan


def _make_plan(
    specs: Sequence[FeatureSpec],
    known: KnownTables,
    positions: Mapping[str, int],
    pools: Mapping[str, int],
) -> RoutePlan:
    version = known.version
    names = list(dict.fromkeys(spec.table for spec in specs))
    key_of = {name: (known[name].spec.dim, pools.get(name)) for name in names}
    keys = list(dict.fromkeys(key_of.values()))
    dims = tuple(dim for dim, _ in keys)
    groups = tuple(tuple(n for n in names if key_of[n] == key) for key in keys)
    ordered = list(itertools.chain(*groups))
    shared = [known[name].spec.shared_rows for name in ordered]
    rows = [
        (
            positions[spec.key],
            ordered.index(spec.table),
            spec.hash_stack_rounds,
            spec.hash_stack_size,
            2 ** (64 - spec.prefix_bits) - 1 if spec.prefix else 0,
            spec.prefix,
        )
        for spec in specs
    ]
    columns = np.array(rows, dtype=np.uint64).reshape(-1, 6).T.copy()
    group_of = tuple(keys.index(key_of[spec.table]) for spec in specs)
    feature_groups = np.array(group_of, dtype=np.int64)
    of_keys, rounds = columns[0].astype(np.int64), columns[2].astype(np.int64)
    poolings = np.array([POOLINGS.index(s.pooling) for s in specs], dtype=np.int64)
    chosen = [np.flatnonzero(feature_groups == group) for group in range(len(dims))]
    return RoutePlan(
        version,
        dict(positions),
        groups,
        dims,
        group_of,
        FeatureColumns(*columns),
        np.array([keys.index(key_of[n]) for n in ordered], dtype=np.int64),
        np.array(shared, dtype=np.uint64),
        feature_groups,
        of_keys,
        poolings,
        tuple(f for f, spec in enumerate(specs) if spec.hash_stack_rounds),
        tuple(
            GroupFeatures(own, of_keys[own], poolings[own], np.maximum(rounds[own], 1))
            for own in chosen
        ),
    )


@dataclass(frozen=True, slots=True)
class RoutedBatch:
    """A batch's ids, unique and grouped by server; what its gradient needs again."""

    plan: RoutePlan
    groups: list[IdGroup]  # as of the plan; only they are asked and updated
    occurrences: list[Counts]  # uint32 (U,) a group: how often each id comes
    inverse: Positions  # int32: which of its group's each id is, feature by feature
    starts: npt.NDArray[np.int64]  # (F + 1,) where a feature begins in it
    lengths: Lengths  # int32: ids per bag, before hashing, by key
    bag_starts: npt.NDArray[np.int64]  # where a key begins in lengths
    id_starts: npt.NDArray[np.int64]  # where a key begins in the ids of the batch
    sources: npt.NDArray[np.int64] | None  # see JaggedIds
    features: BatchFeatures
    num_bags: Sequence[int] = ()  # the length of each output
    number: BatchNumber | None = None  # None when the batch is not for training
    places: Sequence[Positions] = ()  # int32 (B, F) a raw feature, see RawIds
    slots: tuple[str, ...] = ()  # keys of its features, in its order

    @property
    def counts(self) -> list[Counts | None]:
        """What servers are told of how often ids come: of training batches only."""
        is_training = self.number is not None
        return [counts_U if is_training else None for counts_U in self.occurrences]

    @property
    def row_shapes(self) -> list[tuple[int, int]]:
        """The shape (U, D) of the rows of each group, and of their gradients."""
        pairs = zip(self.groups, self.plan.dims, strict=True)
        return [(len(group.ids), dim) for group, dim in pairs]

    def dim_of(self, feature: int) -> int:
        """Return the dim of the feature of an index."""
        return self.plan.dims[self.plan.group_of[feature]]

    def inverse_of(self, feature: int) -> Positions:
        """Return which row of its group each id of a feature is."""
        return self.inverse[self.starts[feature] : self.starts[feature + 1]]

    def ids_of(self, feature: int) -> Ids:
        """Return the unique ids of a feature's table, by server."""
        name = self.features.specs[feature].table
        group = self.groups[self.plan.group_of[feature]]
        ranges = group.ranges_of(group.tables.index(name))
        return np.concatenate([group.ids[start:stop] for start, stop in ranges])

    def bags(
        self,
        rows: Sequence[pooling.RowPieces],
        features: Sequence[int],
        *,
        each_id: bool,
    ) -> pooling.BagsInRoute:
        """Return the bags of some features over rows, or sums of gradients, by group.

        With ``each_id`` every id is a bag of its own.
        """
        chosen, plan = np.array(features, dtype=np.int64), self.plan
        starts, keys = self.starts[chosen], plan.keys[chosen]
        nums = self.starts[chosen + 1] - starts
        if each_id:
            ones = np.ones(int(nums.max(initial=0)), dtype=np.int32)
            lengths, length_starts = ones, np.zeros_like(keys)
        else:
            lengths, length_starts = self.lengths, self.bag_starts[keys]
        return pooling.BagsInRoute(
            rows,
            plan.feature_groups[chosen],
            self.inverse,
            starts,
            nums,
            lengths,
            length_starts,
            {} if each_id else self._hashed_lengths(features),
            plan.poolings[chosen],
        )

    def _hashed_lengths(self, features: Sequence[int]) -> dict[int, Lengths]:
        """Return the lengths of the bags of features whose ids have several buckets."""
        found = {}
        for f in self.plan.hashed:
            if f in features:
                key = self.plan.keys[f]
                lengths = self.lengths[self.bag_starts[key] : self.bag_starts[key + 1]]
                rounds = self.features.specs[f].hash_stack_rounds
                found[features.index(f)] = lengths * np.int32(rounds)
        return found


class RowGradients(NamedTuple):
    """Gradients of rows: ids of tables, grouped by server; float32 ``(U, D)``."""

    groups: Sequence[IdGroup]
    grads: Sequence[Floats]


def add_up(parts: Sequence[RowGradients]) -> RowGradients:
    """Return the gradients of several batches as one, each id of a table once."""
    of_tables: dict[str, list[list[tuple[Ids, Floats]]]] = {}
    for part in parts:
        for group, grads_UD in zip(part.groups, part.grads, strict=True):
            for index, table in enumerate(group.tables):
                pieces = [
                    (group.ids[start:stop], grads_UD[start:stop])
                    for start, stop in group.ranges_of(index)
                ]
                of_tables.setdefault(table, []).append(pieces)
    added = [_add_up_table(of_table) for of_table in of_tables.values()]
    groups = [
        IdGroup.of(name, ids) for name, (ids, _) in zip(of_tables, added, strict=True)
    ]
    return RowGradients(groups, [grads_UD for _, grads_UD in added])


def _add_up_table(
    parts: Sequence[Sequence[tuple[Ids, Floats]]],
) -> tuple[ShardedIds, Floats]:
    """Add up one table. An id keeps its server, which is not computed again."""
    of_servers = []
    for pieces in zip(*parts, strict=True):
        ids_N = np.concatenate([ids for ids, _ in pieces])
        grads_ND = np.concatenate([grads for _, grads in pieces])
        of_servers.append(sum_by_id(ids_N, grads_ND))
    starts = np.cumsum([0, *(len(unique.ids) for unique, _ in of_servers)])
    return ShardedIds(
        np.concatenate([unique.ids for unique, _ in of_servers]),
        starts,
        np.concatenate(
            [
                unique.inverse + np.int32(start)
                for (unique, _), start in zip(of_servers, starts[:-1], strict=True)
            ]
        ),
    ), np.concatenate([sums_UD for _, sums_UD in of_servers])


class ShardedLookup:
    """Pull batches and push their gradients; pool all features into one output.

    The output is float32 ``(B, T)``, its columns in the order of the features, which
    may repeat. Any thread may call any method. The lookup does not close its source.
    """

    each_id: bool = False  # whether every id is a bag of its own

    def __init__(
        self,
        source: RowSource,
        features: Sequence[FeatureSpec],
        *,
        precision: Precision = Precision.FP32,
        timed: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._all = BatchFeatures(features, self.group(features))
        self._tables = list(dict.fromkeys(feature.table for feature in features))
        self.features = self._all.specs
        self._keys = {feature.key for feature in self.features}
        different = [feature.name for feature in dict.fromkeys(self.features)]
        if not different or len(set(different)) < len(different):
            raise ConfigError(
                f"features must be non-empty with unique names. Received: {different}."
            )
        self.source = source
        self.precision = precision
        self._timed = timed
        self.num_ids: Counter[tuple[str, str]] = Counter()
        with report_compilation():  # before the first batch waits for it
            pooling.warm_up()

    @cached_property
    def client(self) -> EmbeddingClient:
        """The client of the servers; rows of this process cannot be trained."""
        if not isinstance(self.source, EmbeddingClient):
            raise ConfigError(
                "Tables must be on servers to be trained. Received: a checkpoint that "
                "is read in this process."
            )
        return self.source

    def add_tables(self, specs: Sequence[TableSpec]) -> None:
        """Make the tables known to the servers; see ``EmbeddingClient.add_tables``."""
        missing = set(self._tables) - {spec.name for spec in specs}
        if missing:
            raise ConfigError(
                f"No table {sorted(missing)[0]!r}, which a feature names."
            )
        self.client.add_tables(specs)

    def learn_tables(self) -> None:
        """Learn the tables from the servers, if some are unknown; change none."""
        try:
            self.dims()
        except ConfigError:
            self.source.learn_tables()

    def change_tables(self, change: TableChange) -> None:
        """Change the settings of this lookup's tables on the servers."""
        known = [self.client.table(name) for name in self._tables]
        if changed := changed_tables(known, change):
            self.client.add_tables(changed)

    def dims(self) -> list[int]:
        """Return the dim of each feature."""
        return [self.source.table(feature.table).dim for feature in self.features]

    def group(self, specs: Sequence[FeatureSpec]) -> list[list[int]]:
        """Return the indices of the features in each output."""
        return [[*range(len(specs))]]

    def shapes(self, batch: RoutedBatch) -> list[tuple[int, int]]:
        """Return the shape of each output, and of its gradient."""
        return [
            (num, sum([batch.dim_of(f) for f in output]))
            for num, output in zip(batch.num_bags, batch.features.outputs, strict=True)
        ]

    def outputs_of(
        self, rows: Sequence[pooling.RowPieces], batch: RoutedBatch
    ) -> Outputs:
        """Make what the model is given out of the read-only rows, per group."""
        return tuple(
            [
                pooling.pool(batch.bags(rows, output, each_id=self.each_id), num)
                for num, output in zip(
                    batch.num_bags, batch.features.outputs, strict=True
                )
            ]
        )

    def row_gradients(self, grads: Outputs, batch: RoutedBatch) -> Sequence[Floats]:
        """Return the gradient of each group's rows ``(U, D)``."""
        sums = [np.empty(shape, dtype=np.float32) for shape in batch.row_shapes]
        rows = [pooling.RowPieces.of([sums_UD], written=False) for sums_UD in sums]
        for grad, output in zip(grads, batch.features.outputs, strict=True):
            bags = batch.bags(rows, output, each_id=self.each_id)
            pooling.add_gradients(grad, bags)
        for of_group in rows:
            of_group.clear_unwritten()
        return sums

    def pull(
        self, bags: Mapping[str, Bags], number: BatchNumber | None
    ) -> tuple[Outputs, RoutedBatch]:
        """Fetch the rows of a batch; return what the model is given, and push needs.

        ``bags`` are by key, exactly those of this lookup's features. Without a number,
        the batch is not for training, and only read.
        """
        with self._timed("lookup_total_time_cost_sec"):
            with self._timed("lookup_preprocess_time_cost_sec"):
                batch = self.route(bags, number)
            return self.fetch(batch), batch

    def fetch(self, batch: RoutedBatch) -> Outputs:
        """Fetch the rows of a batch; to do so twice changes no more than once."""
        with self._timed("lookup_rpc_time_cost_sec"):
            asked = self.source.begin_pull(
                batch.groups, batch.number, self.precision, batch.counts
            )
            pieces = asked.pieces()
        with self._timed("lookup_postprocess_time_cost_sec"):
            return self.outputs_of([*map(pooling.RowPieces.of, pieces)], batch)

    def push(self, batch: RoutedBatch, grads: Outputs) -> list[Reply]:
        """Send the gradients of a training batch; returns before they are applied."""
        assert batch.number is not None, "a batch that was not pulled for training"
        return self.send(self.gradients_of(batch, grads), batch.number)

    def gradients_of(self, batch: RoutedBatch, grads: Outputs) -> RowGradients:
        """Return the gradients of a batch's rows; those of its outputs are given."""
        expected, received = self.shapes(batch), [grad.shape for grad in grads]
        if received != expected:
            raise BatchError(
                f"The gradients must have the shapes {expected}. Received: {received}."
            )
        return RowGradients(batch.groups, self.row_gradients(grads, batch))

    def send(self, gradients: RowGradients, number: BatchNumber) -> list[Reply]:
        """Send gradients of rows; without any the batch is given up."""
        return self.client.push(*gradients, number, precision=self.precision)

    def again(self, batch: RoutedBatch, number: BatchNumber) -> RoutedBatch:
        """Return the batch under another number, for one more push."""
        return replace(batch, number=number)

    def abandon(self, batch: RoutedBatch) -> list[Reply]:
        """Tell the servers that a training batch will get no gradients."""
        assert batch.number is not None, "a batch that was not pulled for training"
        return self.client.push([], [], batch.number)

    def select(
        self, bags: Mapping[str, Bags]
    ) -> tuple[BatchFeatures, JaggedIds, Sequence[Positions]]:
        """Return the features of a batch, its ids, and places of raw ones."""
        jagged = bags if isinstance(bags, JaggedIds) else None
        keys = bags.keys() if jagged is None else jagged.positions.keys()
        if keys != self._keys:
            raise BatchError(
                f"A batch must have the features {sorted(self._keys)}. Received: "
                f"missing {sorted(self._keys - keys)}, unknown "
                f"{sorted(keys - self._keys)}."
            )
        return self._all, _checked(bags) if jagged is None else jagged, ()

    def route(
        self, given: Mapping[str, Bags], number: BatchNumber | None
    ) -> RoutedBatch:
        """Make the ids unique per table, and group them by server; see :meth:`pull`."""
        features, jagged, places = self.select(given)
        plan = features.plan(self.source.tables, jagged.positions)
        if number is not None:
            num_K = jagged.id_starts[1:] - jagged.id_starts[:-1]
            nums, counted = num_K[plan.keys].tolist(), self.num_ids
            for name, num in zip(features.names, nums, strict=True):
                counted[name] += num
        route = route_features(
            jagged.ids,
            jagged.id_starts,
            plan.columns,
            plan.table_groups,
            plan.table_shared_rows,
            self.source.num_servers,
        )
        groups, occurrences = route.by_group(plan.groups)
        if self.each_id:
            num_F = route.starts[1:] - route.starts[:-1]
        else:
            num_F = (jagged.bag_starts[1:] - jagged.bag_starts[:-1])[plan.keys]
        num, num_samples = num_F.tolist(), jagged.num_samples
        return RoutedBatch(
            plan,
            groups,
            occurrences,
            route.inverse,
            route.starts,
            jagged.lengths,
            jagged.bag_starts,
            jagged.id_starts,
            jagged.sources,
            features,
            num_bags=[num[o[0]] if o else num_samples for o in features.outputs],
            number=number,
            places=places,
            slots=tuple(given),
        )


def _checked(bags: Mapping[str, Bags]) -> JaggedIds:
    """Check that the features of a batch fit together; put them side by side."""
    check_bags(bags)
    return JaggedIds.of(bags)


class SequenceLookup(ShardedLookup):
    """Gives a row for each id; its outputs are float32 ``(L, D)``, one per feature."""

    each_id = True

    def group(self, specs: Sequence[FeatureSpec]) -> list[list[int]]:
        """Return an output for each feature."""
        return [[f] for f in range(len(specs))]

    def outputs_of(
        self, rows: Sequence[pooling.RowPieces], batch: RoutedBatch
    ) -> Outputs:
        """Return the row of each id; faster than to pool bags of one id."""
        each = enumerate(batch.plan.group_of)
        return tuple([rows[g].take(batch.inverse_of(f)) for f, g in each])
