"""Several trainers: how they meet, and how they go on when their data end unevenly."""

import contextlib
import math
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.types import ShardingEnv

from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.errors import ConfigError
from persia_torchrec.sharding.remote_lookup import ShardedRemoteCollection
from persia_torchrec.worker.trainers import Trainers


@dataclass(frozen=True, slots=True)
class Joint:
    """How trainers update jointly.

    Attributes:
        client: of the servers.
        timeout_s: seconds that a step may wait for the slowest trainer.
    """

    client: EmbeddingClient
    timeout_s: float

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError(
                "joint_timeout_s must be finite and positive. "
                f"Received: {self.timeout_s}."
            )


@contextlib.contextmanager
def join(model: nn.Module) -> Iterator[None]:
    """Train inside this block where trainers' data may not end at the same batch.

    A trainer that comes to the end of the block, even without a batch, does not hold
    the others up any more: it answers the all-reduces of their dense gradients, and
    the servers do without its share of the joint updates. The block ends when all
    trainers are there; the dense model of the last one, and its loss scale, are then
    those of all, and the next steps are joint again. Gradients are divided by the
    number of all trainers throughout, as in
    ``torch.nn.parallel.DistributedDataParallel.join``.

    An exception ends the block at once, on this trainer alone.

    Args:
        model: a ``DistributedModelParallel``, the same on every trainer.

    Raises:
        ConfigError: the dense half was wrapped with ``static_graph``, as TorchRec's
            default wrapper does: a trainer without a first batch would break it.
        PersiaError: an earlier update failed.

    Example:
        ``with join(model): train(model, this_trainers_batches)``, where the model was
        made with ``data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=
        False)``.
    """
    collections = [
        module
        for module in model.modules()
        if isinstance(module, ShardedRemoteCollection)
    ]
    replicas = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    if any(replica.static_graph for replica in replicas):
        raise ConfigError(
            "Data may end unevenly only without static_graph. Received: a model that "
            "was wrapped with it. Give DistributedModelParallel(data_parallel_wrapper="
            "DefaultDataParallelWrapper(static_graph=False))."
        )
    agreements = {
        c.agreement: None for c in collections if c.agreement and c.agreement.is_used
    }
    joinables: list[Joinable] = [*replicas[:1], *agreements]
    are_several = (
        bool(joinables) and dist.get_world_size(joinables[0].join_process_group) > 1
    )
    with (
        Join(joinables, divide_by_initial_world_size=True)
        if are_several
        else contextlib.nullcontext()
    ):
        yield
        for collection in collections:
            collection.pipeline.leave()


def meet(env: ShardingEnv, device: torch.device, joint: Joint) -> Trainers | None:
    """Agree with the other trainers on a group that updates jointly; all must call it.

    Args:
        env: of the trainers.
        device: on which their process group communicates.
        joint: how they update.

    Returns:
        This trainer's place in the group; None where there is but one trainer.

    Raises:
        ConfigError: there are several and no process group.
        ServerError: a server failed, refused, or did not answer in time.
    """
    if env.world_size == 1:
        return None
    if env.process_group is None:
        raise ConfigError(
            f"{env.world_size} trainers that update jointly must have a process group. "
            'Received: none. Give one, or update="each" to the sharder.'
        )
    group = [secrets.randbits(62)]
    dist.broadcast_object_list(
        group, group_src=0, group=env.process_group, device=device
    )
    trainers = Trainers(
        *(group[0], env.rank, env.world_size),
        client=joint.client,
        timeout_s=joint.timeout_s,
    )
    trainers.join()
    # The servers know all of them before one begins: who is lost is missed then.
    are_here = torch.zeros(1, device=device)
    dist.all_reduce(are_here, group=env.process_group)
    are_here.item()  # on a GPU, the wait for it
    return trainers
