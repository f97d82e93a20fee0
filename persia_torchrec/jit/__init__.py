"""Compiled loops: numba's decorators, instructions of the processor, kernels."""
