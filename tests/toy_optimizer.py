"""An optimizer from outside of the package; servers know it by ``--import``."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from persia_torchrec.embedding.optim import OPTIMIZERS, Optimizer

_ZERO = np.float32(0)


@OPTIMIZERS.register
@dataclass(frozen=True)
class SignWithMemory(Optimizer):
    """Step by the sign of a running mean: ``m = b m + g``, ``w = w - lr t sign(m)``."""

    kind: ClassVar[str] = "sign_with_memory"

    lr: float = 0.5
    kept: float = 0.5

    def num_state_floats(self, dim):
        return dim

    def kernel(self):
        return step_by_sign

    def step_numbers(self, dim, step):
        return self.lr * step, self.kept


def step_by_sign(p, w, s, g, dim):
    rate, kept = p[0], p[1]
    for d in range(dim):
        s[d] = kept * s[d] + g[d]
        w[d] -= rate * sign(s[d])


def sign(x):
    return np.float32(x > _ZERO) - np.float32(x < _ZERO)
