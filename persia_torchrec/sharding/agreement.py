"""Whether the gradients of a step were finite, as all trainers see it.

Dense gradients are averaged over the trainers: what is infinite on one of them is so on
all, which all skip the step and lower the loss scale. Embedding gradients are not, so
the trainers tell one another whether theirs were finite:

    backward pass   each pushed gradient: finite?
    its end         one byte, the maximum over all trainers
    scaler.step     all skip, or none; scaler.update: all scales stay equal

The byte has a process group of its own, on CPUs: collectives of one group must come in
the same order everywhere, and those of the dense gradients come when autograd is ready
for them. The group is made for the first byte, so that only trainers with a loss scale
have it.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from persia_torchrec.errors import JobError


class Agreement(Joinable):
    """What trainers agree on. One per trainer and sharder.

    Called by the thread that trains, or that runs its backward pass.

    Args:
        trainers: all of them.
        device: on which their process group communicates.

    Attributes:
        scaler: whose loss scale all keep; None where nothing scales the loss.
    """

    def __init__(self, trainers: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__()
        self.scaler: torch.amp.GradScaler | None = None
        self._trainers = trainers
        self._device = device
        self._own_group: dist.ProcessGroup | None = None

    @property
    def is_used(self) -> bool:
        """Whether a loss scale is to be agreed on."""
        return self.scaler is not None and self.scaler.is_enabled()

    def any(self, is_true: bool) -> bool:
        """Return whether it is true on any trainer; all of them call this together.

        Raises:
            JobError: another trainer is gone, or does not call it.
        """
        if work := Join.notify_join_context(self):
            work.wait()
        return self.answer(is_true)

    def answer(self, is_true: bool = False) -> bool:
        """Take part in the others' :meth:`any`, as a trainer at the end of its data."""
        flag = torch.tensor([is_true], dtype=torch.uint8)
        try:
            dist.all_reduce(flag, dist.ReduceOp.MAX, self._group())
        except RuntimeError as exc:
            raise JobError(
                "All trainers must take part when they agree on the loss scale, once a "
                f"backward pass. Received: {exc}. Did one end, or run a backward pass "
                "without any table of this sharder?"
            ) from exc
        return bool(flag)

    def share_scale(self, is_last: bool) -> None:
        """Take the loss scale of those who trained on; all call this together.

        Args:
            is_last: whether this trainer is one of them.
        """
        if self.scaler is None:
            return
        state = self.scaler.state_dict()
        mine = torch.tensor(
            [is_last, state["scale"], state["_growth_tracker"]], dtype=torch.float64
        )
        of_all = [torch.empty_like(mine) for _ in range(self._trainers.size())]
        dist.all_gather(of_all, mine, self._group())
        scale, tracker = next(of[1:].tolist() for of in of_all if of[0])
        state |= {"scale": scale, "_growth_tracker": int(tracker)}
        self.scaler.load_state_dict(state)

    def join_hook(self, **_: object) -> JoinHook:
        """Return what ``Join`` calls for a trainer at the end of its data."""
        return _Answer(self)

    @property
    def join_device(self) -> torch.device:
        """Where the tensors by which ``Join`` counts trainers are."""
        return self._device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """All trainers."""
        return self._trainers

    def _group(self) -> dist.ProcessGroup:
        if self._own_group is None:
            self._own_group = dist.new_group(
                dist.get_process_group_ranks(self._trainers),
                backend="gloo",
                use_local_synchronization=True,
            )
        return self._own_group


class _Answer(JoinHook):
    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement

    def main_hook(self) -> None:
        self._agreement.answer()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._agreement.share_scale(is_last_joiner)


def backward_pass() -> int:
    """Return the number of the backward pass that runs in this thread; -1 of none.

    torch's own hooks tell backward passes apart by it. Checked with torch 2.13.
    """
    return torch._C._current_graph_task_id()


def after_backward(call: Callable[[], None]) -> None:
    """Call when the backward pass that runs in this thread has run all its nodes.

    DistributedDataParallel and FSDP finish in the same way; its all-reduces have begun
    by then, and its gradients need not be there yet. Checked with torch 2.13.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)
