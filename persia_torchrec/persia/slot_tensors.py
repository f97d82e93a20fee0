"""A PERSIA batch as tensors: what a model takes, on its device. Needs no TorchRec.

    dense feature, label   any shape
    pooled slot            (B, D)          its columns of the pooled array
    raw slot               (B, F, D + 1)   a vector per position; last channel is 1.0
                                           where there is an id; else all are 0.0

Dimensions: B samples, T sum of the dims of the pooled slots, N different ids and F
positions per sample of a raw slot, D embedding dim.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from persia_torchrec.arrays import Array, Positions
from persia_torchrec.device.transfer import Staging, to_device
from persia_torchrec.persia.slots import Slot, require_slots

Slots = dict[str, torch.Tensor]


class StagedSlots:
    """The embeddings of a batch on their way to a device, and the places of raw ids."""

    def __init__(
        self,
        staging: Staging,
        outputs: Sequence[Array],
        places: Sequence[Positions],
    ) -> None:
        self._num = len(outputs)
        self._staged = staging.start([*outputs, *places])

    def embeddings(self) -> tuple[torch.Tensor, ...]:
        """Make the current stream wait; return float32 as the worker gave it."""
        return self._staged.wait()[: self._num]

    def places(self) -> tuple[torch.Tensor, ...]:
        """Make the current stream wait; return int32 ``(B, F)`` of each raw slot."""
        return self._staged.wait()[self._num :]


def slot_tensors(
    slots: Sequence[Slot],
    names: Sequence[str],
    outputs: Sequence[torch.Tensor],
    places: Sequence[Positions | torch.Tensor],
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
            rows_ND, places_BF = next(rows)
            if not isinstance(places_BF, torch.Tensor):
                places_BF = to_device(torch.from_numpy(places_BF), rows_ND.device)
            tensors[slot.name] = pad_raw(rows_ND, places_BF)
        else:
            tensors[slot.name] = next(columns)
    return tensors


def run_dense(
    model: nn.Module, non_id_tensors: list[torch.Tensor], embeddings: Slots
) -> Any:
    """Run a dense model; an error that may be of shapes has a note of them."""
    try:
        return model(non_id_tensors, list(embeddings.values()))
    except (RuntimeError, ValueError, IndexError) as exc:
        exc.add_note(_describe_inputs(non_id_tensors, embeddings))
        raise


def _describe_inputs(non_id_tensors: list[torch.Tensor], embeddings: Slots) -> str:
    """Say in one line what a model got; neighbours of one shape stand together."""
    shapes = [(name, tuple(tensor.shape)) for name, tensor in embeddings.items()]
    groups = []
    for shape, of_shape in groupby(shapes, key=lambda one: one[1]):
        names = [name for name, _ in of_shape]
        dim = shape[-1] - (len(shape) == 3)  # a raw slot's last channel is its mask
        groups.append(f"{', '.join(names)} of dim {dim} as {shape}")
    dense = ", ".join(str(tuple(tensor.shape)) for tensor in non_id_tensors) or "none"
    width = sum(shape[-1] for _, shape in shapes)
    return (
        f"The model got non-ID features as {dense}, and {len(shapes)} slots, in this "
        f"order: {'; '.join(groups)}. Their last dimensions add up to {width}. "
        "embedding_config.yml sets the dims."
    )


def pad_raw(rows_ND: torch.Tensor, places_BF: torch.Tensor) -> torch.Tensor:
    """Give each position of a raw slot its row, from 1, and the mask; see above."""
    padded = functional.pad(rows_ND, (0, 0, 1, 0))
    vectors_BFD = functional.embedding(places_BF, padded)
    mask_BF1 = (places_BF > 0).to(rows_ND.dtype).unsqueeze(-1)
    return torch.cat([vectors_BFD, mask_BF1], dim=-1)
