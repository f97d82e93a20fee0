"""Gradients averaged over all trainers as 8 bits a number.

The centralised low-precision scheme that Bagua calls ByteGrad, as a communication hook
of ``DistributedDataParallel``. With R ranks a bucket is cut into R parts, and each part
into blocks of 512 numbers, which share a range::

    block     lo ................. hi        float32, as computed
    sent      0 ................. 255        q = round((g - lo) / step)
    received  lo + step * q                  step = (hi - lo) / 255

    1  rank r sends part p of its gradients to rank p, for all p     (all to all)
    2  rank p averages what it got of part p, and codes the average
    3  all ranks get all averaged parts                              (all gather)

Every rank decodes the same bytes in 3, so that the ranks' gradients, and hence their
models, are equal to the last bit. A number is off by at most half a step of its own
block, and half a step of the average's. A rank sends about 2 bytes a number where a
ring of float32 sends 8. A gradient that is not finite makes its block NaN on all ranks,
so that a loss scale sees it.

Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", VLDB 2021.

Dimension key:
    R: ranks
    K: blocks a part
"""

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch has no __all__

BLOCK = 512
_LEVELS = 255
_RANGE_BYTES = 8  # lo and step of a block, float32 each


def average_as_bytes(
    group: dist.ProcessGroup, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over the ranks of a group; a hook for DDP.

    Waits for the other ranks: its two exchanges must come in one order on all ranks,
    which exchanges that start when others end do not promise.
    """
    flat = bucket.buffer()
    num_ranks = dist.get_world_size(group)
    num_blocks = -(-flat.numel() // (num_ranks * BLOCK))  # a part, rounded up
    blocks = flat.new_zeros(num_ranks * num_blocks * BLOCK, dtype=torch.float32)
    blocks[: flat.numel()] = flat

    sent = encode_blocks(blocks.view(num_ranks, num_blocks, BLOCK))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    mean = decode_blocks(received, num_blocks).mean(dim=0, keepdim=True)

    part = encode_blocks(mean).view(-1)
    parts = [torch.empty_like(part) for _ in range(num_ranks)]
    dist.all_gather(parts, part, group=group)
    averaged = decode_blocks(torch.stack(parts), num_blocks).view(-1)

    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(averaged[: flat.numel()].to(flat.dtype))
    return done


def encode_blocks(blocks: torch.Tensor) -> torch.Tensor:
    """Return blocks as bytes.

    Args:
        blocks: float32 ``(R, K, BLOCK)``.

    Returns:
        uint8 ``(R, K * (BLOCK + 8))``, the ranges before the numbers.
    """
    lo = blocks.amin(dim=2, keepdim=True)
    step = (blocks.amax(dim=2, keepdim=True) - lo) / _LEVELS
    # A block of equal numbers has step 0; one that is not finite has a step of NaN or
    # infinity, which makes all of it NaN when it is decoded.
    steps = torch.where(step > 0, (blocks - lo) / step, 0.0)
    levels = steps.nan_to_num(0.0).round().clamp(0, _LEVELS).to(torch.uint8)
    ranges = torch.cat([lo, step], dim=2).contiguous().view(torch.uint8)
    num_rows = len(blocks)
    return torch.cat(
        [ranges.reshape(num_rows, -1), levels.reshape(num_rows, -1)], dim=1
    )


def decode_blocks(data: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Return the blocks that :func:`encode_blocks` coded, float32 ``(R, K, BLOCK)``."""
    num_rows = len(data)
    ranges = data[:, : num_blocks * _RANGE_BYTES].contiguous().view(torch.float32)
    lo, step = ranges.view(num_rows, num_blocks, 2, 1).unbind(dim=2)
    levels = data[:, num_blocks * _RANGE_BYTES :].view(num_rows, num_blocks, BLOCK)
    return lo + step * levels
