"""What a store keeps of each table beside its rows."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from persia_torchrec.compiled import read_only
from persia_torchrec.embedding.admission import AdmitAll
from persia_torchrec.errors import ConfigError
from persia_torchrec.store.admission import AdmissionState, admission_state
from persia_torchrec.store.initializer import FillPlan, fill_plan
from persia_torchrec.store.lookup import Counts, Ids, Places, Slots
from persia_torchrec.store.rows import HAS_METADATA, Floats, Layout, Words
from persia_torchrec.store.steps import step_plan
from persia_torchrec.store.update import update_rows
from persia_torchrec.table import TableSpec

if TYPE_CHECKING:
    from persia_torchrec.store.fbgemm_engine import FbgemmEngine


@dataclass(slots=True)
class TableState:
    """One table of a store. Owned by the store's thread.

    Attributes:
        spec: its settings, which may change while it is in use.
        layout: where the parts of its rows stand.
        num_updates: update requests so far: the table's step, Adam's ``t``.
        admission: decides which ids get a row; None when all do.
        filling: how the weights of a new row are drawn.
        initial_state: float32 ``(S,)``, the optimizer state of a new row.
        scratch: float32 ``(D,)``, where loops widen the weights of 16-bit rows.
        engine: what applies its updates; None for the fused loop.
    """

    spec: TableSpec
    layout: Layout
    num_updates: int
    admission: AdmissionState | None
    filling: FillPlan
    initial_state: Floats
    scratch: Floats
    engine: "FbgemmEngine | None"

    @classmethod
    def begin(
        cls, spec: TableSpec, layout: Layout, engine: "FbgemmEngine | None"
    ) -> "TableState":
        """Return the state of a table that was never used."""
        return cls(
            *(spec, layout, 0, _admission_of(spec)),
            *(fill_plan(spec.initializer, spec.dim), _initial_state(spec)),
            *(np.empty(spec.dim, dtype=np.float32), engine),
        )

    def now(self, now_s: float) -> tuple[np.uint64, np.uint64]:
        """Return the table's step and the present second, for metadata."""
        return np.uint64(self.num_updates), np.uint64(max(now_s, 0))

    def admit(
        self, ids_N: Ids, counts_N: Counts, missing: Places, out_ND: Floats
    ) -> Places:
        """Return which of the missing ids get a row; write what the others read.

        Args:
            ids_N: uint64 ``(N,)``.
            counts_N: uint32 ``(N,)``, how often each is in the batch; or empty.
            missing: int64, which of them have no row.
            out_ND: float32 ``(N, D)``, overwritten where an id is not admitted.
        """
        if self.admission is None:
            return missing
        ids = ids_N[missing]
        counts = counts_N[missing] if len(counts_N) else np.ones(len(ids))
        is_admitted = self.admission.admit(ids, counts.astype(np.int64))
        out_ND[missing[~is_admitted]] = self.spec.admission.unadmitted_value
        return missing[is_admitted]

    def apply(
        self,
        rows: tuple[Floats, Words, Words, Words],
        ids_N: Ids,
        hints_N: Slots,
        grads_ND: Floats,
        now_s: float,
    ) -> tuple[int, int]:
        """Apply the optimizer to the rows of ids: a step of the table.

        Args:
            rows: of the table, see ``ShardMemory.rows``.
            ids_N: uint64 ``(N,)``, read-only.
            hints_N: uint32 ``(N,)``, where each row was when last seen.
            grads_ND: float32 ``(N, D)``, read-only.
            now_s: the present second.

        Returns:
            How many ids have no row, and how many gradients were refused.
        """
        now = self.now(now_s)
        if self.engine is not None:
            return self.engine.update(self, rows, ids_N, hints_N, grads_ND, now)
        plan = step_plan(self.spec.optimizer, self.spec.dim, self.num_updates)
        bound = np.float32(self.spec.weight_bound or np.inf)
        return update_rows(
            *(ids_N, read_only(hints_N), grads_ND, *rows, self.layout),
            *(plan.kind, plan.numbers, bound, *now, self.scratch),
        )

    def require_metadata(self) -> None:
        """Raise ConfigError if the rows carry no metadata."""
        if not self.layout[HAS_METADATA]:
            raise ConfigError(
                f"Table {self.spec.name!r} keeps no metadata. Add it with "
                "keeps_metadata=True."
            )

    def changed(self, spec: TableSpec, engine: "FbgemmEngine | None") -> "TableState":
        """Return the state under new settings.

        Sightings of ids without a row are kept if the admission is the same.
        """
        is_same = (spec.admission, spec.seed) == (self.spec.admission, self.spec.seed)
        return replace(
            self,
            spec=spec,
            admission=self.admission if is_same else _admission_of(spec),
            filling=fill_plan(spec.initializer, spec.dim),
            initial_state=_initial_state(spec),
            engine=engine,
        )


def _admission_of(spec: TableSpec) -> AdmissionState | None:
    if isinstance(spec.admission, AdmitAll):
        return None
    return admission_state(spec.admission, spec.seed)


def _initial_state(spec: TableSpec) -> Floats:
    return np.ascontiguousarray(spec.optimizer.initial_state(spec.dim), np.float32)
