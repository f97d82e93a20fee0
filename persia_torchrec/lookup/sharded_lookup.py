"""Lookup and gradient of a whole batch, over all servers.

    bags of every feature
      -> prefix, unique ids per table, grouped by server    (route)
      -> rows of the unique ids, from the servers           (client.pull)
      -> what the model is given                            (outputs_of)
    gradients of that
      -> gradient of each unique id, summed over the batch  (row_gradients)
      -> to the servers, which apply the optimizer          (client.push)

An id in two features of a table is pulled once and updated once.

Dimensions: B samples, L ids of one feature, U unique ids of one table, D embedding dim,
T sum of the dims of all features.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from persia_torchrec.client.client import BatchNumber, EmbeddingClient, Reply
from persia_torchrec.errors import BatchError, ConfigError
from persia_torchrec.jit.compiled import telling_of_compilation
from persia_torchrec.lookup import pooling
from persia_torchrec.lookup.bags import Bags, FeatureSpec, Lengths, check_bags
from persia_torchrec.routing import shard
from persia_torchrec.routing.hashing import add_prefix, hash_stack
from persia_torchrec.routing.shard import Counts, Positions, ShardedIds
from persia_torchrec.rpc.float_codec import Floats
from persia_torchrec.rpc.messages import Precision
from persia_torchrec.table import TableChange, TableSpec, changed_tables

Outputs = tuple[Floats, ...]
"""What a lookup gives for a batch; it takes back gradients of the same shapes."""


class BatchFeatures:
    """The features of a batch, in the order of its outputs and of their columns."""

    def __init__(
        self, specs: Sequence[FeatureSpec], outputs: Sequence[Sequence[int]] = ()
    ) -> None:
        self.specs = tuple(specs)
        self.outputs = outputs  # indices of the features in each
        self.tables = list(dict.fromkeys(spec.table for spec in self.specs))
        self.table_of = [self.tables.index(spec.table) for spec in self.specs]
        # Indices of the features in the order of their tables.
        self.by_table = sorted(range(len(self.specs)), key=self.table_of.__getitem__)


@dataclass(frozen=True, slots=True)
class RoutedBatch:
    """A batch's ids, unique and grouped by server; what its gradient needs again."""

    number: BatchNumber | None  # None when the batch is not for training
    features: BatchFeatures  # only their tables are asked and updated
    tables: list[tuple[str, ShardedIds]]
    row_shapes: list[tuple[int, int]]  # (U, D) of each table
    inverses: list[Positions]  # int32 (L,) a feature: which of its table's ids each is
    lengths: list[Lengths]  # int32 (B,) a feature: ids per bag
    num_bags: list[int]  # the length of each output
    counts: list[Counts | None]  # uint32 (U,) a table: how often each id comes
    places: Sequence[Positions]  # int32 (B, F) a raw feature, see RawIds
    slots: tuple[str, ...]  # keys of its features, in its order

    def bags(
        self, rows: Sequence[Floats], features: Iterable[int]
    ) -> list[pooling.FeatureBags]:
        """Return the bags of some features over rows or sums of gradients."""
        specs, table_of = self.features.specs, self.features.table_of
        return [
            pooling.FeatureBags(
                rows[table_of[f]], self.inverses[f], self.lengths[f], specs[f].pooling
            )
            for f in features
        ]


class RowGradients(NamedTuple):
    """Gradients of rows: ids of each table, grouped by server; float32 ``(U, D)``."""

    tables: Sequence[tuple[str, ShardedIds]]
    grads: Sequence[Floats]


def add_up(parts: Sequence[RowGradients]) -> RowGradients:
    """Return the gradients of several batches as one, each id of a table once."""
    of_tables: dict[str, list[tuple[ShardedIds, Floats]]] = {}
    for part in parts:
        for (table, ids), grads_UD in zip(part.tables, part.grads, strict=True):
            of_tables.setdefault(table, []).append((ids, grads_UD))
    added = [_add_up_table(of_table) for of_table in of_tables.values()]
    tables = [(name, ids) for name, (ids, _) in zip(of_tables, added, strict=True)]
    return RowGradients(tables, [grads_UD for _, grads_UD in added])


def _add_up_table(
    pieces: Sequence[tuple[ShardedIds, Floats]],
) -> tuple[ShardedIds, Floats]:
    """Add up one table. An id keeps its server, which is not computed again."""
    num_servers = len(pieces[0][0].offsets) - 1
    ids, grads, num_ids = [], [], []
    for server in range(num_servers):
        bounds = [split.offsets[server : server + 2] for split, _ in pieces]
        for (split, grads_UD), (start, stop) in zip(pieces, bounds, strict=True):
            ids.append(split.ids[start:stop])
            grads.append(grads_UD[start:stop])
        num_ids.append(int(sum(stop - start for start, stop in bounds)))
    of_servers, inverse_L = shard.route_ids(np.concatenate(ids), num_ids, 1)
    starts = np.cumsum([0, *(len(split.ids) for split in of_servers)])
    for server, start in enumerate(np.cumsum([0, *num_ids[:-1]]).tolist()):
        inverse_L[start : start + num_ids[server]] += np.int32(starts[server])
    grads_LD = np.concatenate(grads)
    sums_UD = np.zeros((int(starts[-1]), grads_LD.shape[1]), dtype=np.float32)
    ones_L = np.ones(len(grads_LD), dtype=np.int32)
    bags = pooling.FeatureBags(sums_UD, inverse_L, ones_L, "sum")
    pooling.add_gradients(grads_LD, [bags])
    ids_U = np.concatenate([split.ids for split in of_servers])
    return ShardedIds(ids_U, starts, inverse_L), sums_UD


class ShardedLookup:
    """Pull batches and push their gradients; pool all features into one output.

    The output is float32 ``(B, T)``, its columns in the order of the features, which
    may repeat. Any thread may call any method. The lookup does not close its client.
    """

    def __init__(
        self,
        client: EmbeddingClient,
        features: Sequence[FeatureSpec],
        *,
        precision: Precision = Precision.FP32,
        timed: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._all = BatchFeatures(features, self.group(features))
        self.features = self._all.specs
        self._keys = {feature.key for feature in self.features}
        different = [feature.name for feature in dict.fromkeys(self.features)]
        if not different or len(set(different)) < len(different):
            raise ConfigError(
                f"There must be features, each of its own name. Received: {different}."
            )
        self.client = client
        self.precision = precision
        self._timed = timed
        with telling_of_compilation():  # before the first batch waits for it
            pooling.warm_up()

    def add_tables(self, specs: Sequence[TableSpec]) -> None:
        """Make the tables known to the servers; see ``EmbeddingClient.add_tables``."""
        missing = set(self._all.tables) - {spec.name for spec in specs}
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
            self.client.learn_tables()

    def change_tables(self, change: TableChange) -> None:
        """Change the settings of this lookup's tables on the servers."""
        known = [self.client.table(name) for name in self._all.tables]
        if changed := changed_tables(known, change):
            self.client.add_tables(changed)

    def dims(self) -> list[int]:
        """Return the dim of each feature."""
        return [self.client.table(feature.table).dim for feature in self.features]

    def group(self, specs: Sequence[FeatureSpec]) -> list[list[int]]:
        """Return the indices of the features in each output."""
        return [[*range(len(specs))]]

    def shapes(self, batch: RoutedBatch) -> list[tuple[int, int]]:
        """Return the shape of each output, and of its gradient."""
        features, rows = batch.features, batch.row_shapes
        return [
            (num, sum([rows[features.table_of[f]][1] for f in output]))
            for num, output in zip(batch.num_bags, features.outputs, strict=True)
        ]

    def outputs_of(self, rows: Sequence[Floats], batch: RoutedBatch) -> Outputs:
        """Make what the model is given out of the read-only rows, per table."""
        return tuple(
            [
                pooling.pool(batch.bags(rows, output), num)
                for num, output in zip(
                    batch.num_bags, batch.features.outputs, strict=True
                )
            ]
        )

    def row_gradients(self, grads: Outputs, batch: RoutedBatch) -> Sequence[Floats]:
        """Return the gradient of each table's rows ``(U, D)``: slices of one array."""
        stops = list(itertools.accumulate([num * dim for num, dim in batch.row_shapes]))
        pieces = np.split(np.zeros(stops[-1], dtype=np.float32), stops[:-1])
        sums = [
            piece.reshape(shape)
            for piece, shape in zip(pieces, batch.row_shapes, strict=True)
        ]
        for grad, output in zip(grads, batch.features.outputs, strict=True):
            pooling.add_gradients(grad, batch.bags(sums, output))
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
            rows = self.client.pull(
                batch.tables,
                batch=batch.number,
                precision=self.precision,
                counts=batch.counts,
            )
        with self._timed("lookup_postprocess_time_cost_sec"):
            return self.outputs_of(rows, batch)

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
        return RowGradients(batch.tables, self.row_gradients(grads, batch))

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
    ) -> tuple[BatchFeatures, Sequence[Bags], Sequence[Positions]]:
        """Return the features of a batch, the bags of each, and places of raw ones."""
        if bags.keys() != self._keys:
            raise BatchError(
                f"A batch must have the features {sorted(self._keys)}. Received: "
                f"missing {sorted(self._keys - bags.keys())}, unknown "
                f"{sorted(bags.keys() - self._keys)}."
            )
        return self._all, [bags[feature.key] for feature in self.features], ()

    def route(
        self, given: Mapping[str, Bags], number: BatchNumber | None
    ) -> RoutedBatch:
        """Make the ids unique per table, and group them by server; see :meth:`pull`."""
        num_samples = check_bags(given)
        features, bags, places = self.select(given)
        specs = features.specs
        bags = [
            _hashed(bag, spec) if spec.prefix or spec.hash_stack_rounds else bag
            for bag, spec in zip(bags, specs, strict=True)
        ]
        pieces = [bags[f].ids for f in features.by_table]
        num_ids = [0] * len(features.tables)
        for f, piece in zip(features.by_table, pieces, strict=True):
            num_ids[features.table_of[f]] += len(piece)
        ids_L, num_servers = np.concatenate(pieces), self.client.num_servers
        known = [self.client.tables[table] for table in features.tables]
        shared_rows = [table.spec.shared_rows for table in known]
        tables, inverse_L = shard.route_ids(ids_L, num_ids, num_servers, shared_rows)
        inverses, stop = [inverse_L] * len(specs), 0
        for f, piece in zip(features.by_table, pieces, strict=True):
            start, stop = stop, stop + len(piece)
            inverses[f] = inverse_L[start:stop]
        return RoutedBatch(
            number,
            features,
            list(zip(features.tables, tables, strict=True)),
            [
                (len(ids.ids), table.spec.dim)
                for table, ids in zip(known, tables, strict=True)
            ],
            inverses,
            [bag.lengths for bag in bags],
            [len(bags[o[0]].lengths) if o else num_samples for o in features.outputs],
            [
                shard.count_repeats(ids.inverse, len(ids.ids))
                if number is not None and table.wants_counts
                else None
                for table, ids in zip(known, tables, strict=True)
            ],
            places,
            tuple(given),
        )


def _hashed(bags: Bags, feature: FeatureSpec) -> Bags:
    """Return a feature's bags, prefixed, the buckets of its hash stack for its ids."""
    ids, lengths = bags.ids, bags.lengths
    if rounds := feature.hash_stack_rounds:
        ids = hash_stack(ids, rounds, feature.hash_stack_size)
        lengths = lengths * np.int32(rounds)
    if feature.prefix:
        ids = add_prefix(ids, feature.prefix, feature.prefix_bits)
    return Bags(ids, lengths)


class SequenceLookup(ShardedLookup):
    """Gives a row for each id; its outputs are float32 ``(L, D)``, one per feature."""

    def group(self, specs: Sequence[FeatureSpec]) -> list[list[int]]:
        """Return an output for each feature."""
        return [[f] for f in range(len(specs))]

    def select(
        self, bags: Mapping[str, Bags]
    ) -> tuple[BatchFeatures, Sequence[Bags], Sequence[Positions]]:
        """Return the features of a batch, with a bag for each id."""
        features, selected, _ = super().select(bags)
        ids = [bag.ids for bag in selected]
        return features, [Bags(i, np.ones(len(i), dtype=np.int32)) for i in ids], ()

    def outputs_of(self, rows: Sequence[Floats], batch: RoutedBatch) -> Outputs:
        """Return the row of each id; faster than to pool bags of one id."""
        each = zip(batch.features.table_of, batch.inverses, strict=True)
        return tuple([rows[table].take(inverse_L, axis=0) for table, inverse_L in each])
