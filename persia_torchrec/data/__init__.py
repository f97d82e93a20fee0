"""Batches on their way to the model; ``torchrec.py`` is imported by its full name.

Each name of ``__init__.pyi`` is imported on first use: PERSIA's loaders need no torch.
"""

from persia_torchrec import names_on_use

__getattr__, __dir__, __all__ = names_on_use(__name__, __file__)
"""The names of loaders and datasets, and where they are; see the package's own stub."""
