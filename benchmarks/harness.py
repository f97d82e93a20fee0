"""One harness for all benchmarks: settings, turns, medians, report, and the machine.

Operations take turns (:func:`interleave`), so that the same moment of the machine is
compared, and check every value outside of the timed stretches. A rate has a median, a
mean and a slowest request: a store also does work that not every request needs.
"""

import argparse
import ctypes
import gc
import json
import logging
import math
import os
import platform
import re
import shlex
import sys
import time
import typing
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, Generic, NamedTuple, TypeVar

import psutil
from tabulate import tabulate

from persia_torchrec import env
from persia_torchrec.errors import ConfigError, PersiaError

logger = logging.getLogger("benchmarks")

S = TypeVar("S", bound="Settings")
T = TypeVar("T")

Rows = Sequence[Sequence[object]]

_PACKAGES = ("numpy", "numba", "pyzmq", "torch", "torchrec", "redis", "persia-torchrec")
_FBGEMM = ("fbgemm-gpu", "fbgemm-gpu-cpu")
_NOISY = ("torch", "torchrec", "fbgemm_gpu", "tensordict")
_PROC = Path("/proc")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a benchmark measures: each field, ``Annotated[type, "help"]``, is an option.

    Numbers are above 0. Anything else is a ConfigError.
    """

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            values = value if isinstance(value, tuple) else (value,)
            numbers = [v for v in values if isinstance(v, int | float)]
            least = 0 if option.name == "staleness" else sys.float_info.min
            is_fit = bool(values) and all(v >= least for v in numbers)
            self.require(option.name, is_fit, "above 0")

    def require(self, name: str, is_fit: bool, must: str) -> None:
        """Raise a ConfigError if a field does not fit."""
        if not is_fit:
            value = getattr(self, name)
            raise ConfigError(f"{name} must be {must}. Received: {value!r}.")


def add_options(parser: argparse.ArgumentParser, settings: Settings) -> None:
    """Add an option for each field; ``settings`` are the defaults."""
    hints = typing.get_type_hints(type(settings), include_extras=True)
    for option in fields(settings):
        kind, text = typing.get_args(hints[option.name])
        nargs = "+" if typing.get_origin(kind) is tuple else None
        if typing.get_origin(kind) is not typing.Literal:  # of tuple[int, ...], or int
            kind = (typing.get_args(kind) or (kind,))[0]
        choices = typing.get_args(kind) or None
        text = f"{text} [{getattr(settings, option.name)}]"
        flag, kind = f"--{option.name.replace('_', '-')}", str if choices else kind
        parser.add_argument(flag, type=kind, nargs=nargs, choices=choices, help=text)


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Call; return the seconds and the result."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


class Rate(NamedTuple):
    """Million rows per second, or nanoseconds per row; and the highest latency."""

    median: float
    mean: float
    slowest: float
    fastest: float
    latency_ms: float


RATES = "ids | operation | median | mean | slowest | fastest | highest latency, ms"


class Timings:
    """Rows and seconds of every request, by operation: ``"ids | what is done"``."""

    def __init__(self) -> None:
        self._requests: dict[str, list[tuple[int, float]]] = defaultdict(list)

    def add(self, operation: str, num_rows: int, seconds: float) -> None:
        """Note one request."""
        self._requests[operation].append((num_rows, seconds))

    def add_both(self, kind: str, num_rows: int, seconds: tuple[float, float]) -> None:
        """Note a lookup and an update of the same rows, and both together."""
        self.add(f"{kind} | lookup", num_rows, seconds[0])
        self.add(f"{kind} | update", num_rows, seconds[1])
        self.add(f"{kind} | lookup + update", num_rows, sum(seconds))

    def rate(self, operation: str) -> Rate:
        """Return million rows per second; the mean is all rows over all seconds."""
        rates = self._rates(operation)
        rows, seconds = zip(*self._requests[operation], strict=True)
        mean, latency_ms = sum(rows) / sum(seconds) / 1e6, max(seconds) * 1e3
        return Rate(median(rates), mean, min(rates), max(rates), latency_ms)

    def ns_per_row(self, operation: str) -> Rate:
        """Return nanoseconds per row."""
        rate = self.rate(operation)
        return Rate._make([*(1e3 / value for value in rate[:4]), rate.latency_ms])

    def rows(self, relative_to: Callable[[str], str]) -> Rows:
        """Return ids, operation, rate and its ratio to another operation's median."""
        return [
            [*key.split(" | "), *rate, rate.median / self.rate(relative_to(key)).median]
            for key, rate in ((key, self.rate(key)) for key in self._requests)
        ]

    def paired_ratio(self, operation: str, base: str) -> float:
        """Return the median of the ratios of the rates, turn by turn."""
        pairs = zip(self._rates(operation), self._rates(base), strict=True)
        return median(rate / base_rate for rate, base_rate in pairs)

    def _rates(self, operation: str) -> list[float]:
        return [rows / seconds / 1e6 for rows, seconds in self._requests[operation]]


def interleave(turn: Callable[[Timings], None], num_turns: int) -> Timings:
    """Let operations take turns; the first touches new memory and is not counted."""
    turn(Timings())
    timings = Timings()
    for _ in range(num_turns):
        turn(timings)
    return timings


@dataclass(frozen=True, slots=True)
class Table:
    """The answer to one question; its columns are in ``header``, with " | " between."""

    name: str
    question: str
    header: str
    rows: Rows
    notes: Sequence[str] = ()

    def dicts(self) -> list[dict[str, object]]:
        """Return the rows, by column."""
        columns = self.header.split(" | ")
        return [dict(zip(columns, row, strict=True)) for row in self.rows]

    def to_markdown(self) -> str:
        """Return heading, question, table and notes as text."""
        cells = [[_text(cell) for cell in row] for row in self.rows]
        columns = self.header.split(" | ")
        table = tabulate(cells, columns, tablefmt="github", disable_numparse=True)
        notes = "".join(f"\n- {note}" for note in self.notes)
        return f"## {self.name}\n\n{self.question}\n\n{table}\n{notes}\n"


_TRANSPORTS = typing.get_args(env.Transport)


def per_dim(measure: Callable[[S, int], Table]) -> Callable[[S], list[Table]]:
    """Return what measures each of ``dims`` by itself, and puts all into one table."""

    def measure_all(settings: S) -> list[Table]:
        tables = {dim: measure(settings, dim) for dim in vars(settings)["dims"]}
        rows = [[dim, *row] for dim, table in tables.items() for row in table.rows]
        notes = [note for table in tables.values() for note in table.notes]
        first = next(iter(tables.values()))
        return [Table(first.name, first.question, f"D | {first.header}", rows, notes)]

    return measure_all


def _text(cell: object) -> str:
    """Return a cell's text; a float has three significant digits."""
    if not isinstance(cell, float):
        return "-" if cell is None else str(cell)
    rounded = abs(float(f"{cell:.3g}"))
    exponent = math.floor(math.log10(rounded)) if rounded else 0
    return f"{cell:.{min(max(2 - exponent, 0), 5)}f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark(Generic[S]):
    """A benchmark that can be run from the command line.

    ``figures`` answer its questions; this process is pinned to ``core``. A setting in
    ``only_for`` is read by that figure alone, which is left out without it; ``more``
    are further entries of the JSON file.
    """

    name: str
    normal: S
    tiny: S
    figures: Mapping[str, Callable[[S], Iterable[Table]]]
    core: int | None = None
    only_for: Mapping[str, str] = field(default_factory=dict)
    more: Callable[[Sequence[Table]], dict[str, object]] = lambda tables: {}

    def main(self, argv: Sequence[str]) -> int:
        """Run what a command line says; return the process's exit status."""
        level, form = env.log_level(), "%(levelname)s %(name)s: %(message)s"
        logging.basicConfig(level=level, format=form)
        prog = f"python -m benchmarks {self.name}"
        parser = argparse.ArgumentParser(prog, argument_default=argparse.SUPPRESS)
        add = parser.add_argument
        add("--figures", nargs="+", choices=self.figures, help="which questions [all]")
        add("--json", type=Path, help="file for all figures")
        add("--tiny", action="store_true", help="small numbers, to see that it works")
        add("--transport", choices=_TRANSPORTS, help="of all clients [auto]")
        add_options(parser, self.normal)
        given = vars(parser.parse_args(argv))
        try:
            command = f"{prog} {shlex.join(argv)}"
            transport = given.pop("transport", "auto")
            with quiet_frameworks(), env.set_within({"PERSIA_TRANSPORT": transport}):
                report = {"command": command, **self._run(*self.settings(given))}
            sys.stdout.write(f"command: `{command}`\n")
            if "json" in given:
                text = json.dumps(report, indent=2, default=str)
                given["json"].write_text(f"{text}\n")
        except (PersiaError, OSError) as exc:
            logger.error("%s: %s", type(exc).__name__, exc)
            return 1
        return 0

    def settings(self, given: Mapping[str, Any]) -> tuple[S, list[str]]:
        """Return settings and figures; one without effect is a ConfigError."""
        names = given.keys() & {option.name for option in fields(self.normal)}
        changes = {name: given[name] for name in names}
        for name, value in changes.items():
            changes[name] = tuple(value) if isinstance(value, list) else value
        settings = replace(self.tiny if "tiny" in given else self.normal, **changes)
        missing = {f for n, f in self.only_for.items() if not getattr(settings, n)}
        figures = given.get("figures", [f for f in self.figures if f not in missing])
        for name, figure in self.only_for.items():
            if name in changes and figure not in figures:
                text = f"--{name} is for the figure {figure!r}, which is not measured."
                raise ConfigError(f"{text} Received: figures {figures}.")
        return settings, figures

    def _run(self, settings: S, figures: list[str]) -> dict[str, object]:
        """Print all tables; return what the JSON file tells of them."""
        busy_s, tables = busy_seconds(), list[Table]()
        start = time.monotonic()
        with pinned(self.core):
            for figure in figures:
                tables += self.figures[figure](settings)
        others_s = busy_seconds() - busy_s
        facts = {
            "settings": asdict(settings),
            "machine": describe_machine(),
            "cores_used_by_others": max(others_s, 0.0) / (time.monotonic() - start),
            "versions": describe_versions(),
        }
        sys.stdout.write(f"# {self.name}\n\n")
        sys.stdout.writelines(f"{table.to_markdown()}\n" for table in tables)
        for name, value in facts.items():
            sys.stdout.write(f"{name}: {json.dumps(value, default=str)}\n\n")
        found = {t.name: asdict(t) | {"rows": t.dicts()} for t in tables}
        results = {"settings": facts.pop("settings"), "tables": found}
        return {**facts, "results": {self.name: results}, **self.more(tables)}


def describe_machine() -> dict[str, str | int]:
    """Return the processor, how many cores this process may use, and the system."""
    # psutil does not know the model; py-cpuinfo does, and takes a second for it.
    text = (_PROC / "cpuinfo").read_text() if _PROC.exists() else ""
    model = re.search(r"^model name\s*: (.*)$", text, re.M)
    return {
        "cpu": model[1] if model else platform.machine(),
        "cores": len(_cores()) or os.cpu_count() or 1,
        "memory_gb": psutil.virtual_memory().total // 10**9,
        "kernel": f"{platform.system()} {platform.release()}",
    }


def describe_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter, if installed."""
    versions = {"python": platform.python_version()}
    for package in (*_PACKAGES, *_FBGEMM):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


_ALLOWED_CORES = _cores()


@contextmanager
def quiet_frameworks() -> Iterator[None]:
    """Keep back what torch, TorchRec and fbgemm warn of, and not their errors.

    What is measured is what users have; none of it is for who reads the tables.
    """
    names = [n for n in logging.root.manager.loggerDict if n.split(".")[0] in _NOISY]
    loggers = [logging.getLogger(name) for name in (*_NOISY, *names)]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for name in _NOISY:
                warnings.filterwarnings("ignore", module=rf"{name}(\.|$)")
            yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)


@contextmanager
def pinned(which: int | None) -> Iterator[None]:
    """Pin this thread, and all that it starts, to a core, if the system can do so.

    0 is the first core that this process may use, -1 the last, also where it is pinned
    already; None changes nothing.
    """
    previous = _cores()
    if previous and which is not None:
        os.sched_setaffinity(0, {_ALLOWED_CORES[which]})
    try:
        yield
    finally:
        if previous:
            os.sched_setaffinity(0, previous)


def move_to_core(pid: int, which: int) -> None:
    """Pin all threads of a process to a core, as :func:`pinned` does."""
    if _ALLOWED_CORES:
        for thread in (_PROC / str(pid) / "task").iterdir():
            os.sched_setaffinity(int(thread.name), {_ALLOWED_CORES[which]})


def cpu_seconds(pid: int) -> float:
    """Return the processor time of all threads of a process."""
    if sys.platform != "linux":
        times = psutil.Process(pid).cpu_times()
        return times.user + times.system
    # The clock of clock_getcpuclockid(3): nanoseconds, where psutil's has 10 ms.
    return time.clock_gettime((~pid << 3) | 2)


def main_thread_cpu_seconds(pid: int) -> float:
    """Return the processor time of a process's main thread. Linux only."""
    times = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text()
    return int(times.split()[0]) / 1e9


def resident_bytes(pid: int | None = None) -> int:
    """Return the resident memory of a process, by default of this one."""
    return int(psutil.Process(pid).memory_info().rss)


def return_freed_memory() -> None:
    """Return memory that this process has freed to the operating system."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)


def peak_bytes() -> int:
    """Return the largest resident memory since :func:`reset_peak`; Linux only."""
    peak = re.search(r"^VmHWM:\s+(\d+) kB", (_PROC / "self/status").read_text(), re.M)
    return int(peak[1]) * 1024 if peak else resident_bytes()


def reset_peak() -> None:
    """Start :func:`peak_bytes` again with the current resident memory."""
    (_PROC / "self/clear_refs").write_text("5")


def busy_seconds() -> float:
    """Return the processor time so far of all other processes and virtual machines.

    The children that were waited for are not others, nor is softirq: our network.
    """
    used, names = psutil.cpu_times(), ("user", "nice", "system", "steal")
    return sum(getattr(used, name, 0.0) for name in names) - sum(os.times()[:4])
