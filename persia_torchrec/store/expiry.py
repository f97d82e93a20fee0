"""Take out rows that are too old or too small, a few slots at a time.

No request waits for a sweep: the store is asked for one slice after the other when it
is idle. A row leaves when its table's rules (``embedding/eviction.py``) say so:

    step - last_step > steps_to_live
    now_s - last_s > seconds_to_live
    sqrt(sum(w * w)) < min_l2_norm   and   step - first_step >= spared_steps

Dimension key:
    T: tables
"""

import numpy as np
import numpy.typing as npt

from persia_torchrec.compiled import compiled
from persia_torchrec.intrinsics import floats_at, load_u32, load_u64
from persia_torchrec.store import memory
from persia_torchrec.store.index import index_at
from persia_torchrec.store.lookup import remove_row
from persia_torchrec.store.memory import Layout, RowsAt

STEPS_TO_LIVE, SECONDS_TO_LIVE, MIN_L2_NORM, SPARED_STEPS = range(4)
"""Columns of the rules, the fields of ``Expiry``; 0 switches the first three off."""

Rules = npt.NDArray[np.float64]


@compiled
def sweep_slots(
    where: tuple[int, int, int], layouts_T: Layout, rules_T: Rules, now_s: float
) -> None:
    """Take out the expired rows of ``where``: an arena, its first slot, the end slot.

    ``rules_T`` is ``(T, 4)``: see ``STEPS_TO_LIVE`` and the others.
    """
    store = memory.store_at(layouts_T[0])
    arena, index = np.uint64(where[0]), index_at(store)
    base, stride = store.arenas[arena, memory.BASE], store.arenas[arena, memory.STRIDE]
    for slot in range(where[1], where[2]):
        address = base + np.uint64(slot) * stride
        owner = load_u64(address + memory.WORD) >> memory.OWNER_SHIFT
        if owner == np.uint64(0):
            continue
        table = np.int64(owner) - 1
        layout, rules = layouts_T[table], rules_T[table]
        if not rules.any():
            continue
        step = np.int64(layout[memory.STEP])
        age_steps = step - np.int64(load_u32(address + memory.LAST_STEP))
        age_s = now_s - np.float64(load_u32(address + memory.LAST_S))
        if 0 < rules[STEPS_TO_LIVE] < age_steps:
            store.tally[memory.EXPIRED_STEPS] += 1
        elif 0 < rules[SECONDS_TO_LIVE] < age_s:
            store.tally[memory.EXPIRED_SECONDS] += 1
        elif _is_below_norm(memory.rows_at(store, layout), layout, address, rules):
            store.tally[memory.EXPIRED_NORM] += 1
        else:
            continue
        remove_row(store, index, arena, np.uint64(slot))


@compiled
def _is_below_norm(
    rows: RowsAt, layout: Layout, address: np.uint64, rules: Rules
) -> bool:
    age_steps = np.int64(layout[memory.STEP]) - np.int64(
        load_u32(address + memory.FIRST_STEP)
    )
    if rules[MIN_L2_NORM] <= 0 or age_steps < rules[SPARED_STEPS]:
        return False
    memory.read_weights(rows, address, layout[memory.SCRATCH])
    weights = floats_at(layout[memory.SCRATCH])
    total = 0.0
    for d in range(rows.dim):
        total += np.float64(weights[d]) * np.float64(weights[d])
    return total < rules[MIN_L2_NORM] * rules[MIN_L2_NORM]
