"""Whole tables to the servers and back, in blocks, while training may go on.

Dimension key:
    N: rows of one block
    D: embedding dim
    S: optimizer-state floats a row
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from persia_torchrec.client.answers import Exported
from persia_torchrec.client.row_block import RowBlock, rows_a_block
from persia_torchrec.client.servers import Reply, Servers
from persia_torchrec.errors import BatchError, WireError
from persia_torchrec.table import TableSpec
from persia_torchrec.wire.messages import (
    Frames,
    Header,
    Kind,
    decode_json,
    encode_json,
)

_BLOCKS_UNDER_WAY = 2
"""One that the servers write while the next is cut and encoded."""


def write_blocks(
    servers: Servers,
    blocks: Iterable[RowBlock],
    write: Callable[[RowBlock], Sequence[Reply]],
) -> int:
    """Write blocks one after the other; return how many rows there were.

    Args:
        servers: that answer.
        blocks: asked for as the servers get on, so that few are in memory.
        write: sends a block.

    Raises:
        ServerError: a server failed, refused, or did not answer in time.
    """
    under_way: deque[Sequence[Reply]] = deque()
    num_rows = 0
    for block in blocks:
        if len(under_way) == _BLOCKS_UNDER_WAY:
            _wait(servers, under_way.popleft())
        under_way.append(write(block))
        num_rows += len(block.ids)
    for replies in under_way:
        _wait(servers, replies)
    return num_rows


def table_step(
    servers: Servers, table: str, numbers: Sequence[int], step: int | None
) -> int:
    """Ask how many updates a table has had; see ``EmbeddingClient.step``.

    Args:
        servers: all of them.
        table: its name, for errors.
        numbers: of the table, for each server.
        step: what to set, if anything.
    """

    def frames_of(server: int) -> Frames:
        return [encode_json({"table": numbers[server], "step": step})]

    replies = servers.send(Header(Kind.STEP), frames_of, f"step of table {table!r}")
    answers = [decode_json(servers.wait(reply)) for reply in replies]
    steps = [answer for answer in answers if isinstance(answer, int)]
    if len(steps) < len(servers):
        raise WireError(f"A step must be a number. Received: {answers!r:.100}.")
    return max(steps)


def _wait(servers: Servers, replies: Sequence[Reply]) -> None:
    for reply in replies:
        servers.wait(reply)


def export_blocks(
    servers: Servers, spec: TableSpec, numbers: Sequence[int], block_rows: int
) -> Iterator[RowBlock]:
    """Walk the rows of a table on all servers; see ``EmbeddingClient.export``.

    Args:
        servers: each has at most one block under way or waiting to be taken.
        spec: the table.
        numbers: of the table, for each server.
        block_rows: rows a block at most.

    Raises:
        BatchError: ``block_rows`` is below 1.
    """
    if block_rows < 1:
        raise BatchError(f"A block must have at least 1 row. Received: {block_rows}.")
    max_rows = min(rows_a_block(spec, block_rows), *servers.max_request_ids)
    return _export(servers, spec, numbers, max_rows)


def _export(
    servers: Servers, spec: TableSpec, numbers: Sequence[int], max_rows: int
) -> Iterator[RowBlock]:
    def ask(server: int, start: int) -> Reply:
        value = {"table": numbers[server], "start": start, "max_rows": max_rows}
        what = f"export of table {spec.name!r}"
        return servers.send_to(server, Header(Kind.EXPORT), [encode_json(value)], what)

    width = spec.dim + spec.num_state_floats
    under_way = deque((server, ask(server, 0)) for server in range(len(servers)))
    while under_way:
        server, reply = under_way.popleft()
        part = Exported.read(servers.wait(reply), width)
        if part.next_start is not None:
            under_way.append((server, ask(server, part.next_start)))
        if len(part.ids):
            yield _block(part, spec.dim)


def _block(part: Exported, dim: int) -> RowBlock:
    """Copy, so that the message is not kept, and what is returned may be changed."""
    weights, state = part.rows[:, :dim].copy(), part.rows[:, dim:].copy()
    return RowBlock(part.ids.copy(), weights, state)
