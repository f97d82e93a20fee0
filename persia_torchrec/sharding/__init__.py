"""The TorchRec side: sharders, sharded modules."""

from persia_torchrec.version import require_set_that_fits

require_set_that_fits()  # before its modules import TorchRec
