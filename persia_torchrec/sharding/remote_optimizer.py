"""The optimizer of tables on the servers, as torch's schedulers see it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from persia_torchrec.errors import ConfigError


class RemoteOptimizer(torch.optim.Optimizer):
    """Learning rates of tables on the servers, one parameter group a table.

    It is for ``torch.optim.lr_scheduler``: the servers apply the gradients themselves,
    as they come from the backward pass, with the ``lr`` that the group of the table has
    when it comes. A rate that was changed takes effect between the pushes before and
    after it. ``param_groups`` can be read and written as of any optimizer: ``lr`` is
    the only value that is used, and ``"table"`` names the table. Its parameters are
    stand-ins of one number each, and its state is the learning rates.

    Under a ``GradScaler`` it is an optimizer like any other: ``scaler.step`` of it lets
    the scaler find whether the gradients of the embeddings were finite, so that the
    scale falls if they were not. For that the gradient of a stand-in is 0 or infinite,
    until ``zero_grad``.

    Every trainer of a job runs the same schedule: the rate of a table on the servers is
    the one that was sent last, by whichever trainer.

    Args:
        rates: learning rate of each table.
        send: makes the servers use rates, in order with the pushes.

    Raises:
        ConfigError: there are no tables.
    """

    def __init__(
        self,
        rates: Mapping[str, float],
        send: Callable[[Mapping[str, float]], None],
    ) -> None:
        if not rates:
            raise ConfigError(
                "An optimizer of remote tables needs tables. Received: none; ask for "
                "it after DistributedModelParallel has sharded the model."
            )
        groups = [
            {"params": [torch.nn.Parameter(torch.zeros(()))], "lr": lr, "table": table}
            for table, lr in rates.items()
        ]
        super().__init__(groups, {})
        self._send = send

    def learning_rates(self) -> dict[str, float]:
        """Return the rate of each table, as the groups say it now."""
        return {group["table"]: float(group["lr"]) for group in self.param_groups}

    def show(self, rates: Mapping[str, float]) -> None:
        """Write rates that were sent otherwise into the groups."""
        for group in self.param_groups:
            group["lr"] = rates.get(group["table"], group["lr"])

    def note_gradients(self, *, are_finite: bool) -> None:
        """Let a ``GradScaler`` find whether gradients of this step were finite."""
        (stand_in,) = self.param_groups[0]["params"]
        if stand_in.grad is None or not are_finite:
            grad = 0.0 if are_finite else torch.inf
            stand_in.grad = torch.full_like(stand_in, grad)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Send the rates that have changed; the gradients are on their way already.

        Args:
            closure: computes the loss again, with its backward pass.

        Raises:
            ConfigError: the optimizer of a table refuses its rate.
            PersiaError: a push of before failed.
        """
        self._send(self.learning_rates())
        return None if closure is None else closure()
