"""Embeddings for inference: looked up where they are, and nothing changes there.

    batch -> lookup, here or by embedding workers -> slot_tensors.py -> tensors

The ids go the same way as in training and evaluation, so that the embeddings of equal
rows are equal to the last bit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from persia_torchrec.data.dataflow import ReferencedBatch
from persia_torchrec.data.loader import LookupSettings
from persia_torchrec.embedding.data import PersiaBatch
from persia_torchrec.errors import BatchError
from persia_torchrec.routing.dedup import Positions
from persia_torchrec.sharding.slot_tensors import slot_tensors
from persia_torchrec.worker.bags import Bags
from persia_torchrec.worker.hello import Hello, Slot, require_slots, wait_until_ready
from persia_torchrec.worker.pulled import Outputs
from persia_torchrec.worker.schema import bags_of


class Handle(Protocol):
    """What a lookup knows of a batch beside its outputs."""

    @property
    def places(self) -> Sequence[Positions]:
        """For each raw slot, where its ids stand."""

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the slots that the batch has, in its order."""


class Lookup(Protocol):
    """A ``SlotsLookup`` in this process, or ``RemoteWorkers``."""

    def hello(self) -> Hello:
        """Tell the slots and the rows, if it is ready."""

    def pull(self, bags: Mapping[str, Bags], number: None) -> tuple[Outputs, Handle]:
        """Look a batch up, and change nothing."""


@dataclass(frozen=True, slots=True)
class LookedUp:
    """The embeddings of one batch, on the CPU.

    Attributes:
        slots: all that there are.
        names: of those that the batch has, in its order.
        outputs: what the lookup gave for these.
        places: for each raw slot of the batch, where its ids stand.
    """

    slots: tuple[Slot, ...]
    names: tuple[str, ...]
    outputs: Outputs
    places: Sequence[Positions]


class SlotsReader:
    """Looks batches up for inference. Any thread may call any method.

    Args:
        lookup: where to look; the reader does not close it.
        device: where tensors are wanted.
        status: tells how fresh the rows are, for people; nothing if not given.
    """

    def __init__(
        self,
        lookup: Lookup,
        device: torch.device,
        status: Callable[[], Mapping[str, object]] = dict,
    ) -> None:
        self.status = status
        self._lookup = lookup
        self._device = device
        self._slots: tuple[Slot, ...] | None = None

    @property
    def device(self) -> torch.device:
        """Where tensors are wanted."""
        return self._device

    def hello(self) -> Hello:
        """Ask whether all that a lookup needs is ready.

        Raises:
            PersiaError: it is not; the message says what.
        """
        hello = self._lookup.hello()
        self._slots = hello.slots
        return hello

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until :meth:`hello` succeeds.

        Raises:
            RequestTimeoutError: it did not in time; the last reason follows.
        """
        wait_until_ready(self.hello, timeout_s)

    def slots(self) -> tuple[Slot, ...]:
        """Return the slots; asks for them once.

        Raises:
            PersiaError: the lookup is not ready.
        """
        return self._slots or self.hello().slots

    def start_pull(
        self,
        batch: PersiaBatch | ReferencedBatch,
        *,
        is_training: bool = False,
        settings: LookupSettings | None = None,
    ) -> LookedUp:
        """Look a batch up; returns when its embeddings are here.

        Args:
            batch: with its ids.
            is_training: False.
            settings: of a ``DataLoader``; they hold for training batches.

        Raises:
            BatchError: an ID feature of the batch is no slot, or its ids wait
                elsewhere.
            ServerError: a worker or a server failed, or did not answer in time.
        """
        assert not is_training, "a reader changes nothing"
        if isinstance(batch, ReferencedBatch):
            raise BatchError(
                "A batch for inference must have its ids. Received: a batch of a "
                "StreamingDataset, whose ids wait with a training job."
            )
        slots = self.slots()
        features = {feature.name: feature for feature in batch.id_type_features}
        require_slots(list(features), [slot.name for slot in slots])
        outputs, handle = self._lookup.pull(bags_of(features), None)
        return LookedUp(slots, handle.slots, outputs, handle.places)

    def embed(self, pull: LookedUp) -> list[torch.Tensor]:
        """Return a batch's embeddings, a tensor a slot; see ``slot_tensors.py``.

        They have the order of the batch's ID features.
        """
        outputs = [
            torch.from_numpy(output).to(self._device, non_blocking=True)
            for output in pull.outputs
        ]
        tensors = slot_tensors(pull.slots, pull.names, outputs, pull.places)
        return list(tensors.values())
