"""The context of data loader processes: batches for workers and trainers.

``persia/feed.py`` sends them: all contexts of a process send through one feed.
"""

import contextlib
from collections.abc import Iterator

from persia_torchrec import env
from persia_torchrec.errors import ConfigError
from persia_torchrec.job.implicit_member import join_job
from persia_torchrec.persia.batch import PersiaBatch
from persia_torchrec.persia.ctx.base_ctx import BaseCtx
from persia_torchrec.persia.feed import Feed
from persia_torchrec.persia.global_config import reject_inference


class DataCtx(BaseCtx):
    """Send batches from a data loader process to embedding workers and trainers.

    The constructor waits until workers and trainers have registered: a trainer does
    when it first iterates over its ``StreamingDataset``. A process that no launcher has
    started becomes a member of its job here.

    The data of this loader end when its script has ended well, with or without a
    ``with`` block; in a process whose end no job sees, when the last block is left
    without an exception. Until then a process may have several contexts, one after the
    other or at once, and threads may share one: the numbers of batches continue.

    A process that is started again runs its script from the start. Batches are counted
    over all processes of the loader: the first ones, which have arrived, are not sent
    again. A script that does not make the same batches in each run asks ``position``
    where to continue. Where processes are started again, leaving the block waits until
    all batches are trained. It stays connected then: when NN workers are started again,
    and need its batches once more, this process kills itself, so that its supervisor
    starts it again, too.

    Args:
        threadpool_worker_size: how many messages may be on their way at once, at least
            1. One is: ``send_data`` waits for the answer to each.
        device_id: CUDA device that becomes torch's current one, for the script's use;
            what is sent are arrays in the memory of the CPU.
        as_torchrec: whether ids go to the NN workers themselves, with their batches,
            as a ``DataLoader(as_torchrec=True)`` wants them, and not to embedding
            workers. None: as the NN workers ask for.

    Raises:
        ConfigError: this process belongs to no job, or ``as_torchrec`` is not what the
            NN workers ask for.
        DataflowError: the NN workers ask for different things.
    """

    def __init__(
        self,
        threadpool_worker_size: int = 10,
        device_id: int | None = None,
        *,
        as_torchrec: bool | None = None,
    ) -> None:
        super().__init__(threadpool_worker_size, device_id)
        reject_inference("data loader", env.global_config_path())
        store = env.require_job_store("A DataCtx")
        loader, num_loaders = env.get_replica_index(), env.get_replica_size()
        if loader >= num_loaders:
            raise ConfigError(
                f"REPLICA_INDEX must be in [0, {num_loaders}), below "
                f"REPLICA_SIZE. Received: {loader}."
            )
        join_job("loader", loader, num_loaders, store)
        self._is_left = False
        self._feed = feed = Feed.of_process(store, loader, num_loaders)
        if as_torchrec not in (None, feed.takes_ids):
            raise ConfigError(
                f"Data loader {loader}: as_torchrec must be as in the DataLoader "
                f"of the NN workers, {feed.takes_ids}, which says where ids go. "
                f"Received: {as_torchrec}. Leave it out of DataCtx, which then asks "
                "them."
            )

    @property
    def position(self) -> int:
        """How many batches of this loader had arrived when it connected; 0 at first.

        A script that asks before it sends continues there: it makes the batches
        behind them, and ``send_data`` numbers the first one ``position + 1``.
        """
        return self._feed.position()

    def send_data(self, persia_batch: PersiaBatch) -> None:
        """Send a batch; waits while the buffers of worker or trainer are full.

        The ids go to one of the embedding workers in turn, the rest to the trainer
        ``batch_id % number of trainers``. Sets the batch's ``batch_id``. A batch that
        has arrived from an earlier process of this loader is not sent. Any thread may
        call it: batches are numbered and sent one after the other.

        Raises:
            ConfigError: the block of this context was left.
            DataflowError: a buffer stayed full for 15 minutes, or an NN worker was
                started again, which needs batches that are gone here.
        """
        if self._is_left:
            raise ConfigError(
                "send_data must be called before the block of its DataCtx is left. "
                "Received: a batch behind it. Send it in the block, or in another "
                "DataCtx."
            )
        self._feed.send(persia_batch)

    @contextlib.contextmanager
    def _block(self) -> Iterator[None]:
        if self._is_left:
            raise ConfigError(
                "A DataCtx must be entered once. Received: one that was left. Make "
                "another one."
            )
        has_failed = True
        self._feed.enter()
        try:
            yield
            has_failed = False
        finally:
            self._is_left = True
            self._feed.leave(has_failed=has_failed)
