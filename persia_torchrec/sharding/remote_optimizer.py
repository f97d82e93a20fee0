"""The optimizer of tables on the servers, as torch and TorchRec see it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchrec.optim.fused import FusedOptimizer

from persia_torchrec.errors import ConfigError


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
        return learning_rates(self.param_groups)

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

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget whether gradients were finite; the gradients are not kept."""
        for group in self.param_groups:
            for stand_in in group["params"]:
                stand_in.grad = None


def learning_rates(groups: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the rate of each table, as parameter groups say it now."""
    return {group["table"]: float(group["lr"]) for group in groups}
