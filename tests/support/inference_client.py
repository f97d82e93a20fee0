"""Asks an inference server of this process: a pair of its HTTP and its gRPC server."""

import json
import urllib.error
import urllib.request

import grpc

from persia_torchrec.serving.grpc_server import MESSAGES
from tests.support.processes import DEADLINE_S


def ask(server, path, value=None, **headers):
    """Return status, headers and body of an answer."""
    body = value if isinstance(value, bytes | None) else json.dumps(value).encode()
    request = urllib.request.Request(server[0].address + path, body, headers)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def call(server, method, *, metadata=(), **fields):
    """Return the answer of gRPC to a method, of a request with these fields."""
    address = f"127.0.0.1:{server[1].port}"
    with grpc.insecure_channel(address) as channel:
        ask_for = channel.unary_unary(
            f"/inference.GRPCInferenceService/{method}",
            MESSAGES[f"{method}Request"].SerializeToString,
            MESSAGES[f"{method}Response"].FromString,
        )
        request = MESSAGES[f"{method}Request"](**fields)
        return ask_for(request, timeout=DEADLINE_S, metadata=metadata)
