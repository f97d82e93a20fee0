"""``python -m persia_torchrec.launcher``: the command line ``persia-launcher``."""

from persia_torchrec import names_on_use

__getattr__, __dir__, __all__ = names_on_use(__name__, __file__)

if __name__ == "__main__":
    __getattr__("cli")()
