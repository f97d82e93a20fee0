"""The tables of the collections that a sharder has sharded, while they are trained.

Learning rates change here, by hand or by a schedule, and other settings too:

    set_learning_rate, optimizer.step(), a backward pass
      -> the queue of each pipeline, behind the pushes so far -> the servers
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.optim.fused import FusedOptimizer

from persia_torchrec.errors import ConfigError
from persia_torchrec.pipeline.pipeline import BatchPipeline
from persia_torchrec.pipeline.tally import TrainingSummary
from persia_torchrec.sharding.agreement import Agreement
from persia_torchrec.sharding.torchrec_api import after_backward, backward_pass
from persia_torchrec.table import TableChange, TableSpec

logger = logging.getLogger(__name__)


class RemoteOptimizer(FusedOptimizer):
    """Learning rates of tables on the servers, one parameter group a table.

    The servers apply the gradients themselves, as they come from the backward pass,
    with the ``lr`` that the group of the table has when it comes: what TorchRec calls a
    fused optimizer. So it is for schedules, ``torch.optim.lr_scheduler`` or TorchRec's
    ``WarmupOptimizer``; a rate that was changed takes effect between the pushes before
    and after it. ``lr`` is the only value of a group that is used, and ``"table"``
    names the table. All optimizers of a table show the same group.

    Its parameters are stand-ins, and it has no state: rows and optimizer state stay on
    the servers. With ``save_param_groups(True)``, its state dictionary holds
    the rates.

    Under a ``GradScaler`` the gradient of a stand-in is 0, or infinite where those of
    the embeddings were not finite, until ``zero_grad``: so ``scaler.step`` finds it.

    Every trainer of a job runs the same schedule: the rate of a table on the servers is
    the one that was sent last, by whichever trainer.

    Args:
        groups: of each parameter's name: a group with ``"params"`` (one), ``"lr"`` and
            ``"table"``; shared, not copied.
        send: makes the servers use rates, in order with the pushes.

    Raises:
        ConfigError: there are no tables.
    """

    def __init__(
        self,
        groups: Mapping[str, dict[str, Any]],
        send: Callable[[Mapping[str, float]], None],
    ) -> None:
        if not groups:
            raise ConfigError(
                "An optimizer of remote tables needs tables. Received: none; ask for "
                "it after DistributedModelParallel has sharded the model."
            )
        params = {
            name: param for name, group in groups.items() for param in group["params"]
        }
        super().__init__(params, {}, list(groups.values()))
        self._send = send

    def learning_rates(self) -> dict[str, float]:
        """Return the rate of each table, as the groups say it now."""
        return _learning_rates(self.param_groups)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Send the rates that have changed; the gradients are on their way already.

        Args:
            closure: computes the loss again, with its backward pass.

        Raises:
            ConfigError: the optimizer of a table refuses its rate.
            PersiaError: an earlier push failed.
        """
        self._send(self.learning_rates())
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget whether gradients were finite; the gradients are not kept."""
        for group in self.param_groups:
            for stand_in in group["params"]:
                stand_in.grad = None


def _learning_rates(groups: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    return {group["table"]: float(group["lr"]) for group in groups}


class RemoteTables:
    """Tables on the servers, and the pipelines of the collections that use them.

    Owned by the thread that trains, or that runs its backward pass.

    Attributes:
        grad_scaler: scales the loss, if anything does.
        agreement: with the other trainers, on whether gradients were finite; None where
            there are no others.
    """

    def __init__(self) -> None:
        self._specs: dict[str, TableSpec] = {}
        self._pipelines: list[tuple[BatchPipeline[Any, Any], frozenset[str]]] = []
        self._groups: dict[str, dict[str, Any]] = {}
        self._optimizer: RemoteOptimizer | None = None
        self._reported = TrainingSummary()
        self._has_ended = False  # the last report is made
        self.grad_scaler: torch.amp.GradScaler | None = None
        self.agreement: Agreement | None = None
        self._cannot_agree = False
        # Whether the gradients of backward passes under way are finite so far.
        self._are_finite: dict[int, bool] = {}

    def add(
        self,
        pipeline: BatchPipeline[Any, Any],
        specs: Sequence[TableSpec],
        device: torch.device,
    ) -> list[str]:
        """Add a collection's pipeline, its tables known to the servers.

        Args:
            pipeline: of the collection.
            specs: its tables.
            device: where its embeddings are wanted, and stand-ins for its tables are.

        Returns:
            The names of the tables that no earlier collection has.
        """
        self._pipelines.append((pipeline, frozenset(spec.name for spec in specs)))
        self._specs.update((spec.name, spec) for spec in specs)
        added = [spec for spec in specs if spec.name not in self._groups]
        for spec in added:
            self._groups[spec.name] = {
                "params": [nn.Parameter(torch.zeros((), device=device))],
                "lr": spec.optimizer.lr,
                "table": spec.name,
            }
        return [spec.name for spec in added]

    def optimizer_of(self, tables: Mapping[str, str]) -> RemoteOptimizer | None:
        """Return an optimizer of tables, by name of their parameters; None of none."""
        if not tables:
            return None
        groups = {name: self._groups[table] for name, table in tables.items()}
        return RemoteOptimizer(groups, self._send)

    def optimizer(self) -> RemoteOptimizer:
        """Return the optimizer of these tables; the same one each time.

        Raises:
            ConfigError: there are no tables yet, or more than when it was made.
        """
        if self._optimizer is None:
            self._optimizer = RemoteOptimizer(self._groups, self._send)
            self._optimizer.save_param_groups(True)  # it is used alone, as torch's are
        if self._optimizer.learning_rates().keys() != self._groups.keys():
            raise ConfigError(
                "The optimizer must be asked for when all collections are sharded. "
                f"Received: the tables {sorted(self._groups)}, and an optimizer of "
                f"{sorted(self._optimizer.learning_rates())}."
            )
        return self._optimizer

    def names(self) -> list[str]:
        """Return the names of all tables."""
        return list(self._specs)

    def set_learning_rate(self, lr: float, tables: Iterable[str] | None = None) -> None:
        """Change the learning rate of tables, in order with the pushes.

        Raises:
            ConfigError: an unknown table, or its optimizer refuses the rate.
            PersiaError: an earlier push failed.
        """
        names = list(self._specs) if tables is None else list(tables)
        unknown = set(names) - self._specs.keys()
        if unknown:
            raise ConfigError(
                f"tables must be among those sharded, {sorted(self._specs)}. "
                f"Received: {sorted(unknown)}."
            )
        self._send(dict.fromkeys(names, lr))

    def before_push(self) -> None:
        """Send rates that a schedule has changed; a backward pass calls this.

        Raises:
            ConfigError: an optimizer refuses its rate.
            PersiaError: an earlier push failed.
        """
        self._send(_learning_rates(self._groups.values()))

    def loss_scale(self) -> float | None:
        """Return what the loss of this backward pass was multiplied by, if anything."""
        scaler = self.grad_scaler
        return scaler.get_scale() if scaler and scaler.is_enabled() else None

    def use_grad_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Divide gradients by a loss scale; it finds whether they were finite."""
        self.grad_scaler = scaler
        if self.agreement is not None:
            self.agreement.scaler = scaler

    def meet(self, trainers: dist.ProcessGroup | None, device: torch.device) -> None:
        """Agree with other trainers from now on.

        Args:
            trainers: all of them; None if they have no process group.
            device: on which it communicates.
        """
        if trainers is None:
            self._cannot_agree = True
        elif self.agreement is None:
            self.agreement = Agreement(trainers, device)
            self.agreement.scaler = self.grad_scaler

    def after_check(self, are_finite: bool) -> None:
        """Note whether gradients were finite; a backward pass under a scale calls this.

        At its end the ``GradScaler`` can find whether all were, on all trainers.

        Raises:
            ConfigError: there are several without a process group.
        """
        if self._cannot_agree:
            raise ConfigError(
                "Several trainers under a loss scale must have a process group, to "
                "agree on it. Received: none."
            )
        number = backward_pass()
        if number not in self._are_finite:
            self._are_finite[number] = True
            after_backward(partial(self._end_backward, number))
        self._are_finite[number] &= are_finite

    def _end_backward(self, number: int) -> None:
        are_finite = self._are_finite.pop(number)
        if self.agreement is not None:
            are_finite = not self.agreement.any(not are_finite)
        for group in self._groups.values():
            (stand_in,) = group["params"]
            if stand_in.grad is None or not are_finite:
                grad = 0.0 if are_finite else torch.inf
                stand_in.grad = torch.full_like(stand_in, grad)

    def change(self, change: TableChange) -> list[Future[None]]:
        """Change the settings of tables, in order with the pushes.

        Raises:
            ConfigError: a setting is out of its range.
            PersiaError: an earlier push failed.
        """
        specs = {name: change(spec) for name, spec in self._specs.items()}
        changed = {name for name, spec in specs.items() if spec != self._specs[name]}
        users = [
            (pipeline, names & changed)
            for pipeline, names in self._pipelines
            if names & changed
        ]
        if sum(len(names) for _, names in users) > len(changed):
            # Pipelines that share a table are not in order with one another.
            for pipeline, _ in users:
                pipeline.flush()
        for name in changed:
            if specs[name].optimizer.lr != self._specs[name].optimizer.lr:
                self._groups[name]["lr"] = specs[name].optimizer.lr
        self._specs = specs
        return [pipeline.change_tables(change) for pipeline, _ in users]

    def flush(self) -> None:
        """Wait until every push and every change so far is applied."""
        for pipeline, _ in self._pipelines:
            pipeline.flush()

    def summary(self) -> TrainingSummary:
        """Return what became of the training batches of all pipelines so far."""
        return TrainingSummary.total(p.summary() for p, _ in self._pipelines)

    def report(self) -> TrainingSummary:
        """Log how stale rows were, if there were lookups since the last report."""
        summary = self.summary()
        if summary.num_lookups > self._reported.num_lookups:
            logger.info(
                "lookups=%d mean_staleness=%.2f: so many earlier batches had no update "
                "yet, of at most %d by the bound; %.0f %% of the lookups waited for it",
                *(summary.num_lookups, summary.mean_staleness, summary.max_lacking),
                100 * summary.share_waited,
            )
            self._reported = summary
        return summary

    def report_at_end(self) -> None:
        """Log as :meth:`report`, and warn of gradients of evicted rows; once."""
        if self._has_ended:
            return
        self._has_ended = True
        summary = self.report()
        if summary.num_evicted:
            logger.warning(
                "%d gradients (%.2f %% of %d) came after their rows had been evicted, "
                "and moved none; raise the servers' capacity, add servers, or lower "
                "the staleness, if that is a large part",
                *(summary.num_evicted, 100 * summary.share_evicted),
                summary.num_gradients,
            )

    def close(self) -> None:
        """Stop the threads of the pipelines. May be called twice."""
        for pipeline, _ in self._pipelines:
            pipeline.close()

    def _send(self, rates: Mapping[str, float]) -> None:
        if all(self._specs[name].optimizer.lr == lr for name, lr in rates.items()):
            return

        def change(spec: TableSpec) -> TableSpec:
            lr = rates.get(spec.name, spec.optimizer.lr)
            return replace(spec, optimizer=spec.optimizer.with_lr(lr))

        self.change(change)
