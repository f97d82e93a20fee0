"""Measure this package on this machine.

    python -m persia_torchrec.bench store --json store.json
    python -m persia_torchrec.bench store --figures sizes --sizes 1000000 60000000
    python -m persia_torchrec.bench wire --redis /usr/bin/redis-server
    python -m persia_torchrec.bench training --rows 1000000 --dims 16
    python -m persia_torchrec.bench engines --json engine_measurements.json
    python -m persia_torchrec.bench precision --json precision.json
    python -m persia_torchrec.bench increments --interval-s 1

Without a name, store and wire are run; the last four have options of their own.
Without ``--figures``, all of them, Redis only if its program is named. Values are
checked in the same run: a wrong row ends the benchmark with an error. ``--tiny`` takes
small numbers, to see that everything works; its times mean nothing.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path

from persia_torchrec.bench.run_report import RunReport, exit_status_of
from persia_torchrec.bench.settings import OPTIMIZERS, Settings
from persia_torchrec.bench.store import STORE_FIGURES, run_store
from persia_torchrec.bench.wire import WIRE_FIGURES, run_wire
from persia_torchrec.errors import ConfigError

_OWN_MAIN = ("engines", "increments", "precision", "training")
"""Benchmarks with options of their own, each in a file of its name."""

_RUN = {"store": run_store, "wire": run_wire}
_FIGURES = {"store": list(STORE_FIGURES), "wire": list(WIRE_FIGURES)}
_NORMAL = {"store": Settings(dims=(16, 64, 128)), "wire": Settings(repeats=11)}
_TINY = Settings(
    dims=(16,),
    rows=4096,
    ids=512,
    repeats=2,
    zipf_draws=2048,
    zipf_range=10_000,
    in_flight_batches=6,
    sizes=(1024, 4096),
    capacities=(1000, 1_000_000),
)
_BELONGS_TO = {"sizes": "sizes", "redis": "redis", "capacities": "startup"}
"""Options that only one figure reads."""


def main(argv: Sequence[str]) -> int:
    """Run the benchmarks; return the process's exit status.

    Args:
        argv: the command line, without the program's name.
    """
    if argv and argv[0] in _OWN_MAIN:
        # Only when asked for: training needs torch, which takes seconds to start.
        benchmark = import_module(f"persia_torchrec.bench.{argv[0]}")
        return int(benchmark.main(argv[1:]))
    arguments = _parser().parse_args(argv)
    return exit_status_of(lambda: _run(arguments, argv))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m persia_torchrec.bench",
        description="Measure this package on this machine, and check what it computes.",
    )
    store, wire = _NORMAL["store"], _NORMAL["wire"]
    known = sorted({figure for names in _FIGURES.values() for figure in names})
    add = parser.add_argument
    add("name", nargs="?", choices=_RUN, help="which benchmark [both]")
    add("--figures", nargs="+", choices=known, help="which of its questions [all]")
    dims = f"{list(store.dims)}, wire {list(wire.dims)}"
    add("--dims", type=int, nargs="+", help=f"embedding dims [{dims}]")
    add("--rows", type=int, help=f"rows in the store [{store.rows}]")
    add("--ids", type=int, help=f"unique ids of a uniform request [{store.ids}]")
    repeats = f"{store.repeats}, wire {wire.repeats}"
    add("--repeats", type=int, help=f"requests of each kind [{repeats}]")
    add("--optimizer", choices=OPTIMIZERS, help=f"[{store.optimizer}]")
    sizes = f"rows of the stores compared [{list(store.sizes)}]"
    add("--sizes", type=int, nargs="+", help=sizes)
    capacities = f"capacities of the servers started [{list(store.capacities)}]"
    add("--capacities", type=int, nargs="+", help=capacities)
    add("--redis", type=Path, help="program of a Redis server to compare with")
    add("--json", type=Path, help="file for all figures")
    add("--tiny", action="store_true", help="small numbers, to see that it works")
    return parser


def _figures(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Return which figures of which benchmark are wanted.

    Raises:
        ConfigError: a figure or an option would have no effect.
    """
    names = [arguments.name] if arguments.name else list(_RUN)
    wanted = {
        name: [f for f in _FIGURES[name] if f in (arguments.figures or _FIGURES[name])]
        for name in names
    }
    chosen = {figure for figures in wanted.values() for figure in figures}
    unknown = sorted(set(arguments.figures or ()) - chosen)
    if unknown:
        raise ConfigError(
            f"figures of {' and '.join(names)} must be among "
            f"{sorted(chosen.union(*(_FIGURES[n] for n in names)))}. "
            f"Received: {unknown}."
        )
    for option, figure in _BELONGS_TO.items():
        if getattr(arguments, option) is not None and figure not in chosen:
            raise ConfigError(
                f"--{option} is for the figure {figure!r}, which is not measured. "
                f"Received: figures {sorted(chosen)}."
            )
    if arguments.redis is None:
        if arguments.figures and "redis" in chosen:
            raise ConfigError("The figure 'redis' needs --redis PROGRAM.")
        wanted = {
            n: [f for f in figures if f != "redis"] for n, figures in wanted.items()
        }
    return {name: figures for name, figures in wanted.items() if figures}


def _settings(arguments: argparse.Namespace, name: str) -> Settings:
    base = _TINY if arguments.tiny else _NORMAL[name]
    given = {
        "dims": _tuple(arguments.dims),
        "rows": arguments.rows,
        "ids": arguments.ids,
        "repeats": arguments.repeats,
        "optimizer": arguments.optimizer,
        "sizes": _tuple(arguments.sizes),
        "capacities": _tuple(arguments.capacities),
        "redis": arguments.redis,
    }
    return replace(base, **{key: v for key, v in given.items() if v is not None})


def _tuple(numbers: list[int] | None) -> tuple[int, ...] | None:
    return None if numbers is None else tuple(numbers)


def _run(arguments: argparse.Namespace, argv: Sequence[str]) -> None:
    figures = _figures(arguments)
    settings = {name: _settings(arguments, name) for name in figures}
    report = RunReport(argv)
    for name, wanted in figures.items():
        tables, used = _RUN[name](settings[name], wanted)
        report.add(name, tables, used, asdict(settings[name]))
    report.finish(arguments.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
