"""Numbers over time: counters that only rise, and gauges with their maximum."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Metrics:
    """Named numbers of one process part. Owned by one thread.

    Attributes:
        counters: name -> how often.
        gauges: name -> present value.
        maxima: name -> largest value that the gauge had.
    """

    counters: dict[str, int] = field(default_factory=dict)
    gauges: dict[str, int] = field(default_factory=dict)
    maxima: dict[str, int] = field(default_factory=dict)

    def count(self, name: str, times: int = 1) -> None:
        """Count something that happened."""
        self.counters[name] = self.counters.get(name, 0) + times

    def set_gauge(self, name: str, value: int) -> None:
        """Set a value that goes up and down."""
        self.gauges[name] = value
        self.maxima[name] = max(self.maxima.get(name, value), value)

    def snapshot(self) -> dict[str, int]:
        """Return all numbers under one name each; maxima end in ``_max``."""
        maxima = {f"{name}_max": value for name, value in self.maxima.items()}
        return {**self.counters, **self.gauges, **maxima}
