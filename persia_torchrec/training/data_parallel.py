"""What makes the dense models of several trainers one model.

Carries out the options of ``distributed.py``. TorchRec's ``DistributedModelParallel``
leaves what is not sharded to a ``DataParallelWrapper``; these are two, which also say
what happens after a step, and at the end of the data:

    ReducedGradients   DistributedDataParallel, with a communication hook or without
    AveragedWeights    nothing in the backward pass; weights averaged after steps

Trainers whose data end at different steps stay together by torch's ``Join``: who is at
the end answers the collectives of those who go on.
"""

import time
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import FileStore, GradBucket, HashStore, TCPStore  # type: ignore[attr-defined]  # torch has no __all__
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import (
    DataParallelWrapper,
    DefaultDataParallelWrapper,
    DistributedModelParallel,
)
from torchrec.distributed.types import ShardingEnv

from persia_torchrec import env
from persia_torchrec.distributed import (
    DEFAULT_MASTER_PORT,
    BaguaDistributedOption,
    DistributedBaseOption,
)
from persia_torchrec.errors import ConfigError, DiscoveryError
from persia_torchrec.training.byte_gradients import average_as_bytes

_COLLECTIVE_TIMEOUT = timedelta(minutes=10)
_MEETING_TIMEOUT_S = 120.0
_POLL_S = 0.05

Hook = Callable[[dist.ProcessGroup, GradBucket], torch.futures.Future[torch.Tensor]]


class Replication(DataParallelWrapper):
    """Keeps the copies of a dense model alike; one per trainer, of its main thread."""

    averages_gradients: ClassVar[bool]
    """Whether all trainers have equal dense gradients after a backward pass."""

    @abstractmethod
    def after_step(self) -> None:
        """Do what has to follow a step of the dense optimizer."""

    @abstractmethod
    def in_step(self) -> AbstractContextManager[object]:
        """Return a block in which the data of trainers need not end together.

        A trainer that comes to the end of the block answers the collectives of
        :meth:`after_step` of those that go on, until all are there. Those of the
        backward pass are answered by ``persia_torchrec.join``.
        """


class ReducedGradients(DefaultDataParallelWrapper, Replication):
    """Averages gradients in the backward pass.

    Args:
        hook: averages a bucket of gradients; None is torch's own all-reduce.
        bucket_bytes: gradients that are sent at once.
    """

    averages_gradients: ClassVar[bool] = True

    def __init__(
        self, hook: Hook | None = None, bucket_bytes: int = 25 * 1024**2
    ) -> None:
        # As PERSIA's: a step need not use every parameter, nor the same as before.
        super().__init__(
            bucket_cap_mb=bucket_bytes / 1024**2,
            static_graph=False,
            find_unused_parameters=True,
        )
        self._hook = hook

    def wrap(
        self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device
    ) -> None:
        """Replicate what is not sharded; TorchRec calls this."""
        super().wrap(dmp, env, device)
        if self._hook is None or dist.get_world_size() == 1:
            return
        for module in dmp.modules():
            if isinstance(module, DistributedDataParallel):
                module.register_comm_hook(module.process_group, self._hook)

    def after_step(self) -> None:
        """Do nothing: gradients that were equal made equal steps."""

    def in_step(self) -> AbstractContextManager[object]:
        """Return a block that does nothing."""
        return nullcontext()


class AveragedWeights(Replication, Joinable):
    """Averages weights every few steps; until then each trainer goes its own way.

    The dense optimizer's state stays each trainer's own. A trainer at the end of its
    data brings the weights that it ended with, and those of the averages since, to
    every average of the others; at the end of the block all have the average of all.

    Args:
        dense: the trainer's copy of the model.
        period: steps from one average to the next.
    """

    averages_gradients: ClassVar[bool] = False

    def __init__(self, dense: nn.Module, period: int) -> None:
        super().__init__()
        self._dense = dense
        self._period = period
        self._num_steps = 0
        self._device = torch.device("cpu")

    def wrap(
        self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device
    ) -> None:
        """Begin with the weights of rank 0; TorchRec calls this."""
        self._device = device
        self._dense.to(device)
        for tensor in (*self._dense.parameters(), *self._dense.buffers()):
            dist.broadcast(tensor.detach(), src=0)

    def after_step(self) -> None:
        """Average the weights, if it is time; waits for the other trainers then."""
        self._num_steps += 1
        if self._num_steps % self._period == 0:
            Join.notify_join_context(self)
            self.average()

    def average(self) -> None:
        """Average the weights over all trainers; all of them call this together."""
        parameters = [p for p in self._dense.parameters() if p.requires_grad]
        if parameters:
            average_parameters(iter(parameters), self.join_process_group)

    def in_step(self) -> AbstractContextManager[object]:
        """Return the block; the average of all is everybody's model at its end."""
        return Join([self])

    def join_hook(self, **_: object) -> JoinHook:
        """Return what ``Join`` calls for a trainer at the end of its data."""
        return _AnswerAverages(self)

    @property
    def join_device(self) -> torch.device:
        """Where the collectives' tensors are."""
        return self._device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """All trainers."""
        group = dist.group.WORLD
        assert group is not None
        return group


class _AnswerAverages(JoinHook):
    def __init__(self, weights: AveragedWeights) -> None:
        self._weights = weights

    def main_hook(self) -> None:
        self._weights.average()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._weights.average()


def replication_of(option: DistributedBaseOption, dense: nn.Module) -> Replication:
    """Return what keeps copies of a dense model alike as an option says."""
    if not isinstance(option, BaguaDistributedOption):
        return ReducedGradients()
    if option.averages_weights:
        return AveragedWeights(dense, option.period)
    hook = average_as_bytes if option.algorithm == "bytegrad" else None
    return ReducedGradients(hook, option.default_bucket_size)


def init_process_group(option: DistributedBaseOption, device: torch.device) -> None:
    """Join the trainers to torch's process group, unless the script has done so.

    Raises:
        ConfigError: the option's backend cannot serve the device, or its file is
            there already.
        DiscoveryError: the first trainer did not make the file in time.
    """
    if dist.is_initialized():
        return
    backend = option.backend_for(device.type)
    rank, world_size = env.get_rank(), env.get_world_size()
    names_none = option.master_addr is None and option.master_port is None
    store: HashStore | FileStore | TCPStore | None = None
    if world_size == 1:
        store = HashStore()
    elif option.file is not None:
        store = _meet_at_file(Path(option.file), rank, world_size)
    elif not (names_none and all(env.master())):
        store = _meet_at_port(option, rank, world_size)
    # Without a store torch takes the launcher's own meeting point, which torchrun's
    # agents may host already.
    dist.init_process_group(
        backend,
        store=store,
        rank=rank if store is not None else -1,
        world_size=world_size if store is not None else -1,
        timeout=_COLLECTIVE_TIMEOUT,
    )


def _meet_at_port(
    option: DistributedBaseOption, rank: int, world_size: int
) -> TCPStore:
    address = option.master_addr or env.master()[0]
    if address is None:
        raise ConfigError(
            "master_addr must name the host of trainer 0. Received: none, and "
            "MASTER_ADDR is not set. Start the trainers through a launcher, or give it."
        )
    return TCPStore(
        address,
        option.master_port or DEFAULT_MASTER_PORT,
        world_size,
        is_master=rank == 0,
        timeout=timedelta(seconds=_MEETING_TIMEOUT_S),
    )


def _meet_at_file(path: Path, rank: int, world_size: int) -> FileStore:
    """Open the file at which the trainers meet; the first one makes it.

    Only the first trainer can tell a file that an earlier job has left from one of
    this job. PERSIA's trainers all look, and the later ones find the first one's.
    """
    if rank == 0:
        if path.exists():
            raise ConfigError(
                f"sync_file must not exist before the job. Received: {path}, which "
                "does. Remove it, or name another."
            )
    else:
        deadline = time.monotonic() + _MEETING_TIMEOUT_S
        while not path.exists():
            if time.monotonic() >= deadline:
                raise DiscoveryError(
                    f"Trainer 0 must make sync_file within {_MEETING_TIMEOUT_S:g} s. "
                    f"Received: no {path}. Do all trainers share that folder?"
                )
            time.sleep(_POLL_S)
    return FileStore(str(path), world_size)
