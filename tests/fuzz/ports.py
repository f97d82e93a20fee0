"""The ports that are fuzzed: who listens, what is sent there, and who asks meanwhile.

Each listener is a process of its own, as is the client whose latency is measured.
"""

import contextlib
import http.client
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np
import torch
import zmq
from torch import nn

from persia_torchrec import env
from persia_torchrec.checkpoint.signature import ModelSignature
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.embedding.embedding_config import load_embedding_config
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.errors import FrameError
from persia_torchrec.job.process_identity import ProcessIdentity
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.job.requests import (
    AskStatus,
    Beat,
    FindNotes,
    Register,
    Report,
    SetNote,
)
from persia_torchrec.lookup.bags import Bags, encode_bags
from persia_torchrec.parsing.decoding import parse_json
from persia_torchrec.persia.batch import encode_rest
from persia_torchrec.persia.predict_requests import DECODERS
from persia_torchrec.persia.slots import SlotsLookup, build_features
from persia_torchrec.persia.slots_reader import SlotsReader
from persia_torchrec.persia.stream import Inbox
from persia_torchrec.persia.worker.process import IdBuffer, WorkerProcess
from persia_torchrec.rpc import messages, slab
from persia_torchrec.rpc.auth import client_options
from persia_torchrec.rpc.greeting import NO_JOB
from persia_torchrec.rpc.listener_thread import Service
from persia_torchrec.rpc.messages import Header, Kind, Share, encode_json
from persia_torchrec.rpc.slab_client import SharedMemoryTransport, obtain
from persia_torchrec.server.server import EmbeddingServer, ServerConfig
from persia_torchrec.serving.grpc_server import GrpcServer
from persia_torchrec.serving.http_server import HttpConfig, PredictionServer
from persia_torchrec.serving.models import Models, Version
from persia_torchrec.serving.predictor import DenseModel, Predictor
from persia_torchrec.table import TableSpec
from tests.fuzz.mutations import (
    Structured,
    change_frames,
    flip,
    mutate,
    oversize,
    pack,
    unpack,
)
from tests.support.local_job import ONE_SLOT, batch_of
from tests.support.servers import ids_of

SERVING = HttpConfig(receive_timeout_s=5, grpc_port=0)
SPEC = TableSpec(name="item", dim=4, optimizer=SGD(1.0))
ASK_S = 120.0
"""When a client that waits for a reply gives up."""
_SYNC = 128  # messages between two replies that are waited for
_MANY_FRAMES = 20_000


# Who listens


def serve_embeddings() -> None:
    server = EmbeddingServer(
        ServerConfig(capacity_rows=1000, checkpoint_root=(str(Path.cwd()),))
    )
    server.shard.store.add_tables([SPEC])
    server.serve(_tell)


def _connect(address: str) -> SlotsLookup:
    Path("embedding_config.yml").write_text(ONE_SLOT)
    schema = load_embedding_config("embedding_config.yml")
    client = EmbeddingClient.connect([address])
    lookup = SlotsLookup(client, build_features(schema))
    lookup.add_tables([SPEC])
    return lookup


def serve_worker(address: str) -> None:
    process = WorkerProcess(_connect(address), IdBuffer(100, expires_s=60))
    _tell(Service("embedding worker", process.answer, num_threads=8).address)
    threading.Event().wait()


def serve_book() -> None:
    book = AddressBook.host(0)
    _tell(f"tcp://127.0.0.1:{book.port}")
    threading.Event().wait()


def serve_inbox() -> None:
    _tell(Inbox(10, 0, 1).listen("127.0.0.1").address)
    threading.Event().wait()


class Zeros(nn.Module):
    """Predicts 0 for each sample."""

    def forward(
        self, non_id_tensors: object, embeddings: list[torch.Tensor]
    ) -> torch.Tensor:
        return torch.zeros(len(embeddings[0]), 1)


def serve_http(address: str) -> None:
    _tell(PredictionServer(_zeros(address), SERVING, DECODERS).address)
    threading.Event().wait()


def serve_grpc(address: str) -> None:
    _tell(f"grpc://127.0.0.1:{GrpcServer(_zeros(address), SERVING).port}")
    threading.Event().wait()


def _zeros(address: str) -> Models:
    reader = SlotsReader(_connect(address), torch.device("cpu"))
    signature = ModelSignature(("item",), (), (1,))
    models = Models()
    dense = DenseModel(Zeros(), "zeros", signature)
    models.add("zeros").add(Version(Predictor(reader, dense)))
    return models


def _tell(address: str) -> None:
    print("ready", address, flush=True)


# What is sent there


def server_messages() -> list[list[bytes]]:
    ids, floats = ids_of(1, 2, 3), np.ones((3, 4), dtype=np.float32).tobytes()
    segments = list(map(bytes, messages.encode_segments(np.array([[0, 3]]), [ids])))
    share = Share(1, 2, 0, 2, 1000).encode()
    training = {"flags": messages.TRAINING, "stream": 77, "batch": 3}
    with_state = {**training, "flags": messages.TRAINING | messages.STATE}
    written, counts = messages.STATE | messages.COUNTS, np.ones(3, np.uint32).tobytes()
    use = counts, counts, np.array([7]).tobytes()

    def json_of(kind: Kind, value: object) -> list[bytes]:
        return [Header(kind).encode(), encode_json(value)]

    join = [*json_of(Kind.JOIN, {"who": "a", "ended": ""}), share]
    return [
        [Header(Kind.LOOKUP).encode(), *segments],
        [Header(Kind.LOOKUP, **training).encode(), *segments],
        [Header(Kind.UPDATE, stream=77, batch=3).encode(), *segments, floats],
        [Header(Kind.UPDATE, flags=messages.SHARE).encode(), *segments, floats, share],
        [Header(Kind.LOOKUP, **with_state).encode(), *segments],
        [Header(Kind.WRITE).encode(), *segments, floats],
        [Header(Kind.WRITE, flags=written).encode(), *segments, floats, *use],
        [Header(Kind.READ).encode(), *segments],
        [Header(Kind.READ, flags=messages.INITIAL).encode(), *segments],
        [Header(Kind.METADATA).encode(), *segments],
        [Header(Kind.LEAVE).encode(), share],
        join,
        json_of(Kind.EXPORT, {"table": 0, "start": 0, "max_rows": 100}),
        json_of(Kind.IDS, {"table": 0, "start": 0, "first": 2}),
        json_of(Kind.STEP, {"table": 0, "step": 5}),
        json_of(Kind.OWN, {"tables": [0], "rank": 0, "who": "a"}),
        json_of(Kind.ADD_TABLES, [SPEC.to_json()]),
        json_of(Kind.HELLO, None),
        json_of(Kind.COUNTERS, None),
        json_of(Kind.CLEAR, None),
        json_of(Kind.CHECKPOINT, {"do": "dump", "task": 5, "folder": "."}),
        json_of(Kind.CHECKPOINT, {"do": "check", "task": 6, "folder": "/etc"}),
    ]


def worker_messages() -> list[list[bytes]]:
    bags = {"item": Bags(ids_of(1, 2), np.array([1, 1], dtype=np.int32))}
    frames = list(map(bytes, encode_bags(bags)))
    origin = encode_json({"loader": 0, "number": 1})
    numbered = {"stream": 5, "batch": 1}
    training = Header(Kind.FORWARD, flags=messages.TRAINING, **numbered).encode()
    floats = np.ones((2, 4), dtype=np.float32).tobytes()
    return [
        [Header(Kind.BUFFER_IDS, stream=0, batch=1).encode(), *frames],
        [Header(Kind.FORWARD).encode(), b"null", *frames],
        [training, origin],
        [Header(Kind.BACKWARD, **numbered).encode(), b"null", floats],
        [Header(Kind.ABANDON, **numbered).encode(), origin],
        [Header(Kind.ADD_TABLES).encode(), encode_json([SPEC.to_json()])],
        [Header(Kind.HELLO).encode(), b"null"],
    ]


def book_messages() -> list[list[bytes]]:
    requests = [
        FindNotes(["x"]),
        SetNote("x", "1", "0"),
        Register("server", 0, ProcessIdentity.of_this_process()),
        Beat("server", 0, "", 7, is_compiling=True, notes={"x": "2"}),
        Beat("server", 0, "", 7, is_paused=True, figures={"rows": 2, "at_s": 0.5}),
        AskStatus(),
        Report("server", 0, pid=7, cause="none"),
    ]
    return [[Header(Kind.BOOK).encode(), msgspec.json.encode(r)] for r in requests]


def inbox_messages() -> list[list[bytes]]:
    of = {"incarnation": 7, "stream": 0, "flags": 1}
    batch = batch_of([1], [2], label=1.0)
    return [
        [Header(Kind.POSITION, **of).encode(), b"null"],
        [Header(Kind.POSITION, **of).encode(), encode_json({"1": 0})],
        [Header(Kind.BATCH, batch=1, **of).encode(), b"[0, 5]", encode_rest(batch)],
        [Header(Kind.END_OF_DATA, **of).encode(), b"null"],
    ]


def _greetings() -> list[bytes]:
    """Return what clients of ZeroMQ begin with, by mechanism (ZMTP 3)."""
    found = []
    for name in (b"NULL", b"PLAIN", b"CURVE"):
        begin = b"\xff" + bytes(8) + b"\x7f\x03\x00" + name.ljust(20, b"\0") + bytes(32)
        ready = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"
        hello = b"\x05HELLO\x041234\x04abcd"
        commands = ready, hello, b"\x05HELLO" + bytes(194)
        found += [begin + struct.pack("BB", 4, len(c)) + c for c in commands]
    return found


# Who sends


class Dealer:
    """A client with the job's token that sends whatever it is told to."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        is_book = address.endswith("#book")
        options = client_options(env.job_token(), encrypts=is_book or env.encrypts())
        options |= {zmq.LINGER: 0, zmq.ROUTING_ID: NO_JOB.encode()}
        for option, value in options.items():
            self.socket.setsockopt(option, value)
        self.socket.connect(address.removesuffix("#book"))
        self._number, self.reply = 2**40, list[bytes]()

    def ask(self, frames: Sequence[bytes]) -> float:
        """Send a request; return the seconds until its reply."""
        self._number += 1
        header = Header.decode(frames[0]).encode(request=self._number)
        began_s = time.perf_counter()
        self.socket.send_multipart([header, *frames[1:]])
        while True:
            assert self.socket.poll(1000 * ASK_S), "no reply"
            self.reply = self.socket.recv_multipart()
            if Header.decode(self.reply[0]).request == self._number:
                return time.perf_counter() - began_s

    def ask_json(self, value: object, type_: Any) -> Any:
        """Send a SLAB; return the JSON value of its reply."""
        self.ask([Header(Kind.SLAB).encode(), encode_json(value)])
        return parse_json(self.reply[1], type_, "The reply", FrameError)

    def close(self) -> None:
        self.socket.close()
        self._context.term()


def fuzz_messages(
    address: str, seeds: Sequence[Sequence[bytes]], num: int, seed: int
) -> None:
    """Send messages behind the proof; wait for a reply now and then."""
    rng, packed = random.Random(seed), list(map(pack, seeds))
    hello = [Header(Kind.HELLO).encode(), b"null"]
    dealer = Dealer(address)
    for n in range(num):
        _, data = mutate(rng, packed, change_frames)
        frames = unpack(data)
        if n % 5000 == 7:
            frames += [b""] * _MANY_FRAMES
        if not _ends_the_server(frames):
            dealer.socket.send_multipart(frames)
        if n % _SYNC == 0:
            dealer.ask(hello)
    dealer.ask(hello)
    dealer.close()


def _ends_the_server(frames: Sequence[bytes]) -> bool:
    try:
        return Header.decode(frames[0]).kind is Kind.SHUTDOWN
    except FrameError:
        return False


def fuzz_memory(
    address: str, seeds: Sequence[Sequence[bytes]], num: int, seed: int
) -> None:
    """Write what no client writes into memory that the server shares with this one.

    Numbers of a message, where it is, and how many there are; it may be read meanwhile.
    """
    rng, packed = random.Random(seed), list(map(pack, seeds))
    hello = [Header(Kind.HELLO).encode(), b"null"]
    dealer = Dealer(address)
    channel = obtain(dealer.ask_json)
    for n in range(num):
        if channel.is_lost() or n % 200 == 0:  # it may wait for messages over TCP
            channel.close()
            channel = obtain(dealer.ask_json)
        _, data = mutate(rng, packed, change_frames)
        frames = unpack(data)[: slab.MAX_FRAMES]
        if not _ends_the_server(frames):
            _post_changed(rng, channel, frames)
        if n % 32 == 0:
            dealer.ask(hello)  # it is answered after what is in the memory
    dealer.ask(hello)
    channel.close()
    dealer.close()


def _post_changed(
    rng: random.Random, channel: SharedMemoryTransport, frames: Sequence[bytes]
) -> None:
    shared, size = channel.slab, slab.size_of_message([*map(len, frames)])
    at = slab.FIRST + 4096 * rng.randrange(64)
    shared.write(at, frames)
    place = struct.pack("<5Q", at, size, slab.FIRST + 2**19, 2**18, 0)
    what = rng.random()
    if what < 0.4:
        place = rng.choice((flip, oversize))(rng, place)[:40].ljust(40, b"\0")
    elif what < 0.8:
        head = rng.choice((flip, oversize))(rng, shared.memory[at : at + 64])
        shared.memory[at : at + 64] = head[:64]
    else:
        shared.words[slab.REQUESTS] += rng.choice((0, 0, 1, 300, 2**40))
    shared.post_request(slab.RequestSlot(*struct.unpack("<5Q", place)))
    with contextlib.suppress(OSError):  # the server may have closed it
        channel.socket.send(b"\0" * rng.choice((1, 1, 100)))


def change_bytes(rng: random.Random, data: bytes) -> bytes:
    return rng.choice((flip, oversize))(rng, data)


def fuzz_connections(
    address: str,
    seeds: Sequence[bytes],
    num: int,
    seed: int,
    change: Structured = change_bytes,
) -> None:
    """Send bytes over connections of their own; some stay open for a while."""
    rng, opened = random.Random(seed), list[socket.socket]()
    host, port = address.rpartition("//")[2].removesuffix("#book").split(":")
    for n in range(num):
        _, data = mutate(rng, seeds, change)
        one = socket.create_connection((host, int(port)), timeout=ASK_S)
        # Closed at once: the kernel keeps no port for what is still under way.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        try:
            one.sendall(data)
            if n % 4 == 0:
                one.settimeout(0.01)
                one.recv(100)
        except OSError:
            pass  # it was closed at the other end
        opened.append(one)
        while len(opened) > 20:
            opened.pop(rng.randrange(len(opened))).close()
    for one in opened:
        one.close()


def measure(address: str, ask: Sequence[bytes], folder: str) -> None:
    """Ask one request after the other until a file says so; print the latencies."""
    took, end = [], Path(folder) / "end"
    if address.startswith("http"):
        ask_once: Callable[[], float] = lambda: _get(address)  # noqa: E731
        close = lambda: None  # noqa: E731
    elif address.startswith("grpc"):
        channel = grpc.insecure_channel(address.removeprefix("grpc://"))
        ask_once, close = (lambda: _call(channel)), channel.close
    else:
        dealer = Dealer(address)
        ask_once, close = (lambda: dealer.ask(ask)), dealer.close
    took.append(ask_once())
    print("asking", flush=True)  # and connected
    while not end.exists():
        took.append(ask_once())
        time.sleep(0.002)
    close()
    print("latencies", msgspec.json.encode(took).decode(), flush=True)


def _get(address: str) -> float:
    began_s = time.perf_counter()
    while True:
        connection = http.client.HTTPConnection(
            address.removeprefix("http://"), timeout=ASK_S
        )
        connection.request("GET", "/healthz")
        status = connection.getresponse().status
        connection.close()
        if status != 503:  # as many requests as may be in progress
            return time.perf_counter() - began_s


def _call(channel: grpc.Channel) -> float:
    began_s = time.perf_counter()
    live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
    live(b"", timeout=ASK_S, wait_for_ready=True)
    return time.perf_counter() - began_s


LOOKUP = server_messages()[0]
HELLO = [Header(Kind.HELLO).encode(), b"null"]
FORWARD = worker_messages()[1]
GET = book_messages()[0]
GREETINGS = _greetings()
