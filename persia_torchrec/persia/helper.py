"""PERSIA's helper for tests: a whole job around a block, as child processes.

with PersiaServiceCtx(data_loader_func=send, embedding_config=slots):
    with TrainCtx(...) as ctx:           # the trainer is this process
        for batch in DataLoader(StreamingDataset()): ...
"""

import contextlib
import secrets
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import FunctionType
from typing import Any, Self

from persia_torchrec import env
from persia_torchrec.embedding.embedding_config import load_embedding_config
from persia_torchrec.errors import ConfigError, JobError
from persia_torchrec.job.children import Children, Watch, Work
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.job.script import PROXY
from persia_torchrec.parsing.command_line import format_flags
from persia_torchrec.parsing.decoding import require_at_least_1
from persia_torchrec.persia import feed
from persia_torchrec.persia.global_config import (
    load_global_config,
    reject_inference,
)
from persia_torchrec.persia.utils import dump_yaml
from persia_torchrec.rpc.addresses import LOOPBACK, reserved_port_from
from persia_torchrec.rpc.greeting import Greeting

Config = Mapping[str, object]

_DEFAULT_GLOBAL_CONFIG: Config = {
    "embedding_worker_config": {"forward_buffer_size": 1000},
    "common_config": {"metrics_config": {"enable_metrics": False}},
}


class PersiaServiceCtx:
    """Start a job's processes on this machine for a block, and end them with it.

    Within the block the environment names the job. Leaving it ends the job, and waits
    for given NN workers first. A process that fails ends all, interrupts the block (of
    the main thread only), and is named in the error that the block raises.

    A function runs in a process that imports its module again, as multiprocessing's
    "spawn" does. So it must be at the top of a module, and a script needs the line
    ``if __name__ == "__main__":`` in front of what it does itself.

    Args:
        data_loader_func: what each data loader does; None: there are none.
        nn_worker_func: what each NN worker does; None: the block itself trains.
        embedding_config: content of ``embedding_config.yml``; or
        embedding_config_path: its path. One of the two is needed.
        global_config: content of ``global_config.yml``; or
        global_config_path: its path; without both, PERSIA's defaults.
        data_loader_replica_num: number of data loaders.
        nproc_per_node: number of NN workers.
        embedding_worker_replica_num: number of embedding workers.
        embedding_parameter_replica_num: number of embedding servers.
        embedding_worker_port: the workers take the first free ports from here on.
        embedding_parameter_server_port: and the servers from here on.
        nats_server_port: and the coordinator from here on.
        timeout_s: how long leaving the block may wait for the NN workers.
    """

    def __init__(
        self,
        data_loader_func: Work | None = None,
        nn_worker_func: Work | None = None,
        embedding_config: Config | None = None,
        embedding_config_path: str | Path | None = None,
        global_config: Config | None = None,
        global_config_path: str | Path | None = None,
        data_loader_replica_num: int = 1,
        nproc_per_node: int = 1,
        embedding_worker_replica_num: int = 1,
        embedding_parameter_replica_num: int = 1,
        embedding_worker_port: int = 7777,
        embedding_parameter_server_port: int = 8888,
        nats_server_port: int = 4222,
        *,
        timeout_s: float = 600.0,
    ) -> None:
        if timeout_s <= 0:
            raise ConfigError(f"timeout_s must be > 0. Received: {timeout_s}.")
        if global_config is None and global_config_path is None:
            global_config = _DEFAULT_GLOBAL_CONFIG
        configs = {
            "embedding_config": (embedding_config, embedding_config_path),
            "global_config": (global_config, global_config_path),
        }
        self._configs = {name: _choose(name, *of) for name, of in configs.items()}
        self._work = {
            "loader": _check_work("data_loader_func", data_loader_func),
            "trainer": _check_work("nn_worker_func", nn_worker_func),
        }
        counts = {
            ("loader", "data_loader_replica_num"): data_loader_replica_num,
            ("trainer", "nproc_per_node"): nproc_per_node,
            ("worker", "embedding_worker_replica_num"): embedding_worker_replica_num,
            ("server", "embedding_parameter_replica_num"): (
                embedding_parameter_replica_num
            ),
        }
        for (role, name), count in counts.items():
            require_at_least_1(**{name: count})
            if count > 1 and self._work.get(role, role) is None:
                raise ConfigError(
                    f"{name} must be 1 where no function is given for that role. "
                    f"Received: {count}."
                )
        self._counts = {role: count for (role, _), count in counts.items()}
        self._ports = {
            "worker": embedding_worker_port,
            "server": embedding_parameter_server_port,
            "coordinator": nats_server_port,
        }
        self._timeout_s = timeout_s

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            port = stack.enter_context(reserved_port_from(self._ports["coordinator"]))
            stack.enter_context(env.set_within(self._variables(folder, port)))
            self._children = Children()
            stack.callback(self._children.end)
            self._start_services(port, stack)
            book = AddressBook.join(
                LOOPBACK,
                port,
                env.job_id(),
                look=self._children.require_none_failed,
            )
            stack.callback(book.close)
            for role, work in self._work.items():
                if work is not None:
                    for index in range(self._counts[role]):
                        self._children.start_work(role, index, self._counts[role], work)
                elif role == "trainer":
                    self._children.start_module(
                        "proxy trainer", "job.script", "trainer", PROXY
                    )
            self._watch = Watch(book, self._children)
            stack.callback(self._watch.stop)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        exc = exc_info[1]
        with self._stack:
            failure = self._watch.disarm()
            if exc is None and failure is None:
                feed.end_all()
                self._children.finish()
                status = self._children.wait_for_coordinator(self._timeout_s)
                failure = self._watch.stop() or f"the coordinator's status is {status}"
                if status == 0 or self._watch.is_finished:  # the job's verdict
                    failure = None
            if failure is not None:
                raise JobError(f"The job failed: {failure}") from exc

    def _variables(self, folder: Path, port: int) -> dict[str, str]:
        """Write the job's files; return the variables that name the job."""
        paths = []
        for name, config in self._configs.items():
            path = config if isinstance(config, Path) else folder / f"{name}.yml"
            if path is not config:
                dump_yaml(config, path)
            paths.append(str(path.absolute()))
        load_embedding_config(paths[0], warns=False)
        load_global_config(paths[1], warns=False)
        reject_inference("PersiaServiceCtx", paths[1])
        return {
            "PERSIA_JOB_ID": Greeting.draw().job_id,
            "PERSIA_STORE_PORT": str(port),
            "PERSIA_STORE_HOST": LOOPBACK,
            "PERSIA_JOB_TOKEN": env.job_token() or secrets.token_hex(32),
            "PERSIA_MEMBER": str(port),  # a context of the block makes it none
            "PERSIA_EMBEDDING_CONFIG": paths[0],
            "PERSIA_GLOBAL_CONFIG": paths[1],
        }

    def _start_services(self, port: int, stack: contextlib.ExitStack) -> None:
        counts, has_loaders = self._counts, self._work["loader"] is not None
        flags = format_flags(
            port=port,
            linger_s=0,
            heartbeat_s=0.2,
            trainers=counts["trainer"],
            data_loaders=counts["loader"] if has_loaders else 0,
            embedding_workers=counts["worker"],
            servers=counts["server"],
        )
        self._children.start_module("coordinator", "job.coordinator", *flags)
        replica_flags = (
            ("server", "shard", "num_shards"),
            ("worker", "index", "num_workers"),
        )
        for role, own, all_ in replica_flags:
            for index in range(counts[role]):
                free = stack.enter_context(reserved_port_from(self._ports[role]))
                flags = format_flags(**{own: index, all_: counts[role]}, port=free)
                self._children.start_module(f"{role} {index}", role, *flags)


ensure_persia_service = PersiaServiceCtx
"""PERSIA's other name for it."""


def _choose(
    name: str, content: Config | None, path: str | Path | None
) -> Config | Path:
    if (content is None) == (path is None):
        both = "both" if content is not None else "neither"
        raise ConfigError(
            f"{name}, or {name}_path, must be given, one of them. Received: {both}."
        )
    if path is not None:
        return Path(path)
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"{name} must be a mapping, as the file's content. Received: {content!r}. "
            f"The path of a file is {name}_path."
        )
    return dict(content)


def _check_work(name: str, work: Work | None) -> Work | None:
    if isinstance(work, str | Path):
        if not Path(work).is_file():
            raise ConfigError(
                f"{name} must be a function, or the path of a script. "
                f"Received: {str(work)!r}, and there is no such file."
            )
        return Path(work)
    module = sys.modules.get(getattr(work, "__module__", ""))
    qualname = getattr(work, "__qualname__", "")
    is_at_top = getattr(module, qualname, None) is work
    if work is not None and not (isinstance(work, FunctionType) and is_at_top):
        raise ConfigError(
            f"{name} must be a function at the top of a module, which its process "
            f"imports. Received: {work!r}. Move it there, or give the path of a script."
        )
    return work
