"""Values that a process measures, those of a server, and the push to a gateway."""
