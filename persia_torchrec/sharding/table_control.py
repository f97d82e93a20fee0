"""The tables of the collections that a sharder has sharded, while they are trained.

Learning rates change here, by hand or by a schedule, and other settings too:

    set_learning_rate, optimizer.step(), a backward pass
      -> the queue of each pipeline, behind the pushes so far -> the servers
"""

import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch.profiler import record_function
from torchrec.distributed.types import ModuleSharder, ShardingEnv

from persia_torchrec import timeouts
from persia_torchrec.errors import ConfigError
from persia_torchrec.job.trainer_group import waiting
from persia_torchrec.pipeline.pipeline import BatchPipeline
from persia_torchrec.pipeline.staleness import TrainingSummary
from persia_torchrec.rpc.own_process import OwnProcess
from persia_torchrec.sharding import torchrec_api
from persia_torchrec.sharding.backward_pass import (
    Agreement,
    BackwardPass,
    UnevenInputsHook,
)
from persia_torchrec.sharding.optimizer import (
    JoinedGroup,
    RemoteOptimizer,
    States,
    rate_of,
    set_values,
)
from persia_torchrec.sharding.planned import Placeholder
from persia_torchrec.sharding.stored_tensor import is_sharded
from persia_torchrec.sharding.trainer_metrics import TrainerCounts, TrainerMetrics
from persia_torchrec.table import TableChange, TableSpec

if TYPE_CHECKING:
    from persia_torchrec.sharding.row_cache import RowCache

logger = logging.getLogger(__name__)

# Spans of the training thread in traces of torch.profiler: until the rows of a batch
# are here; and until its gradients are queued, or at staleness 0 applied.
WAIT_FOR_ROWS, WAIT_FOR_PUSH = "persia: wait for rows", "persia: wait for push"


_MANY_SKIPPED = 20
"""Backward passes in a row without finite gradients of which there is a warning."""


def loss_scale(scaler: torch.amp.GradScaler, device: torch.device) -> torch.Tensor:
    """Return the loss scale, float32 on a device; no thread waits for it.

    A tensor, also since one may divide by it when it is 0.
    """
    return scaler.scale(torch.ones((), device=device))


class TrainerTables(OwnProcess):
    """Tables on the servers, and the pipelines of the collections that use them.

    Owned by the thread that trains, or that runs its backward pass.
    """

    def __init__(self) -> None:
        self.specs: dict[str, TableSpec] = {}  # with their current settings
        self._optimizers: dict[str, object] = {}  # at first, by table
        self.users: WeakSet[TrainerTables] = WeakSet()  # of the same client, if any
        # Each with the names of its tables.
        self.pipelines: list[tuple[BatchPipeline[Any, Any], frozenset[str]]] = []
        self.groups: dict[str, dict[str, Any]] = {}  # of parameters, by table
        self.joined: list[JoinedGroup] = []  # of several tables, of fused optimizers
        self.states: States = {}  # the rows, by table
        # By table: what its collection calls it, and the path of that.
        self.own_names: dict[str, tuple[str, str]] = {}
        self.unnamed: set[str] = set()  # tables for which no optimizer is named
        self.tells_of_several = True  # of names that several collections have, once
        # What was loaded last, by table: for which collection, and the tensor.
        self.loaded: dict[str, tuple[object, ref[torch.Tensor]]] = {}
        self.optimizer: RemoteOptimizer | None = None  # of all, once it is asked for
        self.reported = TrainingSummary()
        self.lost: Mapping[str, int] = {}  # that of the client
        self.recovery_s = 0.0  # that of the client, too
        self.cache: RowCache | None = None  # of rows that are trained here
        self.has_ended = False  # the last report is made
        self.accumulates = False
        self.has_local = False  # tables of the same collections under TorchRec
        self.grad_scaler: torch.amp.GradScaler | None = None
        self.agreement: Agreement | None = None
        self.counts = TrainerCounts()
        self.pushes_metrics = True  # those of a TrainCtx are pushed by it
        self.clock: UnevenInputsHook | None = None  # of automatic checkpoints
        self._told: set[str] = set()  # of what users forget, once each
        self._cannot_agree = False
        self._num_skipped = 0  # backward passes in a row that were not finite
        # Current backward passes, by number; torch holds them until they end.
        self._current: weakref.WeakValueDictionary[int, BackwardPass]
        self._current = weakref.WeakValueDictionary()

    def add(
        self,
        pipeline: BatchPipeline[Any, Any],
        specs: Sequence[TableSpec],
        env: ShardingEnv,
        device: torch.device,
    ) -> list[str]:
        """Add a collection's pipeline; return the tables that no earlier one has."""
        names = frozenset(spec.name for spec in specs)
        self._tell_of_shared(names)
        self.users.add(self)
        for other, of_other in [p for user in self.users for p in user.pipelines]:
            if names & of_other:
                pipeline.trains_rows.add(other)
                other.trains_rows.add(pipeline)
        if self.pushes_metrics and not self.pipelines:
            TrainerMetrics.begin(self.counts)
        self.counts.add(pipeline)
        self.pipelines.append((pipeline, names))
        self.specs.update((spec.name, spec) for spec in specs)
        added = [spec for spec in specs if spec.name not in self.groups]
        for spec in added:
            stands_for_table = Placeholder(torch.zeros((), device=device))
            stands_for_table.table = spec.name
            self.groups[spec.name] = {
                "params": [stands_for_table],
                "lr": spec.optimizer.lr,
                "table": spec.name,
            }
        if env.world_size > 1 and env.process_group is None:
            self._cannot_agree = True
        elif env.world_size > 1 and self.agreement is None:
            self.agreement = Agreement(env.process_group, device)
            self.agreement.scaler = self.grad_scaler
            self.agreement.timeout_s = timeouts.exchange_s(self.recovery_s)
        return [spec.name for spec in added]

    def join(
        self, groups: Iterable[dict[str, Any]], poolings: Mapping[str, object]
    ) -> list[JoinedGroup]:
        """Join groups of single tables where TorchRec has one kernel for them.

        That is one per optimizer, dtype and pooling of a collection; ``poolings`` are
        by table.
        """
        kernels: dict[object, list[dict[str, Any]]] = {}
        for group in groups:
            spec = self.specs[group["table"]]
            kernel = spec.optimizer, spec.weight_dtype, poolings.get(spec.name)
            kernels.setdefault(kernel, []).append(group)
        joined = [JoinedGroup(tables) for tables in kernels.values()]
        self.joined += joined
        return joined

    def require_one_optimizer(self, specs: Iterable[TableSpec]) -> None:
        """Reject a table of two collections, each with an optimizer of its own."""
        for spec in specs:
            first = self._optimizers.setdefault(spec.name, spec.optimizer)
            if spec.optimizer != first:
                raise ConfigError(
                    f"Table {spec.name!r} must have one optimizer, as collections with "
                    f"tables of one name share its rows. Received: {first}, and "
                    f"{spec.optimizer}. Give both the same one, or other names."
                )

    def _tell_of_shared(self, names: frozenset[str]) -> None:
        """Log which tables a collection shares with others, which may not be meant."""
        others = [user for user in self.users if user is not self]
        if shared := sorted(names & self.specs.keys()):
            logger.warning(
                "tables %s are in several collections, which share their rows. If that "
                "is not meant, leave shared= of the sharders out, or give the sharders "
                "of another model a namespace=.",
                shared,
            )
        elif shared := sorted(n for n in names if any(n in o.specs for o in others)):
            logger.warning(
                "tables %s are those of another model too, and both train the same "
                'rows. If that is not meant, give the sharders of one namespace="...".',
                shared,
            )

    def tell_of_unnamed(self) -> None:
        """Log which tables train by TorchRec's default, as no optimizer is named."""
        if self.unnamed:
            specs = [self.specs[name] for name in sorted(self.unnamed)]
            optimizer = specs[0].optimizer.describe("lr")
            self._tell_once(
                "unnamed",
                "no optimizer is named for the tables %s: they train by %s, TorchRec's "
                "default. Name it: remote_sharders(client, %s), or another one; "
                "Adagrad(), if they are of a version whose default that was.",
                [spec.name for spec in specs],
                optimizer,
                optimizer,
            )

    def tell_of_evaluation(self) -> None:
        """Log that a backward pass reached rows that do not train."""
        self._tell_once(
            "evaluation",
            "a backward pass reached rows that were looked up under model.eval(), "
            "which looks only: they do not train. Call model.train() first, and eval() "
            "of single layers, as of a BatchNorm, after it. To freeze tables, use "
            "freeze() of the sharders.",
        )

    def tell_of_order(self, loaded: Mapping[str, Any]) -> None:
        """Log where sharded TorchRec, whose weights are loaded, orders columns else.

        It groups tables by the trainers that hold them, by pooling and by dtype.
        """
        trainers = {
            table: {s.placement.rank() for s in entry.metadata().shards_metadata}
            for table, entry in loaded.items()
            if is_sharded(entry)
        }
        for pipeline, _ in self.pipelines:
            lookup: Any = pipeline.lookup
            of_loaded = [f for f in lookup.features if f.table in trainers]
            groups = [
                (
                    min(trainers[f.table]),
                    f.pooling,
                    self.specs[f.table].weight_dtype,
                )
                for f in of_loaded
            ]
            firsts = list(dict.fromkeys(groups))
            places = [firsts.index(group) for group in groups]
            if lookup.each_id or places == sorted(places):
                continue
            self._tell_once(
                "order",
                "weights of a sharded model of TorchRec's are loaded, which orders the "
                "columns of a collection by groups of tables; here they are in the "
                "order of the collection, %s. Where the model uses values(), permute "
                "the columns of its first dense layer, see keys() of both outputs.",
                [feature.name for feature in lookup.features],
            )

    def tell_of_frozen(self, table: str) -> None:
        """Log that a table trains, though its parameter wants no gradient."""
        if self.specs[table].is_frozen:
            return
        self._tell_once(
            "requires_grad",
            "requires_grad=False of table %r changes nothing, as for a table of "
            "TorchRec's whose optimizer runs in the backward pass: it trains. To "
            "freeze it, use freeze([%r]) of the sharders, or "
            "TableSettings(is_frozen=True).",
            table,
            table,
        )

    def _tell_once(self, about: str, text: str, *args: object) -> None:
        if about not in self._told:
            self._told.add(about)
            logger.warning(text, *args)

    def current_backward(self, *, agrees: bool = False) -> BackwardPass:
        """Return the backward pass that runs in this thread.

        With ``agrees`` the trainers agree at its end whether gradients were finite.
        """
        if agrees and self._cannot_agree:
            raise ConfigError(
                "Several trainers under a loss scale must have a process group, to "
                "agree on it. Received: none."
            )
        number = torchrec_api.backward_pass()
        current = self._current.get(number)
        if current is None:
            current = self._current[number] = BackwardPass()
            torchrec_api.after_backward(partial(self._end_backward, current))
        current.agrees |= agrees
        return current

    def _end_backward(self, ended: BackwardPass) -> None:
        pushed = [check() for check in ended.checks]
        if ended.agrees:
            are_finite = None not in pushed
            if self.agreement is not None:
                are_finite = not self.agreement.any(not are_finite)
            self.count_skipped(is_skipped=not are_finite)
            self.mark(are_finite=are_finite)
        elif self.agreement is not None:
            self.agreement.tell_others()
        with record_function(WAIT_FOR_PUSH):
            for wait in [*ended.waits, *filter(None, pushed)]:
                wait()

    def count_skipped(self, *, is_skipped: bool) -> None:
        """Note whether a backward pass pushed nothing; warn once of 20 in a row."""
        self.counts.num_skipped += is_skipped
        self._num_skipped = self._num_skipped + 1 if is_skipped else 0
        if self._num_skipped == _MANY_SKIPPED:
            logger.warning(
                "gradients of the embeddings were not finite in %d backward passes in "
                "a row; no row was updated: is the loss finite, and the loss scale "
                "above 0?",
                _MANY_SKIPPED,
            )

    def mark(self, *, are_finite: bool) -> None:
        """Let a scaler find in the placeholders whether gradients were finite."""
        for group in self.groups.values():
            (placeholder,) = group["params"]
            if placeholder.grad is None or not are_finite:
                grad = 0.0 if are_finite else torch.inf
                placeholder.grad = torch.full_like(placeholder, grad)

    def change(self, change: TableChange) -> list[Future[None]]:
        """Change the settings of tables, in order with the pushes."""
        self.agree_on_rates()
        specs = {name: change(spec) for name, spec in self.specs.items()}
        changed = {name for name, spec in specs.items() if spec != self.specs[name]}
        users = [pipeline for pipeline, names in self.pipelines if names & changed]
        if sum(len(names & changed) for _, names in self.pipelines) > len(changed):
            # Pipelines that share a table are not in order with one another.
            for pipeline in users:
                pipeline.flush()
        for name in changed:
            if specs[name].optimizer.lr != self.specs[name].optimizer.lr:
                set_values(self.groups[name], {"lr": specs[name].optimizer.lr})
        self.follow_rates()
        self.specs = specs
        return [pipeline.change_tables(change) for pipeline in users]

    def send_rates(self) -> None:
        """Send rates that a schedule has changed, in order with the pushes."""
        self.agree_on_rates()
        specs, groups = self.specs, self.groups
        if any(groups[n]["lr"] != specs[n].optimizer.lr for n in groups):
            self.set_rates({name: rate_of(groups[name]) for name in groups})

    def agree_on_rates(self) -> None:
        """Let groups of several tables, and of single ones, have the same rates."""
        for joined in self.joined:
            joined.agree(leads=True)

    def follow_rates(self) -> None:
        """Let groups of several tables have the rates of these, which were set."""
        for joined in self.joined:
            joined.agree(leads=False)

    def flush(self, table: str) -> None:
        """Wait until this trainer's updates of a table so far are applied."""
        for pipeline, names in self.pipelines:
            if table in names:
                pipeline.flush()

    def meet(self) -> None:
        """Wait until all trainers are here; all call this together."""
        if self.agreement is not None:
            group = self.agreement.cpu_group()
            with waiting(group, "tables"):
                dist.barrier(group)

    def set_rates(self, rates: Mapping[str, float]) -> None:
        """Change learning rates by table, in order with the pushes."""

        def change(spec: TableSpec) -> TableSpec:
            lr = rates.get(spec.name, spec.optimizer.lr)
            return replace(spec, optimizer=replace(spec.optimizer, lr=lr))

        self.change(change)


class SharderApi:
    """What a trainer does with its tables on the servers, outside of its steps."""

    remote_tables: TrainerTables
    """Of all collections, sharded or to be."""

    def flush(self) -> None:
        """Wait until every update of the collections sharded so far is applied.

        Call it before rows are read elsewhere or the script ends, unless the staleness
        is 0. A PersiaError says that an update failed, or was not acknowledged in time.
        """
        for pipeline, _ in self.remote_tables.pipelines:
            pipeline.flush()
        if self.remote_tables.cache is not None:
            self.remote_tables.cache.flush()
        self._report()

    def rates(self) -> dict[str, float]:
        """Return the learning rate of each table, which may not have been sent yet."""
        self.remote_tables.agree_on_rates()
        groups = self.remote_tables.groups.items()
        return {name: rate_of(group) for name, group in groups}

    def restore(
        self,
        specs: Mapping[str, TableSpec],
        rates: Mapping[str, float],
        timeout_s: float,
    ) -> None:
        """Go back to earlier settings and rates; wait until the servers have these."""
        tables = self.remote_tables
        same = {  # others have begun again, with the settings of the script
            name: specs[name]
            for name, spec in tables.specs.items()
            if name in specs and specs[name].describe_rows() == spec.describe_rows()
        }
        for done in tables.change(lambda spec: same.get(spec.name, spec)):
            done.result(timeout_s)
        for name in same:
            group = tables.groups[name]
            set_values(group, {"lr": rates.get(name, group["lr"])})
        tables.follow_rates()

    def close(self) -> None:
        """Stop the threads of the collections sharded so far. May be called twice."""
        self.report_at_end()
        if self.remote_tables.cache is not None:
            self.remote_tables.cache.close()
        for pipeline, _ in self.remote_tables.pipelines:
            pipeline.close()

    def summary(self) -> TrainingSummary:
        """Return statistics of this trainer's batches so far, which ``flush`` logs."""
        tables = self.remote_tables
        return replace(
            TrainingSummary.total(p.summary() for p, _ in tables.pipelines),
            num_lost_updates=tables.lost.get("lost_updates", 0),
            num_lost_rows=tables.lost.get("lost_rows", 0),
        )

    def report_at_end(self, num_rows: Sequence[int] = ()) -> None:
        """Log :meth:`summary`, with the rows of each server if they are given; once.

        Warns of gradients of evicted rows.
        """
        if self.remote_tables.has_ended:
            return
        self.remote_tables.has_ended = True
        summary = self._report(num_rows)
        if summary.num_lost or summary.num_lost_updates:
            logger.warning(
                "servers restarted without memory; lost updates: unacknowledged=%d "
                "acknowledged=%d rows=%d",
                summary.num_lost,
                summary.num_lost_updates,
                summary.num_lost_rows,
            )
        if summary.num_evicted:
            logger.warning(
                "%d gradients (%.2f %% of %d) came after the eviction of their rows, "
                "and were dropped; raise the servers' capacity, add servers, or lower "
                "the staleness, if that is a large fraction",
                summary.num_evicted,
                100 * summary.share_evicted,
                summary.num_gradients,
            )

    def _report(self, num_rows: Sequence[int] = ()) -> TrainingSummary:
        """Log how stale rows were, if there were lookups since the last report."""
        summary = self.summary()
        if summary.num_lookups > self.remote_tables.reported.num_lookups:
            rows = f"rows={sum(num_rows)} on {len(num_rows)} servers, "
            logger.info(
                "%slookups=%d mean_staleness=%.2f (earlier batches without an update, "
                "of %d that the bound allows); %.0f %% of the lookups waited for one",
                rows if num_rows else "",
                summary.num_lookups,
                summary.mean_staleness,
                summary.max_lacking,
                100 * summary.share_waited,
            )
            self.remote_tables.reported = summary
            if self.remote_tables.cache is not None:
                self.remote_tables.cache.report()
        return summary

    def set_learning_rate(self, lr: float, tables: Iterable[str] | None = None) -> None:
        """Change the learning rate of tables on the servers; returns at once.

        The gradients of this trainer's backward passes so far are applied with the
        previous rate, those of later ones with the new rate. Another trainer's get the
        new rate when it arrives: let all trainers set the same.

        Args:
            lr: the new rate.
            tables: names of tables; all that are sharded so far by default.

        Raises:
            ConfigError: an unknown table, or its optimizer rejects the rate.
            PersiaError: an earlier update failed.
        """
        self.remote_tables.set_rates(dict.fromkeys(self._known(tables), lr))

    def freeze(
        self, tables: Iterable[str] | None = None, *, is_frozen: bool = True
    ) -> None:
        """Let rows of tables keep their weights, or train again; returns at once.

        It holds from the next backward pass on, as a learning rate does. Ids without a
        row get one all the same, with its initial weights.

        Args:
            tables: names of tables; all that are sharded so far by default.
            is_frozen: False lets them train again.

        Raises:
            ConfigError: an unknown table.
            PersiaError: an earlier update failed.
        """
        names = self._known(tables)

        def change(spec: TableSpec) -> TableSpec:
            of_table = is_frozen if spec.name in names else spec.is_frozen
            return replace(spec, is_frozen=of_table)

        self.remote_tables.change(change)

    def _known(self, tables: Iterable[str] | None) -> list[str]:
        """Return the names of sharded tables, by default of all."""
        known = self.remote_tables.specs
        names = list(known) if tables is None else list(tables)
        if unknown := set(names) - known.keys():
            raise ConfigError(
                f"tables must be among those sharded, {sorted(known)}. "
                f"Received: {sorted(unknown)}."
            )
        return names

    def use_grad_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Undo the loss scale of automatic mixed precision before gradients leave.

        The gradients that a backward pass pushes are divided by the current
        ``scaler.get_scale()``. A collection whose gradients are not finite pushes
        nothing for that batch, as ``scaler.step`` skips an optimizer. To tell the
        scaler, call ``scaler.step(sharder.optimizer)`` too, between ``backward`` and
        ``update``, and its ``zero_grad`` like that of the dense optimizer.

        Several trainers agree at the end of each backward pass: if one has gradients
        that are not finite, the scalers of all find it. So every trainer does as many
        backward passes, each through a table of this sharder; within ``join(model)``
        trainers may end. Finite gradients of other trainers and collections are already
        on their way to the servers by then, and are applied.

        Args:
            scaler: what scales the loss; for all collections, sharded or to be.
        """
        self.remote_tables.grad_scaler = scaler
        if self.remote_tables.agreement is not None:
            self.remote_tables.agreement.scaler = scaler

    @property
    def optimizer(self) -> RemoteOptimizer:
        """The tables' learning rates, for ``torch.optim.lr_scheduler``.

        Ask for it when ``DistributedModelParallel`` has sharded all collections.

        Raises:
            ConfigError: no collection is sharded, or one more since the first time.
        """
        tables = self.remote_tables
        tables.agree_on_rates()
        if tables.optimizer is None:
            tables.optimizer = RemoteOptimizer(
                tables.groups, tables.send_rates, tables.states
            )
            tables.optimizer.save_param_groups(True)  # it is used alone, as torch's are
        if tables.optimizer.learning_rates().keys() != tables.groups.keys():
            raise ConfigError(
                "The optimizer must be asked for when all collections are sharded. "
                f"Received: the tables {sorted(tables.groups)}, and an optimizer of "
                f"{sorted(tables.optimizer.learning_rates())}."
            )
        return tables.optimizer


Sharders = SharderApi | Iterable[SharderApi | ModuleSharder[Any]]


def table_controls(sharders: Sharders) -> list[SharderApi]:
    """Return those of some sharders that have tables on servers.

    A list of ``remote_sharders(...)`` holds TorchRec's own for other modules, too.
    """
    if isinstance(sharders, SharderApi):
        return [sharders]
    given = list(sharders) if isinstance(sharders, Iterable) else [sharders]
    by_tables = {
        id(getattr(sharder, "remote_tables", sharder)): sharder
        for sharder in given
        if hasattr(sharder, "flush") or hasattr(sharder, "remote_tables")
    }
    if given and not by_tables:
        raise ConfigError(
            "sharders must be remote_sharders(...), or a list with what puts tables on "
            f"the servers. Received: {[type(sharder).__name__ for sharder in given]}."
        )
    return list(by_tables.values())
