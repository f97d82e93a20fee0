"""Updates of several: of joint trainers, and of several batches of one trainer.

Every trainer numbers its backward passes in their order; those of the same number make
up a joint step, as do the all-reduces of the dense half. So every trainer must run as
many, or leave. A training batch that is looked up and gets no backward pass is no step.
Trainers that have left come together again in the next group, where all begin at step
1. The servers notice when the connection of a trainer is lost; a process that ends by
itself tells them why, so that the others hear it too.

The gradients of several batches that are one update:

    started     the parts of an update have one permit, and each a number of its own,
                by which its rows are looked up; one that is forgotten without a
                backward pass makes room for another
    settled     a part has its gradients, or will get none: those of its rows are kept,
                and the servers are told that its number gets no update
    complete    when the last part is settled: what is kept is added up, each id once,
                and pushed under a number of the update's own, as one trainer's share of
                a joint step if there are several trainers

So the servers see one update, which they apply once, and the memory is bounded by the
permits: of the parts of as many updates as may be in flight.
"""

import atexit
import logging
import os
import platform
import sys
from collections import deque
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from persia_torchrec import timeouts
from persia_torchrec.client.client import BatchNumber, EmbeddingClient, Reply
from persia_torchrec.errors import PersiaError
from persia_torchrec.lookup.sharded_lookup import Outputs, RowGradients
from persia_torchrec.pipeline.staleness import Permit
from persia_torchrec.rpc.messages import Share

if TYPE_CHECKING:
    from concurrent.futures import Future


Handle = TypeVar("Handle", contravariant=True)


@runtime_checkable
class AddingLookup(Protocol[Handle]):
    """A lookup in this process, which knows the gradients of rows."""

    def gradients_of(self, handle: Handle, grads: Outputs) -> RowGradients:
        """Return the gradients of a batch's rows."""

    def send(self, gradients: RowGradients, number: BatchNumber) -> list[Reply]:
        """Send gradients of rows; the replies come when they are applied."""


class AccumulationGroup:
    """The parts of an update, which have one permit, and what is kept of them.

    The pipeline starts its parts, under its lock; any thread lets them go; the pushing
    thread settles them.

    Attributes:
        permit: of all parts, which is let go with the last one.
        number: under which it is pushed.
        num_started: parts so far.
        is_over: training has gone on with the next one, or has ended.
        is_dropped: the update is given up, whatever its parts get.
        is_step: a backward pass has run through a part.
        kept: gradients of the rows of settled parts.
        sent: ends when the update is acknowledged; None until it is complete.
    """

    def __init__(self, number: BatchNumber, num_parts: int) -> None:
        self.permit, self.number = Permit(), number
        self.num_started = 0
        self.is_over = self.is_dropped = self.is_step = False
        self.kept: list[RowGradients] = []
        self.sent: Future[None] | None = None
        self._num_parts = num_parts
        # Locks would not do, see let_go.
        self._gone, self._forgotten = deque[None](), deque[None]()
        self._is_closed = False
        self._num_settled = 0

    @property
    def is_full(self) -> bool:
        """Whether no further part can be started."""
        num_forgotten = len(self._forgotten)
        return self._is_closed or self.num_started - num_forgotten >= self._num_parts

    @property
    def is_complete(self) -> bool:
        """Whether all parts are settled."""
        return self.is_full and self._num_settled >= self.num_started

    def let_go(self, *, is_forgotten: bool = False) -> None:
        """Note that a part is pushed or dropped; finalizers call it: no lock."""
        if is_forgotten:
            self._forgotten.append(None)
        self._gone.append(None)
        self._let_go_if_full()

    def close(self) -> None:
        """Start no further part."""
        self._is_closed = True
        self._let_go_if_full()

    def settle(self, gradients: RowGradients | None) -> None:
        """Keep the gradients of a part, or note that it gets none."""
        self._num_settled += 1
        self.is_step |= gradients is not None
        if gradients is not None and not self.is_dropped:
            self.kept.append(gradients)

    def _let_go_if_full(self) -> None:
        if self.is_full and len(self._gone) >= self.num_started:
            self.permit.let_go()


logger = logging.getLogger(__name__)


class Trainers:
    """Numbers the joint steps of one collection. Its pipeline locks it.

    All trainers of the collection, and no others, agree on the group of ``first``, the
    share of the first step; its timeout is that of a step.
    """

    def __init__(self, client: EmbeddingClient, first: Share) -> None:
        self.timeout_s = first.timeout_ms / 1000
        self.client = client
        self._pid = os.getpid()
        self._who = f"process {self._pid} on {platform.node()}"
        self._next = first

    def join(self) -> None:
        """Introduce this trainer to the servers, which then notice if it is lost."""
        self.client.join(self._next, self._who)
        atexit.register(self._end_with_the_process)

    def end(self, why: str) -> None:
        """Tell the servers, for trainers that wait, why no share will come any more."""
        atexit.unregister(self._end_with_the_process)
        self.client.join(self._next, self._who, why)

    def _end_with_the_process(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child
        error = getattr(sys, "last_value", None)  # what the main thread has raised
        why = "its script has ended"
        if error is not None:
            why = f"it raised {type(error).__name__}: {error}"
        try:
            gone = self.client.join(
                self._next, self._who, why, timeouts.JOINT_FAREWELL_S
            )
        except (PersiaError, TimeoutError):
            return  # the servers notice it by themselves
        if error is not None and gone:
            # It may be why the process group, which names no rank, has failed.
            logger.error("trainers that had ended before this one: %s", gone)

    def next_share(self) -> Share:
        """Return this trainer's share of its next step."""
        share = self._next
        self._next = share._replace(step=share.step + 1)
        return share

    def next_group(self) -> Share:
        """Begin with the next group; return the share that the previous one lacks."""
        share = self._next
        self._next = share._replace(group=share.group + 1, step=1)
        return share
