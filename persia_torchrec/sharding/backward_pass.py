"""Hooks of a backward pass besides its nodes: trainers agree on loss scale and end."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from persia_torchrec import timeouts
from persia_torchrec.errors import JobError
from persia_torchrec.job import trainer_group
from persia_torchrec.sharding import torchrec_api


class UnevenInputsHook(Joinable, JoinHook):
    """What a trainer at the end of its data answers to the others: torch's two in one.

    ``trainers`` are those of the job by default, and communicate on ``device``, or on
    one that their group has; in the group of its own they wait for one another for
    ``timeout_s``.
    """

    trainers: dist.ProcessGroup | None = None
    timeout_s = timeouts.exchange_s()
    _own_group: dist.ProcessGroup | None = None
    device = torch.device("cpu")

    def join_hook(self, **_: object) -> JoinHook:
        """Return what ``Join`` calls for a trainer at the end of its data."""
        return self

    @property
    def join_device(self) -> torch.device:
        """Where the tensors by which ``Join`` counts trainers are."""
        return trainer_group.device_in(self.join_process_group, self.device)

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """All trainers."""
        group = dist.group.WORLD if self.trainers is None else self.trainers
        assert group is not None
        return group

    def cpu_group(self) -> dist.ProcessGroup:
        """Return a group of its own, on CPUs; all call this together the first time."""
        if self._own_group is None:
            self._own_group = trainer_group.make_cpu_group(
                self.join_process_group, self.timeout_s
            )
        return self._own_group


class Agreement(UnevenInputsHook):
    """Trainers agree on the loss scale; there is one per trainer and sharder.

    Dense gradients are averaged over the trainers: an infinity on one of them reaches
    all. Embedding gradients are not, so the trainers tell one another whether theirs
    were finite:

        backward pass   each pushed gradient: finite?
        its end         whether one of any trainer was not
        scaler.step     all skip, or none; scaler.update: all scales stay equal

    The exchange has a process group of its own, on CPUs: collectives of one group must
    come in the same order everywhere, and those of the dense gradients come when
    autograd is ready for them. The thread that trains calls it, or that runs its
    backward pass.
    """

    def __init__(self, trainers: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__()
        self.trainers, self.device = trainers, device
        self.scaler: torch.amp.GradScaler | None = None

    @property
    def is_needed(self) -> bool:
        """Whether the next backward pass needs it; the same on all trainers."""
        return self.scaler is not None and self.scaler.is_enabled()

    def any(self, is_true: bool) -> bool:
        """Return whether it is true on any trainer; all of them call this together."""
        self.tell_others()
        return self._any(is_true)

    def tell_others(self) -> None:
        """Tell trainers at the end of their data that this one trains; once a pass.

        Dense replicas do so, where there are some.
        """
        if work := Join.notify_join_context(self):
            work.wait()

    def main_hook(self) -> None:
        """Take part in the others' :meth:`any`."""
        if self.is_needed:
            self._any(False)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the loss scale of a trainer that trained last."""
        if self.scaler is None or not self.is_needed:
            return
        state = self.scaler.state_dict()
        mine = torch.tensor(
            [is_last_joiner, state["scale"], state[torchrec_api.GROWTH_TRACKER]],
            dtype=torch.float64,
            device="cpu",
        )
        of_all = [torch.empty_like(mine) for _ in range(self.join_process_group.size())]
        with trainer_group.waiting(self.cpu_group(), "the loss scale at the end"):
            dist.all_gather(of_all, mine, self.cpu_group())
        scale, tracker = next(of[1:].tolist() for of in of_all if of[0])
        state |= {"scale": scale, torchrec_api.GROWTH_TRACKER: int(tracker)}
        self.scaler.load_state_dict(state)

    def _any(self, is_true: bool) -> bool:
        told = torch.tensor([is_true], dtype=torch.uint8, device="cpu")
        try:
            with trainer_group.waiting(self.cpu_group(), "a backward pass"):
                dist.all_reduce(told, dist.ReduceOp.MAX, self.cpu_group())
        except RuntimeError as exc:
            raise JobError(
                "All trainers must take part when they agree on the loss scale, once "
                f"per backward pass. Received: {exc}. Did one end, or run a backward "
                "pass without any table of this sharder?"
            ) from exc
        return bool(told.item())


@dataclass(eq=False)
class BackwardPass:
    """What is left to do when a backward pass has run all its nodes.

    ``checks`` push gradients that are finite, and return None of others; ``waits`` wait
    for what was pushed. An exception within the pass leaves it out.
    """

    checks: list[Callable[[], Callable[[], None] | None]] = field(default_factory=list)
    waits: list[Callable[[], None]] = field(default_factory=list)
    agrees: bool = False


def saved_as_itself(token: torch.Tensor | None = None) -> saved_tensors_hooks:
    """Have autograd keep what it saves in a block, whatever outer hooks would do.

    Outer hooks may free a tensor, as activation checkpointing does, or copy it.
    Autograd gives ``token`` back as the same object, with its attributes; of another
    tensor it gives one of the same memory.
    """
    if token is None:
        return saved_tensors_hooks(_itself, _itself)
    address = token.data_ptr()
    return saved_tensors_hooks(
        lambda saved: token if saved.data_ptr() == address else saved, _itself
    )


def _itself(saved: torch.Tensor) -> torch.Tensor:
    return saved


class _LookedUp(torch.autograd.Function):
    """Rows that do not train; tells if a backward pass reaches them."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        made: tuple[tuple[torch.Tensor, ...]],
        tell: Callable[[], None],
    ) -> tuple[torch.Tensor, ...]:
        ctx.tell = tell
        return made[0]

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[None, None, None]:
        ctx.tell()
        return None, None, None


def looked_up(
    tensors: tuple[torch.Tensor, ...], anchor: torch.Tensor, tell: Callable[[], None]
) -> tuple[torch.Tensor, ...]:
    """Return rows of an evaluation in a graph that calls ``tell``, and moves none.

    ``anchor`` wants a gradient, which is never computed.
    """
    if not any(tensor.requires_grad for tensor in tensors):
        made: tuple[torch.Tensor, ...] = _LookedUp.apply(anchor, (tensors,), tell)
        return made
    for tensor in tensors:  # of weights that the model has computed
        tensor.register_hook(lambda _: tell())
    return tensors
