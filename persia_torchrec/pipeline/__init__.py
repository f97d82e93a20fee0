"""Batches of a trainer in flight: lookups ahead of the training, updates after it."""
