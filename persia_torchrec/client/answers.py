"""Answers of servers, read and checked."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from persia_torchrec.errors import ConfigError, FrameError, WireError
from persia_torchrec.wire.messages import (
    Frame,
    Frames,
    Ids,
    Precision,
    array_of,
    decode_json,
)
from persia_torchrec.wire.precision import Floats, decode_floats

_FIELDS = ("shard", "num_shards", "incarnation", "max_request_ids")


@dataclass(frozen=True, slots=True)
class Hello:
    """What a server says of itself when a client connects.

    Attributes:
        incarnation: which start of it.
        max_request_ids: ids that it accepts in a request.
    """

    incarnation: int
    max_request_ids: int

    @classmethod
    def read(cls, frames: Frames, shard: int, num_shards: int, server: str) -> Self:
        """Read the answer of a server that must be a certain shard.

        Args:
            frames: of the answer.
            shard: which shard the server must be.
            num_shards: of how many.
            server: its name, for errors.

        Raises:
            WireError: this is no answer of an embedding server.
            ConfigError: it is another shard.
        """
        hello = decode_json(frames)
        if not isinstance(hello, dict) or not all(
            isinstance(hello.get(field), int) for field in _FIELDS
        ):
            raise WireError(f"{server} is no embedding server of this version.")
        if (hello["shard"], hello["num_shards"]) != (shard, num_shards):
            raise ConfigError(
                f"{server} must be shard {shard} of {num_shards}. "
                f"Received: it is shard {hello['shard']} of {hello['num_shards']}. "
                "Give all addresses, in the order of their shards."
            )
        return cls(hello["incarnation"], hello["max_request_ids"])


def body_of(frames: Frames) -> Frame:
    """Return the one frame after a reply's header.

    Raises:
        FrameError: there is none, or several.
    """
    if len(frames) != 2:
        raise FrameError(f"The reply must have 2 frames. Received: {len(frames)}.")
    return frames[1]


@dataclass(frozen=True, slots=True)
class Exported:
    """Some rows of a table on one server.

    Attributes:
        ids: uint64 ``(N,)``.
        rows: float32 ``(N, W)``, weights and optimizer state.
        next_start: where to go on; None at the end.
    """

    ids: Ids
    rows: Floats
    next_start: int | None

    @classmethod
    def read(cls, frames: Frames, width: int) -> Self:
        """Read a reply to EXPORT.

        Args:
            frames: of the reply.
            width: W.

        Raises:
            FrameError: the frames are others, or do not fit one another.
        """
        if len(frames) != 4:
            raise FrameError(f"The reply must have 4 frames. Received: {len(frames)}.")
        place = decode_json(frames[:2])
        next_start = place.get("next", "") if isinstance(place, dict) else ""
        if not isinstance(next_start, int | None):
            raise FrameError(f"An export must say what is next. Received: {place!r}.")
        ids = array_of(frames[2], np.uint64)
        rows = decode_floats(frames[3], len(ids) * width, Precision.FP32)
        return cls(ids, rows.reshape(len(ids), width), next_start)


def added_tables(answer: object, num: int) -> list[dict[str, int]]:
    """Return what a server says of each table that it has added: number and wishes.

    Raises:
        WireError: it says something else.
    """
    if (
        not isinstance(answer, list)
        or len(answer) != num
        or not all(
            isinstance(table, dict) and table.keys() >= {"number", "wants_counts"}
            for table in answer
        )
    ):
        raise WireError(
            f"The reply to ADD_TABLES must tell of {num} tables. "
            f"Received: {answer!r:.100}."
        )
    return answer


def told_tables(answer: object) -> dict[str, dict[str, Any]]:
    """Return the tables that a server tells of in its answer to HELLO, by name.

    Raises:
        WireError: it tells of none.
    """
    tables = answer.get("tables") if isinstance(answer, dict) else None
    if not isinstance(tables, list) or not all(
        isinstance(table, dict) and isinstance(table.get("spec"), dict)
        for table in tables
    ):
        raise WireError(
            f"The reply to HELLO must tell of tables. Received: {answer!r:.100}."
        )
    return {str(table["spec"].get("name")): table for table in tables}
