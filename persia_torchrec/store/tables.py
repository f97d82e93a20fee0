"""The tables of a store: settings, compiled loops, and what is kept beside the rows.

Dimension key:
    N: ids of one request
    P: numbers of one request
    D: embedding dim
    S: optimizer-state floats per row
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt

from persia_torchrec.compiled import (
    compile_for,
    inlined_kernel,
    read_only,
    specialized,
)
from persia_torchrec.embedding.setting import Admission, Kernel
from persia_torchrec.store.fbgemm_engine import FbgemmEngine
from persia_torchrec.store.insert import build_insert
from persia_torchrec.store.lookup import Indices
from persia_torchrec.store.row_columns import RowShape
from persia_torchrec.store.rows import (
    FILL,
    HAS_METADATA,
    INITIAL_STATE,
    NOW_S,
    SCRATCH,
    SEED,
    STEP,
    Counts,
    Floats,
    Ids,
    Layout,
    Slots,
    Words,
    reserve,
)
from persia_torchrec.store.update import build_update
from persia_torchrec.table import TableSpec

Bools = npt.NDArray[np.bool_]

_NO_IDS = read_only(np.empty(0, dtype=np.uint64))
_NO_SLOTS = read_only(np.empty(0, dtype=np.uint32))
_NO_INDICES = np.empty(0, dtype=np.int64)


class AdmissionState:
    """What a table's admission, which has a kernel, remembers.

    The store's one thread owns it. ``memory`` is the kernel's, ``numbers`` (read-only)
    what it needs of the settings.
    """

    def __init__(self, admission: Admission, seed: int) -> None:
        kernel = admission.kernel
        assert kernel is not None
        self._admit = build_admit(kernel)
        self.memory: Words = reserve(admission.num_memory_words())
        numbers = np.array(admission.kernel_numbers(seed), dtype=np.uint64)
        self.numbers = read_only(numbers)

    def admit(self, ids_N: Ids, counts_N: npt.NDArray[np.int64]) -> Bools:
        """Count ids that have no row; return which of them get one.

        ``counts_N`` is how often the batch holds each, ``>= 1``. Repeats are decided
        one after the other.
        """
        is_admitted_N = np.empty(len(ids_N), dtype=np.bool_)
        ids_N, counts_N = read_only(ids_N), read_only(counts_N)
        self._admit(self.memory, self.numbers, ids_N, counts_N, is_admitted_N)
        return is_admitted_N


@cache
def build_admit(kernel: Kernel) -> Callable[..., None]:
    """Compile the kernel of an admission as a loop."""
    decide = inlined_kernel(kernel)

    def admit(
        memory: Words,
        p: Words,
        ids_N: Ids,
        counts_N: npt.NDArray[np.int64],
        is_admitted_N: Bools,
    ) -> None:
        decide(memory, p, ids_N, counts_N, is_admitted_N)

    return specialized(admit, kernel)


class TableState:
    """One table of a store. Owned by the store's thread.

    The first table with an optimizer or initializer compiles its loop, or loads it. The
    layout's columns of settings are overwritten. ``engine`` is None for the fused loop.
    An ``admission`` that is given keeps what it remembers; the attribute is None when
    all ids are admitted. ``insert`` makes rows: see :func:`build_insert`.
    """

    def __init__(
        self,
        spec: TableSpec,
        layout: Layout,
        engine: FbgemmEngine | None,
        admission: AdmissionState | None = None,
    ) -> None:
        self.spec, self.layout, self.engine = spec, layout, engine
        self.admission = admission
        if admission is None and spec.admission.kernel is not None:
            self.admission = AdmissionState(spec.admission, spec.seed)
        state_S = spec.optimizer.initial_state(spec.dim)
        fill = spec.initializer.fill_numbers(spec.dim)
        self._kept = {
            SCRATCH: np.empty(spec.dim, dtype=np.float32),
            FILL: np.array(fill, dtype=np.float32),
            INITIAL_STATE: np.ascontiguousarray(state_S, dtype=np.float32),
        }
        for column, array in self._kept.items():
            layout[column] = array.ctypes.data
        layout[SEED] = spec.seed
        self.insert = build_insert(spec.initializer.kernel)
        no_rows = np.empty((0, spec.dim), dtype=np.float32)
        slots = _NO_SLOTS.copy()
        compile_for(
            self.insert, layout, _NO_IDS, _NO_SLOTS, _NO_INDICES, no_rows, slots
        )
        self._bound = np.float32(spec.weight_bound or np.inf)
        if engine is None:
            self._update = build_update(spec.optimizer.kernel)
            grads, numbers = read_only(no_rows), self._step_numbers()
            compile_for(self._update, layout, _NO_IDS, _NO_SLOTS, grads, numbers)

    @property
    def has_metadata(self) -> bool:
        """Whether its rows carry metadata."""
        return bool(self.layout[HAS_METADATA])

    @property
    def shape(self) -> RowShape:
        """The form of its rows outside of a store."""
        return RowShape.of(self.spec, has_metadata=self.has_metadata)

    @property
    def num_updates(self) -> int:
        """Update requests so far: the table's step, Adam's ``t``."""
        return int(self.layout[STEP])

    @num_updates.setter
    def num_updates(self, step: int) -> None:
        self.layout[STEP] = step

    def admit(
        self, ids_N: Ids, counts_N: Counts, missing: Indices, out_ND: Floats
    ) -> Indices:
        """Return which of the missing ids get a row; write what the others read.

        ``counts_N`` is how often each id is in the batch, or empty.
        """
        if self.admission is None:
            return missing
        ids = ids_N[missing]
        counts = counts_N[missing] if len(counts_N) else np.ones(len(ids))
        is_admitted = self.admission.admit(ids, counts.astype(np.int64))
        out_ND[missing[~is_admitted]] = self.spec.admission.unadmitted_value
        return missing[is_admitted]

    def step_rows(
        self, ids_N: Ids, hints_N: Slots, grads_ND: Floats, now_s: float
    ) -> tuple[int, int]:
        """Apply the optimizer to the rows of ids: a step of the table.

        ``ids_N`` and ``grads_ND`` are read-only. Returns how many ids have no row, and
        how many gradients were refused.
        """
        layout = self.layout
        layout[STEP] += np.uint64(1)
        layout[NOW_S] = max(int(now_s), 0)
        if self.engine is not None:
            bound, optimizer = float(self._bound), self.spec.optimizer
            update = self.engine.update
            return update(optimizer, layout, ids_N, hints_N, grads_ND, bound)
        hints_N = read_only(hints_N)
        return self._update(layout, ids_N, hints_N, grads_ND, self._step_numbers())

    def changed(self, spec: TableSpec, engine: FbgemmEngine | None) -> "TableState":
        """Return the state under new settings.

        What the admission remembers is kept if the admission is the same.
        """
        is_same = (spec.admission, spec.seed) == (self.spec.admission, self.spec.seed)
        admission = self.admission if is_same else None
        return TableState(spec, self.layout.copy(), engine, admission)

    def cleared(self) -> "TableState":
        """Return the state of the same table before any request."""
        layout = self.layout.copy()
        layout[STEP] = 0
        return TableState(self.spec, layout, self.engine)

    def _step_numbers(self) -> Floats:
        """Return the bound of the weights, and the optimizer's numbers of a step."""
        spec, step = self.spec, max(self.num_updates, 1)
        numbers = spec.optimizer.step_numbers(spec.dim, step)
        return np.array((self._bound, *numbers), dtype=np.float32)
