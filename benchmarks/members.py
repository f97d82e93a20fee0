"""What do the members of a job cost its coordinator, and how late is silence noticed?

A coordinator of its own process has a job's token, so that its connections are
encrypted. Members are sockets of this process, each with a connection of its own, as if
they were of other hosts: they register, and send heartbeats when the coordinator's
answer to the last one says so. Then one of them falls silent, and the job fails.
"""

import heapq
import secrets
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any
from unittest.mock import patch

import msgspec
import zmq
from msgspec import structs

from benchmarks.harness import Benchmark, Settings, Table, cpu_seconds
from benchmarks.reference import require
from persia_torchrec import env
from persia_torchrec.errors import JobError, StoreError
from persia_torchrec.job.process_identity import ProcessIdentity
from persia_torchrec.job.requests import Beat, Register, Request, View
from persia_torchrec.rpc import auth
from persia_torchrec.rpc.addresses import (
    LOOPBACK,
    free_port,
    join_address,
    raise_descriptor_limit,
)
from persia_torchrec.rpc.greeting import Greeting
from persia_torchrec.rpc.messages import Header, Kind, decode_json
from persia_torchrec.rpc.sockets import open_socket

_JOB_ID = "members"
_ANSWER_MS = 60_000
_STEP_S = 0.05


@dataclass(frozen=True, kw_only=True)
class MemberSettings(Settings):
    """What to measure."""

    members: Annotated[tuple[int, ...], "members of a job"] = (8, 64, 512, 2048)
    seconds: Annotated[float, "of heartbeats in each job"] = 20.0
    heartbeat_s: Annotated[float, "between two heartbeats, at least"] = 1.0
    silent_s: Annotated[float, "after which a member counts as dead"] = 20.0


class _Member:
    """A trainer of another host, with a socket of its own."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", index: int) -> None:
        options = auth.client_options(env.job_token(), encrypts=True)
        options |= {zmq.ROUTING_ID: Greeting(_JOB_ID).encode(), zmq.LINGER: 0}
        self._socket = open_socket(zmq.DEALER, options, context)
        own = ProcessIdentity.of_this_process()
        self._own = structs.replace(own, process_table=f"host {index}")
        self.index = index
        self._num_sent = self._num_answers = 0

    def join(self, address: str) -> None:
        """Connect and register."""
        self._socket.connect(address)
        self._send(Register("trainer", self.index, self._own))
        require("A place", received=self._receive(str), expected=self._own.nonce)

    def beat(self) -> None:
        """Send a heartbeat."""
        self._send(Beat("trainer", self.index, self._own.nonce, self._num_sent))

    def next_beat_s(self) -> float:
        """Return when the next heartbeat is due, as the answer to the last one says."""
        view: View = self._receive(View)
        require("The job", received=view.outcome, expected="running")
        return view.next_beat_s

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _send(self, request: Request) -> None:
        self._num_sent += 1
        header = Header(Kind.BOOK, self._num_sent)
        self._socket.send_multipart([header.encode(), msgspec.json.encode(request)])

    def _receive(self, kind: type) -> Any:
        while self._socket.poll(_ANSWER_MS):
            frames = self._socket.recv_multipart()
            header = Header.decode(frames[0])
            if header.request:  # else it only looks whether there is a connection
                require("An answer", received=header.kind, expected=Kind.REPLY)
                return decode_json(frames, kind)
        raise JobError(f"The coordinator must answer within {_ANSWER_MS} ms.")


class _Job:
    """A coordinator in a process of its own, and so many members."""

    def __init__(self, settings: MemberSettings, num: int, stack: ExitStack) -> None:
        self._silent_s = settings.silent_s
        address = join_address(LOOPBACK, port := free_port(LOOPBACK))
        flags: dict[str, float] = {
            "port": port,
            "num-trainers": num,
            "linger-s": 0,
            "grace-s": 1,
        }
        flags |= {"heartbeat-s": settings.heartbeat_s, "silent-s": settings.silent_s}
        words = [f"--{name}={value}" for name, value in flags.items()]
        self._process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", "persia_torchrec.job.coordinator", *words],
                stderr=subprocess.PIPE,
                text=True,
                env=env.of_child({"PERSIA_JOB_ID": _JOB_ID}),
            )
        )
        stack.callback(self._process.kill)
        self.pid = self._process.pid
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(context.term)
        context.set(zmq.MAX_SOCKETS, 2 * num + 16)
        self._members = [_Member(context, index) for index in range(num)]
        self._due: list[tuple[float, int]] = []
        for member in self._members:
            stack.callback(member.close)
            member.join(f"tcp://{address}")
            member.beat()
            due_s = time.monotonic() + settings.heartbeat_s * member.index / num
            heapq.heappush(self._due, (due_s, member.index))
            self.send_until(time.monotonic())

    def send_until(self, end_s: float, silent: int = -1) -> int:
        """Send the heartbeats that are due until then; return how many."""
        num = 0
        while self._due and self._due[0][0] <= end_s:
            due_s, index = heapq.heappop(self._due)
            time.sleep(max(due_s - time.monotonic(), 0.0))
            if index == silent:
                continue
            next_s = due_s + self._members[index].next_beat_s()
            self._members[index].beat()
            heapq.heappush(self._due, (next_s, index))
            num += 1
        time.sleep(max(end_s - time.monotonic(), 0.0))
        return num

    def fall_silent(self) -> float:
        """Have a member fall silent; return after how many limits that is noticed."""
        while self._due[0][1] != len(self._members) - 1:
            self.send_until(self._due[0][0])
        self.send_until(self._due[0][0])
        since_s, heard_s = time.monotonic(), list[float]()
        reader = threading.Thread(target=self._read, args=(heard_s,), daemon=True)
        reader.start()
        while not heard_s and time.monotonic() < since_s + 3 * self._silent_s:
            try:
                self.send_until(time.monotonic() + _STEP_S, len(self._members) - 1)
            except StoreError:  # the job has failed
                reader.join(_ANSWER_MS / 1000)
        if not heard_s:
            raise JobError("The coordinator must notice that a member is silent.")
        return (heard_s[0] - since_s) / self._silent_s

    def _read(self, heard_s: list[float]) -> None:
        assert self._process.stderr is not None
        lines = iter(self._process.stderr)
        if any("the job has failed" in line for line in lines):
            heard_s.append(time.monotonic())
            deque(lines, maxlen=0)  # so that none is waited for


def measure(settings: MemberSettings) -> Table:
    """Run one job after the other."""
    rows = []
    raise_descriptor_limit()
    with patch.dict("os.environ"):  # which has a token for a while
        if env.job_token() is None:
            env.set_variable("PERSIA_JOB_TOKEN", secrets.token_hex(32))
        for num in settings.members:
            with ExitStack() as stack:
                job = _Job(settings, num, stack)
                job.send_until(time.monotonic() + settings.seconds / 2)  # it settles
                start_s, cpu_s = time.monotonic(), cpu_seconds(job.pid)
                beats = job.send_until(start_s + settings.seconds)
                took_s = time.monotonic() - start_s
                share = (cpu_seconds(job.pid) - cpu_s) / took_s
                late = job.fall_silent()
                rows.append([num, beats / took_s, 100 * share, late])
    question = "What do members cost the coordinator?"
    header = "members | heartbeats/s | % of a core | silence noticed after x its limit"
    return Table("members", question, header, rows)


BENCHMARK = Benchmark(
    name="members",
    normal=MemberSettings(),
    tiny=MemberSettings(members=(3,), seconds=0.5, heartbeat_s=0.1, silent_s=0.5),
    figures={"members": lambda settings: [measure(settings)]},
)
