"""Limits of a server, for the checks of settings wherever they are given."""

MAX_DIM = 4096
"""Largest embedding dim, in weights per row."""

MAX_ROWS = 2**32 - 2
"""Rows that the 32-bit slot numbers of a server can tell apart."""
