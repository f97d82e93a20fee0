"""``python -m persia_torchrec.worker``: an embedding worker, ``persia/worker/``."""
