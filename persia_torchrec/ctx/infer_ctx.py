"""Inference outside of a job: embeddings by the addresses of embedding workers."""

from collections.abc import Sequence

from torch import nn

from persia_torchrec import timeouts
from persia_torchrec.ctx.base_ctx import LookupCtx, PreprocessMode
from persia_torchrec.errors import ConfigError
from persia_torchrec.pipeline.worker_client import RemoteWorkers
from persia_torchrec.serving.embeddings import ConcurrentLookups
from persia_torchrec.wire.ports import tcp_address


class InferCtx(LookupCtx):
    """Look up embeddings for inference; nothing changes on the servers.

    It belongs to no job and needs no environment. Its workers may be those of a job
    that trains, or stand by themselves over servers that have loaded a checkpoint. It
    connects in the background; any thread may use it.

    Args:
        embedding_worker_address_list: of all embedding workers, as ``"10.0.0.1:7000"``,
            ``"10.0.0.1: 7000"`` or ``"tcp://10.0.0.1:7000"``; batches go to them in
            turn.
        model: the dense model, already on its device; None where only embeddings are
            wanted.
        embedding_config: None; here because PERSIA has it here.
        threadpool_worker_size: how many lookups of a ``DataLoader`` may be under way at
            once, if its ``num_workers`` does not allow fewer.
        device_id: CUDA device of tensors; None is the CPU.
        timeout_s: seconds that a lookup may take.

    Example:
        ``with InferCtx(["127.0.0.1:7000"], model) as ctx: ctx.wait_for_serving()``
    """

    embeddings: ConcurrentLookups

    def __init__(
        self,
        embedding_worker_address_list: Sequence[str],
        model: nn.Module | None = None,
        embedding_config: None = None,
        threadpool_worker_size: int = 10,
        device_id: int | None = None,
        *,
        timeout_s: float = timeouts.REQUEST_S,
    ) -> None:
        if timeout_s <= 0:
            raise ConfigError(f"timeout_s must be > 0. Received: {timeout_s}.")
        if embedding_config is not None:
            raise ConfigError(
                "embedding_config must be None: an InferCtx changes nothing on the "
                f"servers. Received: {embedding_config}. It is for TrainCtx."
            )
        super().__init__(threadpool_worker_size, device_id)
        self.preprocess_mode = PreprocessMode.INFERENCE
        self.model = model
        addresses = [tcp_address(a) for a in embedding_worker_address_list]
        self._workers = RemoteWorkers(addresses, timeout_s=timeout_s)
        self.embeddings = ConcurrentLookups(
            self._workers, self._device, timeout_s=2 * timeout_s + 5
        )

    def wait_for_serving(self, timeout_s: float = timeouts.READY_S) -> None:
        """Wait until all workers and their servers answer and have their tables."""
        self.embeddings.wait_until_ready(timeout_s)

    def get_embedding_size(self) -> list[int]:
        """Return how many rows each embedding server holds."""
        return list(self.embeddings.hello().num_rows)

    def close(self) -> None:
        """Close the connections; workers and servers live on. May be called twice."""
        self.embeddings.close()
        self._workers.close()

    def _end(self, exc: BaseException | None) -> None:
        self.close()
