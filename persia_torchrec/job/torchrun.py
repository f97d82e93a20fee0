"""Start the NN workers of one machine by torchrun's agent, which restarts them.

    python -m persia_torchrec.job.torchrun --nproc-per-node 2 -- train.py --epochs 2

Each NN worker is a ``job/script.py``. The agents of all machines meet in the address
book, see ``rendezvous.py``. No agent has files, which a cleaner of the temporary folder
would remove: NN workers write to its output, and report to the coordinator why they
fail.

    what ends          what follows
    an NN worker       its agent restarts those of its machine. The other agents notice,
                       and restart theirs
    an agent           its NN workers end. A supervisor starts the next agent, and the
                       others restart their NN workers with that
    the job, failed    the agent ends its NN workers, and itself
    a signal           the agent makes known that the job is told to end, so that NN
                       workers know what SIGTERM means. They have ``grace_s`` to save
"""

import contextlib
import logging
import math
import os
import secrets
import select
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from persia_torchrec import env
from persia_torchrec.errors import (
    ConfigError,
    FrameError,
    JobError,
    JobMismatchError,
    PersiaError,
)
from persia_torchrec.job import failures, process_identity
from persia_torchrec.job.member import tell_before_joining
from persia_torchrec.job.process_identity import Siblings
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.job.rendezvous import BACKEND, BookRendezvous
from persia_torchrec.job.script import require_script
from persia_torchrec.job.signals import END_SIGNALS, START_AGAIN, WARNINGS
from persia_torchrec.logger import get_default_logger
from persia_torchrec.parsing.command_line import parse_flags
from persia_torchrec.parsing.settings import declared
from persia_torchrec.rpc.addresses import local_address

logger = logging.getLogger("persia_torchrec.job.torchrun")  # also as __main__

_PROG = "python -m persia_torchrec.job.torchrun"
_MACHINE = "machine of NN workers"
_LOOK_S = 0.5
# torchrun kills an NN worker that does not end so soon. torch 2.11 has no such setting.
_HAS_SHUTDOWN = "shutdown_timeout" in LaunchConfig.__dataclass_fields__
_SHUTDOWN_S = 10 if _HAS_SHUTDOWN else 30
# They report NN workers that fail, and signals; members of the job do so themselves.
_REPEATING = ("multiprocessing.api", "multiprocessing.tail_log", "agent.server.api")


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentConfig:
    """Start the NN workers of one machine by torchrun."""

    nproc_per_node: int = declared("nproc_per_node")
    nnodes: int = field(default_factory=env.get_replica_size)
    """Machines with NN workers [REPLICA_SIZE]"""
    node_rank: int = field(default_factory=env.get_replica_index)
    """Index of this machine [REPLICA_INDEX]"""
    max_restarts: int = 3
    """How often torchrun starts them again; with a supervisor, until that does."""


class Agent:
    """torchrun's agent in this process. The main thread runs it; another watches."""

    def __init__(self, config: AgentConfig, book: AddressBook) -> None:
        self._config = config
        self._book = book
        address = local_address(book.host_name)
        # A single agent is the first one, whatever its machine's index is.
        rank = config.node_rank if config.nnodes > 1 else 0
        self._rendezvous = BookRendezvous(book, rank, config.nnodes, address)
        self._supervisor = process_identity.find_supervisor()
        self._is_over = threading.Event()
        self._failure = ""  # why the job has failed
        self._has_workers = self._is_ending = False  # of the main thread

    def run(self, script: Sequence[str]) -> int:
        """Run a script as NN workers until all have ended; return the exit status."""
        ends = [signal.Signals[n] for n in LaunchConfig.signals_to_handle.split(",")]
        # torchrun would handle also what a shell, or nohup, has ignored.
        ends = [n for n in ends if signal.getsignal(n) is not signal.SIG_IGN]
        for number in ends:
            signal.signal(number, self._end)
        for number in WARNINGS:
            signal.signal(number, lambda *_: None)  # the thread that watches reads it
        self._signals, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for name in _REPEATING:
            logging.getLogger(f"torch.distributed.elastic.{name}").setLevel("CRITICAL")
        self._set_variables()
        config = self._meet()
        config.signals_to_handle = ""  # it would raise for each, also while it waits
        process_identity.report_joined()
        threading.Thread(target=self._watch, name="job watch", daemon=True).start()
        status = self._launch(config, script)
        self._is_over.set()
        if self._failure:
            failures.tell_launcher(self._failure)
            return 1
        return status

    def _launch(self, config: LaunchConfig, script: Sequence[str]) -> int:
        self._has_workers = True
        try:
            launch = elastic_launch(config, sys.executable)
            launch("-m", "persia_torchrec.job.script", "trainer", *script)
        except SignalException as exc:
            name = signal.Signals(exc.sigval).name
            failures.tell_launcher(f"NN workers were told to end ({name}), and did")
            return 128 + exc.sigval
        except SystemExit as exc:
            return int(exc.code or 0)
        except ChildFailedError as exc:
            return self._status(f"{len(exc.failures)} NN workers have failed")
        except (RendezvousError, RuntimeError) as exc:  # of the store, if it is gone
            return self._status(f"torchrun has failed: {exc}")
        return 0

    def _end(self, number: int, _: object) -> None:
        """End the NN workers, for which the first signal waits; others are ignored.

        A scheduler signals all processes, and each supervisor passes it on.
        """
        if self._is_ending:
            return
        self._is_ending = True
        if not self._has_workers:
            raise SystemExit(128 + number)
        sent = signal.Signals(number)
        raise SignalException(f"{sent.name} ends the NN workers", sent)

    def _set_variables(self) -> None:
        if self._supervisor is None:
            env.set_variable("PERSIA_SUPERVISOR_PARENT", os.getppid())
        env.set_variable("PERSIA_SUPERVISOR", self._supervisor or "")
        env.set_variable("PERSIA_AGENT", os.getpid())
        if self._config.nproc_per_node > 1 and env.text("OMP_NUM_THREADS") is None:
            env.set_variable("OMP_NUM_THREADS", 1)  # as torchrun

    def _status(self, why: str) -> int:
        """Return the exit status after a failure: whether to be started again."""
        self._ask_for_failure()
        has_joined = self._book.member("trainer", 0).process is not None
        if self._failure or self._supervisor is None or not has_joined:
            logger.error("%s", why)
            return 1
        logger.warning("%s; restarting all NN workers", why)
        return START_AGAIN

    def _ask_for_failure(self) -> None:
        try:
            self._failure = self._rendezvous.look().reason
        except (JobError, FrameError) as exc:  # the coordinator has ended
            self._failure = str(exc)

    def _meet(self) -> LaunchConfig:
        """Return torchrun's settings; there is one agent for each machine."""
        config, book = self._config, self._book
        if config.nnodes > 1:
            book.claim_size(_MACHINE, config.node_rank, config.nnodes)
            own = secrets.token_hex(8)
            known = book.claim_note(f"{_MACHINE}/{config.node_rank}", own)
            if known != own and not env.num_restarts():
                raise JobMismatchError(
                    f"The NN workers of --node-rank {config.node_rank} must be started "
                    f"once in a job. Received: job {book.greeting.job_id!r}, at port "
                    f"{book.port}, has them already. {book.another_port()}"
                )
        save_s = math.ceil(book.timings().grace_s)
        ends: dict[str, Any] = (
            {"shutdown_timeout": _SHUTDOWN_S + save_s} if _HAS_SHUTDOWN else {}
        )
        return LaunchConfig(
            min_nodes=config.nnodes,
            max_nodes=config.nnodes,
            nproc_per_node=config.nproc_per_node,
            run_id=book.greeting.job_id,
            role="trainer",
            rdzv_backend=BACKEND,
            rdzv_configs={"handler": self._rendezvous},
            max_restarts=config.max_restarts,
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
            **ends,
        )

    def _watch(self) -> None:
        """End the agent with the job, and the job by a signal to the agent."""
        while not self._is_over.is_set():
            if select.select([self._signals], [], [], _LOOK_S)[0]:
                self._tell_to_end(os.read(self._signals, 64))
            self._ask_for_failure()
            if self._failure and not self._is_over.is_set():  # else its book is closed
                logger.info("ends itself by SIGTERM: %s", self._failure)
                os.kill(os.getpid(), signal.SIGTERM)
                if not self._is_over.wait(1.5 * _SHUTDOWN_S):
                    os._exit(1)
                return

    def _tell_to_end(self, numbers: bytes) -> None:
        heard = [number for number in END_SIGNALS if number in numbers]
        who = f"torchrun {self._config.node_rank}"
        with contextlib.suppress(JobError):  # the coordinator has ended
            for number in heard[:1]:
                self._book.tell_to_end(number.name, who)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the NN workers of one machine; return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    get_default_logger()
    try:
        config = parse_flags(AgentConfig, words[:end], prog=_PROG)
        if not words[end + 1 :]:
            raise ConfigError(f"{_PROG} must be given a script, after --.")
        store = env.require_job_store("An NN worker")
        try:
            require_script(words[end + 1 :])
        except ConfigError as exc:
            tell_before_joining(exc)  # NN workers tell the job
        book = AddressBook.join(*store, look=Siblings().require_coordinator)
        with contextlib.closing(book):
            return Agent(config, book).run(words[end + 1 :])
    except PersiaError as exc:
        logger.error("%s", exc)
        failures.tell_launcher(str(exc))
        return 1


if __name__ == "__main__":
    sys.exit(main())
