"""PERSIA's ``persia.k8s_utils``: names of ``persia/k8s_utils.py``."""

from persia_torchrec import names_on_use

__getattr__, __dir__, __all__ = names_on_use(__name__, __file__)

if __name__ == "__main__":
    __getattr__("main")()
