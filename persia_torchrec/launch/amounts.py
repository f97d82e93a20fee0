"""Amounts of processors and memory, as Kubernetes writes them."""

import re
from fractions import Fraction

from persia_torchrec.errors import ConfigError

_LEAST_MEMORY = 64 * 1024**2

_UNITS = {
    "m": Fraction(1, 1000),
    "": Fraction(1),
    **{unit: Fraction(1000**n) for n, unit in enumerate("kMGTPE", 1)},
    **{f"{unit}i": Fraction(1024**n) for n, unit in enumerate("KMGTPE", 1)},
}


def quantity(amount: float | str) -> Fraction:
    """Return what Kubernetes means by an amount, as 0.5, "500m" or "64Gi"."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([A-Za-z]{0,2})", str(amount))
    if match is None or match[2] not in _UNITS:
        raise ConfigError(
            "cpu and memory must be numbers, with one of Kubernetes' units or none, as "
            f"500m or 64Gi. Received: {amount!r}."
        )
    return Fraction(match[1]) * _UNITS[match[2]]


def require_processors(amount: float | str) -> None:
    """Reject what is no number of processors, as 8Gi."""
    if str(amount)[-1] not in "0123456789m" or quantity(amount) < Fraction(1, 1000):
        raise ConfigError(
            "cpu must be a number of processors, as 8, or 500m for half of one, and at "
            f"least 1m. Received: {amount!r}."
        )


def require_memory(amount: int | str) -> None:
    """Reject less memory than a process needs to start, as of a forgotten unit."""
    num_bytes = quantity(amount)
    if num_bytes < _LEAST_MEMORY:
        number = str(amount).rstrip("kmMGTPEi")
        raise ConfigError(
            f"memory must be at least 64Mi. Received: {amount!r}, which is "
            f"{float(num_bytes):g} bytes. Write {number}Gi or {number}Mi."
        )
