"""Predictions over HTTP, from a dense model and embeddings that are only read."""
