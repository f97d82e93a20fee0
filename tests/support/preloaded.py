"""What the forkserver of the tests imports: a process of a test begins with all of it.

TorchRec, the mains of all roles, and the compiled loops, loaded from numba's cache.
"""

import gc
import logging

import persia_torchrec.job.coordinator
import persia_torchrec.job.script
import persia_torchrec.persia.ctx.train_ctx
import persia_torchrec.persia.worker.__main__  # noqa: F401
from persia_torchrec.lookup.pooling import warm_up as warm_up_worker
from persia_torchrec.rpc import float_codec
from persia_torchrec.store.warm_up import warm_up as warm_up_store

warm_up_store()
warm_up_worker()
float_codec.warm_up()

# TorchRec sets up the root logger while it is imported; the mains of roles do, too.
logging.root.handlers.clear()

# No garbage collection of a process of a test visits what is imported.
gc.freeze()
