"""The engine under PERSIA's contexts: one model, its two halves joined by TorchRec."""

from persia_torchrec.version import require_set_that_fits

require_set_that_fits()  # before its modules import TorchRec
