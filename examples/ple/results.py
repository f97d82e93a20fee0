"""What a run of the PLE example leaves: a bar while it trains, and then its results.

output_dir/
  results.json       AUC and accuracy of each task, speed, options, versions
  results.md         the same numbers as a table
  curves.png         losses and throughput over the steps
  events.out.*       the same for TensorBoard
"""

import json
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from torch.utils.tensorboard import SummaryWriter
from torchmetrics.functional.classification import binary_auroc
from tqdm import tqdm

from persia_torchrec.version import __version__

EVERY = 20
"""Steps that are one point of the curves, and one line of TensorBoard."""

PACKAGES = ("torch", "torchrec", "fbgemm-gpu-cpu", "numpy")

mpl.use("agg")


class Progress:
    """Shows how the training of some tasks proceeds, and keeps its curves.

    Args:
        folder: of TensorBoard's file, made if it is missing.
        tasks: names, in the order of the losses.
        num_steps: that will be trained, or None if it is not known.
        first_step: that is trained already.
        is_shown: whether there is a bar; the other trainers of a job show none.
    """

    def __init__(
        self,
        folder: Path,
        tasks: Iterable[str],
        num_steps: int | None,
        first_step: int = 0,
        *,
        is_shown: bool = True,
    ) -> None:
        self.tasks = list(tasks)
        self.steps: list[int] = []
        self.losses: list[list[float]] = []
        self.rates: list[float] = []
        self.num_steps, self.num_timed, self.num_samples = first_step, 0, 0
        self._writer = SummaryWriter(str(folder)) if is_shown else None
        self._bar = tqdm(
            total=num_steps,
            initial=first_step,
            unit="step",
            mininterval=1.0,
            disable=not is_shown,
        )
        self._began_s = self._point_s = time.monotonic()
        self._sum = torch.zeros(len(self.tasks))
        self._num, self._point_samples = 0, 0
        self.seconds = 0.0

    def step(self, losses: torch.Tensor, num_samples: int) -> None:
        """Count a step with the losses of its tasks, float32 ``(T,)``."""
        self.num_steps += 1
        self.num_timed += 1
        self.num_samples += num_samples
        self._point_samples += num_samples
        self._sum = self._sum.to(losses.device) + losses
        self._num += 1
        self._bar.update(1)
        if self._num == EVERY:
            self._end_point()

    def close(self) -> None:
        """End the bar, and the time that counts as training."""
        self.seconds = time.monotonic() - self._began_s
        if self._num:
            self._end_point()
        self._bar.close()

    def end(self, results: Mapping[str, Any]) -> None:
        """Write the last numbers for TensorBoard."""
        if self._writer is not None:
            for name, value in results.items():
                if isinstance(value, float):
                    self._writer.add_scalar(f"test/{name}", value, self.num_steps)
            self._writer.close()

    def _end_point(self) -> None:
        now_s = time.monotonic()
        losses = (self._sum / self._num).tolist()
        rate = self._point_samples / max(now_s - self._point_s, 1e-9)
        self.steps.append(self.num_steps)
        self.losses.append(losses)
        self.rates.append(rate)
        named = {f"loss_{n}": v for n, v in zip(self.tasks, losses, strict=True)}
        shown = {name: f"{value:.4f}" for name, value in named.items()}
        self._bar.set_postfix({**shown, "samples/s": f"{rate:.0f}"}, refresh=False)
        if self._writer is not None:
            for name, value in {**named, "samples_per_s": rate}.items():
                self._writer.add_scalar(f"train/{name}", value, self.num_steps)
        self._sum.zero_()
        self._num, self._point_samples, self._point_s = 0, 0, now_s


def measure(
    tasks: Iterable[str], logits: torch.Tensor, labels: torch.Tensor
) -> dict[str, float | None]:
    """Return the exact AUC, and the accuracy at 0.5, of each task over all rows.

    Logits are float32 ``(N, T)``, labels too, 0 or 1. An AUC needs both labels: without
    it is None.
    """
    results: dict[str, float | None] = {}
    for task, name in enumerate(tasks):
        truth = labels[:, task].int()
        has_both = 0 < truth.sum() < len(truth)
        auc = float(binary_auroc(logits[:, task], truth)) if has_both else None
        results[f"auc_{name}"] = auc
        hits = (logits[:, task] > 0) == truth.bool()
        results[f"acc_{name}"] = float(hits.double().mean())
    return results


def write(
    folder: Path, progress: Progress, results: Mapping[str, Any], options: Any
) -> None:
    """Write all files of a run but that of TensorBoard, and a line to that."""
    folder.mkdir(parents=True, exist_ok=True)
    everything = {**results, "options": options, "versions": versions()}
    (folder / "results.json").write_text(json.dumps(everything, indent=1) + "\n")
    (folder / "results.md").write_text(table(results))
    draw(folder / "curves.png", progress)
    progress.end(results)


def versions() -> dict[str, str]:
    """Return the versions of what computes."""
    found = {"persia-torchrec": __version__}
    for package in PACKAGES:
        found[package] = version(package)
    return found


def table(results: Mapping[str, Any]) -> str:
    """Return results as a table of Markdown, a line for each task."""
    tasks = [n.removeprefix("auc_") for n in results if n.startswith("auc_")]
    lines = ["| task | AUC | accuracy |", "|---|---|---|"]
    for task in tasks:
        auc = results[f"auc_{task}"]
        shown = "one label only" if auc is None else f"{auc:.4f}"
        lines.append(f"| {task} | {shown} | {results[f'acc_{task}']:.4f} |")
    steps = f"{results['steps']} steps, {results['steps_per_s']:.2f} a second."
    return "\n".join([*lines, "", steps, ""])


def draw(path: Path, progress: Progress) -> None:
    """Draw losses and throughput over the steps."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    of_losses, of_rates = figure.subplots(2, sharex=True)
    for task, name in enumerate(progress.tasks):
        losses = [point[task] for point in progress.losses]
        of_losses.plot(progress.steps, losses, label=name)
    of_losses.set_ylabel("cross-entropy")
    of_losses.legend()
    of_rates.plot(progress.steps, progress.rates)
    of_rates.set_ylabel("samples / s")
    of_rates.set_ylim(bottom=0)
    of_rates.set_xlabel("step")
    figure.savefig(path)
