"""Data parallelism of dense models, with the options of ``distributed.py``.

    ReducedGradients   DistributedDataParallel, with a communication hook or without
    AveragedWeights    nothing in the backward pass; weights averaged after steps

**8 bits per number.** ``average_as_bytes`` is the centralised low-precision scheme that
Bagua calls ByteGrad (Gan et al., VLDB 2021), as a hook of ``DistributedDataParallel``.
With R ranks a bucket is cut into R segments, and each segment into blocks of 512
numbers, which share a range::

    block     lo ................. hi        float32, as computed
    sent      0 ................. 255        q = round((g - lo) / step)
    received  lo + step * q                  step = (hi - lo) / 255

    1  rank r sends segment p of its gradients to rank p, for all p  (all to all)
    2  rank p averages what it got of segment p, and codes the average
    3  all ranks get all averaged segments                           (all gather)

All decode the same bytes in 3, so that all models are equal to the last bit. A number
is off by at most half a step of its own block, and half a step of the average's. A rank
sends about 2 bytes per number where a ring of float32 sends 8. A gradient that is not
finite makes its block NaN on all ranks, so that a loss scale sees it.

Dimension key:
    R: ranks
    K: blocks per segment
"""

import logging
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import FileStore, GradBucket, HashStore, TCPStore  # type: ignore[attr-defined]  # torch has no __all__
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import (
    DataParallelWrapper,
    DefaultDataParallelWrapper,
    DistributedModelParallel,
)
from torchrec.distributed.types import ShardingEnv

from persia_torchrec import env, timeouts
from persia_torchrec.errors import ConfigError, DiscoveryError
from persia_torchrec.job.trainer_group import waiting
from persia_torchrec.persia import distributed
from persia_torchrec.rpc.addresses import open_listening
from persia_torchrec.sharding.backward_pass import UnevenInputsHook
from persia_torchrec.sharding.planned import dense_parameters

logger = logging.getLogger(__name__)

BLOCK = 512
_LEVELS = 255
_RANGE_BYTES = 8  # lo and step of a block, float32 each

_POLL_S = 0.05


class ReducedGradients(DefaultDataParallelWrapper):
    """Averages gradients in the backward pass, by torch's all-reduce or a hook."""

    def __init__(self, option: distributed.DistributedBaseOption) -> None:
        bucket_bytes, self._is_coded = 25 * 1024**2, False
        if isinstance(option, distributed.BaguaDistributedOption):
            bucket_bytes = option.default_bucket_size
            self._is_coded = option.algorithm == "bytegrad"
        # As PERSIA's: a step need not use every parameter, nor the same as before.
        super().__init__(
            bucket_cap_mb=bucket_bytes / 1024**2,
            static_graph=False,
            find_unused_parameters=True,
        )

    def wrap(
        self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device
    ) -> None:
        """Replicate what is not sharded; TorchRec calls this."""
        if not any(parameter.requires_grad for parameter in dmp.parameters()):
            return  # which DistributedDataParallel takes for a mistake
        with warnings.catch_warnings():
            deprecated = "`broadcast_buffers` is deprecated"  # TorchRec's own argument
            warnings.filterwarnings("ignore", deprecated, FutureWarning)
            super().wrap(dmp, env, device)
        for module in dmp.modules():
            if isinstance(module, DistributedDataParallel):
                _use_up_warning(module)
                if self._is_coded and dist.get_world_size() > 1:
                    module.register_comm_hook(module.process_group, average_as_bytes)


def _use_up_warning(replica: DistributedDataParallel) -> None:
    """Let torch warn now that ``find_unused_parameters`` is not needed, unseen.

    It does so once per process, at the first step that uses all parameters, on stderr.
    Within a function of autograd's it is a warning of Python's, which can be filtered.
    A parameter that is never used would silence it too: for that a GPU is waited for at
    the end of each backward pass, to learn whether other trainers used it.
    """
    with warnings.catch_warnings():
        needless = "find_unused_parameters=True was specified"
        warnings.filterwarnings("ignore", needless, UserWarning)
        _Prepare.apply(torch.zeros(0), replica)


class _Prepare(torch.autograd.Function):
    """Prepares a backward pass, which never comes, of all parameters of a replica."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, replica: DistributedDataParallel
    ) -> torch.Tensor:
        with torch.enable_grad():
            used = [p.flatten()[:1].sum() for p in dense_parameters(replica)]
            replica.reducer.prepare_for_backward(used)
        return anchor


class AveragedWeights(DataParallelWrapper, UnevenInputsHook):
    """Averages weights after each ``period`` of steps; trainers step alone.

    The dense optimizer's state stays each trainer's own. A trainer at the end of its
    data takes part in every average of the others; at the end of the block all have the
    average of all.
    """

    def __init__(self, dense: nn.Module, period: int) -> None:
        super().__init__()
        self._dense = dense
        self._period = period
        self._num_steps = 0

    def wrap(
        self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device
    ) -> None:
        """Begin with the weights of rank 0; TorchRec calls this."""
        self.device = device
        self._dense.to(device)
        assert dist.group.WORLD is not None
        with waiting(dist.group.WORLD, "the first weights"):
            for tensor in (*dense_parameters(self._dense), *self._dense.buffers()):
                dist.broadcast(tensor.detach(), src=0)

    def after_step(self) -> bool:
        """Average the weights with other trainers, if it is time; return whether."""
        self._num_steps += 1
        is_time = self._num_steps % self._period == 0
        if is_time:
            Join.notify_join_context(self)
            self.main_hook()
        return is_time

    def main_hook(self) -> None:
        """Average the weights over all trainers, those at the end of their data too."""
        parameters = [p for p in dense_parameters(self._dense) if p.requires_grad]
        if parameters:
            average_parameters(iter(parameters), self.join_process_group)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Average the weights of all at the end."""
        self.main_hook()


def average_as_bytes(
    group: dist.ProcessGroup, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over the ranks of a group; a hook for DDP.

    Waits for the other ranks: its two exchanges must come in one order on all ranks,
    which exchanges that start when others end do not promise.
    """
    flat = bucket.buffer()
    num_ranks = dist.get_world_size(group)
    num_blocks = -(-flat.numel() // (num_ranks * BLOCK))  # per segment, rounded up
    blocks = flat.new_zeros(num_ranks * num_blocks * BLOCK, dtype=torch.float32)
    blocks[: flat.numel()] = flat

    sent = encode_blocks(blocks.view(num_ranks, num_blocks, BLOCK))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    mean = decode_blocks(received, num_blocks).mean(dim=0, keepdim=True)

    own = encode_blocks(mean).view(-1)
    segments = [torch.empty_like(own) for _ in range(num_ranks)]
    dist.all_gather(segments, own, group=group)
    averaged = decode_blocks(torch.stack(segments), num_blocks).view(-1)

    # With them, who waits for it waits for the current stream's work too.
    devices: list[Any] = [flat.device] if flat.device.type == "cuda" else []
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    done.set_result(averaged[: flat.numel()].to(flat.dtype))
    return done


def encode_blocks(blocks: torch.Tensor) -> torch.Tensor:
    """Code float32 ``(R, K, BLOCK)`` as uint8 ``(R, K * (8 + BLOCK))``."""
    lo = blocks.amin(dim=2, keepdim=True)
    step = (blocks.amax(dim=2, keepdim=True) - lo) / _LEVELS
    # A block of equal numbers has step 0; one that is not finite has a step of NaN or
    # infinity, which makes all of it NaN when it is decoded.
    steps = torch.where(step > 0, (blocks - lo) / step, 0.0)
    levels = steps.nan_to_num(0.0).round().clamp(0, _LEVELS).to(torch.uint8)
    ranges = torch.cat([lo, step], dim=2).contiguous().view(torch.uint8)
    return torch.cat([ranges.flatten(1), levels.flatten(1)], dim=1)


def decode_blocks(data: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Decode what :func:`encode_blocks` coded."""
    coded, levels = data.tensor_split([num_blocks * _RANGE_BYTES], dim=1)
    ranges = coded.contiguous().view(torch.float32).view(-1, num_blocks, 2, 1)
    lo, step = ranges.unbind(dim=2)
    return lo + step * levels.reshape(-1, num_blocks, BLOCK)


def init_process_group(
    option: distributed.DistributedBaseOption,
    device: torch.device,
    recovery_s: float = 0.0,
) -> None:
    """Join the trainers to torch's process group, unless the script has done so.

    Its operations wait longer than another process of the job may be away, and than
    rank 0 may wait for servers that write a checkpoint, while the others train on.
    """
    if dist.is_initialized():
        return
    backend = option.backend_for(device.type)
    rank, world_size = env.get_rank(), env.get_world_size()
    most_s = max(timeouts.exchange_s(recovery_s), env.join_timeout_s())
    what = f"waiting for the other NN workers of {world_size}"
    with timeouts.saying(logger, lambda: what, level=logging.INFO):
        store = _make_store(option, rank, world_size)
        # Without a store torch takes the launcher's own rendezvous, which torchrun's
        # agents may host already.
        meeting: dict[str, Any] = {}
        if store is not None:
            meeting = {"store": store, "rank": rank, "world_size": world_size}
        dist.init_process_group(backend, timeout=timedelta(seconds=most_s), **meeting)


def _make_store(
    option: distributed.DistributedBaseOption, rank: int, world_size: int
) -> HashStore | FileStore | TCPStore | None:
    """Make the store by which the trainers meet; None: the launcher has one."""
    if world_size == 1:
        return HashStore()
    if isinstance(option, distributed.DDPOption) and option.sync_file is not None:
        return _rendezvous_at_file(Path(option.sync_file), rank, world_size)
    named = option.master_addr, option.master_port
    if named == (None, None) and all(env.master()) and env.agent_has_store():
        return None
    address = option.master_addr or env.master()[0]
    if address is None:
        raise ConfigError(
            "master_addr must name the host of trainer 0. Received: none, and "
            "MASTER_ADDR is not set. Start the trainers through a launcher, or give it."
        )
    port = option.master_port or distributed.DEFAULT_MASTER_PORT
    if named == (None, None):
        port = env.master()[1] or port
    listener = None
    if rank == 0 and env.is_loopback(address):  # else torch listens on all addresses
        listener = open_listening(address, port).detach()
    return TCPStore(
        address,
        port,
        world_size,
        is_master=rank == 0,
        timeout=timedelta(seconds=env.join_timeout_s()),
        master_listen_fd=listener,
    )


def _rendezvous_at_file(path: Path, rank: int, world_size: int) -> FileStore:
    """Open the file at which the trainers meet; rank 0 makes it, as a new one."""
    if rank == 0 and path.exists():
        raise ConfigError(
            f"sync_file must not exist before the job. Received: {path}, which does. "
            "Remove it, or name another."
        )
    timeout_s = env.join_timeout_s()
    deadline = time.monotonic() + timeout_s
    while rank > 0 and not path.exists():
        if time.monotonic() >= deadline:
            raise DiscoveryError(
                f"Trainer 0 must make sync_file within {timeout_s:g} s. "
                f"Received: no {path}. Do all trainers share that folder?"
            )
        time.sleep(_POLL_S)
    return FileStore(str(path), world_size)
