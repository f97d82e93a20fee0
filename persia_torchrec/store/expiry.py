"""Take out rows that are too old or too small, a few slots at a time.

No request waits for a sweep: the store is asked for one slice after the other when it
is idle. A row leaves when its table's rules (``embedding/eviction.py``) say so:

    step - last_step > steps_to_live
    now_s - last_s > seconds_to_live
    sqrt(sum(w * w)) < min_l2_norm   and   step - first_step >= spared_steps

Dimension key:
    T: tables
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from persia_torchrec.compiled import compiled
from persia_torchrec.embedding.eviction import Expiry
from persia_torchrec.intrinsics import floats_at, load_u32, load_u64
from persia_torchrec.store.index import index_at
from persia_torchrec.store.insert import remove_row
from persia_torchrec.store.rows import (
    BASE,
    EXPIRED_NORM,
    EXPIRED_SECONDS,
    EXPIRED_STEPS,
    FIRST_STEP,
    LAST_S,
    LAST_STEP,
    OWNER_SHIFT,
    SCRATCH,
    STEP,
    STRIDE,
    USED,
    WORD,
    Layout,
    RowsAt,
    Words,
    read_weights,
    rows_at,
    store_at,
)

STEPS_TO_LIVE, SECONDS_TO_LIVE, MIN_L2_NORM, SPARED_STEPS = range(4)
"""Columns of the rules; 0 switches the first three off."""

Rules = npt.NDArray[np.float64]


class Sweeper:
    """Where the sweep has come to. Owned by the store's thread."""

    def __init__(self) -> None:
        self._arena = 0
        self._slot = 0

    def sweep(
        self,
        max_rows: int,
        layouts: Sequence[Layout],
        expiries: Sequence[Expiry],
        directory: Words,
        now_s: float,
    ) -> bool:
        """Sweep the next ``max_rows`` slots.

        ``layouts`` and ``expiries`` are those of all tables. Returns False at the end
        of a pass over all slots, and where no row can expire.
        """
        if not any(expiry.is_on for expiry in expiries):
            return False
        layouts_T = np.stack(layouts)
        rules_T = np.array(
            [
                (e.steps_to_live, e.seconds_to_live, e.min_l2_norm, e.spared_steps)
                for e in expiries
            ],
            dtype=np.float64,
        )
        while max_rows > 0 and self._arena < len(directory):
            num_used = int(directory[self._arena, USED])
            stop = min(self._slot + max_rows, num_used)
            where = self._arena, self._slot, stop
            sweep_slots(where, layouts_T, rules_T, now_s)
            # The store may have been cleared since the last slice.
            max_rows -= max(stop - self._slot, 0)
            self._slot = stop
            if stop >= num_used:
                self._arena, self._slot = self._arena + 1, 0
        if self._arena < len(directory):
            return True
        self._arena = 0
        return False


@compiled
def sweep_slots(
    where: tuple[int, int, int], layouts_T: Layout, rules_T: Rules, now_s: float
) -> None:
    """Take out the expired rows of ``where``: an arena, its first slot, the end slot.

    ``rules_T`` is ``(T, 4)``: see ``STEPS_TO_LIVE`` and the others.
    """
    store = store_at(layouts_T[0])
    arena, index = np.uint64(where[0]), index_at(store)
    base, stride = store.arenas[arena, BASE], store.arenas[arena, STRIDE]
    for slot in range(where[1], where[2]):
        address = base + np.uint64(slot) * stride
        owner = load_u64(address + WORD) >> OWNER_SHIFT
        if owner == np.uint64(0):
            continue
        table = np.int64(owner) - 1
        layout, rules = layouts_T[table], rules_T[table]
        if not rules.any():
            continue
        step = np.int64(layout[STEP])
        age_steps = step - np.int64(load_u32(address + LAST_STEP))
        age_s = now_s - np.float64(load_u32(address + LAST_S))
        if 0 < rules[STEPS_TO_LIVE] < age_steps:
            store.tally[EXPIRED_STEPS] += 1
        elif 0 < rules[SECONDS_TO_LIVE] < age_s:
            store.tally[EXPIRED_SECONDS] += 1
        elif _is_below_norm(rows_at(store, layout), layout, address, rules):
            store.tally[EXPIRED_NORM] += 1
        else:
            continue
        remove_row(store, index, arena, np.uint64(slot))


@compiled
def _is_below_norm(
    rows: RowsAt, layout: Layout, address: np.uint64, rules: Rules
) -> bool:
    age_steps = np.int64(layout[STEP]) - np.int64(load_u32(address + FIRST_STEP))
    if rules[MIN_L2_NORM] <= 0 or age_steps < rules[SPARED_STEPS]:
        return False
    read_weights(rows, address, layout[SCRATCH])
    weights = floats_at(layout[SCRATCH])
    total = 0.0
    for d in range(rows.dim):
        total += np.float64(weights[d]) * np.float64(weights[d])
    return total < rules[MIN_L2_NORM] * rules[MIN_L2_NORM]
