"""A client that sends a server frames of its own making."""

import struct

from persia_torchrec.rpc.messages import Header, Kind, decode_json
from tests.support.servers import DEADLINE_S
from tests.support.sockets import member_socket


class Stranger:
    """A socket that sends a server what it likes."""

    def __init__(self, address):
        self.socket = member_socket()
        self.socket.connect(address)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close(linger=0)

    def ask(self, *frames):
        """Send frames; return the reply's header and what follows, decoded."""
        self.socket.send_multipart([bytes(frame) for frame in frames])
        return self.receive()

    def receive(self):
        """Return the next reply's header and what follows, decoded."""
        assert self.socket.poll(DEADLINE_S * 1000), "no answer"
        header, *body = self.socket.recv_multipart()
        header = Header.decode(header)
        if header.kind is Kind.ERROR:
            body = decode_json([b"", *body])
        return header, body


def one_segment(*ids, table=0):
    return struct.pack("<qq", table, len(ids)), struct.pack(f"<{len(ids)}Q", *ids)


GRADS = bytes(2 * 8)
