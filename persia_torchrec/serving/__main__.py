r"""Run an inference server.

    python -m persia_torchrec.serving --checkpoint runs/7 \
        --embedding-config embedding_config.yml --port 8080

It takes a dense TorchScript model, ``jit_dense.pt``, from the checkpoint's folder, and
the embeddings from the checkpoint, which it loads into servers of its own; with
``--workers`` it asks embedding workers for them instead, and with ``--workers-of-job``
those of the job that the environment names, whose member it then is. It prints ``ready
ADDRESS`` when it can predict, and ends by SIGTERM, or with its job, when the requests
under way are answered. See ``http_server.py`` for what it answers.
"""

import argparse
import contextlib
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from persia_torchrec import env
from persia_torchrec.config import load_embedding_config
from persia_torchrec.errors import ConfigError, PersiaError
from persia_torchrec.serving.http_server import HttpConfig, PredictionServer
from persia_torchrec.serving.local import embeddings_of_checkpoint
from persia_torchrec.serving.predictor import ModelFollower, Predictor, load_model
from persia_torchrec.serving.reader import SlotsReader
from persia_torchrec.wire.greeting import NO_JOB, Greeting
from persia_torchrec.wire.membership import JobMember
from persia_torchrec.wire.ports import tcp_address
from persia_torchrec.wire.signals import EndSignals, end_by_signals
from persia_torchrec.worker.remote import RemoteWorkers

logger = logging.getLogger("persia_torchrec.serving")

_WORKERS_TIMEOUT_S = 600.0


def main() -> int:
    """Run the server; return the process's exit status."""
    end_by_signals()
    arguments = _parser().parse_args()
    logging.basicConfig(
        level=env.log_level(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    ending = threading.Event()
    try:
        if arguments.workers_of_job:
            _serve_in_job(arguments, ending)
        else:
            signals = EndSignals(lambda _: ending.set())
            _serve(arguments, ending, arguments.workers, signals)
    except PersiaError as exc:
        logger.error("%s: %s", type(exc).__name__, exc)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m persia_torchrec.serving",
        description="Predict over HTTP, from a checkpoint.",
    )
    add = parser.add_argument
    add("--checkpoint", required=True, help="folder of a checkpoint, or its URL")
    add(
        "--model",
        default="jit_dense.pt",
        help="file in that folder: the dense model as TorchScript [jit_dense.pt]",
    )
    add("--embedding-config", type=Path, default=None, help="embedding_config.yml")
    add(
        "--workers",
        nargs="+",
        default=None,
        help="addresses of embedding workers that look rows up [servers of its own]",
    )
    add(
        "--workers-of-job",
        action="store_true",
        help="belong to a job, and ask its embedding workers; see --port",
    )
    add("--num-servers", type=int, default=1, help="how many servers of its own [1]")
    add(
        "--follow",
        default=None,
        metavar="DIR",
        help="the servers of its own follow what a training writes there; and as below",
    )
    add(
        "--follow-model",
        action="store_true",
        help="take the dense model of each checkpoint that is complete later",
    )
    _add_http(parser)
    return parser


def _add_http(parser: argparse.ArgumentParser) -> None:
    defaults = HttpConfig()
    add = parser.add_argument
    add("--host", default=defaults.host, help="address to listen on [127.0.0.1]")
    add(
        "--port",
        type=int,
        default=0,
        help="port to listen on; 0 takes a free one; in a job REPLICA_INDEX is added",
    )
    add(
        "--max-requests",
        type=int,
        default=defaults.max_requests,
        help=f"requests under way at once [{defaults.max_requests}]",
    )
    add(
        "--max-body-bytes",
        type=int,
        default=defaults.max_body_bytes,
        help=f"bytes that a batch may have [{defaults.max_body_bytes}]",
    )


def _serve_in_job(arguments: argparse.Namespace, ending: threading.Event) -> None:
    store = env.job_store()
    if store is None:
        raise ConfigError(
            "PERSIA_STORE_PORT must name the port of the job's address book, for "
            "--workers-of-job. Received: none. Start the job with torchx, which sets "
            "it."
        )
    index, size = env.get_replica_index(), env.get_replica_size()
    if arguments.port:
        arguments.port += index
    with JobMember.join("predictor", index, size, store=store) as member:
        member.call_at_end(ending.set)
        workers = member.book.addresses("worker", timeout_s=_WORKERS_TIMEOUT_S)
        # The member hears the signals, from here on.
        signals = contextlib.nullcontext()
        _serve(arguments, ending, workers, signals, member.book.greeting)


def _serve(
    arguments: argparse.Namespace,
    ending: threading.Event,
    workers: Sequence[str] | None,
    signals: contextlib.AbstractContextManager[object],
    greeting: Greeting = NO_JOB,
) -> None:
    config = HttpConfig(
        host=arguments.host,
        port=arguments.port,
        max_requests=arguments.max_requests,
        max_body_bytes=arguments.max_body_bytes,
    )
    device = torch.device("cpu")
    model, path = load_model(arguments.checkpoint, arguments.model, device)
    with (
        _reader(arguments, device, workers, greeting) as reader,
        contextlib.ExitStack() as stack,
    ):
        predictor = Predictor(reader, model, path)
        if arguments.follow_model or arguments.follow is not None:
            run, name = arguments.checkpoint, arguments.model
            stack.callback(ModelFollower(predictor, run, name, device).close)
        server = PredictionServer(predictor, config)
        logger.info("serving model=%s address=%s", path, server.address)
        stack.enter_context(signals)
        try:
            sys.stdout.write(f"ready {server.address}\n")
            sys.stdout.flush()
            ending.wait()
        finally:  # a member of a job is interrupted
            server.close()


@contextlib.contextmanager
def _reader(
    arguments: argparse.Namespace,
    device: torch.device,
    addresses: Sequence[str] | None,
    greeting: Greeting,
) -> Iterator[SlotsReader]:
    if addresses is None:
        path = arguments.embedding_config or env.embedding_config_path()
        if path is None:
            raise ConfigError(
                "--embedding-config, or PERSIA_EMBEDDING_CONFIG, is needed."
            )
        schema = load_embedding_config(path)
        num_servers = arguments.num_servers
        with embeddings_of_checkpoint(
            *(arguments.checkpoint, schema, device),
            num_servers=num_servers,
            incremental_dir=arguments.follow,
        ) as reader:
            yield reader
        return
    if arguments.follow is not None:
        raise ConfigError(
            "--follow is for servers of its own. Received: embedding workers too. "
            "Their servers follow by --incremental-dir, or by their global_config.yml; "
            "give --follow-model for the dense model."
        )
    workers = RemoteWorkers(list(map(tcp_address, addresses)), greeting=greeting)
    try:
        reader = SlotsReader(workers, device)
        reader.wait_until_ready(_WORKERS_TIMEOUT_S)
        yield reader
    finally:
        workers.close()


if __name__ == "__main__":
    sys.exit(main())
