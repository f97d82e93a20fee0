"""Strangers at the ports of a job: none proves its token, and each comes again."""

import asyncio
import contextlib

import zmq

from persia_torchrec.rpc.auth import client_options

NUM_OF_A_KIND = 200
MIB = 2**20

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"PLAIN".ljust(20, b"\0") + bytes(32)
_LARGE_COMMAND = b"\x06" + (4 * MIB).to_bytes(8, "big")  # its size, as ZMTP 3.0 has it


async def _be_silent(writer: asyncio.StreamWriter) -> None:
    del writer


async def _send_bytes(writer: asyncio.StreamWriter) -> None:
    for byte in _GREETING:
        writer.write(bytes([byte]))
        await asyncio.sleep(1)


async def _send_mib(writer: asyncio.StreamWriter) -> None:
    writer.write(_GREETING + _LARGE_COMMAND + bytes(MIB))
    await writer.drain()


_KINDS = {
    "silent": _be_silent,
    "a byte a second": _send_bytes,
    "1 MiB, then silence": _send_mib,
}
WRONG_TOKEN = "another token"
KINDS = (*_KINDS, WRONG_TOKEN)


def come_again(kinds: list[str], ports: list[int]) -> None:
    """Be so many strangers of each kind, which connect again as they are closed."""
    context, sockets = zmq.Context(), []
    for number in range(NUM_OF_A_KIND if WRONG_TOKEN in kinds else 0):
        socket = context.socket(zmq.DEALER)
        for option, value in client_options(WRONG_TOKEN).items():
            socket.set(option, value)
        socket.connect(f"tcp://127.0.0.1:{ports[number % len(ports)]}")
        sockets.append(socket)
    asyncio.run(_connect_all([kind for kind in kinds if kind != WRONG_TOKEN], ports))


async def _connect_all(kinds: list[str], ports: list[int]) -> None:
    closed = dict.fromkeys(kinds, 0)
    async with asyncio.TaskGroup() as group:
        for number in range(NUM_OF_A_KIND):
            for kind in kinds:
                port = ports[number % len(ports)]
                group.create_task(_connect(kind, port, closed))
        while True:
            print("closed", *closed.values(), flush=True)
            await asyncio.sleep(1)


async def _connect(kind: str, port: int, closed: dict[str, int]) -> None:
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        sending = asyncio.ensure_future(_KINDS[kind](writer))
        with contextlib.suppress(ConnectionError):
            while await reader.read(MIB):
                pass
        sending.cancel()
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await sending
        writer.close()
        closed[kind] += 1
