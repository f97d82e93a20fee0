"""Benchmarks: ``python -m persia_torchrec.bench NAME``."""
