"""What several trainers agree on: who updates jointly, and the loss scale.

Dense gradients are averaged over the trainers: an infinity on one of them reaches all,
which all skip the step and lower the loss scale. Embedding gradients are not, so the
trainers tell one another whether theirs were finite:

    backward pass   each pushed gradient: finite?
    its end         one byte, the maximum over all trainers
    scaler.step     all skip, or none; scaler.update: all scales stay equal

The byte has a process group of its own, on CPUs, made for the first one: collectives of
one group must come in the same order everywhere, and those of the dense gradients come
when autograd is ready for them.
"""

import secrets

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torchrec.distributed.types import ShardingEnv

from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.errors import ConfigError, JobError
from persia_torchrec.pipeline.joint import Trainers
from persia_torchrec.sharding.torchrec_api import GROWTH_TRACKER
from persia_torchrec.wire.messages import Share


class AnswersAtEnd(Joinable, JoinHook):
    """What a trainer at the end of its data answers to the others: torch's two in one.

    ``trainers`` are those of the job by default, and communicate on ``device``.
    """

    trainers: dist.ProcessGroup | None = None
    device = torch.device("cpu")

    def join_hook(self, **_: object) -> JoinHook:
        """Return what ``Join`` calls for a trainer at the end of its data."""
        return self

    @property
    def join_device(self) -> torch.device:
        """Where the tensors by which ``Join`` counts trainers are."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """All trainers."""
        group = dist.group.WORLD if self.trainers is None else self.trainers
        assert group is not None
        return group


class Agreement(AnswersAtEnd):
    """What trainers agree on; one per trainer and sharder.

    The thread that trains calls it, or that runs its backward pass. ``scaler`` has the
    loss scale of all, if there is one.
    """

    def __init__(self, trainers: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__()
        self.trainers, self.device = trainers, device
        self.scaler: torch.amp.GradScaler | None = None
        self._own_group: dist.ProcessGroup | None = None

    def any(self, is_true: bool) -> bool:
        """Return whether it is true on any trainer; all of them call this together."""
        if work := Join.notify_join_context(self):
            work.wait()
        return self._any(is_true)

    def main_hook(self) -> None:
        """Take part in the others' :meth:`any`."""
        self._any(False)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the loss scale of a trainer that trained last."""
        if self.scaler is None:
            return
        state = self.scaler.state_dict()
        mine = torch.tensor(
            [is_last_joiner, state["scale"], state[GROWTH_TRACKER]], dtype=torch.float64
        )
        of_all = [torch.empty_like(mine) for _ in range(self.join_process_group.size())]
        dist.all_gather(of_all, mine, self._group())
        scale, tracker = next(of[1:].tolist() for of in of_all if of[0])
        state |= {"scale": scale, GROWTH_TRACKER: int(tracker)}
        self.scaler.load_state_dict(state)

    def _any(self, is_true: bool) -> bool:
        flag = torch.tensor([is_true], dtype=torch.uint8)
        try:
            dist.all_reduce(flag, dist.ReduceOp.MAX, self._group())
        except RuntimeError as exc:
            raise JobError(
                "All trainers must take part when they agree on the loss scale, once "
                f"per backward pass. Received: {exc}. Did one end, or run a backward "
                "pass without any table of this sharder?"
            ) from exc
        return bool(flag)

    def _group(self) -> dist.ProcessGroup:
        if self._own_group is None:
            self._own_group = dist.new_group(
                dist.get_process_group_ranks(self.trainers),
                backend="gloo",
                use_local_synchronization=True,
            )
        return self._own_group


def rendezvous(
    env: ShardingEnv, device: torch.device, client: EmbeddingClient, timeout_s: float
) -> Trainers:
    """Agree with the other trainers on a group that updates jointly; all must call it.

    A joint step may wait ``timeout_s`` for the slowest trainer.
    """
    if env.process_group is None:
        raise ConfigError(
            f"{env.world_size} trainers that update jointly must have a process group. "
            'Received: none. Give one, or update="each" to the sharder.'
        )
    group = [secrets.randbits(62)]
    dist.broadcast_object_list(
        group, group_src=0, group=env.process_group, device=device
    )
    timeout_ms = round(1000 * timeout_s)
    first = Share(group[0], 1, env.rank, env.world_size, timeout_ms)
    trainers = Trainers(client, first)
    trainers.join()
    # The servers know all of them before one begins, and so notice which one is lost.
    are_here = torch.zeros(1, device=device)
    dist.all_reduce(are_here, group=env.process_group)
    are_here.item()  # on a GPU, the wait for it
    return trainers
