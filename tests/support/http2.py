"""Frames of HTTP/2 (RFC 9113), as a client of gRPC sends them, or as none does."""


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return a frame of HTTP/2."""
    head = len(payload).to_bytes(3, "big") + bytes([kind & 255, flags & 255])
    return head + (stream & 0xFFFFFFFF).to_bytes(4, "big") + payload


def _field(name: str, value: str) -> bytes:
    """Return a field of a header that no table has (RFC 7541, 6.2.2)."""
    parts = (bytes([len(one)]) + one.encode() for one in (name, value))
    return b"\0" + b"".join(parts)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"")


def headers_of(method: str, encoding: str = "identity") -> bytes:
    """Return the headers of a request of gRPC, whose message is to follow."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/inference.GRPCInferenceService/{method}",
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
        "grpc-encoding": encoding,
    }
    return frame(1, 4, 1, b"".join(_field(*one) for one in fields.items()))
