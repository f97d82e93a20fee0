"""Tries inputs in a process of its own, and says what is wrong with one.

The process writes each input down before it tries it, so that the one that has killed
it, or on which it hangs, is known; that is kept in ``cases``, and each later run tries
it first. What an input may do: be accepted, or raise one of this package's errors.
"""

import gc
import hashlib
import logging
import mmap
import os
import random
import resource
import struct
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from persia_torchrec.errors import PersiaError
from tests.fuzz.mutations import Structured, mutate
from tests.support.processes import Processes, is_running, wait_until

CASES = Path(__file__).with_name("cases")
MIB = 2**20
MOST_GROWN_MIB = 32.0
"""What a process may have taken at the end of its inputs, more than after a tenth."""
MOST_OF_ONE_MIB = 64.0
"""Of one input: all are below 1 MiB. Formats that a library reads may have another."""
STUCK_S = 120.0

_HEAD = struct.Struct("<QQ")
_LAST_BYTES = 2**24


class Format(msgspec.Struct):
    """Valid inputs, what changes one within its structure, and what reads one."""

    seeds: list[bytes]
    structured: Structured
    check: Callable[[bytes], object]
    most_of_one_mib: float = MOST_OF_ONE_MIB


class Outcome(msgspec.Struct):
    """What has become of the inputs of one format."""

    inputs: int
    accepted: int
    kinds: dict[str, int]
    seconds: float
    slowest_ms: float
    processor_ms: float
    peak_mib: float
    grown_mib: float


def fuzz(make: Callable[[], Format], num: int, seed: int, last: Path) -> None:
    """Try inputs; print the outcome, or the defect."""
    warnings.simplefilter("error")
    logging.getLogger("persia_torchrec").addHandler(_Tracebacks())
    with last.open("r+b") as file, mmap.mmap(file.fileno(), _LAST_BYTES) as memory:
        target = make()
        outcome = _try_all(target, num, random.Random(seed), memory)
    print("outcome", msgspec.json.encode(outcome).decode(), flush=True)


def _try_all(
    target: Format, num: int, rng: random.Random, memory: mmap.mmap
) -> Outcome:
    kinds, num_accepted = Counter[str](), 0
    slowest_s = 0.0, 0.0  # of one input: in all, and of processor time
    open_before, base_mib = (0, 0), 0.0
    started = time.monotonic()
    for n in range(num):
        kind, data = mutate(rng, target.seeds, target.structured)
        kinds[kind] += 1
        memory[: _HEAD.size + len(data)] = _HEAD.pack(n + 1, len(data)) + data
        if n == num // 10:
            open_before, base_mib = _num_open(), _own_mib()
        peak_mib, began = _peak_mib(), (time.perf_counter(), time.process_time())
        num_accepted += is_accepted(target, data)
        took_s = time.perf_counter() - began[0], time.process_time() - began[1]
        slowest_s = max(slowest_s, took_s)
        took_mib = _peak_mib() - peak_mib
        is_little = took_mib < target.most_of_one_mib
        assert n < num // 10 or is_little, f"it took {took_mib} MiB"
    seconds = time.monotonic() - started
    grown_mib = _own_mib() - base_mib
    assert grown_mib < MOST_GROWN_MIB, f"all inputs left {grown_mib:.1f} MiB behind"
    open_after = _num_open()
    assert open_after <= open_before, f"open before {open_before}, after {open_after}"
    return Outcome(
        inputs=num,
        accepted=num_accepted,
        kinds=dict(kinds),
        seconds=seconds,
        slowest_ms=1000 * slowest_s[0],
        processor_ms=1000 * slowest_s[1],
        peak_mib=_peak_mib(),
        grown_mib=grown_mib,
    )


def is_accepted(target: Format, data: bytes) -> bool:
    """Return whether an input is accepted; raise what is no error of ours."""
    try:
        target.check(data)
    except PersiaError as exc:
        message = str(exc)
    else:
        return True
    assert len(message) < 10_000, f"an error that is too long: {message}"
    return False


def run(
    processes: Processes,
    folder: Path,
    name: str,
    make: Callable[[], Format],
    num: int,
    seed: int,
) -> Outcome:
    """Fuzz in another process, which must survive; it writes to a folder."""
    last = folder / "last"
    last.touch()
    os.truncate(last, _LAST_BYTES)
    # Arrow's own allocator keeps what threads that have ended have freed.
    pool = {"ARROW_DEFAULT_MEMORY_POOL": "system"}
    given = make, num, seed, last
    process = processes.start(name, fuzz, *given, cwd=folder, env=pool)
    seen, since = -1, time.monotonic()

    def has_ended() -> bool:
        nonlocal seen, since
        with last.open("rb") as file:
            number, _ = _HEAD.unpack(file.read(_HEAD.size))
        if number != seen:
            seen, since = number, time.monotonic()
        is_stuck = time.monotonic() - since > STUCK_S
        return is_stuck or not is_running(process.pid)

    wait_until(has_ended, f"the inputs of {name}", 7200.0)
    has_hung = is_running(process.pid)
    if not has_hung and process.status() == 0:
        text = process.output().rpartition("outcome ")[2]
        return msgspec.json.decode(text, type=Outcome)
    data = last.read_bytes()
    number, size = _HEAD.unpack(data[: _HEAD.size])
    case = keep(name, data[_HEAD.size : _HEAD.size + size])
    raise AssertionError(
        f"input {number} of {name}, seed {seed}, kept as {case}: "
        f"{'it hangs' if has_hung else process.status()}\n"
        f"{process.output()[-6000:]}"
    )


def keep(name: str, data: bytes) -> Path:
    """Keep an input that has shown a defect."""
    path = CASES / name / hashlib.sha256(data).hexdigest()[:12]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


class _Tracebacks(logging.Handler):
    """Raises where a traceback would be logged."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            raise AssertionError(record.getMessage()) from record.exc_info[1]


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _own_mib() -> float:
    """Return what the process itself has written; of files, others decide."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * resource.getpagesize() / MIB


def _num_open() -> tuple[int, int]:
    """Return how many descriptors and threads there are, when garbage is gone."""
    gc.collect()
    return len([*Path("/proc/self/fd").iterdir()]), threading.active_count()
