"""The memory of one shard: index, recency, rows, initial values, optimizers; no I/O.

Dimension key:
    N: ids of one request
    D: embedding dim
    S: optimizer-state floats per row
    T: tables
    A: arenas
    K: ids or slots that are chosen
    R: rows of a checkpoint, numbered in the order in which they come
    U: rows of one block of fbgemm's
    Z: length of the block's set of slots, a power of two above U
"""
