"""One embedding parameter server: one process, one shard of all tables."""
