"""What a request must be before a server does anything about it.

Dimension key:
    N: ids of one table in a request
    D: its embedding dim
    S: its optimizer-state floats a row
"""

from collections.abc import Sequence
from dataclasses import dataclass

from persia_torchrec.errors import BatchError, ConfigError, FrameError, StoreError
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.table import TableSpec
from persia_torchrec.wire.messages import (
    MAX_MEMBER_CHARS,
    Frame,
    Frames,
    Precision,
    TableIds,
    decode_segments,
)
from persia_torchrec.wire.precision import Floats, decode_floats
from persia_torchrec.wire.transport import MAX_MESSAGE_BYTES


@dataclass(frozen=True, slots=True)
class Slice:
    """Which rows are to be exported: see ``EmbeddingStore.scan``."""

    table: int
    start: int
    max_rows: int


class RequestReader:
    """Reads requests for the tables of a store. Owned by the store's thread.

    Args:
        store: only its tables are read.
        max_ids: ids that a request may name.
    """

    def __init__(self, store: EmbeddingStore, max_ids: int) -> None:
        self._store = store
        self._max_ids = max_ids

    def specs(self, descriptions: object) -> list[TableSpec]:
        """Read the tables that are to be added.

        Raises:
            FrameError: it is no list of tables.
            ConfigError: a table cannot be read.
        """
        if not isinstance(descriptions, list) or not all(
            isinstance(description, dict) for description in descriptions
        ):
            raise FrameError("ADD_TABLES must carry a list of tables.")
        return [TableSpec.from_json(description) for description in descriptions]

    def tables(self, frames: Frames, *, num_frames: int) -> list[TableIds]:
        """Read the ids of each table.

        Raises:
            FrameError: frames are missing, or do not fit one another.
            BatchError: more ids than a request may name.
            ConfigError: a table that the store does not have.
        """
        tables = decode_segments(frames, num_frames=num_frames)
        num_ids = len(frames[2]) // 8
        if num_ids > self._max_ids:
            raise BatchError(
                f"A request may name {self._max_ids} ids. Received: {num_ids}. Send "
                "smaller requests, or raise the server's max_request_ids."
            )
        for t in tables:
            self._require_table(t.table)
        return tables

    def _require_table(self, number: int) -> None:
        num_tables = len(self._store.tables)
        if not 0 <= number < num_tables:
            raise ConfigError(
                f"Unknown table number {number}: this server has "
                f"{num_tables} tables. Add the tables first."
            )

    def rows(
        self,
        tables: Sequence[TableIds],
        frame: Frame,
        precision: Precision,
        *,
        has_state: bool = False,
    ) -> list[Floats]:
        """Read weights or gradients, float32 ``(N, D)`` a table.

        Args:
            tables: which rows.
            frame: with their numbers.
            precision: of the numbers.
            has_state: the rows are ``(N, D + S)``, weights and optimizer state.

        Raises:
            FrameError: there are not as many numbers as the ids of the tables need.
        """
        specs = [self._store.tables[t.table] for t in tables]
        shapes = [
            (len(t.ids), spec.dim + (spec.num_state_floats if has_state else 0))
            for t, spec in zip(tables, specs, strict=True)
        ]
        flat = decode_floats(
            frame, sum(num * width for num, width in shapes), precision
        )
        rows = []
        place = 0
        for num, width in shapes:
            rows.append(flat[place : place + num * width].reshape(num, width))
            place += num * width
        return rows

    def export(self, value: object) -> Slice:
        """Read which rows are to be exported.

        Raises:
            FrameError: a field is missing or no number.
            BatchError: more rows than a request may have, or than a reply holds.
            ConfigError: a table that the store does not have.
        """
        table, start, max_rows = _numbers_of(
            value, "EXPORT", "table", "start", "max_rows"
        )
        self._require_table(table)
        if not 0 <= start < 2**32 or not 1 <= max_rows <= self._max_ids:
            raise BatchError(
                "An export must begin at a slot in [0, 2**32), and have 1 to "
                f"{self._max_ids} rows. Received: start {start}, max_rows {max_rows}."
            )
        spec = self._store.tables[table]
        require_reply_fits(4 * max_rows * (spec.dim + spec.num_state_floats))
        return Slice(table, start, max_rows)

    def step(self, value: object) -> tuple[int, int | None]:
        """Read the number of a table, and the step to set if there is one.

        Raises:
            FrameError: a field is missing, no number, or a step is out of range.
            ConfigError: a table that the store does not have.
        """
        (table,) = _numbers_of(value, "STEP", "table")
        self._require_table(table)
        assert isinstance(value, dict)
        if value.get("step") is None:
            return table, None
        (step,) = _numbers_of(value, "STEP", "step")
        if not 0 <= step < 2**63:
            raise FrameError(f"A step must be in [0, 2**63). Received: {step}.")
        return table, step

    def member(self, value: object) -> tuple[str, str]:
        """Read who a trainer is, and why it has ended if it has.

        Raises:
            FrameError: a field is missing, or no short text.
        """
        fields = value if isinstance(value, dict) else {}
        who, ended = fields.get("who"), fields.get("ended")
        for text in (who, ended):
            if not isinstance(text, str) or len(text) > MAX_MEMBER_CHARS:
                raise FrameError(
                    "JOIN must have the texts who and ended, of at most "
                    f"{MAX_MEMBER_CHARS} characters. Received: {value!r:.100}."
                )
        return str(who), str(ended)

    def num_weights(self, t: TableIds) -> int:
        """Return how many weights the rows of some ids have."""
        return len(t.ids) * self._store.tables[t.table].dim


def require_reply_fits(num_bytes: int) -> None:
    """Refuse a request whose reply would be too large, before it takes memory.

    Raises:
        BatchError: ``num_bytes`` is more than a frame holds.
    """
    if num_bytes > MAX_MESSAGE_BYTES:
        raise BatchError(
            f"A reply may have {MAX_MESSAGE_BYTES} bytes. Received: a request whose "
            f"reply has {num_bytes} bytes. Send smaller requests."
        )


def _numbers_of(value: object, kind: str, *names: str) -> list[int]:
    fields = value if isinstance(value, dict) else {}
    numbers = [n for name in names if type(n := fields.get(name)) is int]
    if len(numbers) < len(names):
        raise FrameError(
            f"{kind} must have the numbers {', '.join(names)}. "
            f"Received: {value!r:.100}."
        )
    return numbers


def error_to_tell(exc: Exception) -> Exception:
    """Return the error that the sender of a request that failed is told."""
    if isinstance(exc, MemoryError):
        return StoreError(
            f"The server must have the memory that a request takes ({exc}). Send "
            "smaller requests, or lower its capacity."
        )
    return exc
