"""Batches of a ``DataLoader`` looked up side by side, and given in their order."""

from concurrent.futures import Future

import torch

from persia_torchrec.data.dataflow import ReferencedBatch
from persia_torchrec.data.loader import LookupSettings
from persia_torchrec.embedding.data import PersiaBatch
from persia_torchrec.errors import PersiaError, RequestTimeoutError
from persia_torchrec.serving.reader import LookedUp, SlotsReader
from persia_torchrec.worker.puller import Puller


class SideBySide:
    """Looks up by a reader, several batches at once. Any thread may call any method.

    Args:
        reader: looks up; it bounds how long a lookup may take.
        timeout_s: seconds to wait for the lookup of a batch, and for those before it.
    """

    def __init__(self, reader: SlotsReader, *, timeout_s: float) -> None:
        self._reader = reader
        self._timeout_s = timeout_s
        self._puller = Puller("lookups")

    @property
    def device(self) -> torch.device:
        """Where tensors are wanted."""
        return self._reader.device

    def start_pull(
        self,
        batch: PersiaBatch | ReferencedBatch,
        *,
        is_training: bool,
        settings: LookupSettings | None = None,
    ) -> Future[LookedUp]:
        """Begin to look a batch up.

        Args:
            batch: as the reader takes it.
            is_training: False.
            settings: of the ``DataLoader`` that it comes from; returns at once then.
                None looks up before it returns.

        Raises:
            PersiaError: without settings: what went wrong.
        """
        assert not is_training, "a reader changes nothing"
        looked_up: Future[LookedUp] = Future()
        if settings is None:
            looked_up.set_result(self._reader.start_pull(batch))
            return looked_up
        self._puller.set_num_threads(settings.num_workers)
        return self._puller.submit(
            lambda: None,  # there is no permit to wait for
            lambda: self._reader.start_pull(batch),
            looked_up,
        )

    def embed(self, pull: Future[LookedUp]) -> list[torch.Tensor]:
        """Wait for a batch; return its embeddings, a tensor a slot.

        Raises:
            PersiaError: what went wrong with its lookup.
        """
        try:
            looked_up = pull.result(self._timeout_s)
        except PersiaError:
            raise
        except TimeoutError as exc:
            raise RequestTimeoutError(
                f"a batch must be looked up within {self._timeout_s:g} s",
                server="embeddings",
            ) from exc
        return self._reader.embed(looked_up)

    def close(self) -> None:
        """Begin no further lookup. May be called twice."""
        self._puller.close()
