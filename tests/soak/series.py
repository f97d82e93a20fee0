"""What the processes of a job hold, measured again and again, and what of it grows."""

import contextlib
import os
from pathlib import Path

import numpy as np

from tests.soak.trend import trend_of

MIB = 2**20


def tolerated(what, median):
    """Return how much more at the end is none: of noise, and of what is kept ahead."""
    match what:
        case "memory MiB":
            return 2.0 + 0.03 * median
        case "files MiB":
            return 1.0 + 0.1 * median
        case "p50 ms" | "p99 ms":
            return 0.5 * median
    return 2.0


def sample(pid):
    """Return what a process holds."""
    status = Path(f"/proc/{pid}/status").read_text()
    return {
        "memory MiB": int(status.partition("VmRSS:")[2].split()[0]) / 1024,
        "descriptors": len([*Path(f"/proc/{pid}/fd").iterdir()]),
        "threads": int(status.partition("Threads:")[2].split()[0]),
    }


def files_of(folder, *, but=()):
    """Return how many files there are, and their bytes; some go meanwhile.

    Those whose names begin with one of ``but`` do not count.
    """
    sizes = []
    for place, _, names in os.walk(folder):
        for name in names:
            if not name.startswith(tuple(but)):
                with contextlib.suppress(FileNotFoundError):
                    sizes.append((Path(place) / name).stat().st_size)
    return {"files": len(sizes), "files MiB": sum(sizes) / MIB}


class Series:
    """Measurements at equal intervals, by what and of which process."""

    def __init__(self):
        self.values = {}

    def add(self, of, measured):
        for what, value in measured.items():
            self.values.setdefault((of, what), []).append(value)

    def grown(self):
        """Return the lines of the table, and those of what has grown."""
        lines, found = [], []
        for (of, what), values in sorted(self.values.items()):
            trend = trend_of(np.array(values))
            most = tolerated(what, trend.median)
            numbers = trend.median, trend.growth, trend.z, most
            line = f"| {of} | {what} | {' | '.join(f'{n:.2f}' for n in numbers)} |\n"
            lines.append(line)
            if trend.grows(most):
                found.append(line)
        return lines, found
