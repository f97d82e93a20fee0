"""Strangers at the ports of a job: none proves its token, and each comes again."""

import asyncio
import contextlib
import itertools
import threading
from collections import Counter

import zmq

from persia_torchrec.rpc.auth import client_options

NUM = 200
MIB = 2**20

PLAIN, CURVE = "PLAIN", "CURVE"
"""How a listener has clients prove the token."""

_LARGE_COMMAND = b"\x06" + MIB.to_bytes(8, "big")  # its size, as ZMTP 3.0 has it


def _greeting(mechanism: str) -> bytes:
    named = mechanism.encode().ljust(20, b"\0")
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + named + bytes(32)


async def _be_silent(writer: asyncio.StreamWriter, mechanism: str) -> None:
    del writer, mechanism


async def _send_bytes(writer: asyncio.StreamWriter, mechanism: str) -> None:
    for byte in _greeting(mechanism):
        writer.write(bytes([byte]))
        await asyncio.sleep(1)


async def _send_mib(writer: asyncio.StreamWriter, mechanism: str) -> None:
    writer.write(_greeting(mechanism) + _LARGE_COMMAND + bytes(MIB - 1))
    await writer.drain()


_KINDS = {
    "silent": _be_silent,
    "a byte a second": _send_bytes,
    "1 MiB, then silence": _send_mib,
}
WRONG_TOKEN = "another token"
KINDS = (*_KINDS, WRONG_TOKEN)


def come_again(kind: str, mechanisms: dict[int, str]) -> None:
    """Be strangers of a kind, which connect again as they are closed.

    ``mechanisms`` has the ports, and how a listener there has the token proven.
    """
    listeners = list(itertools.islice(itertools.cycle(mechanisms.items()), NUM))
    if kind != WRONG_TOKEN:
        asyncio.run(_connect_all(kind, listeners))
        return
    context, sockets = zmq.Context(), []
    for port, mechanism in listeners:
        socket = context.socket(zmq.DEALER)
        options = client_options(WRONG_TOKEN, encrypts=mechanism == CURVE)
        for option, value in options.items():
            socket.set(option, value)
        socket.connect(f"tcp://127.0.0.1:{port}")
        sockets.append(socket)
    print("closed, as ZeroMQ knows", flush=True)
    threading.Event().wait()


async def _connect_all(kind: str, listeners: list[tuple[int, str]]) -> None:
    closed = Counter[str]()
    async with asyncio.TaskGroup() as group:
        for port, mechanism in listeners:
            group.create_task(_connect(kind, port, mechanism, closed))
        while True:
            print("closed", dict(closed), flush=True)
            await asyncio.sleep(1)


async def _connect(kind: str, port: int, mechanism: str, closed: Counter[str]) -> None:
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        sending = asyncio.ensure_future(_KINDS[kind](writer, mechanism))
        with contextlib.suppress(ConnectionError):
            while await reader.read(MIB):
                pass
        sending.cancel()
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await sending
        writer.close()
        closed[mechanism] += 1
