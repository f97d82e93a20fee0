"""Types of arrays, by what their numbers mean."""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.uint32]
"""How often an id occurs."""
Doubles = npt.NDArray[np.float64]
Exponents = npt.NDArray[np.int8]
"""Of the rows that travel as FP16."""
Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.uint16]
"""The bits of FP16 or BF16."""
Ids = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.int32]
"""Ids per bag."""
Offsets = npt.NDArray[np.int64]
"""Where parts of an array begin; the last one is its length."""
Positions = npt.NDArray[np.int32]
"""Which of its group's unique ids each id is."""
Slots = npt.NDArray[np.uint32]
"""Where rows lie in the memory of a store."""
Starts = npt.NDArray[np.int64]
"""Where the ids of each table of a request begin; the last one is their number."""
Words = npt.NDArray[np.uint64]
"""Words of 64 bits of a store's memory."""
