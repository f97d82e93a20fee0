"""Embedding servers and workers of ``job_type: Infer``, as processes of a test."""

import sys
from collections.abc import Sequence
from pathlib import Path

from persia_torchrec.job import supervisor
from persia_torchrec.lookup.pooling import warm_up as warm_up_worker
from persia_torchrec.persia.worker import __main__ as worker
from persia_torchrec.rpc import float_codec
from persia_torchrec.server import __main__ as server
from persia_torchrec.store.warm_up import warm_up as warm_up_store
from tests.support.faults import kill
from tests.support.ports import draw_port, draw_ports
from tests.support.processes import Processes, Running, children_of, wait_until
from tests.support.repository import ROOT


def run_server(*arguments):
    sys.argv = ["server", *arguments]
    return server.main()


def run_worker(*arguments):
    sys.argv = ["worker", *arguments]
    return worker.main()


def run_supervised(module, port, *arguments):
    """Be the supervisor of a role, which listens on its socket."""
    flags = ["--port", str(port), "--memory-dir", "private"]
    command = [sys.executable, "-m", f"persia_torchrec.{module}", *arguments]
    return supervisor.main([*flags, "--", *command])


def kill_below(running):
    """Kill the process that a supervisor has started."""
    (inner,) = children_of(running.pid)
    (command,) = children_of(inner)
    kill(command)


def comes_back(running):
    """Wait until a process that was killed once serves again."""
    wait_until(
        lambda: running.output().count("ready ") == 2,
        f"{running.log.stem} is back",
        details=running.output,
    )


class InferenceJob:
    """Starts roles by one ``global_config.yml``, which this writes."""

    def __init__(
        self,
        processes: Processes,
        checkpoint: Path,
        embedding_config: Path,
        *,
        num_servers: int = 1,
        capacity: int = 1000,
        increments_dir: Path | None = None,
    ) -> None:
        warm_up_store()  # a process of its own would compile for longer than one waits
        warm_up_worker()
        float_codec.warm_up()
        self.processes = processes
        self.ports = draw_ports(num_servers)
        self.embedding_config = embedding_config
        self.path = processes.folder / "global_config.yml"
        following = ""
        if increments_dir is not None:
            following = (
                "  enable_incremental_update: true\n"
                f"  incremental_dir: {increments_dir}\n"
            )
        self.path.write_text(
            self.text([f"127.0.0.1:{port}" for port in self.ports], checkpoint)
            + f"embedding_parameter_server_config:\n  capacity: {capacity}\n"
            + following
        )

    @staticmethod
    def text(servers: Sequence[str], checkpoint: Path | str) -> str:
        return (
            "common_config:\n"
            "  job_type: Infer\n"
            "  infer_config:\n"
            f"    servers: {list(servers)}\n"
            f"    embedding_checkpoint: {checkpoint}\n"
        )

    def server(self, shard: int, *arguments: str) -> Running:
        return self.processes.start(
            f"server-{shard}",
            run_server,
            *("--shard", str(shard), "--num-shards", str(len(self.ports))),
            *("--global-config", str(self.path)),
            *arguments,
        )

    def worker(
        self, name: str = "worker", config: Path | None = None, port: int = 0
    ) -> Running:
        return self.processes.start(
            name,
            run_worker,
            *("--port", str(port)),
            *("--embedding-config", str(config or self.embedding_config)),
            *("--global-config", str(self.path)),
        )

    def supervised_server(self) -> Running:
        """Start the only server, with a supervisor."""
        own = ["--shard", "0", "--global-config", str(self.path)]
        return self._supervised("server", "server", self.ports[0], *own)

    def supervised_worker(self, index: int) -> Running:
        """Start a worker with a supervisor."""
        own = ["--embedding-config", str(self.embedding_config)]
        own += ["--global-config", str(self.path)]
        return self._supervised(f"worker {index}", "worker", draw_port(), *own)

    def _supervised(self, name: str, *own: object) -> Running:
        env = {"PYTHONPATH": str(ROOT)}
        return self.processes.start(name, run_supervised, *own, env=env)


def address_of(running: Running) -> str:
    """Return where a process serves, when it is ready."""
    running.has_printed("ready tcp://127.0.0.1:")
    return running.output().partition("ready ")[2].split()[0]
