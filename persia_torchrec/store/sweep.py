"""Take out rows that are too old or too small, a few slots at a time.

A sweep walks the slots of an arena. A row leaves when its table's rules say so (see
``embedding/eviction.py``):

    step - last_step > steps_to_live
    now_s - last_s > seconds_to_live
    sqrt(sum(w * w)) < min_l2_norm   and   step - first_step >= spared_steps

Nothing waits for a sweep: the store is asked for one slice after the other when there
is nothing else to do.

Dimension key:
    T: tables
"""

import numpy as np
import numpy.typing as npt

from persia_torchrec.compiled import compiled
from persia_torchrec.embedding.eviction import Expiry
from persia_torchrec.store.halves import widen
from persia_torchrec.store.index import index_at
from persia_torchrec.store.insert import remove_row
from persia_torchrec.store.lookup import (
    EXPIRED_SECONDS,
    EXPIRED_STEPS,
    FADED,
    Tally,
)
from persia_torchrec.store.memory import load_half_word, load_word
from persia_torchrec.store.rows import (
    BASE,
    DIM,
    DTYPE,
    FIRST_STEP,
    FP32,
    LAST_S,
    LAST_STEP,
    OWNER_SHIFT,
    STRIDE,
    USED,
    WEIGHTS,
    WORD,
    Floats,
    Layout,
    Words,
)
from persia_torchrec.store.shard_memory import ShardMemory

STEPS_TO_LIVE, SECONDS_TO_LIVE, MIN_L2_NORM, SPARED_STEPS = range(4)
"""Columns of the rules; 0 switches the first three off."""


class Sweeper:
    """Where the sweep has come to. Owned by the store's thread."""

    def __init__(self) -> None:
        self._arena = 0
        self._slot = 0

    def sweep(self, max_rows: int, memory: ShardMemory, now_s: float) -> bool:
        """Go on sweeping.

        Args:
            max_rows: slots to look at, at most.
            memory: of the store.
            now_s: the present second.

        Returns:
            False at the end of a pass over all slots, and where no row can expire.
        """
        tables, arenas = memory.tables.states, memory.tables.arenas
        directory, index = memory.tables.directory, memory.index
        if not any(table.spec.expiry.is_on for table in tables):
            return False
        layouts_T = np.stack([table.layout for table in tables])
        rules_T = np.array([_rules(table.spec.expiry) for table in tables])
        steps_T = np.array([table.num_updates for table in tables], dtype=np.int64)
        while max_rows > 0 and self._arena < len(arenas):
            stop = self._slot + max_rows
            sweep_slots(
                *(self._arena, self._slot, stop, arenas[self._arena].floats),
                *(layouts_T, rules_T, steps_T, now_s),
                *(index.lines, index.cursor, directory, memory.tally),
            )
            num_used = int(directory[self._arena, USED])
            # The store may have been cleared since the last slice.
            max_rows -= max(min(stop, num_used) - self._slot, 0)
            self._slot = stop
            if stop >= num_used:
                self._arena, self._slot = self._arena + 1, 0
        if self._arena < len(arenas):
            return True
        self._arena = 0
        return False


@compiled
def sweep_slots(
    arena: int,
    start: int,
    stop: int,
    floats: Floats,
    layouts_T: Layout,
    rules_T: npt.NDArray[np.float64],
    steps_T: npt.NDArray[np.int64],
    now_s: float,
    lines: Words,
    cursor: Words,
    arenas: Words,
    tally: Tally,
) -> None:
    """Take out those rows of some slots that must leave.

    Args:
        arena: number of the arena.
        start: first slot.
        stop: bound behind the last slot.
        floats: the arena's rows.
        layouts_T: int64 ``(T, 8)``, a line a table.
        rules_T: float64 ``(T, 4)``, see ``STEPS_TO_LIVE`` and the others.
        steps_T: int64 ``(T,)``, each table's present step.
        now_s: the present second.
        lines: of the index.
        cursor: of the index.
        arenas: the directory of arenas.
        tally: int64 ``(12,)``, counted up.
    """
    arena_ = np.uint64(arena)
    index = index_at(lines, cursor)
    base, stride = arenas[arena_, BASE], arenas[arena_, STRIDE]
    num_used = np.int64(arenas[arena_, USED])
    for slot in range(start, min(stop, int(num_used))):
        address = base + np.uint64(slot) * stride
        owner = load_word(address + WORD) >> OWNER_SHIFT
        if owner == np.uint64(0):
            continue
        table = np.int64(owner) - 1
        rules = rules_T[table]
        if not rules.any():
            continue
        age_steps = steps_T[table] - np.int64(load_half_word(address + LAST_STEP))
        age_s = now_s - np.float64(load_half_word(address + LAST_S))
        if 0 < rules[STEPS_TO_LIVE] < age_steps:
            tally[EXPIRED_STEPS] += 1
        elif 0 < rules[SECONDS_TO_LIVE] < age_s:
            tally[EXPIRED_SECONDS] += 1
        elif _has_faded(floats, slot, address, layouts_T[table], rules, steps_T[table]):
            tally[FADED] += 1
        else:
            continue
        remove_row(arena_, np.uint64(slot), index, cursor, arenas, tally)


def _rules(expiry: Expiry) -> list[float]:
    return [
        *(float(expiry.steps_to_live), expiry.seconds_to_live),
        *(expiry.min_l2_norm, float(expiry.spared_steps)),
    ]


@compiled
def _has_faded(
    floats: Floats,
    slot: int,
    address: np.uint64,
    layout: Layout,
    rules: npt.NDArray[np.float64],
    step: int,
) -> bool:
    age_steps = step - np.int64(load_half_word(address + FIRST_STEP))
    if rules[MIN_L2_NORM] <= 0 or age_steps < rules[SPARED_STEPS]:
        return False
    dim, begin = layout[DIM], layout[WEIGHTS]
    weights = np.empty(dim, dtype=np.float32)
    if layout[DTYPE] == FP32:
        weights[:] = floats[slot, begin : begin + dim]
    else:
        halves = floats.view(np.uint16)[slot, 2 * begin : 2 * begin + dim]
        widen(halves, weights, layout[DTYPE])
    total = 0.0
    for d in range(dim):
        total += np.float64(weights[d]) * np.float64(weights[d])
    return total < rules[MIN_L2_NORM] * rules[MIN_L2_NORM]
