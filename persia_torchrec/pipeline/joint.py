"""Joint updates of several trainers.

Every trainer numbers its backward passes in their order; those of the same number make
up a joint step, as do the all-reduces of the dense half. So every trainer must run as
many, or leave. A training batch that is looked up and gets no backward pass is no step.
Trainers that have left come together again in the next group, where all begin at step
1. The servers notice when the connection of a trainer is lost; a process that ends by
itself tells them why, so that the others hear it too.
"""

import atexit
import logging
import os
import platform
import sys

from persia_torchrec import timeouts
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.errors import PersiaError
from persia_torchrec.rpc.messages import Share

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
