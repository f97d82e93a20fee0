"""Control messages between trainers, by separate process groups on CPUs.

A trainer that waits for servers makes the others wait: at a checkpoint for as long as
that takes. In the group that trains they would wait within its time limit, which is
that of a step, and NCCL ends a process that waits for longer, having kept its GPU busy.
So checkpoints, resumes and the start have groups by gloo, with a time limit that fits.
"""

import contextlib
import itertools
import logging
import socket
import weakref
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from persia_torchrec import timeouts
from persia_torchrec.errors import ConfigError, JobError
from persia_torchrec.parsing.decoding import decoder_of

logger = logging.getLogger(__name__)

# By the group that trains, and by the time limit; they are gone with the former.
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[float, dist.ProcessGroup]]
_groups = weakref.WeakKeyDictionary()


# How often each group has waited, the same on all its trainers.
_num_waits: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]]
_num_waits = weakref.WeakKeyDictionary()


class _Gpu(msgspec.Struct, frozen=True):
    uuid: str
    host: str


def make_cpu_group(trainers: dist.ProcessGroup, timeout_s: float) -> dist.ProcessGroup:
    """Return a new group of the same trainers, on CPUs; all of them call it together.

    Args:
        trainers: the group that trains.
        timeout_s: seconds that a trainer waits for the others.
    """
    with waiting(trainers, "a process group"):
        group: dist.ProcessGroup = dist.new_group(
            dist.get_process_group_ranks(trainers),
            timeout=timedelta(seconds=timeout_s),
            backend="gloo",
            use_local_synchronization=True,
        )
    return group


@contextlib.contextmanager
def waiting(group: dist.ProcessGroup, what: str) -> Iterator[None]:
    """Say which trainers are missing in a collective operation that takes long.

    A trainer that waits so long notes it in the store of the group; those without a
    note are missing. All trainers of the group call it together, ``what`` is said.
    """
    number = next(_num_waits.setdefault(group, itertools.count()))
    with timeouts.saying(logger, lambda: _missing(group, number, what)):
        yield


def _missing(group: dist.ProcessGroup, number: int, what: str) -> str:
    """Return for whom a trainer waits; with one other, that is the one."""
    own, ranks = group.rank(), range(group.size())
    others = [rank for rank in ranks if rank != own]
    if len(others) > 1:
        with contextlib.suppress(RuntimeError):  # of a store that is gone: any other
            store = group.get_group_store()
            store.set(f"waits/{number}/{own}", "")
            there = [r for r in others if store.check([f"waits/{number}/{r}"])]
            others = [rank for rank in others if rank not in there] or others
    names = [f"trainer {rank}" for rank in others]
    return f"{what}: {timeouts.waiting_for(names, len(ranks), 'trainers')}"


def exchange_group(
    timeout_s: float, trainers: dist.ProcessGroup | None = None
) -> dist.ProcessGroup | None:
    """Return the group for :func:`gather`, which the first call makes; all call it.

    Call it before what trainers do for different times: to meet is not to wait long.

    Args:
        timeout_s: seconds that a trainer waits for the others, in an exchange.
        trainers: the group that trains; by default that of all trainers.

    Returns:
        The group; None: there is one trainer.
    """
    if not dist.is_initialized():
        return None
    trainers = trainers or dist.group.WORLD
    assert trainers is not None
    if trainers.size() == 1:
        return None
    known = _groups.setdefault(trainers, {})
    if timeout_s not in known:
        known[timeout_s] = make_cpu_group(trainers, timeout_s)
    return known[timeout_s]


def gather(text: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Return the texts of all trainers by rank, as tensors: nothing is pickled.

    Raises:
        JobError: a trainer has ended, or did not come within the time limit.
    """
    if group is None:
        return [text]
    sizes = torch.zeros(group.size(), dtype=torch.int64, device="cpu")
    sizes[group.rank()] = len(text)
    try:
        with waiting(group, "a checkpoint, or the start"):
            dist.all_reduce(sizes, group=group)
            longest = int(sizes.max())
            own = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8)
            texts = [torch.empty_like(own) for _ in sizes]
            dist.all_gather(texts, own, group=group)
    except RuntimeError as exc:
        raise JobError(
            "All trainers must take part when they agree on the result of a "
            "checkpoint, or of the start."
            f" Received: {exc}. Has one ended?"
        ) from exc
    sent = zip(texts, sizes.tolist(), strict=True)
    return [one.numpy().tobytes()[:size] for one, size in sent]


def broadcast(text: bytes, source: int, group: dist.ProcessGroup | None) -> bytes:
    """Return the text of the trainer with rank ``source``, as a tensor; all call it.

    Raises:
        JobError: a trainer has ended, or did not come within the time limit.
    """
    if group is None:
        return text
    size = torch.tensor([len(text)], device="cpu")
    try:
        dist.broadcast(size, source, group=group)
        data = torch.zeros(int(size), dtype=torch.uint8, device="cpu")
        if group.rank() == source and text:
            data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        dist.broadcast(data, source, group=group)
    except RuntimeError as exc:
        raise JobError(
            "All trainers must take part when one sends its state to the others. "
            f"Received: {exc}. Has one ended?"
        ) from exc
    return data.numpy().tobytes()


def device_in(trainers: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Return a device whose tensors a group exchanges: the given one if it does so."""
    pairs = dist.get_backend_config(trainers).split(",")  # cpu:gloo,cuda:nccl
    types = [pair.partition(":")[0] for pair in pairs]
    if device.type in types or "cuda" not in types:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def require_own_gpu(
    device: torch.device, trainers: dist.ProcessGroup | None, timeout_s: float
) -> None:
    """Reject trainers that share a GPU under NCCL; all of a group call it together.

    Raises:
        ConfigError: two of them do; all raise it.
    """
    if device.type != "cuda" or trainers is None or trainers.size() == 1:
        return
    if "cuda:nccl" not in dist.get_backend_config(trainers).split(","):
        return  # trainers that talk by gloo may share one
    own = _Gpu(str(torch.cuda.get_device_properties(device).uuid), socket.gethostname())
    told = gather(msgspec.json.encode(own), exchange_group(timeout_s, trainers))
    ranks = defaultdict(list)
    for rank, text in enumerate(told):
        ranks[decoder_of(_Gpu).decode(text)].append(rank)
    for gpu, twins in ranks.items():
        if len(twins) > 1:
            raise ConfigError(
                "Each trainer must have a separate GPU: NCCL does not connect two "
                f"that share one. Received: trainers {', '.join(map(str, twins))} on "
                f"GPU {gpu.uuid} of host {gpu.host}. Give each its own: by "
                "CUDA_VISIBLE_DEVICES, or, where each process sees all GPUs, by a "
                "device of its LOCAL_RANK % torch.cuda.device_count(); start trainers "
                "of one host by one torchrun, which counts their LOCAL_RANK. Or let "
                "them share it, by the backend gloo."
            )
