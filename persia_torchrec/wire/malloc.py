"""Reuse of freed memory in processes that answer requests.

By default the C library returns the memory of each large message to the operating
system, which clears every page of the next one again. That took a quarter of the time
of a thread that receives gradients.
"""

import ctypes

KEPT_BYTES = 2**28
"""Freed memory that stays with the process."""

_LARGEST_REUSED_BYTES = 2**25  # glibc accepts no more
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def keep_freed_memory() -> bool:
    """Make the C library reuse the memory of messages of up to 32 MiB.

    For processes of our own, before their first request: it affects the whole process.

    Returns:
        Whether this is possible: with glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    reused = mallopt(_M_MMAP_THRESHOLD, _LARGEST_REUSED_BYTES)
    return bool(reused and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
