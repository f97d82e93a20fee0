"""Inference beside no job: embeddings by the addresses of embedding workers."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import torch
from torch import nn

from persia_torchrec.ctx.lookup_ctx import LookupCtx, PreprocessMode, cuda_device
from persia_torchrec.data.loader import enter_context, leave_context
from persia_torchrec.errors import ConfigError
from persia_torchrec.serving.reader import SlotsReader
from persia_torchrec.wire.ports import tcp_address
from persia_torchrec.worker.remote import RemoteWorkers


class InferCtx(LookupCtx):
    """Look up embeddings for inference; nothing changes on the servers.

    It belongs to no job and needs no environment. Its workers may be those of a job
    that trains, or stand by themselves over servers that have loaded a checkpoint. It
    connects in the background; any thread may use it.

    Args:
        embedding_worker_address_list: of all embedding workers, as ``"10.0.0.1:7000"``
            or ``"tcp://10.0.0.1:7000"``; batches go to them in turn.
        model: the dense model, already on its device; None where only embeddings are
            wanted.
        device_id: CUDA device of tensors; None is the CPU.
        timeout_s: seconds that a lookup may take.

    Raises:
        ConfigError: no address, or one that cannot be read, or no such device.

    Example:
        ``with InferCtx(["127.0.0.1:7000"], model) as ctx: ctx.wait_for_serving()``
    """

    def __init__(
        self,
        embedding_worker_address_list: Sequence[str],
        model: nn.Module | None = None,
        device_id: int | None = None,
        *,
        timeout_s: float = 60.0,
    ) -> None:
        if timeout_s <= 0:
            raise ConfigError(f"timeout_s must be > 0. Received: {timeout_s}.")
        self.preprocess_mode = PreprocessMode.INFERENCE
        self.model = model
        cpu = torch.device("cpu")
        device = cpu if device_id is None else cuda_device(device_id)
        addresses = [tcp_address(a) for a in embedding_worker_address_list]
        self._workers = RemoteWorkers(addresses, timeout_s=timeout_s)
        self._reader = SlotsReader(self._workers, device)

    @property
    def _source(self) -> SlotsReader:
        return self._reader

    def note_wait(self, seconds: float) -> None:
        """Do nothing: PERSIA has no metrics of a context that serves."""

    def wait_for_serving(self, timeout_s: float = 600.0) -> None:
        """Wait until all workers and their servers answer and have their tables.

        Raises:
            RequestTimeoutError: they did not in time; the message says what is missing.
        """
        self._reader.wait_until_ready(timeout_s)

    def get_embedding_size(self) -> list[int]:
        """Return how many rows each embedding server holds."""
        return list(self._reader.hello().num_rows)

    def close(self) -> None:
        """Close the connections; workers and servers live on. May be called twice."""
        self._workers.close()

    def __enter__(self) -> Self:
        enter_context(self)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        leave_context(self)
        self.close()
