"""How much memory this process uses."""

from pathlib import Path

MIB = 2**20


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
