"""The other end of the servers: connections, fan-out over shards, staleness permits."""
