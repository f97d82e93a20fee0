"""How many different ids have been seen, in a few kilobytes: HyperLogLog.

Each id is hashed. The first bits of the hash choose a register; the register keeps the
longest run of zeros, plus one, at the end of the remaining ones:

    hash   rrrrrrrrrrrrrr bbbb...bbbb1000    register r keeps max(4, ...)
           14 bits        50 bits

Of n ids that share a register the longest run is about log2 n. P. Flajolet et al.,
"HyperLogLog", 2007; the estimate is that of O. Ertl, "New cardinality estimation
algorithms for HyperLogLog sketches", 2017 (algorithm 6), which needs no corrections for
few or many ids. The standard error is 0.8 %.

Dimension key:
    L: ids, in any order
"""

import math
import threading

import numpy as np

from persia_torchrec.compiled import read_only
from persia_torchrec.routing.hashing import Ids, farmhash64

_BITS = 14
_REGISTERS = 1 << _BITS
_LONGEST = 64 - _BITS
_MARK = np.uint64(1 << _LONGEST)
_EXPONENT_BITS, _EXPONENT_BIAS = 52, 1023  # of a float64


class DistinctIds:
    """Estimates how many different ids it was shown. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._registers = np.zeros(_REGISTERS, dtype=np.uint8)  # guarded by _lock

    def add(self, ids_L: Ids) -> None:
        """Show ids.

        Args:
            ids_L: uint64 ``(L,)``, repeats allowed, may be empty.
        """
        hashes_L = farmhash64(read_only(ids_L))
        registers_L = (hashes_L >> np.uint64(_LONGEST)).astype(np.int64)
        rest_L = hashes_L | _MARK  # ends the run of a hash that has zeros only
        lowest_L = rest_L & (~rest_L + np.uint64(1))
        # A power of two is exact as a float, whose exponent is the length of the run.
        exponents_L = lowest_L.astype(np.float64).view(np.int64) >> _EXPONENT_BITS
        runs_L = (exponents_L - _EXPONENT_BIAS + 1).astype(np.uint8)
        with self._lock:
            np.maximum.at(self._registers, registers_L, runs_L)

    def estimate(self) -> float:
        """Return about how many different ids there were."""
        with self._lock:
            num_with = np.bincount(self._registers, minlength=_LONGEST + 2)
        shares = num_with / _REGISTERS
        total = _of_full(1.0 - float(shares[_LONGEST + 1]))
        for share in shares[_LONGEST:0:-1]:
            total = (total + float(share)) / 2
        total += _of_empty(float(shares[0]))
        return _REGISTERS / (2 * math.log(2) * total)


def _of_empty(share: float) -> float:
    """Return Ertl's sigma; infinite where all registers are empty."""
    if share == 1.0:
        return math.inf
    total, power = share, 1.0
    while True:
        share *= share
        before, total = total, total + share * power
        power *= 2
        if total == before:
            return total


def _of_full(share: float) -> float:
    """Return Ertl's tau."""
    if share in (0.0, 1.0):
        return 0.0
    total, power = 1.0 - share, 1.0
    while True:
        share = math.sqrt(share)
        power /= 2
        before, total = total, total - (1.0 - share) ** 2 * power
        if total == before:
            return total / 3
