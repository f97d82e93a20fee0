"""Training batches that are used in another order than their pulls were begun in.

A train pipeline begins the pull of a batch some batches before the model uses it, and
uses them in that order. But between its ``detach()`` and ``attach()`` the model may be
given another batch, whose pull is begun last and used first:

    begun    1  2                    4      pulled ahead by the pipeline
                      3                     by the model itself, and used at once
    used     1        3   2   4

With few permits, batch 2 has the one that 3 needs, and is used behind it. So it is
*recalled*: the servers are told that it gets no gradients, its permit comes back, and
it is pulled again when the model uses it, behind the update of 3, as in a plain loop.
Batches that were begun behind one that is pulled again are so too, behind it. Counts of
lookups, as those of an admission by frequency, have both pulls.
"""

from collections.abc import Callable
from typing import Any
from weakref import ref

from persia_torchrec.pipeline.pipeline import PrefetchedBatch


class BatchesInTurn:
    """Batches of one collection whose pulls are begun; the training thread's.

    ``begin`` begins the pull of what a batch was given, once more.
    """

    def __init__(self, begin: Callable[[Any], PrefetchedBatch[Any]]) -> None:
        self._begin = begin
        # In their order. The caller may drop them.
        self._begun: list[ref[PrefetchedBatch[Any]]] = []

    def begun(self, batch: PrefetchedBatch[Any]) -> None:
        """Note a batch whose pull is begun, and which will be used."""
        if batch.given is not None:
            self._begun = [one for one in self._begun if one() is not None]
            self._begun.append(ref(batch))

    def used(
        self, batch: PrefetchedBatch[Any], max_in_flight: int
    ) -> PrefetchedBatch[Any]:
        """Return the pull of a batch that is used now; it is no other's turn any more.

        If ``max_in_flight`` batches are before it, they would not let it be pulled.
        """
        begun = [one for ref_ in self._begun if (one := ref_()) is not None]
        if batch not in begun:
            return batch
        n = begun.index(batch)
        before, behind = begun[:n], begun[n + 1 :]
        self._begun = [ref(one) for one in before + behind]
        if len(before) >= max_in_flight:
            for one in before:
                one.latest.recall()
        if batch.latest.is_recalled:
            for one in behind:
                one.latest.recall()
            for one in (batch, *behind):
                if one.latest.is_recalled:
                    one.again = self._begin(one.given)
        return batch.latest
