"""The endpoint that a user would write: rows in the process, one dict a feature.

    python -m benchmarks.bare_endpoint FOLDER [--numbers]

It answers the requests of ``benchmarks serving`` and checks nothing. ``FOLDER`` has the
rows, ``rows.npy``, float32 ``(features, rows, D)`` of the ids from 1 on, and the dense
model, ``model.pt``. With ``--numbers`` an id is a row number, which no model of users
has: what remains without a search for rows.
"""

import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_LENGTH = "inference-header-content-length"


class Endpoint:
    """Predicts, one request at a time."""

    def __init__(self, folder: Path, *, by_number: bool) -> None:
        self._rows = torch.from_numpy(np.load(folder / "rows.npy"))
        load: Any = torch.jit.load  # torch leaves it untyped
        self._model = load(str(folder / "model.pt"))
        ids = range(1, self._rows.shape[1] + 1)
        self._row_of = [
            {} if by_number else {id_: id_ - 1 for id_ in ids} for _ in self._rows
        ]
        self._by_number = by_number

    async def predict(self, request: Request) -> Response:
        """Answer with the predictions, float32."""
        body = await request.body()
        size = int(request.headers[_LENGTH])
        head = msgspec.json.decode(body[:size])
        data = memoryview(body)[size:]
        dense, slots = list[torch.Tensor](), list[torch.Tensor]()
        for one in head["inputs"]:
            num_bytes = one["parameters"]["binary_data_size"]
            piece, data = data[:num_bytes], data[num_bytes:]
            if one["datatype"] == "FP32":
                array = np.frombuffer(bytearray(piece), np.float32).reshape(
                    one["shape"]
                )
                dense.append(torch.from_numpy(array))
                continue
            ids, rows = np.frombuffer(piece, np.uint64), self._rows[len(slots)]
            if self._by_number:
                index = ids.astype(np.int64) - 1
            else:
                row_of = self._row_of[len(slots)]
                index = np.array([row_of[id_] for id_ in ids.tolist()])
            slots.append(rows[torch.from_numpy(index)])
        with torch.inference_mode():
            output = self._model(dense, slots).numpy()
        return Response(output.tobytes(), media_type="application/octet-stream")


def main(folder: str, *flags: str) -> None:
    """Serve on a port that is printed, until the process is ended."""
    endpoint = Endpoint(Path(folder), by_number="--numbers" in flags)
    path = "/v2/models/model/infer"
    app = Starlette(routes=[Route(path, endpoint.predict, methods=["POST"])])
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    sys.stdout.write(f"{listening.getsockname()[1]}\n")
    sys.stdout.flush()
    settings = uvicorn.Config(app, lifespan="off", log_level="critical")
    uvicorn.Server(settings).run(sockets=[listening])


if __name__ == "__main__":
    main(*sys.argv[1:])
