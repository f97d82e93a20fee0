"""Whether a series of measurements grows: Mann-Kendall's test, and Theil-Sen's slope.

Of n measurements over time, S is the number of pairs of which the later one is larger,
less those of which it is smaller. Without a trend its variance is
n (n - 1) (2n + 5) / 18, less what ties take; z is S, one nearer to 0, by its root. The
slope is the median of those of all pairs. Both need no assumption on the noise. (Mann
1945; Sen 1968.)
"""

from dataclasses import dataclass

import numpy as np

Z = 3.09
"""Above it a trend is no chance: one time in a thousand without one."""


@dataclass(frozen=True)
class Trend:
    """What a series does: its median, what it has grown by in all, and z."""

    median: float
    growth: float
    z: float

    def grows(self, tolerated: float) -> bool:
        """Return whether it grows, and by more than is tolerated."""
        return self.z > Z and self.growth > tolerated


def trend_of(values: np.ndarray) -> Trend:
    """Return the trend of measurements at equal intervals, without the first quarter.

    That is the time in which caches fill.
    """
    values = np.asarray(values, dtype=np.float64)[len(values) // 4 :]
    num = len(values)
    earlier, later = np.triu_indices(num, 1)
    differences = values[later] - values[earlier]
    score = np.sign(differences).sum()
    _, ties = np.unique(values, return_counts=True)
    tied = (ties * (ties - 1) * (2 * ties + 5)).sum()
    variance = (num * (num - 1) * (2 * num + 5) - tied) / 18
    z = (score - np.sign(score)) / np.sqrt(variance) if variance > 0 else 0.0
    slope = np.median(differences / (later - earlier))
    return Trend(float(np.median(values)), float(slope * (num - 1)), float(z))
