"""Lookup and gradient of a whole batch: numbers only, sockets are the client's."""
