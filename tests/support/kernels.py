"""Kernels of the settings, as functions of arrays."""

from functools import cache

import numpy as np

from persia_torchrec.jit.compiled import inlined_kernel, specialized
from persia_torchrec.jit.intrinsics import floats_at


@cache
def build_fill(kernel):
    draw_weights = inlined_kernel(kernel, is_as_written=True)

    def fill(numbers, seed, weights):
        p = floats_at(np.uint64(numbers.ctypes.data))
        w = floats_at(np.uint64(weights.ctypes.data))
        draw_weights(p, seed, w, len(weights))

    return specialized(fill, kernel)


def draw(seed, dim, initializer):
    weights = np.full(dim, np.nan, dtype=np.float32)
    numbers = np.array(initializer.fill_numbers(dim), dtype=np.float32)
    build_fill(initializer.kernel)(numbers, np.uint64(seed), weights)
    return weights
