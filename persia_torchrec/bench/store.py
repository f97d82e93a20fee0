"""The questions about the store itself: in process, on one core, without a network."""

from collections.abc import Callable

from persia_torchrec.bench.eviction import measure_eviction
from persia_torchrec.bench.limits import measure_limits
from persia_torchrec.bench.machine import cores, pinned
from persia_torchrec.bench.overhead import measure_overhead
from persia_torchrec.bench.rates import measure_rates
from persia_torchrec.bench.report import Table
from persia_torchrec.bench.settings import Settings
from persia_torchrec.bench.sizes import measure_sizes
from persia_torchrec.bench.stages import measure_stages
from persia_torchrec.bench.startup import measure_startup
from persia_torchrec.store.warm_up import warm_up
from persia_torchrec.wire.memory import keep_freed_memory

STORE_FIGURES: dict[str, Callable[[Settings], list[Table]]] = {
    "rates": measure_rates,
    "limits": measure_limits,
    "eviction": measure_eviction,
    "stages": measure_stages,
    "sizes": measure_sizes,
    "overhead": measure_overhead,
    "startup": measure_startup,
}


def run_store(settings: Settings, figures: list[str]) -> tuple[list[Table], str]:
    """Measure the store.

    Args:
        settings: see there.
        figures: of ``STORE_FIGURES``.

    Returns:
        The tables, and which cores were used.

    Raises:
        StoreError: a row is not what it should be, or there is no memory.
    """
    warm_up()
    keep_freed_memory()  # as a server does
    allowed = cores()
    core = allowed[-1] if allowed else None
    with pinned(core):
        tables = [t for figure in figures for t in STORE_FIGURES[figure](settings)]
    return tables, "not pinned" if core is None else f"all on core {core}"
