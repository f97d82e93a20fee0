"""The memory of one shard: index, recency, rows, initial values, optimizers; no I/O."""
