"""A batch on its way, and when it is pulled, the one push that it may get."""

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from persia_torchrec.client.permits import Permit
from persia_torchrec.errors import BatchError
from persia_torchrec.worker.pooling import Floats

Handle = TypeVar("Handle")

Outputs = tuple[Floats, ...]
"""What a lookup gives for a batch; it takes back gradients of the same shapes.

Which arrays there are is the lookup's affair: one pooled array, a sequence a feature,
or the unique rows of each table.
"""


class PulledBatch(Generic[Handle]):
    """The embeddings of one batch, and the one push they may get.

    Attributes:
        outputs: float32, C-contiguous; what the lookup gave.
        handle: what else the lookup knows of the batch.
        is_training: whether it can be pushed.
    """

    def __init__(
        self,
        outputs: Outputs,
        handle: Handle,
        push: Callable[[Outputs], None] | None,
        give_up: Callable[[bool], None] | None,
    ) -> None:
        self.outputs = outputs
        self.handle = handle
        self.is_training = push is not None
        self._push = push
        # Runs at most once: when this object is no longer used, unless push() came.
        # It is told whether nobody asked for it, so that a backward pass is missing.
        self._give_up = weakref.finalize(self, give_up, True) if give_up else None
        if self._give_up is not None:
            self._give_up.atexit = False

    def push(self, grads: Outputs) -> None:
        """Send the gradients of ``outputs``; waits for the servers at staleness 0.

        Args:
            grads: float32, of the shapes of ``outputs``; not to be changed any more.

        Raises:
            BatchError: this batch was pushed before, or was not pulled for training.
            PersiaError: a push of before failed, or, at staleness 0, this one.
        """
        if self._push is None or self._give_up is None or not self._give_up.detach():
            raise BatchError(
                "A training batch's gradients can be pushed once. Received: a second "
                "backward pass, or a batch that was looked up for evaluation."
            )
        self._push(grads)

    def give_up(self) -> None:
        """Make room for another batch: no gradients will come.

        Does nothing after a push. A batch that nobody uses any more gives itself up.
        """
        if self._give_up is not None and (finalizer := self._give_up.detach()):
            _, give_up, _, _ = finalizer
            give_up(False)


class HeldPull(Future[PulledBatch[Handle]]):
    """A training batch on its way; the thread that waits for it holds its permit."""

    def __init__(self, permit: Permit) -> None:
        super().__init__()
        self._permit = permit

    def result(self, timeout: float | None = None) -> PulledBatch[Handle]:
        """Wait for the batch, to push it from this thread's backward pass.

        Raises:
            PersiaError: what went wrong.
            TimeoutError: it did not come in time.
        """
        self._permit.hold()
        return super().result(timeout)
