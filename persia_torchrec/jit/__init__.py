"""Compiled loops that both a client and the store run."""
