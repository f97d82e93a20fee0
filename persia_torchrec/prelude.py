"""PERSIA's ``persia.prelude``: names of its native module."""

from persia_torchrec import names_on_use

__getattr__, __dir__, __all__ = names_on_use(__name__, __file__)
