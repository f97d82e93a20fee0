"""Tell, once each, that a server evicts rows, and that most leave before they learn.

    room --first eviction--> full --many evictions per lookup--> thrashing

Both are a line in the server's log, and in that of each trainer: the reply to one of
its updates has it. The store counts evictions anyway; here the counters are looked at
between requests.
"""

import logging

import numpy as np

from persia_torchrec.store import memory
from persia_torchrec.store.embedding_store import EmbeddingStore

logger = logging.getLogger(__name__)

THRASHING = 0.2
"""Evictions per id that is looked up, above which rows hardly learn."""

_LEAST_IDS, _MOST_IDS = 1000, 100_000  # of a window, which is the capacity in between
_MAX_SLOTS = 2**18  # that are counted; of more rows some
_MAX_NAMES, _MAX_PEERS = 8, 4096
_LOOKUPS = [memory.HITS, memory.MISSES]


class Room:
    """Watches the room of a store. The serving thread owns it.

    Attributes:
        text: what is to be told; empty while no row has been evicted.
    """

    def __init__(self, store: EmbeddingStore, shard: int) -> None:
        self.text = ""
        self._store, self._name = store, f"embedding server {shard}"
        self._is_thrashing = False
        self._told: set[bytes] = set()  # peers
        self.begin()

    def begin(self) -> None:
        """Count from here: the store was opened, or a checkpoint loaded."""
        self._begin_ids, self._begin_evictions = self._counts()

    def check(self) -> None:
        """Look whether rows are evicted; cheap, but not for each request."""
        num_ids, num_evictions = self._counts()
        num_ids -= self._begin_ids
        num_evictions -= self._begin_evictions
        if num_evictions and not self.text:
            self._tell("is full, and evicts")
        if num_ids < min(max(self._store.capacity_rows, _LEAST_IDS), _MOST_IDS):
            return
        if num_evictions > THRASHING * num_ids and not self._is_thrashing:
            self._is_thrashing = True
            self._tell(
                f"evicts {num_evictions} rows while {num_ids} ids are looked up: most "
                "leave before they have learnt. It is full, and evicts"
            )
        self.begin()

    def untold(self, peer: bytes) -> dict[str, str]:
        """Return what a peer has not been told, by the name of this server."""
        if peer in self._told:
            return {}
        if len(self._told) >= _MAX_PEERS:
            self._told.clear()
        self._told.add(peer)
        return {self._name: self.text}

    def _counts(self) -> tuple[int, int]:
        tally = self._store.tally
        return int(tally[_LOOKUPS].sum()), int(tally[memory.EVICTED])

    def _tell(self, what: str) -> None:
        store = self._store
        which = "least frequently" if store.is_lfu else "least recently"
        self.text = (
            f"{self._name} {what} the rows used {which}, with what they have learnt: "
            f"capacity_rows={store.capacity_rows}, rows by table: "
            f"{describe_rows_by_table(store)}. If they are wanted, raise --capacity, "
            "add servers, or admit only frequent ids."
        )
        self._told.clear()
        logger.warning("%s", self.text)


def describe_rows_by_table(store: EmbeddingStore) -> str:
    """Return how many rows the tables with most have; of a large store about."""
    num_T = np.zeros(len(store.states) + 1, dtype=np.int64)
    for words, line in zip(store.arenas.words, store.arenas.directory, strict=True):
        num_used = int(line[memory.USED])
        step = max(-(-num_used // _MAX_SLOTS), 1)
        owners = (words[:num_used:step, 1] >> memory.OWNER_SHIFT).astype(np.int64)
        num_T += step * np.bincount(owners, minlength=len(num_T))
    num_T[[state.number + 1 for state in store.states if state.is_dropped]] = 0
    most = np.argsort(-num_T[1:], kind="stable")[:_MAX_NAMES].tolist()
    return ", ".join(f"{store.states[t].spec.name}={num_T[t + 1]}" for t in most)
