"""The tables of the collections that a sharder has sharded, while they are trained.

Learning rates change here, by hand or by a schedule, and other settings too:

    set_learning_rate, optimizer.step(), a backward pass
      -> the queue of each pipeline, behind the pushes so far -> the servers
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from persia_torchrec.errors import ConfigError
from persia_torchrec.sharding.remote_optimizer import (
    RemoteOptimizer,
    learning_rates,
)
from persia_torchrec.table import TableChange, TableSpec
from persia_torchrec.worker.pipeline import BatchPipeline


class RemoteTables:
    """Tables on the servers, and the pipelines of the collections that use them.

    Owned by the thread that trains, or that runs its backward pass.

    Attributes:
        grad_scaler: scales the loss, if anything does.
    """

    def __init__(self) -> None:
        self._specs: dict[str, TableSpec] = {}
        self._pipelines: list[tuple[BatchPipeline[Any, Any], frozenset[str]]] = []
        self._groups: dict[str, dict[str, Any]] = {}
        self._optimizer: RemoteOptimizer | None = None
        self.grad_scaler: torch.amp.GradScaler | None = None

    def add(
        self, pipeline: BatchPipeline[Any, Any], specs: Sequence[TableSpec]
    ) -> list[str]:
        """Add a collection's pipeline, its tables known to the servers.

        Returns:
            The names of the tables that no earlier collection has.
        """
        self._pipelines.append((pipeline, frozenset(spec.name for spec in specs)))
        self._specs.update((spec.name, spec) for spec in specs)
        added = [spec for spec in specs if spec.name not in self._groups]
        for spec in added:
            self._groups[spec.name] = {
                "params": [nn.Parameter(torch.zeros(()))],
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
            PersiaError: a push of before failed.
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
            PersiaError: a push of before failed.
        """
        self._send(learning_rates(list(self._groups.values())))

    def loss_scale(self) -> float | None:
        """Return what the loss of this backward pass was multiplied by, if anything."""
        scaler = self.grad_scaler
        return scaler.get_scale() if scaler and scaler.is_enabled() else None

    def after_check(self, are_finite: bool) -> None:
        """Let a ``GradScaler`` find whether gradients of this step were finite."""
        for group in self._groups.values():
            (stand_in,) = group["params"]
            if stand_in.grad is None or not are_finite:
                grad = 0.0 if are_finite else torch.inf
                stand_in.grad = torch.full_like(stand_in, grad)

    def change(self, change: TableChange) -> list[Future[None]]:
        """Change the settings of tables, in order with the pushes.

        Raises:
            ConfigError: a setting is out of its range.
            PersiaError: a push of before failed.
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
