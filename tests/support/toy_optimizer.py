"""An optimizer from outside of the package; servers know it by ``--import``."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from persia_torchrec.embedding.optim import OPTIMIZERS, Optimizer

_ZERO = np.float32(0)


def step_by_sign(p, w, s, g, dim):
    rate, kept = p[0], p[1]
    for d in range(dim):
        s[d] = kept * s[d] + g[d]
        w[d] -= rate * sign(s[d])


def sign(x):
    return np.float32(x > _ZERO) - np.float32(x < _ZERO)


@OPTIMIZERS.register
@dataclass(frozen=True)
class SignWithMemory(Optimizer):
    """Step by the sign of a running mean: ``m = b m + g``, ``w = w - lr t sign(m)``."""

    kind: ClassVar[str] = "sign_with_memory"
    kernel = staticmethod(step_by_sign)

    lr: float = 0.5
    kept: float = 0.5

    def initial_state(self, dim):
        return np.zeros(dim, dtype=np.float32)

    def step_numbers(self, dim, step):
        return self.lr * step, self.kept
