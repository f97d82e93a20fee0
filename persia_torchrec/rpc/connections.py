"""The connections of a client to other processes of a job: one thread drives them all.

A request ends in a reply, in an error, at its deadline, or as soon as the connection is
lost; until the server is back, requests fail at once. What has failed is not sent
later. Requests to a server that was never reached wait: it may start yet.

Where servers are started again, with ``recovery_s``, a request outlives its connection:

    lost --> away: a new socket --connected--> HELLO --same incarnation--> all requests
                       ^      without a reply are sent again in their order, then others
                       '--- NotReadyError: it is asked again

The server recognises what it had applied before; see ``server/dedup.py``.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import zmq

from persia_torchrec.errors import ConfigError, ServerError
from persia_torchrec.rpc import addresses as hosts
from persia_torchrec.rpc.connection import Connection
from persia_torchrec.rpc.greeting import NO_JOB, Greeting
from persia_torchrec.rpc.own_process import OwnProcess
from persia_torchrec.rpc.silences import Silences
from persia_torchrec.rpc.sockets import IoLoop

logger = logging.getLogger(__name__)

_IDLE_POLL_MS = 200


class Connections(OwnProcess):
    """Connections to several servers, by their number. Any thread may call any method.

    ``role`` is what the servers are called in errors, as ``"embedding server"``, with
    their numbers from ``first`` on. They must belong to the job of the greeting, or to
    none. Each connection proves the job's token to the one that it means: of this role
    and number, or what the greeting names. With ``encrypts`` it is encrypted then, see
    ``auth.py``. A server that was lost may be away for ``recovery_s`` seconds; if it is
    back without what it had, ``when_restarted`` is called in the I/O thread, which must
    not wait.
    """

    def __init__(
        self,
        role: str,
        addresses: Sequence[str],
        *,
        greeting: Greeting = NO_JOB,
        recovery_s: float = 0.0,
        when_restarted: Callable[[int], None] = lambda _: None,
        encrypts: bool = False,
        first: int = 0,
    ) -> None:
        if not addresses:
            raise ConfigError(f"At least one address of an {role} is needed.")
        if not hosts.has_descriptors():
            raise ServerError(hosts.no_descriptors(), server="")
        whom = [f"{role} {n}" for n in range(first, first + len(addresses))]
        self.names = [f"{w} at {a}" for w, a in zip(whom, addresses, strict=True)]
        self.is_closed = False
        self._loop, self._silences = IoLoop(), Silences(self.names)
        self._all: list[Connection] = []
        for number, address in enumerate(addresses):
            try:
                connection = Connection(
                    self._silences.servers[number],
                    address,
                    greeting.of(greeting.who or whom[number]),
                    self._loop,
                    recovery_s=recovery_s,
                    encrypts=encrypts,
                )
            except zmq.ZMQError as exc:
                self._end("")
                if exc.errno in hosts.NO_DESCRIPTORS:
                    raise ServerError(hosts.no_descriptors(), server="") from exc
                raise ConfigError(
                    "An address must look like 'tcp://host:port'. "
                    f"Received: {address!r} ({exc})."
                ) from exc
            connection.when_restarted = partial(when_restarted, number)
            self._all.append(connection)
        self._thread = threading.Thread(
            target=self._run, name=f"{role} connections", daemon=True
        )
        self._thread.start()

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, server: int) -> Connection:
        return self._all[server]

    def __iter__(self) -> Iterator[Connection]:
        return iter(self._all)

    def close(self) -> None:
        """Close all connections; pending requests fail. May be called twice."""
        self.abandon()
        self._thread.join(timeout=5)

    def abandon(self) -> None:
        """Have all closed, without a wait: finalizers call it, in any thread."""
        if self._pid == os.getpid():  # else the pipe is that of the parent
            self.is_closed = True
            self._loop.wakeup.wake()

    def _run(self) -> None:
        """Be the I/O thread."""
        reason = "the connections were closed."
        try:
            while not self.is_closed:
                self._loop.poll(self._look())
        except Exception as exc:  # handed to all callers that wait
            logger.exception("the I/O thread of %s died", self.names)
            reason = f"the I/O thread died ({exc!r})."
        finally:
            self._end(reason)

    def _end(self, reason: str) -> None:
        self.is_closed = True
        for connection in self._all:
            connection.end(reason)
        self._loop.wakeup.close()

    def _look(self) -> int:
        """Do what is due; return how many ms to wait at most."""
        now_s = time.monotonic()
        if now_s >= self._silences.look_s:
            for server in self._silences.look(now_s, [c.oldest() for c in self._all]):
                self._all[server].ping()
        due_s = min(connection.look(now_s) for connection in self._all)
        return max(math.ceil(min(1000 * (due_s - now_s), _IDLE_POLL_MS)), 0)
