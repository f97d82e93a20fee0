"""Benchmarks of this package: ``python -m persia_torchrec.bench store`` and others."""
