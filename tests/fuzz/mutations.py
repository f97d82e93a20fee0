"""Inputs that no client sends on purpose: random ones, and valid ones that are changed.

An input is bytes. A message of several frames is bytes, too: see ``pack``.
"""

import json
import random
import struct
from collections.abc import Callable, Sequence

from hypothesis import strategies as st

EXTREMES = (0, 1, -1, 2**15, 2**16 - 1, 2**31 - 1, 2**32 - 1, 2**48, 2**63 - 1, 2**64)
ODD_VALUES = (
    *(None, True, False, "", "x", "\0", "../../etc", "é\u2028", "9" * 5000, 0.5, -0.0),
    *(1e400, -1e308, [], {}, [[]], {"kind": []}, [None] * 40, {"": 0}, *EXTREMES),
    *(2**200, "0" * 64, "checkpoint-00000001", "file:/etc", "s3://a/b", "a::b://c"),
)
KINDS = ("random", "truncated", "flipped", "oversized", "spliced", "structured")

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
"""Any value of JSON, as Hypothesis draws it."""

Structured = Callable[[random.Random, bytes], bytes]


def pack(frames: Sequence[bytes]) -> bytes:
    """Return frames as one input."""
    return b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)


def unpack(data: bytes) -> list[bytes]:
    """Return the frames of any input; the last one may be cut off."""
    frames = []
    while len(data) >= 4:
        (size,) = struct.unpack_from("<I", data)
        frames.append(data[4 : 4 + size])
        data = data[4 + size :]
    return frames or [data]


def mutate(
    rng: random.Random, seeds: Sequence[bytes], structured: Structured
) -> tuple[str, bytes]:
    """Return an input, and of which kind it is; ``structured`` changes a valid one."""
    kind = rng.choice(KINDS)
    seed = rng.choice(seeds)
    match kind:
        case "random":
            start = seed[: rng.choice((0, 0, 8, 24, 48))]
            return kind, start + rng.randbytes(rng.randrange(200))
        case "truncated":
            return kind, seed[: rng.randrange(len(seed) + 1)]
        case "flipped":
            return kind, flip(rng, seed)
        case "oversized":
            return kind, oversize(rng, seed)
        case "spliced":
            other = rng.choice(seeds)
            at, of_other = rng.randrange(len(seed) + 1), rng.randrange(len(other) + 1)
            return kind, seed[:at] + other[of_other:]
    return kind, structured(rng, seed)


def flip(rng: random.Random, data: bytes) -> bytes:
    """Flip up to eight bits."""
    changed = bytearray(data or b"\0")
    for _ in range(rng.randint(1, 8)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def oversize(rng: random.Random, data: bytes) -> bytes:
    """Write an extreme number over some bytes, or repeat a part of the input."""
    changed = bytearray(data)
    if rng.random() < 0.7 and changed:
        size = rng.choice((1, 2, 4, 8))
        at = rng.randrange(len(changed)) // size * size
        number = rng.choice((*EXTREMES, len(data), len(data) + 1, rng.getrandbits(64)))
        changed[at : at + size] = (number % 2 ** (8 * size)).to_bytes(size, "little")
        return bytes(changed)
    at = rng.randrange(len(changed) + 1)
    stop = at + rng.randrange(64)
    return data[:stop] + data[at:stop] * rng.choice((1, 2, 30, 500)) + data[stop:]


def change_json(rng: random.Random, text: bytes) -> bytes:
    """Change values of a JSON text: other types, extremes, keys that go or come."""
    value = json.loads(text)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        value = _changed(rng, value)
    return json.dumps(value).encode()


def _changed(rng: random.Random, value: object) -> object:
    """Return a value in which one node, any one below it, is another."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        what = rng.random()
        if what < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if what < 0.15:
            return {**value, rng.choice(("", "kind", "x")): rng.choice(ODD_VALUES)}
        return {**value, key: _changed(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        what = rng.random()
        if what < 0.1:
            return value[:at] + value[at + 1 :]
        if what < 0.2:
            return value + value[at : at + 1] * rng.choice((1, 2, 50))
        return [*value[:at], _changed(rng, value[at]), *value[at + 1 :]]
    if isinstance(value, int) and rng.random() < 0.4:
        return value + rng.choice((-1, 1, 7, 2**16))
    return rng.choice(ODD_VALUES)


def change_frames(rng: random.Random, data: bytes) -> bytes:
    """Change one frame of a message, or how many there are."""
    frames = unpack(data)
    what, at = rng.random(), rng.randrange(len(frames))
    if what < 0.15:
        del frames[at]
    elif what < 0.3:
        frames[at:at] = [rng.choice(frames)] * rng.choice((1, 2, 100))
    elif what < 0.75 and frames[at][:1] in (b"{", b"["):
        frames[at] = change_json(rng, frames[at])
    else:
        frames[at] = rng.choice((flip, oversize))(rng, frames[at])
    return pack(frames)
