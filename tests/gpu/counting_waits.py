"""Run a trainer's script and count where its steps wait for the GPU.

    python tests/gpu/counting_waits.py SCRIPT [ARGUMENT...]

torch warns of each of its operators that synchronises with the device. These are
counted by line, from the optimizer's ``FIRST_STEP`` on, when buffers and sizes are
known, to its last one. The file ``$WAITS`` gets them as JSON.
"""

import atexit
import json
import os
import runpy
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

FIRST_STEP = 20
SAYS = "synchronizing CUDA operation"


class Waits:
    """Counts warnings by the line of Python that causes them, and steps."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._seen: Counter[str] = Counter()
        self._at_first: Counter[str] = Counter()
        self._at_last: Counter[str] = Counter()
        self._show = warnings.showwarning

    def show(self, message, category, filename, lineno, *more) -> None:
        """Take the place of ``warnings.showwarning``."""
        if SAYS in str(message):
            self._seen[f"{'/'.join(Path(filename).parts[-3:])}:{lineno}"] += 1
        else:
            self._show(message, category, filename, lineno, *more)

    def step(self, *_: object) -> None:
        """Count a step of the optimizer."""
        self.num_steps += 1
        self._at_last = self._seen.copy()
        if self.num_steps <= FIRST_STEP:
            self._at_first = self._at_last

    def by_line(self) -> dict[str, float]:
        """Return waits a step, the most frequent first."""
        num = max(self.num_steps - FIRST_STEP, 1)
        counted = (self._at_last - self._at_first).most_common()
        return {line: count / num for line, count in counted}

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"steps": self.num_steps, "waits": self.by_line()}))


def main() -> None:
    waits, path = Waits(), Path(os.environ["WAITS"])
    warnings.showwarning = waits.show
    warnings.filterwarnings("always", message=f".*{SAYS}")
    register_optimizer_step_post_hook(waits.step)
    atexit.register(waits.write, path)
    if torch.cuda.is_available():
        torch.cuda.init()
        torch.cuda.set_sync_debug_mode("warn")
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
