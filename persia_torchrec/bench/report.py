"""Figures of a benchmark: from samples to a table that can be committed as it is."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

MEMORY_COPY = "memory_copy"
"""The figure that the others are compared with."""

Sample = Mapping[str, float]
"""Rows a second, by figure, of one repeat."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Rows a second of one operation, over all repeats."""

    median: float
    lowest: float
    highest: float

    of_memory_copy: float
    """The median, as a share of the memory copy's in the same run."""


@dataclass(frozen=True, slots=True)
class Results:
    """What one benchmark measured.

    Attributes:
        question: what the benchmark answers, in a sentence.
        pinned: which cores were used for what.
        meanings: each figure's name in words, in the order of the table.
        figures: by dim, then by name.
        remarks: sentences below the table.
    """

    question: str
    pinned: str
    meanings: Mapping[str, str]
    figures: Mapping[int, Mapping[str, Figure]]
    remarks: Sequence[str] = ()

    def to_json(self) -> dict[str, object]:
        """Describe the results in plain JSON values."""
        return {
            "pinned": self.pinned,
            "rows_per_s": {
                str(dim): {name: asdict(figure) for name, figure in figures.items()}
                for dim, figures in self.figures.items()
            },
        }

    def to_markdown(self) -> str:
        """Return question, table and remarks as text."""
        lines = [
            self.question,
            "",
            "| D | million rows/s | median | lowest | highest | of memory copy |",
            "|---|---|---|---|---|---|",
        ]
        for dim, figures in self.figures.items():
            for name, meaning in self.meanings.items():
                figure = figures[name]
                rates = (figure.median, figure.lowest, figure.highest)
                cells = " | ".join(f"{rate / 1e6:.2f}" for rate in rates)
                share = f"{figure.of_memory_copy:.3f}"
                lines.append(f"| {dim} | {meaning} | {cells} | {share} |")
        lines += ["", f"Cores: {self.pinned}.", *self.remarks]
        return "\n".join(lines) + "\n"


def summarize(samples: Sequence[Sample]) -> dict[str, Figure]:
    """Return each figure's median and spread.

    Args:
        samples: one a repeat, at least one, all with the same figures.

    Example:
        >>> samples = [{"lookup": 1.0, "memory_copy": 4.0}] * 2
        >>> summarize(samples)["lookup"].of_memory_copy
        0.25
    """
    copy = median(sample[MEMORY_COPY] for sample in samples)
    figures = {}
    for name in samples[0]:
        rates = [sample[name] for sample in samples]
        middle = median(rates)
        figures[name] = Figure(middle, min(rates), max(rates), middle / copy)
    return figures
