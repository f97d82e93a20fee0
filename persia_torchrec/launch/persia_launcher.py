"""``persia-launcher``: PERSIA's command line, for jobs that are started by hand.

Its four commands and their flags, one process a command, and a fifth where PERSIA
starts nats-server. A whole job on one machine::

    export PERSIA_STORE_PORT=29400
    export PERSIA_EMBEDDING_CONFIG=embedding_config.yml
    export PERSIA_GLOBAL_CONFIG=global_config.yml
    persia-launcher coordinator &
    persia-launcher embedding-parameter-server &
    persia-launcher embedding-worker &
    persia-launcher data-loader data_loader.py &
    persia-launcher nn-worker train.py

On several machines ``PERSIA_STORE_HOST`` names the coordinator's, for all of them. With
``PERSIA_JOB_ID`` in the environment, of the coordinator too, a process that comes to
another job's port is told so; without it, when it finds its place taken. The
coordinator must be told how many processes each role has: it ends the job when all NN
workers are done, or when one process of any role fails.

With ``job_type: Infer`` in ``global_config.yml`` the embedding servers and workers
belong to no job, and need no coordinator.

A command turns into the process that it starts, so that signals, exit status and
output are that process's own. Torchx starts the same processes, see ``components/``.
"""

import argparse
import os
import secrets
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from persia_torchrec import env
from persia_torchrec.config import (
    inference_settings,
    load_embedding_config,
    refuse_inference,
)
from persia_torchrec.errors import ConfigError, JobMismatchError, PersiaError
from persia_torchrec.wire.discovery import AddressBook
from persia_torchrec.wire.ports import LOOPBACK, free_port, local_address

_MEETING_TIMEOUT_S = 300.0
_MASTER = "nn-worker/master"
_MACHINE = "machine of NN workers"

Command = list[str]


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Turn into the process of a role.

    Raises:
        SystemExit: that cannot be; the message says why.
    """
    try:
        arguments = parser().parse_args(argv)
        env.reject_unsupported_variables()
        if not env.names_store_host():
            env.set_env("PERSIA_STORE_HOST", "localhost")
        build: Callable[[argparse.Namespace], Command] = arguments.build
        command = [sys.executable, *build(arguments)]
    except PersiaError as exc:
        raise SystemExit(f"persia-launcher: {exc}") from exc
    if env.is_launcher_verbose():
        sys.stderr.write(f"persia-launcher starts {shlex.join(command)}\n")
    sys.stderr.flush()
    os.execv(command[0], command)


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    parser = argparse.ArgumentParser(
        prog="persia-launcher", description="Start one process of a job."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_nn_worker(commands.add_parser("nn-worker", help="train: the user's script"))
    _add_data_loader(commands.add_parser("data-loader", help="send the training data"))
    _add_service(
        commands.add_parser("embedding-worker", help="look up and update batches"),
        port=8887,
        build=_embedding_worker,
    )
    _add_service(
        commands.add_parser("embedding-parameter-server", help="hold the rows"),
        port=8888,
        build=_embedding_parameter_server,
    )
    _add_coordinator(
        commands.add_parser("coordinator", help="what nats-server is to PERSIA")
    )
    return parser


def _add_nn_worker(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", nargs="?", help="the script [PERSIA_NN_WORKER_ENTRY]")
    add("--nproc-per-node", type=_count, default=1, help="NN workers a machine [1]")
    add("--node-rank", type=int, default=0, help="which machine this is [0]")
    add("--nnodes", type=_count, default=1, help="machines with NN workers [1]")
    parser.set_defaults(build=_nn_worker)


def _add_data_loader(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", help="the script [PERSIA_DATALOADER_ENTRY]")
    _add_replica(parser)
    parser.set_defaults(build=_data_loader)


def _add_service(
    parser: argparse.ArgumentParser,
    *,
    port: int,
    build: Callable[[argparse.Namespace], Command],
) -> None:
    add = parser.add_argument
    add("--port", type=int, default=port, help=f"TCP port to listen on [{port}]")
    add("--embedding-config", help="embedding_config.yml [PERSIA_EMBEDDING_CONFIG]")
    add("--global-config", help="global_config.yml [PERSIA_GLOBAL_CONFIG]")
    _add_replica(parser)
    parser.set_defaults(build=build)


def _add_replica(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--replica-index", type=int, default=0, help="which of its role this is [0]")
    add("--replica-size", type=_count, default=1, help="how many the role has [1]")


def _add_coordinator(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--port", type=int, default=None, help="TCP port [PERSIA_STORE_PORT]")
    for role in _ROLES:
        add(f"--{role}", type=int, default=1, help="processes of the role [1]")
    parser.set_defaults(build=_coordinator)


_ROLES = {
    "embedding-parameter-servers": "--num-servers",
    "embedding-workers": "--num-workers",
    "data-loaders": "--num-loaders",
    "nn-workers": "--num-trainers",
}
"""Flags of our coordinator's command, and what its module calls them."""


def _nn_worker(arguments: argparse.Namespace) -> Command:
    refuse_inference("NN worker", env.global_config_path())
    script = _script(arguments.file, env.nn_worker_entry(), "PERSIA_NN_WORKER_ENTRY")
    if not 0 <= arguments.node_rank < arguments.nnodes:
        raise ConfigError(
            f"--node-rank must be in [0, {arguments.nnodes}), below --nnodes. "
            f"Received: {arguments.node_rank}."
        )
    address, port = _meet(arguments.node_rank, arguments.nnodes)
    return [
        *("-m", "torch.distributed.run"),
        *("--nproc-per-node", str(arguments.nproc_per_node)),
        *("--nnodes", str(arguments.nnodes)),
        *("--node-rank", str(arguments.node_rank)),
        *("--master-addr", address, "--master-port", port),
        *("--module", "persia_torchrec.launch.script", "trainer", script),
    ]


def _meet(node: int, num_nodes: int) -> tuple[str, str]:
    """Return address and port at which torchrun's agents of all machines meet."""
    store = _job_store()
    if num_nodes == 1:
        return LOOPBACK, str(free_port())
    book = AddressBook.join(*store, timeout_s=_MEETING_TIMEOUT_S)
    _take_place(book, node, num_nodes)
    if node == 0:
        address = local_address(book.host_name)
        book.tell(_MASTER, f"{address} {free_port(address)}")
    (master,) = book.ask([_MASTER], timeout_s=_MEETING_TIMEOUT_S)
    book.close()
    address, _, port = master.rpartition(" ")
    return address, port


def _take_place(book: AddressBook, node: int, num_nodes: int) -> None:
    """Be the machine of that number; refuse a second one, of another job."""
    book.claim_size(_MACHINE, node, num_nodes)
    own = secrets.token_hex(8)
    if book.claim_note(f"{_MACHINE}/{node}", own) != own:
        raise JobMismatchError(
            f"The NN workers of --node-rank {node} must be started once in a job. "
            f"Received: job {book.greeting.job_id!r}, at port {book.port}, has them "
            f"already. {book.another_port()}"
        )


def _data_loader(arguments: argparse.Namespace) -> Command:
    refuse_inference("data loader", env.global_config_path())
    script = _script(arguments.file, env.data_loader_entry(), "PERSIA_DATALOADER_ENTRY")
    _job_store()
    _export_replica(arguments)
    return ["-m", "persia_torchrec.launch.script", "loader", script]


def _embedding_worker(arguments: argparse.Namespace) -> Command:
    embedding_config, global_config = _configs(arguments)
    _require_job_or_inference(global_config)
    _export_replica(arguments)
    return [
        *("-m", "persia_torchrec.worker", "--port", str(arguments.port)),
        *("--embedding-config", embedding_config, "--global-config", global_config),
    ]


def _embedding_parameter_server(arguments: argparse.Namespace) -> Command:
    embedding_config, global_config = _configs(arguments)
    _require_job_or_inference(global_config)
    _export_replica(arguments)
    # A server learns its tables from the trainers. What is wrong with the file is
    # said here all the same, as by PERSIA's server.
    load_embedding_config(embedding_config, warns=False)
    return [
        *("-m", "persia_torchrec.server", "--port", str(arguments.port)),
        *("--global-config", global_config),
    ]


def _coordinator(arguments: argparse.Namespace) -> Command:
    refuse_inference("coordinator", env.global_config_path())
    port = _job_store().port if arguments.port is None else arguments.port
    if env.is_local_job():
        sys.stderr.write(
            "persia-launcher: the coordinator listens for this machine only. For a "
            "job on several, set PERSIA_STORE_HOST to its host, on all of them.\n"
        )
    command = ["-m", "persia_torchrec.launch.coordinator", "--port", str(port)]
    for role, flag in _ROLES.items():
        command += [flag, str(getattr(arguments, role.replace("-", "_")))]
    return command


def _script(file: str | None, by_environment: str | None, variable: str) -> str:
    script = file or by_environment
    if script is None:
        raise ConfigError(
            f"FILE, or {variable}, must name the script to run. Received: neither."
        )
    return script


def _configs(arguments: argparse.Namespace) -> tuple[str, str]:
    by_environment = env.embedding_config_path(), env.global_config_path()
    return (
        _config(arguments.embedding_config or by_environment[0], "embedding-config"),
        _config(arguments.global_config or by_environment[1], "global-config"),
    )


def _config(path: str | None, what: str) -> str:
    if path is None:
        variable = f"PERSIA_{what.replace('-', '_').upper()}"
        raise ConfigError(
            f"--{what}, or {variable}, must name the file. Received: neither."
        )
    return path


def _export_replica(arguments: argparse.Namespace) -> None:
    index, size = arguments.replica_index, arguments.replica_size
    if not 0 <= index < size:
        raise ConfigError(
            f"--replica-index must be in [0, {size}), below --replica-size. "
            f"Received: {index}."
        )
    env.set_env("REPLICA_INDEX", index)
    env.set_env("REPLICA_SIZE", size)


def _require_job_or_inference(global_config: str) -> None:
    in_job = env.job_store() is not None
    if inference_settings(global_config, in_job=in_job) is None:
        _job_store()


def _job_store() -> env.JobStore:
    store = env.job_store()
    if store is None:
        raise ConfigError(
            "PERSIA_STORE_PORT must be set to the port of the job's coordinator, and "
            "PERSIA_STORE_HOST to its host unless all runs on this machine. "
            "Received: none. Start one with `persia-launcher coordinator`."
        )
    return store


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1. Received: {value}.")
    return value


if __name__ == "__main__":
    main()
