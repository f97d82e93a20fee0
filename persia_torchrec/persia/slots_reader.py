"""Embeddings of PERSIA's slots for inference: read-only lookups, here or by workers.

Ids take the same path as in training, so that equal rows give bit-identical embeddings.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch

from persia_torchrec import timeouts
from persia_torchrec.device.transfer import Staging
from persia_torchrec.embedding.embedding_config import EmbeddingSchema
from persia_torchrec.errors import (
    BatchError,
    NotReadyError,
    PersiaError,
    RemoteError,
    RequestTimeoutError,
    ServerError,
)
from persia_torchrec.lookup.bags import JaggedIds
from persia_torchrec.lookup.sharded_lookup import Outputs, RoutedBatch, RowSource
from persia_torchrec.persia import slots
from persia_torchrec.persia.batch import PersiaBatch, ReferencedBatch
from persia_torchrec.persia.loader import LookupSettings
from persia_torchrec.persia.slot_tensors import Slots, StagedSlots, slot_tensors
from persia_torchrec.persia.worker.process import require_dims
from persia_torchrec.persia.worker_client import RemoteBatch, RemoteWorkers

T = TypeVar("T")

_CPU = torch.device("cpu")
_RETRY_S = 0.05
_AWAY = {ServerError.__name__, NotReadyError.__name__}  # of what a worker asks

Pulled = tuple[Outputs | StagedSlots, RoutedBatch | RemoteBatch]
"""The embeddings of a batch, on the CPU or on their way to a GPU, and which of its
slots they are for."""


def open_slots(
    source: RowSource, schema: EmbeddingSchema, device: torch.device = _CPU
) -> "SlotsReader":
    """Return a reader that looks up itself; ConfigError if a dim is not the tables'."""
    require_dims(source, schema)
    return SlotsReader(slots.SlotsLookup(source, slots.build_features(schema)), device)


class SlotsReader:
    """Looks batches up for inference. Any thread may call any method.

    ``timeout_s`` is for a batch of a ``DataLoader`` and those before it. While a worker
    or a server is away, as one that is started again, other workers are asked, for
    ``patience_s``. It does not close the lookup.

    Attributes:
        is_local: whether a lookup waits for no other process.
        lookup_timeout_s: seconds that a lookup may take.
    """

    takes_references: ClassVar[bool] = False
    """Whether a batch may refer to ids in a worker: only in the workers' own job."""

    def __init__(
        self,
        lookup: slots.SlotsLookup | RemoteWorkers,
        device: torch.device = _CPU,
        timeout_s: float = timeouts.REQUEST_S,
        patience_s: float = 0.0,
    ) -> None:
        self.device = device
        self.is_local = not isinstance(lookup, RemoteWorkers) and (
            lookup.source.is_local
        )
        self.lookup_timeout_s = timeouts.REQUEST_S
        self._lookup = lookup
        self._slots: tuple[slots.Slot, ...] | None = None
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._num_threads = 1  # guarded by _lock
        self._pool = ThreadPoolExecutor(1, "lookups")  # guarded by _lock
        self._staging: Staging | None = None  # made under _lock

    def hello(
        self, timeout_s: float | None = None, *, of_any: bool = False
    ) -> slots.LookupHello:
        """Return slots and rows; raise PersiaError if something is not ready.

        With ``of_any``, it is enough that one of the embedding workers is.
        """
        lookup = self._lookup
        if of_any and isinstance(lookup, RemoteWorkers):
            hello = lookup.hello(timeout_s, of_any=True)
        else:
            hello = lookup.hello(timeout_s)
        self._slots = hello.slots
        return hello

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until :meth:`hello` succeeds, or raise RequestTimeoutError."""
        slots.wait_until_ready(self.hello, timeout_s)

    def set_lookup_timeout(self, timeout_s: float) -> None:
        """Set the seconds that a lookup may take from now on, those away included."""
        lookup = self._lookup
        asks = lookup if isinstance(lookup, RemoteWorkers) else lookup.source
        asks.timeout_s = self.lookup_timeout_s = timeout_s
        self._patience_s = min(self._patience_s, timeout_s)

    def all_slots(self) -> tuple[slots.Slot, ...]:
        """Return the slots; asks for them once."""
        return self._slots or self._persist(partial(self.hello, of_any=True)).slots

    def look_up(self, batch: PersiaBatch | ReferencedBatch) -> Pulled:
        """Look a batch up, or raise BatchError or ServerError; begin to copy it."""
        source: Any = batch
        names = [slot.name for slot in self.all_slots()]
        if isinstance(batch, PersiaBatch):
            source = batch.bags()
            slots.require_slots(list(source), names)
        elif not self.takes_references:
            raise BatchError(
                "A batch for inference must have its ids. Received: a batch of a "
                "StreamingDataset, whose ids an embedding worker of a job holds."
            )
        return self._pull(source)

    def look_up_ids(self, ids: JaggedIds) -> Pulled:
        """Look the ID features of a batch up; see :meth:`look_up`."""
        return self._pull(ids)

    def _pull(self, source: Any) -> Pulled:
        outputs, handle = self._persist(lambda: self._lookup.pull(source, None))
        if self.device.type not in Staging.DEVICES:
            return outputs, handle
        with self._lock:
            staging = self._staging = self._staging or Staging(self.device)
        return StagedSlots(staging, outputs, handle.places), handle

    def to_tensors(self, pulled: Pulled) -> Slots:
        """Return a tensor per slot, in the batch's order; see ``slot_tensors.py``."""
        outputs, handle = pulled
        slots = self.all_slots(), handle.slots
        if isinstance(outputs, StagedSlots):
            return slot_tensors(*slots, outputs.embeddings(), outputs.places())
        return slot_tensors(*slots, list(map(torch.from_numpy, outputs)), handle.places)

    def start_pull(
        self,
        batch: PersiaBatch | ReferencedBatch,
        *,
        is_training: bool,
        settings: LookupSettings | None = None,
    ) -> Future[Pulled]:
        """Begin to look a batch up; without settings, finish before this returns."""
        assert not is_training, "a reader changes nothing"
        if settings is None:
            pull: Future[Pulled] = Future()
            pull.set_result(self.look_up(batch))
            return pull
        with self._lock:
            if settings.num_workers != self._num_threads:
                self._num_threads = settings.num_workers
                self._pool.shutdown(wait=True)
                self._pool = ThreadPoolExecutor(self._num_threads, "lookups")
            return self._pool.submit(self.look_up, batch)

    def embed(self, pull: Future[Pulled]) -> Slots:
        """Wait for a batch; return its embeddings, a tensor per slot."""
        try:
            pulled = pull.result(self._timeout_s)
        except PersiaError:
            raise
        except CancelledError as exc:
            raise PersiaError("The context is closed.") from exc
        except TimeoutError as exc:
            raise RequestTimeoutError(
                f"a batch must be looked up within {self._timeout_s:g} s",
                server="embeddings",
            ) from exc
        return self.to_tensors(pulled)

    def close(self) -> None:
        """Begin no further lookup. May be called twice."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _persist(self, ask: Callable[[], T]) -> T:
        """Ask again while what is asked is away; each time it may be another worker."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return ask()
            except ServerError as exc:
                is_away = not isinstance(exc, RequestTimeoutError)
                if isinstance(exc, RemoteError):
                    is_away = exc.kind in _AWAY
                if not is_away or time.monotonic() >= deadline:
                    raise
            time.sleep(_RETRY_S)
