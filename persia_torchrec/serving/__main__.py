r"""Run an inference server.

    python -m persia_torchrec.serving --checkpoint runs/7 \
        --embedding-config embedding_config.yml --port 8080
    python -m persia_torchrec.serving --models ranking=runs/7 ads=runs/8

It loads the embeddings into servers of its own, or asks embedding workers for them. It
prints ``ready ADDRESS`` when it can predict, and ends by SIGTERM, or with its job, when
the requests in progress are answered. See ``app.py`` for the requests.
"""

import contextlib
import gc
import logging
import math
import re
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from persia_torchrec import env, timeouts
from persia_torchrec.checkpoint.folder import Folder, require_received
from persia_torchrec.embedding.embedding_config import (
    EmbeddingSchema,
    load_embedding_config,
)
from persia_torchrec.errors import ConfigError
from persia_torchrec.job.lifetime import Lifetime, report_ready, run_service
from persia_torchrec.job.member import JobMember
from persia_torchrec.job.registry import SERVED_CHECKPOINT
from persia_torchrec.lookup.sharded_lookup import RowSource
from persia_torchrec.parsing.command_line import ImportFlags, parse_flags
from persia_torchrec.parsing.settings import declared
from persia_torchrec.persia.predict_requests import DECODERS
from persia_torchrec.persia.slots_reader import SlotsReader, open_slots
from persia_torchrec.persia.worker_client import RemoteWorkers
from persia_torchrec.rpc.addresses import tcp_address
from persia_torchrec.serving.batching import Batching
from persia_torchrec.serving.embeddings import (
    CollectionsReader,
    RowReader,
    host_checkpoint,
)
from persia_torchrec.serving.models import (
    Models,
    ServedModel,
    Version,
    following_checkpoints,
)
from persia_torchrec.serving.predictor import (
    SCRIPT_MODEL,
    DenseModel,
    Predictor,
    Trust,
    checkpoint_of,
    choose_device,
    find_model,
    following_model,
    load_model,
    newest_version,
)

try:
    from persia_torchrec.serving.http_server import HttpConfig, PredictionServer
except ModuleNotFoundError as exc:
    raise SystemExit(
        "An inference server needs Starlette and uvicorn. Received: "
        f"{exc}. Run: pip install 'persia-torchrec[serving]'"
    ) from exc

logger = logging.getLogger("persia_torchrec.serving")

_NAMED = re.compile("([^/=]+)=.+")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingFlags(ImportFlags):
    """Predict over HTTP, from a checkpoint."""

    checkpoint: str | None = declared("checkpoint", default=None)
    models: tuple[str, ...] = ()
    """NAME=FOLDER of each of several models, in place of ``--checkpoint`` and
    ``--model-name``; an embedding_config.yml in the folder is that of its model."""
    model: str | None = None
    """File in that folder: the dense model [jit_dense.pt, TorchScript, or else
    serving_model.pt, of ``export_for_serving``]"""
    factory: tuple[str, ...] = ()
    """module:function of each ``factory`` of ``export_for_serving`` whose models may be
    served; it is imported and called"""
    allow_torchscript: bool = declared("allow_torchscript")
    model_name: str = "model"
    """Name of the model in the paths of the Open Inference Protocol."""
    device: Literal["auto", "cpu", "cuda"] = declared("device")
    embedding_config: str | None = declared(
        "embedding_config",
        default_factory=env.embedding_config_path,
        also="It is of PERSIA's models",
    )
    workers: tuple[str, ...] = ()
    """Addresses of embedding workers that look rows up [servers of its own]"""
    workers_of_job: bool = False
    """Be a member of a job, and ask its embedding workers; then ``--port`` is that of
    replica 0, and the next replica has the next port."""
    num_servers: int = declared(
        "servers", also="1 without --increments-dir: the rows are in this process"
    )
    follow: str | None = declared(
        "increments_dir",
        default=None,
        previous=("follow",),
        also="It implies --follow-model",
    )
    follow_model: bool = declared(
        "follow_model",
        also="Without embedding workers, whose servers follow by "
        "themselves, of the rows, too",
    )
    patience_s: float = timeouts.AWAY_S
    """Seconds that a request waits for embedding workers, or their servers, that are
    away, as one that is started again."""
    lookup_timeout_s: float = timeouts.REQUEST_S
    """Seconds that embeddings have to answer a request."""
    default_answer: float | None = None
    """What is predicted for each sample while embeddings do not answer; the answer says
    that it is degraded [status 503]"""
    drain_s: float = 0.0
    """Seconds after SIGTERM in which it is not ready and takes requests, until no load
    balancer sends more; a second signal ends them."""
    batch_window_s: float | None = None
    """Predict batches of several requests together; the first one waits so long for
    others [each alone]"""
    batch_samples: int = field(default=4096, metadata={"needs": "batch_window_s"})
    """Samples that are predicted together."""
    metrics_port: int | None = declared("metrics_port", default=None)
    http: HttpConfig = field(default_factory=HttpConfig)

    def __post_init__(self) -> None:
        if (self.checkpoint is None) == (not self.models):
            raise ConfigError(
                "One of --checkpoint FOLDER and --models NAME=FOLDER must be given. "
                f"Received: {'both' if self.models else 'neither'}."
            )
        self._require_several()
        for name, least in (
            ("lookup_timeout_s", 0.001),
            ("batch_window_s", 0.0),
            ("batch_samples", 1),
            ("drain_s", 0.0),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value < math.inf:
                raise ConfigError(f"{name} must be >= {least:g}. Received: {value}.")

        if self.default_answer is not None and not math.isfinite(self.default_answer):
            raise ConfigError(
                f"default_answer must be finite. Received: {self.default_answer}."
            )

    def _require_several(self) -> None:
        """Check ``models``, or raise ConfigError."""
        names = [_NAMED.fullmatch(one) for one in self.models]
        found = {match[1] for match in names if match is not None}
        if len(found) != len(names):
            raise ConfigError(
                "models must be NAME=FOLDER each, of different names without '/'. "
                f"Received: {' '.join(self.models)}."
            )
        for flag, given in (
            ("--workers", self.workers),
            ("--workers-of-job", self.workers_of_job),
            ("--increments-dir", self.follow),
        ):
            if self.models and given:
                raise ConfigError(
                    f"{flag} cannot be combined with --models: its rows are of one "
                    "model. Serve that model by a process of its own."
                )

    def each(self) -> list["ServingFlags"]:
        """Return the flags of each model, as if it were the only one."""
        if not self.models:
            return [self]
        found = []
        for one in self.models:
            name, _, folder = one.partition("=")
            own = Path(folder) / "embedding_config.yml"
            config = str(own) if own.is_file() else self.embedding_config
            of_model = replace(self, models=(), model_name=name, checkpoint=folder)
            found.append(replace(of_model, embedding_config=config))
        return found

    @property
    def run(self) -> str:
        """The folder of the checkpoints of the one model."""
        assert self.checkpoint is not None, "it is one of each()"
        return self.checkpoint

    @property
    def trust(self) -> Trust:
        """What of a checkpoint may run."""
        return Trust(self.factory, self.allow_torchscript)

    def batching(self) -> Batching | None:
        """Return the settings of batching, or None."""
        if self.batch_window_s is None:
            return None
        return Batching(self.batch_window_s, self.batch_samples, self.lookup_timeout_s)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server; return the process's exit status."""
    prog = "python -m persia_torchrec.serving"

    def serve() -> None:
        flags = parse_flags(ServingFlags, argv, prog=prog)
        env.set_metrics_port(flags.metrics_port)
        _serve(flags)

    return run_service(logger.name, serve)


def _serve(flags: ServingFlags) -> None:
    ending = threading.Event()
    http, addresses = flags.http, flags.workers
    device = choose_device(
        flags.device, env.get_replica_index() if flags.workers_of_job else 0
    )
    life: JobMember | Lifetime
    with contextlib.ExitStack() as stack:
        if flags.workers_of_job:
            store = env.require_job_store("An inference server with --workers-of-job")
            index, size = env.get_replica_index(), env.get_replica_size()
            http = replace(http, port=http.port + index if http.port else 0)
            life = stack.enter_context(JobMember("predictor", index, size, store=store))
            life.call_at_end(ending.set)
            addresses = tuple(life.book.addresses("worker"))
        else:
            life = stack.enter_context(Lifetime())
            life.serve_metrics("predictor", env.get_replica_index(), "", http.address)
        models = _open_models(flags, device, addresses, life, stack)
        life.become_ready(partial(_why_not_ready, models))
        server = PredictionServer(models, http, DECODERS)
        stack.callback(server.close)
        if http.grpc_port is not None:
            _serve_grpc(models, http, stack)
        paths = ",".join(str(model.health().get("model")) for model in models)
        logger.info(
            "serving model=%s device=%s address=%s", paths, device, server.address
        )
        life.call_at_end(ending.set)
        gc.collect()
        gc.freeze()  # or each full collection walks through all of torch
        report_ready(server.address)
        ending.wait()
        models.drain()
        if flags.drain_s:
            logger.info("not ready, and serving drain_s=%g more", flags.drain_s)
            life.told_again.wait(flags.drain_s)


def _serve_grpc(models: Models, http: HttpConfig, stack: contextlib.ExitStack) -> None:
    # When it is imported, it reads how much to log, bytes of clients as they are.
    if env.text("GRPC_VERBOSITY") is None:
        env.set_variable("GRPC_VERBOSITY", "NONE")
    from persia_torchrec.serving.grpc_server import GrpcServer  # needs grpcio

    server = GrpcServer(models, http)
    stack.callback(server.close)
    logger.info("serving gRPC port=%d", server.port)


def _open_models(
    flags: ServingFlags,
    device: torch.device,
    addresses: Sequence[str],
    life: JobMember | Lifetime,
    stack: contextlib.ExitStack,
) -> Models:
    """Return the models to serve, which the end of ``stack`` closes."""
    models = Models()
    stack.callback(models.close)
    if life.endpoint is not None:
        life.endpoint.add_collector(models.statistics.registry)
        life.endpoint.hosts.add(flags.http.allowed_hosts)
    for one in flags.each():
        model = models.add(one.model_name, default_answer=one.default_answer)
        if addresses:
            _add_workers(one, device, addresses, life, model, stack)
        else:
            _add_checkpoint(one, device, model, stack)
    return models


def _why_not_ready(models: Models) -> str:
    """Return what a probe is told: why it cannot predict now, or ""."""
    health = models.health()
    return "" if health["ready"] else str(health["error"])


def _add_checkpoint(
    flags: ServingFlags,
    device: torch.device,
    served: ServedModel,
    stack: contextlib.ExitStack,
) -> None:
    """Serve the rows of a checkpoint by servers of its own."""
    run, name = flags.run, flags.model or find_model(flags.run)
    load = partial(load_model, name=name, device=device, trust=flags.trust)
    first = load(run)  # its errors come before servers are started
    schema = None if first.collections is not None else _read_slots(flags)

    def open_reader(model: DenseModel, source: RowSource) -> RowReader:
        if schema is not None:
            return open_slots(source, schema, device)
        return CollectionsReader(source, model.collections or (), device)

    def open_version(number: str | None) -> Version:
        # One folder for both halves, whatever becomes complete meanwhile.
        folder = checkpoint_of(run, number)
        model = load(folder.url if name in folder.names() else run)
        rows = run if number is None and flags.follow is not None else folder.url
        with contextlib.ExitStack() as opening:
            hosting = host_checkpoint(
                rows,
                partial(open_reader, model),
                num_servers=flags.num_servers,
                increments_dir=flags.follow,
                imports=flags.imports,
            )
            reader = opening.enter_context(hosting)
            reader.set_lookup_timeout(flags.lookup_timeout_s)
            predictor = Predictor(reader, model, flags.batching())
            return Version(predictor, opening.pop_all().close)

    served.open = open_version
    served.load()
    if flags.follow is not None:
        with served.using() as version:
            predictor = version.predictor
        stack.enter_context(following_model(predictor, run, name, trust=flags.trust))
    elif flags.follow_model:
        newest = partial(newest_version, run, name)
        stack.enter_context(following_checkpoints(served, newest))


def _read_slots(flags: ServingFlags) -> EmbeddingSchema:
    if flags.embedding_config is None:
        raise ConfigError("--embedding-config, or PERSIA_EMBEDDING_CONFIG, is needed.")
    return load_embedding_config(flags.embedding_config)


def _add_workers(
    flags: ServingFlags,
    device: torch.device,
    addresses: Sequence[str],
    life: JobMember | Lifetime,
    served: ServedModel,
    stack: contextlib.ExitStack,
) -> None:
    """Serve the rows that embedding workers look up."""
    if flags.follow is not None:
        raise ConfigError(
            "--increments-dir cannot be combined with embedding workers. "
            "Their servers follow by --increments-dir, or by their global_config.yml; "
            "give --follow-model for the dense model."
        )
    greeting = life.greeting
    if flags.workers:  # a list of the user's, which may be in any order
        greeting = greeting.of("embedding worker")
    workers = RemoteWorkers(list(map(tcp_address, addresses)), greeting=greeting)
    stack.callback(workers.close)
    reader = SlotsReader(workers, device, patience_s=flags.patience_s)
    reader.wait_until_ready(timeouts.READY_S)
    run = find_dense(flags, life.book.note(SERVED_CHECKPOINT))
    if flags.follow_model and reader.hello(of_any=True).is_fixed:
        raise _joins_two("one checkpoint")
    name = flags.model or find_model(run)
    model = load_model(run, name, device, flags.trust)
    if model.collections is not None:
        raise ConfigError(
            "Embedding workers must serve a model of PERSIA. Received: "
            f"{model.path}, of TorchRec. Serve it without --workers."
        )
    reader.set_lookup_timeout(flags.lookup_timeout_s)
    predictor = Predictor(reader, model, flags.batching())
    served.begin(Version(predictor))
    if flags.follow_model:
        stack.enter_context(following_model(predictor, run, name, trust=flags.trust))


def find_dense(flags: ServingFlags, served: str | None) -> str:
    """Return the folder of the dense model: that of the rows that a job serves.

    Raises:
        ConfigError: later models are wanted, without their rows.
    """
    if served is None:
        return flags.run
    if flags.follow_model:
        raise _joins_two(served)
    folder = Folder(require_received(served, [flags.run]))
    has_model = (flags.model or SCRIPT_MODEL) in folder.names()
    return served if has_model else flags.run


def _joins_two(served: str) -> ConfigError:
    return ConfigError(
        "With --follow-model, servers must follow the training "
        "(enable_incremental_update and incremental_dir in global_config.yml), or "
        f"answers would join two checkpoints. Received: servers that serve {served}."
    )


if __name__ == "__main__":
    sys.exit(main())
