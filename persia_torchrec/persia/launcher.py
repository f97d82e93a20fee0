"""``persia-launcher``: PERSIA's command line, for jobs that are started by hand.

Its four commands and their flags, and a fifth where PERSIA starts nats-server; see
``docs/persia.md``. A command replaces itself by the process that it starts. Behind
``--`` stand a script's arguments, as in ``nn-worker train.py -- --epochs 2``; without a
FILE before it, ``-m MODULE`` or the script, and arguments.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn
from urllib.parse import urlsplit

from persia_torchrec import env
from persia_torchrec.embedding.embedding_config import load_embedding_config
from persia_torchrec.embedding.optimizer_engine import require_engine
from persia_torchrec.errors import ConfigError, PersiaError
from persia_torchrec.job.script import require_script, split_module
from persia_torchrec.job.supervisor import ALL, under_supervisor
from persia_torchrec.job.survivable_memory import PRIVATE
from persia_torchrec.parsing.command_line import (
    ImportFlags,
    add_flags,
    build,
    format_flags,
    present_flags,
)
from persia_torchrec.parsing.settings import SETTINGS, declared, require_used
from persia_torchrec.persia.global_config import (
    load_global_config,
    reject_inference,
)

_NATS_PORT = 4222
_EVERYWHERE = "", "0.0.0.0", "::"


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Replace this process by that of a role, or exit with a message."""
    try:
        words = list(sys.argv[1:] if argv is None else argv)
        end = words.index("--") if "--" in words else len(words)
        given = vars(parser().parse_args(_present(words[:end])))
        arguments = _arguments(given, words[end + 1 :])
        for name, (harmless, reason) in env.REJECTED.items():
            if (value := env.text(name)) not in (None, harmless):
                must = f"{name} must not be set. Received: {value!r}."
                raise ConfigError(f"{must} {reason}")
        _read_nats_url()
        if not (env.text("PERSIA_STORE_HOST") or env.text("PERSIA_STORE_HOST_ENV")):
            env.set_variable("PERSIA_STORE_HOST", "localhost")
        command = build(COMMANDS[given.pop("command")], given)
        require_used(command, given)
        if isinstance(command, NnWorker | DataLoader):
            require_script([command.file, *arguments])
        env.set_variable("PERSIA_JOIN_TIMEOUT_S", f"{command.join_timeout_s:g}")
        env.join_timeout_s()
        env.set_metrics_port(command.metrics_port)
        env.metrics_port()
        words = [sys.executable, *command.words(), *arguments]
    except PersiaError as exc:
        raise SystemExit(f"persia-launcher: {exc}") from exc
    if env.integer("PERSIA_LAUNCHER_VERBOSE", 0) > 0:
        sys.stderr.write(f"persia-launcher starts {shlex.join(words)}\n")
    sys.stderr.flush()
    os.execv(words[0], words)


def _present(words: list[str]) -> list[str]:
    """Return words with the present names of a command's flags."""
    kind = COMMANDS.get(words[0]) if words else None
    return words if kind is None else [words[0], *present_flags(words[1:], kind)]


def _arguments(given: dict[str, Any], words: list[str]) -> list[str]:
    """Return a script's arguments, of words behind ``--``; name it in what is given."""
    if words and given["command"] not in ("nn-worker", "data-loader"):
        raise ConfigError(
            "Words behind -- must be of a script, of nn-worker or data-loader. "
            f"Received: {shlex.join(words)!r} for {given['command']}."
        )
    if not words or "file" in given:
        return words
    split_module(words)  # or an error
    given["file"] = words[0]
    return words[1:]


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    about = "Start one process of a job."
    parser = argparse.ArgumentParser("persia-launcher", description=about)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, kind in COMMANDS.items():
        add_flags(commands.add_parser(name, help=kind.__doc__), kind)
    return parser


def _path(name: str, flag: str = "", **metadata: bool) -> Any:
    """Return a field of a command: a path that a flag gives, or else a variable."""
    variable = SETTINGS[name].variable

    def read() -> str:
        path = env.text(variable)
        if path is None:
            named = flag or "--" + name.replace("_", "-")
            must = f"{named}, or {variable}, must name the file."
            raise ConfigError(f"{must} Received: neither.")
        return path

    return declared(name, default_factory=read, **metadata)


@dataclass(frozen=True, kw_only=True)
class _Process:
    join_timeout_s: float = declared(
        "join_timeout_s", default_factory=env.join_timeout_s
    )
    metrics_port: int | None = declared("metrics_port", default=None)


@dataclass(frozen=True, kw_only=True)
class _Recovering:
    restarts: bool = field(default=False, metadata={"previous": ("recover",)})
    """Start the process again when it is killed."""

    def _command(self, words: list[str], **survives: object) -> list[str]:
        """Return a command line, with a supervisor if it shall be started again."""
        if not self.restarts:
            return words
        return under_supervisor([sys.executable, *words], **survives)


@dataclass(frozen=True, kw_only=True)
class NnWorker(_Process, _Recovering):
    """Train: run the user's script."""

    file: str = _path("nn_worker", "FILE", positional=True)
    nproc_per_node: int = declared("nproc_per_node")
    node_rank: int = 0
    """Index of this machine."""
    nnodes: int = 1
    """Machines with NN workers."""
    max_restarts: int = 3
    """How often all NN workers are started again when one fails. They continue from the
    last automatic checkpoint. With --restarts, without a trained batch in between."""

    def words(self) -> list[str]:
        """Return the command line of torchrun, which starts the scripts."""
        reject_inference("NN worker", env.global_config_path())
        if self.nproc_per_node < 1:
            raise ConfigError(
                f"--nproc-per-node must be >= 1. Received: {self.nproc_per_node}."
            )
        _require_index("--node-rank", self.node_rank, "--nnodes", self.nnodes)
        env.require_job_store("An NN worker")
        flags = format_flags(
            nproc_per_node=self.nproc_per_node,
            nnodes=self.nnodes,
            node_rank=self.node_rank,
            max_restarts=self.max_restarts,
        )
        words = ["-m", "persia_torchrec.job.torchrun", *flags, "--", self.file]
        return self._command(words, memory_dir=PRIVATE)


@dataclass(frozen=True, kw_only=True)
class _Replica(_Process):
    replica_index: int = 0
    """Index of this process among those of its role."""
    replica_size: int = 1
    """How many processes the role has."""

    def export(self) -> None:
        """Pass the index on to the process that is started, by the environment."""
        index, size = self.replica_index, self.replica_size
        _require_index("--replica-index", index, "--replica-size", size)
        env.set_variable("REPLICA_INDEX", index)
        env.set_variable("REPLICA_SIZE", size)


@dataclass(frozen=True, kw_only=True)
class DataLoader(_Replica, _Recovering):
    """Send the training data."""

    file: str = _path("data_loader", "FILE", positional=True)

    def words(self) -> list[str]:
        """Return the command line of the script."""
        reject_inference("data loader", env.global_config_path())
        env.require_job_store("A data loader")
        self.export()
        words = ["-m", "persia_torchrec.job.script", "loader", self.file]
        return self._command(words, memory_dir=PRIVATE)


@dataclass(frozen=True, kw_only=True)
class _Service(_Replica, ImportFlags, _Recovering):
    module: ClassVar[str]

    embedding_config: str = _path("embedding_config")
    global_config: str = _path("global_config")
    port: int = 8888
    """TCP port to listen on."""

    def words(self) -> list[str]:
        """Return the command line of a service, whose files are variables.

        A mistake in one of them is an error here, before anything waits for a job.
        """
        load_embedding_config(self.embedding_config, warns=False)
        infer = load_global_config(self.global_config, warns=False).common.infer
        if infer is None:
            or_inference = ", or give a global_config.yml with job_type: Infer"
            env.require_job_store("The role", or_inference)
        self.export()
        env.set_variable("PERSIA_EMBEDDING_CONFIG", self.embedding_config)
        env.set_variable("PERSIA_GLOBAL_CONFIG", self.global_config)
        flags = format_flags(port=self.port, import_=list(self.imports))
        return self._command(
            ["-m", self.module, *flags, *self.flags()],
            host=infer and infer.listen_host,
            port=self.port,
            memory_dir=self.memory(),
        )

    def flags(self) -> list[str]:
        """Return further flags of the process."""
        return []

    def memory(self) -> str:
        """Return where memory is that outlives the process."""
        return PRIVATE


@dataclass(frozen=True, kw_only=True)
class EmbeddingWorker(_Service):
    """Look up and update batches."""

    module = "persia_torchrec.worker"
    port: int = 8887


@dataclass(frozen=True, kw_only=True)
class EmbeddingParameterServer(_Service):
    """Hold the rows."""

    module = "persia_torchrec.server"
    memory_dir: str = declared("memory_dir")
    optimizer_engine: str | None = declared("optimizer_engine", default=None)

    def flags(self) -> list[str]:
        """Return the flag of the engine, if it is given; reject an unknown one."""
        if self.optimizer_engine is not None:
            require_engine(self.optimizer_engine)
        return format_flags(optimizer_engine=self.optimizer_engine)

    def memory(self) -> str:
        """Return the flag."""
        return self.memory_dir


@dataclass(frozen=True, kw_only=True)
class Coordinator(_Process, _Recovering):
    """Host the address book and end the job, as nats-server does for PERSIA."""

    port: int | None = declared(
        "port", default=None, help="TCP port of the job's address book"
    )
    embedding_parameter_servers: int | None = None
    """Processes of the role [what the first one says, by --replica-size]"""
    embedding_workers: int | None = None
    """Processes of the role [what the first one says]"""
    data_loaders: int | None = None
    """Processes of the role; 0 for none [what the first one says]"""
    nn_workers: int | None = None
    """Processes of the role [what the first one says]"""

    def words(self) -> list[str]:
        """Return the command line of the coordinator."""
        reject_inference("coordinator", env.global_config_path())
        port = self.port
        if port is None:
            port = env.require_job_store("The coordinator, without --port,").port
        if env.is_local_job():
            sys.stderr.write(
                "persia-launcher: the coordinator listens for this machine only. For a "
                "job on several, set PERSIA_STORE_HOST to its host, on all of them.\n"
            )
        counts = {
            "server": self.embedding_parameter_servers,
            "worker": self.embedding_workers,
            "loader": self.data_loaders,
            "trainer": self.nn_workers,
        }
        learn = [role for role, number in counts.items() if number is None]
        names = ("servers", "embedding_workers", "data_loaders", "trainers")
        given = dict(zip(names, counts.values(), strict=True))
        flags = format_flags(port=port, **given, learn=learn)
        words = ["-m", "persia_torchrec.job.coordinator", *flags]
        return self._command(words, host=ALL, port=port)


COMMANDS: dict[str, type[Any]] = {
    "nn-worker": NnWorker,
    "data-loader": DataLoader,
    "embedding-worker": EmbeddingWorker,
    "embedding-parameter-server": EmbeddingParameterServer,
    "coordinator": Coordinator,
}


def _read_nats_url() -> None:
    """Take the place of PERSIA's nats-server for the coordinator's, and say so."""
    url = env.text("PERSIA_NATS_URL")
    if url is None:
        return
    if env.text("PERSIA_STORE_PORT") is None:
        first, *_ = url.split(",")
        try:
            place = urlsplit(first if "://" in first else f"nats://{first}")
            host, port = place.hostname or "", place.port or _NATS_PORT
        except ValueError:
            raise ConfigError(
                "PERSIA_NATS_URL must be nats://HOST:PORT, where the coordinator is; "
                "or set PERSIA_STORE_PORT and PERSIA_STORE_HOST. Received: one "
                "whose host or port cannot be read."
            ) from None  # it may hold a password
        env.set_variable("PERSIA_STORE_PORT", port)
        if env.text("PERSIA_STORE_HOST") is None and host not in _EVERYWHERE:
            env.set_variable("PERSIA_STORE_HOST", host)
    store = env.job_store()
    assert store is not None
    sys.stderr.write(
        "persia-launcher: PERSIA_NATS_URL is set, but there is no NATS here: roles "
        f"meet at the coordinator at {store.host}:{store.port}. Start `persia-launcher "
        "coordinator` in the place of nats-server. PERSIA_STORE_PORT and "
        "PERSIA_STORE_HOST say where it is, in the place of this variable.\n"
    )


def _require_index(name: str, index: int, size_name: str, size: int) -> None:
    if not 0 <= index < size:
        raise ConfigError(
            f"{name} must be in [0, {size}), below {size_name}. Received: {index}."
        )


cli = main  # under PERSIA's name

if __name__ == "__main__":
    main()
