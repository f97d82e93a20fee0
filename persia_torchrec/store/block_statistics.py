"""How often ids of a table with blocks were seen: read, and ranked.

A row's statistics are ``acc`` (float64), ``cur`` and t (float32), the last words of its
state. They are brought up to the t that is asked for when they are read. At the end of
a period one loop reads all rows, and the thresholds are selected without a sort.

Dimension key:
    K: rows, each once
    R: ranks
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from persia_torchrec.embedding.usage import KEPT, LEAST, NUM_STATISTICS, Doubles
from persia_torchrec.jit import intrinsics as cpu
from persia_torchrec.jit.compiled import compiled_as_written, read_only
from persia_torchrec.store import loops, memory
from persia_torchrec.store.memory import Layout, Slots

_NEGLIGIBLE = 1e-7
_AHEAD = 12
_STATISTICS_BYTES = np.uint64(4 * NUM_STATISTICS)
_4, _8, _12 = (np.uint64(num) for num in (4, 8, 12))
_S32 = np.uint64(32)

Int64s = npt.NDArray[np.int64]


def rank_frequencies(
    layout: Layout, num_used: int, t: int, ranks: Callable[[int], Int64s]
) -> Doubles | None:
    """Return the frequencies, when ``t`` periods have ended, at some ranks.

    Args:
        layout: of the table.
        num_used: slots of its arena that may have rows.
        t: periods.
        ranks: given how many rows are ranked, how many come before each, the most
            frequent ones first, ``(R,)``.

    Returns:
        float64 ``(R,)``; None: no row was seen often enough.
    """
    acc_K = np.empty(num_used, dtype=np.float64)
    acc_K = acc_K[: _read_all(layout, t, acc_K)]
    if not len(acc_K):
        return None
    places = len(acc_K) - 1 - ranks(len(acc_K))
    acc_K.partition(np.unique(places))
    found: Doubles = acc_K[places]
    return found


def read_statistics(
    layout: Layout, slots_K: Slots, t: int
) -> tuple[Doubles, Doubles, npt.NDArray[np.bool_]]:
    """Return ``acc`` and ``cur`` of rows, when ``t`` periods have ended.

    And whether an id has been seen since.
    """
    acc_K, cur_K = np.empty(len(slots_K)), np.empty(len(slots_K))
    is_seen_K = np.empty(len(slots_K), dtype=np.bool_)
    _read(layout, read_only(slots_K), t, (acc_K, cur_K), is_seen_K)
    return acc_K, cur_K, is_seen_K


@compiled_as_written
def _read(
    layout: Layout,
    slots_K: Slots,
    t: int,
    into: tuple[Doubles, Doubles],
    is_seen_K: npt.NDArray[np.bool_],
) -> None:
    acc_K, cur_K = into
    rows = memory.rows_at(memory.store_at(layout), layout)
    at = rows.base + rows.state + rows.state_bytes - _STATISTICS_BYTES
    for k in range(len(slots_K)):
        if k + _AHEAD < len(slots_K):
            ahead = at + np.uint64(slots_K[k + _AHEAD]) * rows.stride
            loops.prefetch_lines(ahead, _STATISTICS_BYTES)
        address = at + np.uint64(slots_K[k]) * rows.stride
        acc_K[k], cur_K[k] = _bring_up(address, t)
        is_seen_K[k] = _since(address) >= t


@compiled_as_written
def _read_all(layout: Layout, t: int, into_C: Doubles) -> int:
    """Read the rows of a table; return how many are ranked, which are written."""
    rows, end, num = memory.rows_at(memory.store_at(layout), layout), len(into_C), 0
    at = rows.state + rows.state_bytes - _STATISTICS_BYTES
    for slot in range(end):
        address = rows.base + np.uint64(slot) * rows.stride
        if slot + _AHEAD < end:
            ahead = address + np.uint64(_AHEAD) * rows.stride
            cpu.prefetch(ahead)
            loops.prefetch_lines(ahead + at, _STATISTICS_BYTES)
        if memory.owner_at(address) == rows.owner:
            acc, _ = _bring_up(address + at, t)
            if acc >= LEAST:
                into_C[num] = acc
                num += 1
    return num


@compiled_as_written
def _bring_up(address: np.uint64, t: int) -> tuple[np.float64, np.float64]:
    """Return ``acc`` and ``cur`` of the statistics at an address, as of t."""
    low, high = cpu.load_u32(address), cpu.load_u32(address + _4)
    acc = cpu.double_of(low | (high << _S32))
    cur = np.float64(cpu.from_bits(np.uint32(cpu.load_u32(address + _8))))
    since = _since(address)
    while since < t and (acc > _NEGLIGIBLE or cur > 0.0):
        acc = np.float64(KEPT * acc + (1 - KEPT) * cur)
        cur = np.float64(0)
        since += np.int64(1)
    return acc, cur


@compiled_as_written
def _since(address: np.uint64) -> np.int64:
    """Return when statistics were brought up to date."""
    return np.int64(cpu.from_bits(np.uint32(cpu.load_u32(address + _12))))
