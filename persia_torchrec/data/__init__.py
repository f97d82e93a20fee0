"""Batches on their way to the model: datasets, the loader, KeyedJaggedTensors."""
