"""A PERSIA batch as tensors: what a model takes, on its device. Needs no TorchRec.

    dense feature, label   any shape
    pooled slot            (B, D)          its columns of the pooled array
    raw slot               (B, F, D + 1)   a vector per position; last channel is 1.0
                                           where there is an id; else all are 0.0

Dimensions: B samples, T sum of the dims of the pooled slots, N different ids and F
positions per sample of a raw slot, D embedding dim.
"""

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch.nn import functional

from persia_torchrec.lookup.slots import Slot, require_slots
from persia_torchrec.routing.shard import Positions

Slots = dict[str, torch.Tensor]


def dense_tensor(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return an array as a tensor on a device; on the CPU it shares writable memory."""
    writable = array if array.flags.writeable else array.copy()
    return torch.from_numpy(writable).to(device, non_blocking=True)


def slot_tensors(
    slots: Sequence[Slot],
    names: Sequence[str],
    outputs: Sequence[torch.Tensor],
    places: Sequence[Positions],
) -> Slots:
    """Give each slot of a batch its tensor, in the batch's order and autograd graph.

    ``slots`` are all that there are, ``names`` those of the batch, in the order of the
    outputs of a ``SlotsLookup``; ``places`` has int32 ``(B, F)`` for each raw slot.
    """
    slot_of = {slot.name: slot for slot in slots}
    require_slots(names, [*slot_of])
    slots, (pooled_BT, *raw) = [slot_of[name] for name in names], outputs
    dims = [slot.dim for slot in slots if not slot.num_places]
    columns, rows = iter(pooled_BT.split(dims, dim=1)), zip(raw, places, strict=True)
    tensors = {}
    for slot in slots:
        if slot.num_places:
            rows_ND, of_slot = next(rows)
            places_BF = torch.from_numpy(of_slot).to(rows_ND.device, non_blocking=True)
            tensors[slot.name] = pad_raw(rows_ND, places_BF)
        else:
            tensors[slot.name] = next(columns)
    return tensors


def pad_raw(rows_ND: torch.Tensor, places_BF: torch.Tensor) -> torch.Tensor:
    """Give each position of a raw slot its row, from 1, and the mask; see above."""
    padded = functional.pad(rows_ND, (0, 0, 1, 0))
    vectors_BFD = functional.embedding(places_BF, padded)
    mask_BF1 = (places_BF > 0).to(rows_ND.dtype).unsqueeze(-1)
    return torch.cat([vectors_BFD, mask_BF1], dim=-1)
