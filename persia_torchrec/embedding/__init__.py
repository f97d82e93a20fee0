"""What a table's settings can say; and PERSIA's ``persia.embedding``, on first use."""

from persia_torchrec import names_on_use

__getattr__, __dir__, __all__ = names_on_use(__name__, __file__)
