"""Lookup and gradient of a whole batch.

    bags of every feature
      -> prefix, unique ids a table, grouped by server      (route)
      -> rows of the unique ids, from the servers           (client.pull)
      -> what the model is given                            (outputs_of)
    gradients of that
      -> gradient of each unique id, summed over the batch  (row_gradients)
      -> to the servers, which apply the optimizer          (client.push)

Ids of all features of a table are made unique together: an id in two features is
pulled once and updated once, with the sum of both gradients.

What the model is given differs: one vector a bag (``pooled.py``), a row for each id
(``sequences.py``), PERSIA's slots of both kinds (``slots.py``), or the unique rows
themselves (``rows.py``).

Dimension key:
    B: samples
    L: ids of one feature in a batch
    U: unique ids of one table
    D: embedding dim
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from persia_torchrec.client.client import BatchNumber, EmbeddingClient, Reply
from persia_torchrec.client.codec import PushOutcome
from persia_torchrec.compiled import telling_of_compilation
from persia_torchrec.errors import BatchError, ConfigError
from persia_torchrec.routing.dedup import Counts, Positions, count_repeats
from persia_torchrec.routing.hashing import Ids, add_prefix, hash_stack
from persia_torchrec.routing.shard import ShardedIds
from persia_torchrec.routing.tables import route_ids
from persia_torchrec.table import TableChange, TableSpec, changed_tables
from persia_torchrec.wire.messages import Precision
from persia_torchrec.worker.bags import Bags, FeatureSpec
from persia_torchrec.worker.pooling import FeatureBags, Floats, Lengths
from persia_torchrec.worker.pulled import Outputs
from persia_torchrec.worker.warm_up import warm_up


class BatchFeatures:
    """The features of a batch, and how their ids are routed.

    Args:
        specs: in the order of the outputs, or of their columns.

    Attributes:
        specs: as given.
        tables: names of the tables of these features, each once.
        table_of: for each feature, which of these tables is its own.
        by_table: numbers of the features in the order of their tables.
    """

    def __init__(self, specs: Sequence[FeatureSpec]) -> None:
        self.specs = tuple(specs)
        self.tables = list(dict.fromkeys(spec.table for spec in self.specs))
        numbers = {table: number for number, table in enumerate(self.tables)}
        self.table_of = [numbers[spec.table] for spec in self.specs]
        self.by_table = sorted(range(len(self.specs)), key=self.table_of.__getitem__)

    @cached_property
    def pooled_and_raw(self) -> list[list[int]]:
        """Numbers of all pooled features; then, by itself, that of each raw one."""
        numbered = list(enumerate(self.specs))
        pooled = [f for f, spec in numbered if not spec.num_places]
        return [pooled, *([f] for f, spec in numbered if spec.num_places)]


@dataclass(frozen=True, slots=True)
class RoutedBatch:
    """A batch's ids, unique and grouped by server; what its gradient needs again.

    Attributes:
        number: which batch it is, or None when it is not for training.
        features: of the batch; only their tables are asked and updated.
        tables: names of tables with their unique ids.
        inverses: for each feature, int32 ``(L,)``: which of its table's grouped ids
            each id is.
        lengths: for each feature, int32 ``(B,)``: ids a bag.
        num_samples: B.
        counts: for each table, uint32 ``(U,)``: how often each of its grouped ids
            occurs in the batch; None where nobody wants to know.
        places: for each raw feature, int32 ``(B, F)``, see ``worker/raw_ids.py``.
        slots: names of the features, where the lookup lets a batch choose them.
    """

    number: BatchNumber | None
    features: BatchFeatures
    tables: list[tuple[str, ShardedIds]]
    inverses: list[Positions]
    lengths: list[Lengths]
    num_samples: int
    counts: list[Counts | None] | None = None
    places: Sequence[Positions] = ()
    slots: tuple[str, ...] = ()


class EmbeddingWorker(ABC):
    """Pull batches and push their gradients; what all lookups share.

    Any thread may call any method.

    Args:
        client: of the servers; the worker does not close it.
        features: in the order of the outputs, or of their columns; one may stand there
            more than once, as a feature that a table names twice.
        precision: how rows and gradients travel.

    Attributes:
        features: as given.
        table_of: for each feature, which of the tables is its own.

    Raises:
        ConfigError: no feature, or two different ones of the same name.
    """

    def __init__(
        self,
        client: EmbeddingClient,
        features: Sequence[FeatureSpec],
        *,
        precision: Precision = Precision.FP32,
    ) -> None:
        self._all = BatchFeatures(features)
        self.features = self._all.specs
        self.table_of = self._all.table_of
        different = [feature.name for feature in dict.fromkeys(self.features)]
        if not different or len(set(different)) < len(different):
            raise ConfigError(
                f"There must be features, each of its own name. Received: {different}."
            )
        self._client = client
        self._precision = precision
        with telling_of_compilation():  # before the first batch waits for it
            warm_up()

    def add_tables(self, specs: Sequence[TableSpec]) -> None:
        """Make the tables known to the servers; see ``EmbeddingClient.add_tables``.

        Raises:
            ConfigError: a feature's table is not among them.
        """
        missing = set(self._all.tables) - {spec.name for spec in specs}
        if missing:
            raise ConfigError(
                f"No table {sorted(missing)[0]!r}, which a feature names."
            )
        self._client.add_tables(specs)

    def learn_tables(self) -> None:
        """Get to know the tables from the servers, if some are unknown; change none.

        Those that the servers have not yet stay unknown.

        Raises:
            ServerError: a server failed, or did not answer in time.
        """
        try:
            self.dims()
        except ConfigError:
            self._client.learn_tables()

    def change_tables(self, change: TableChange) -> None:
        """Change the settings of this worker's tables on the servers.

        Raises:
            ServerError: a server refuses, failed, or did not answer in time.
        """
        known = [self._client.table(name) for name in self._all.tables]
        if changed := changed_tables(known, change):
            self._client.add_tables(changed)

    def dims(self, features: BatchFeatures | None = None) -> list[int]:
        """Return the dim of each feature; of all by default."""
        specs = self.features if features is None else features.specs
        return [self._client.table(feature.table).dim for feature in specs]

    @abstractmethod
    def shapes(self, batch: RoutedBatch) -> list[tuple[int, ...]]:
        """Return the shape of each output, and of its gradient."""

    @abstractmethod
    def outputs_of(self, rows: Sequence[Floats], batch: RoutedBatch) -> Outputs:
        """Make what the model is given out of the unique rows.

        Args:
            rows: float32 ``(U, D)`` a table of the batch; not to be written to.
            batch: which of these rows each id is.
        """

    @abstractmethod
    def row_gradients(self, grads: Outputs, batch: RoutedBatch) -> list[Floats]:
        """Return the gradient of the unique rows, float32 ``(U, D)`` a table.

        Args:
            grads: of the outputs, of their shapes.
            batch: which row each id is.
        """

    def pull(
        self, bags: Mapping[str, Bags], number: BatchNumber | None
    ) -> tuple[Outputs, RoutedBatch]:
        """Fetch the rows of a batch; returns when they are here.

        Args:
            bags: by key of the features, all of the same number of samples; exactly
                the keys of this worker's features.
            number: which batch of which stream, when it is for training. None only
                looks.

        Returns:
            What the model is given, and what :meth:`push` needs.

        Raises:
            BatchError: features are missing, unknown, or do not fit together.
            ServerError: a server failed, refused, or did not answer in time.
        """
        num_samples = self.check(bags)
        bags_of = {feature.name: bags[feature.key] for feature in self.features}
        batch = self.route(self._all, bags_of, num_samples, number)
        return self.outputs_of(self.rows_of(batch), batch), batch

    def push(self, batch: RoutedBatch, grads: Outputs) -> list[Reply]:
        """Send the gradients of a training batch; returns before they are applied.

        Args:
            batch: what :meth:`pull` returned.
            grads: float32, of the outputs, of their shapes.

        Returns:
            Replies of the servers, for :meth:`missed`.

        Raises:
            BatchError: the shape of a gradient is not its output's.
        """
        assert batch.number is not None, "a batch that was not pulled for training"
        expected, received = self.shapes(batch), [grad.shape for grad in grads]
        if received != expected:
            raise BatchError(
                f"The gradients must have the shapes {expected}. Received: {received}."
            )
        row_grads = self.row_gradients(grads, batch)
        return self._client.push(
            batch.tables, row_grads, batch.number, precision=self._precision
        )

    def feature_bags(
        self,
        rows: Sequence[Floats],
        batch: RoutedBatch,
        features: Iterable[int] | None = None,
    ) -> list[FeatureBags]:
        """Return the bags of features over rows, or over what stands for them.

        Args:
            rows: float32 ``(U, D)`` a table of the batch.
            batch: which row each id is.
            features: numbers of features of the batch; all of them by default.
        """
        of_batch = batch.features
        return [
            FeatureBags(
                rows[of_batch.table_of[f]],
                batch.inverses[f],
                batch.lengths[f],
                of_batch.specs[f].pooling,
            )
            for f in (range(len(of_batch.specs)) if features is None else features)
        ]

    def row_shapes(self, batch: RoutedBatch) -> list[tuple[int, int]]:
        """Return the shape ``(U, D)`` of each table's unique rows."""
        return [
            (len(split.ids), self._client.table(table).dim)
            for table, split in batch.tables
        ]

    def no_gradients(self, batch: RoutedBatch) -> list[Floats]:
        """Return zeros for each table's unique rows, to be added to.

        They are pieces of one array, in the order in which they are sent.
        """
        shapes = self.row_shapes(batch)
        sizes = [num * dim for num, dim in shapes]
        flat = np.zeros(sum(sizes), dtype=np.float32)
        pieces = np.split(flat, np.cumsum(sizes)[:-1])
        return [piece.reshape(s) for piece, s in zip(pieces, shapes, strict=True)]

    def abandon(self, batch: RoutedBatch) -> list[Reply]:
        """Tell the servers that a training batch will get no gradients."""
        assert batch.number is not None, "a batch that was not pulled for training"
        return self._client.push([], [], batch.number)

    def missed(self, replies: Sequence[Reply]) -> int:
        """Wait until a push is applied; return how many ids had no row any more."""
        return self._client.missed(replies)

    def outcome(self, replies: Sequence[Reply]) -> PushOutcome:
        """Wait until a push is applied; return which gradients were not."""
        return self._client.outcome(replies)

    def check(self, bags: Mapping[str, Bags]) -> int:
        """Check a batch against the features; return its number of samples.

        Raises:
            BatchError: features are missing, unknown, or do not fit together.
        """
        keys = {feature.key for feature in self.features}
        if bags.keys() != keys:
            raise BatchError(
                f"A batch must have the features {sorted(keys)}. Received: missing "
                f"{sorted(keys - bags.keys())}, unknown {sorted(bags.keys() - keys)}."
            )
        return self.check_bags(bags)

    @staticmethod
    def check_bags(bags: Mapping[str, Bags]) -> int:
        """Check that features fit together; return their number of samples.

        Raises:
            BatchError: they do not.
        """
        num_samples = {name: len(bag.lengths) for name, bag in bags.items()}
        if len(set(num_samples.values())) > 1:
            raise BatchError(
                "All features must have the same number of samples. "
                f"Received: {num_samples}."
            )
        for name, bag in bags.items():
            bag.check(name)
        return next(iter(num_samples.values()))

    def rows_of(self, batch: RoutedBatch) -> list[Floats]:
        """Fetch the unique rows, float32 ``(U, D)`` a table; not to be written to."""
        return self._client.pull(
            batch.tables,
            batch=batch.number,
            precision=self._precision,
            counts=batch.counts,
        )

    def route(
        self,
        features: BatchFeatures,
        bags_of: Mapping[str, Bags],
        num_samples: int,
        number: BatchNumber | None,
    ) -> RoutedBatch:
        """Make the ids unique by table, and group them by server.

        Args:
            features: of the batch.
            bags_of: by name of the features.
            num_samples: B.
            number: as in :meth:`pull`.
        """
        specs, by_table = features.specs, features.by_table
        bags_of = {f.name: _stacked(bags_of[f.name], f) for f in specs}
        pieces = [_prefixed(bags_of[specs[f].name], specs[f]) for f in by_table]
        num_ids = [0] * len(features.tables)
        for f, piece in zip(by_table, pieces, strict=True):
            num_ids[features.table_of[f]] += len(piece)
        routed = route_ids(np.concatenate(pieces), num_ids, self._client.num_servers)
        of_tables = np.split(routed.inverse, np.cumsum(num_ids)[:-1])
        of_features = np.split(routed.inverse, np.cumsum([*map(len, pieces)])[:-1])
        inverse_of = dict(zip(by_table, of_features, strict=True))
        return RoutedBatch(
            number,
            features,
            list(zip(features.tables, routed.tables, strict=True)),
            [inverse_of[f] for f in range(len(specs))],
            [bags_of[feature.name].lengths for feature in specs],
            num_samples,
            [
                count_repeats(inverse_L, len(split.ids))
                if number is not None and self._client.wants_counts(table)
                else None
                for table, split, inverse_L in zip(
                    features.tables, routed.tables, of_tables, strict=True
                )
            ],
        )


def _stacked(bags: Bags, feature: FeatureSpec) -> Bags:
    """Return a feature's bags with the buckets of its hash stack in place of ids."""
    rounds, size = feature.hash_stack_rounds, feature.hash_stack_size
    if not rounds:
        return bags
    return replace(
        bags,
        ids=hash_stack(bags.ids, rounds, size),
        lengths=bags.lengths * np.int32(rounds),
    )


def _prefixed(bags: Bags, feature: FeatureSpec) -> Ids:
    if not feature.prefix:
        return bags.ids
    return add_prefix(bags.ids, feature.prefix, feature.prefix_bits)
