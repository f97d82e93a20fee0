"""PERSIA's contexts: ``persia_torchrec.ctx`` has their names."""
