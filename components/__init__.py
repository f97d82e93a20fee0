"""Components of torchx, installed as ``persia_torchrec.components``."""
