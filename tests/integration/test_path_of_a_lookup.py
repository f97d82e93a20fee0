"""How many files and functions a batch passes on its way to its rows and back.

A warm training lookup (bags, on the CPU, one server, staleness 0) and its gradient run
under a profile function in every thread, the server's included. Counted is what runs
between the call of the model and its output, or between ``backward`` and its return;
of the server's thread from taking the request off the socket to handing the reply to
it, without what it does while it is idle, or while an update waits in its queue.

    file       one of ours in which a function ran
    hop        a function that called another of ours, or a compiled loop: it passes
               the batch on. A function that calls none of ours is a tool of its caller.
    hand-over  a change of the thread on the way out, in the trainer's process

Compiled loops are seen by wrappers in the modules that import them; what they call in
compiled code is a part of them. Names of a walk are printed (``pytest -s``).
"""

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import numba
import pytest
import torch
from torchrec import EmbeddingBagConfig

import persia_torchrec
from persia_torchrec import SGD, env
from tests.support.processes import wait_until
from tests.support.remote_job import Bags, RemoteJob, kjt_of

ROOT = Path(persia_torchrec.__file__).parent
TABLES = [
    EmbeddingBagConfig(10, 4, name="term", feature_names=["ad"]),
    EmbeddingBagConfig(10, 8, name="user", feature_names=["user"]),
]
# A server's thread is at the request between these; in between it waits in a queue.
BEGINS = {"Listener.take", "UpdateQueue.apply_oldest"}
ENDS = {"Listener.send", "UpdateQueue.add"}


class Function(NamedTuple):
    """One of ours; comprehensions are a part of theirs."""

    file: str
    name: str


class Call(NamedTuple):
    """A call, in a thread, by the nearest function of ours."""

    thread: str
    function: Function
    caller: Function | None
    is_compiled: bool = False


class Walk:
    """The calls of ours in all threads, while it is recorded."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.is_recording = False
        self._serving: set[str] = set()  # threads at a request
        self._functions: dict[CodeType, Function | None] = {}

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        """The profile function of each thread."""
        if not self.is_recording or event not in ("call", "return"):
            return
        function = self.function_of(frame.f_code)
        if function is None:
            return
        thread = threading.current_thread().name
        if event == "call":
            if function.name in BEGINS:
                self._serving.add(thread)
            self.note(Call(thread, function, self.caller_of(frame)))
        elif function.name in ENDS:
            self._serving.discard(thread)

    def note(self, call: Call) -> None:
        """Keep a call, unless it is an idle server's."""
        if not call.thread.startswith("server") or call.thread in self._serving:
            self.calls.append(call)

    def caller_of(self, frame: FrameType) -> Function | None:
        """Return the nearest other function of ours that waits for a frame's."""
        function, caller = self.function_of(frame.f_code), frame.f_back
        while caller is not None:
            found = self.function_of(caller.f_code)
            if found is not None and found != function:
                return found
            caller = caller.f_back
        return None

    def function_of(self, code: CodeType) -> Function | None:
        """Return which function of ours a code belongs to, if it does."""
        if code not in self._functions:
            path, name = Path(code.co_filename), code.co_qualname
            while name.endswith(("comp>", "<genexpr>")):
                name = name.rpartition(".<locals>.")[0]
            is_ours = path.is_relative_to(ROOT)
            function = Function(str(path.relative_to(ROOT)), name) if is_ours else None
            self._functions[code] = function
        return self._functions[code]

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record what happens in a block."""
        self.calls = []
        sys.setprofile(self.profile)
        self.is_recording = True
        try:
            yield
        finally:
            self.is_recording = False
            self._serving.clear()
            sys.setprofile(None)

    @property
    def files(self) -> set[str]:
        return {call.function.file for call in self.calls}

    @property
    def functions(self) -> set[Function]:
        return {call.function for call in self.calls}

    @property
    def hops(self) -> set[Function]:
        callers = {call.caller for call in self.calls if call.caller}
        return callers | {call.function for call in self.calls if call.is_compiled}

    def num_hand_overs(self) -> int:
        """Count the trainer's threads on the way out, but the first."""
        names = list(dict.fromkeys(call.thread for call in self.calls))
        return sum(not name.startswith("server") for name in names) - 1

    def print(self, title: str) -> None:
        hops, seen = self.hops, set()
        print(f"{title}: {len(self.files)} files, {len(hops)} hops of")
        print(f"  {len(self.functions)} functions, {self.num_hand_overs()} hand-overs")
        for call in self.calls:
            if call.function not in seen:
                seen.add(call.function)
                mark = "*" if call.function in hops else " "
                print(f"  {mark} {call.thread:28}", *call.function)


@pytest.fixture(scope="module", params=["tcp", "shm"])
def transport(request):
    with env.set_within({"PERSIA_TRANSPORT": request.param}):
        yield request.param


@pytest.fixture(scope="module")
def walks(transport):
    """Return the walks of a lookup and of its gradient."""
    walk = Walk()
    threading.setprofile(walk.profile)
    try:
        with RemoteJob(num_servers=1) as job, pytest.MonkeyPatch.context() as patch:
            model = job.put_on_servers(Bags(TABLES), SGD(0.1), staleness=0)
            connection = job.client._servers.connections[0]
            is_shared = transport == "shm"
            wait_until(
                lambda: (connection.memory is not None) == is_shared, "shared memory"
            )
            for _ in range(3):  # warm
                model(batch()).values().sum().backward()
            watch_compiled(walk, patch)
            for state in job.servers.servers[0].shard.store.states:
                watch_loops_of(walk, state, patch)
            lookups, gradients = [], []
            for _ in range(8):
                with walk.recorded():
                    output = model(batch()).values()
                lookups.append(walk.calls)
                loss = output.sum()
                with walk.recorded():
                    loss.backward()
                gradients.append(walk.calls)
            # In others the thread of the connections ends what was before them.
            lookup, gradient = map(shortest, (lookups, gradients))
    finally:
        threading.setprofile(None)
    lookup.print("lookup")
    gradient.print("gradient")
    assert torch.isfinite(loss)
    return lookup, gradient


def shortest(recorded):
    walks = [Walk() for _ in recorded]
    for walk, calls in zip(walks, recorded, strict=True):
        walk.calls = calls
    return min(walks, key=lambda walk: len(walk.hops))


def batch():
    return kjt_of({"ad": [[1, 2], [3]], "user": [[5], [6, 7]]})


def watch_compiled(walk: Walk, patch: pytest.MonkeyPatch) -> None:
    """Have the calls of compiled loops noted, which no profile function sees."""
    for name, module in list(sys.modules.items()):
        if name.startswith("persia_torchrec."):
            watch_loops_of(walk, module, patch)


def watch_loops_of(walk: Walk, owner: object, patch: pytest.MonkeyPatch) -> None:
    """Have the calls of the loops noted that are attributes of a module or object."""
    for attribute, loop in list(vars(owner).items()):
        if isinstance(loop, numba.core.dispatcher.Dispatcher):
            patch.setattr(owner, attribute, watched(walk, loop))


def watched(walk: Walk, loop):
    function = walk.function_of(loop.py_func.__code__)

    def call(*args):
        if walk.is_recording:
            caller = walk.caller_of(sys._getframe(0))
            thread = threading.current_thread().name
            walk.note(Call(thread, function, caller, is_compiled=True))
        return loop(*args)

    return call


# Two files keep requests whole, and know those repeated; one copies by one thread.
# Three functions repeat what a server has lost, one has blocks; three ask before they
# wait, so that an index is built meanwhile; routes, copies and replies are of all
# tables, and a table is asked for what its kind does. Gradients leave a device on
# their way. Samples are counted, the step is timed, updates have a histogram. Shared
# memory has a channel beside TCP's, which both ends look into. torch.fx takes a module
# for a leaf by the module's own forward.


def test_a_lookup_passes_few_files_and_functions(walks, transport):
    walk, _ = walks
    hand_overs, files, hops = {"tcp": (2, 33, 67), "shm": (1, 35, 78)}[transport]
    assert walk.num_hand_overs() == hand_overs
    assert len(walk.files) <= files
    assert len(walk.hops) <= hops


def test_a_gradient_passes_few_files_and_functions(walks, transport):
    _, walk = walks
    files, hops = {"tcp": (35, 65), "shm": (37, 81)}[transport]
    assert walk.num_hand_overs() <= 2
    assert len(walk.files) <= files
    assert len(walk.hops) <= hops


SECTION = "## A batch, to its rows and back\n"
THREADS = {
    "The trainer's thread": "MainThread",
    "A pulling thread": "training pulls 0",
    "The pushing thread": "pushes",
    "The I/O thread": "embedding server connections",
    "The server's thread": "server 0",
}


def files_on_the_page(title):
    """Return the files of each thread of one part of the walk, in their order."""
    page = (ROOT.parent / "docs/internals.md").read_text()
    section = page.split(SECTION)[1].split("\n## ")[0]
    assert len(section.split()) <= 1200
    part = section.split(f"### {title}\n")[1].split("\n### ")[0]
    paragraphs = re.findall(r"\*\*(.+?)\*\*(.*?)(?=\n\n|\Z)", part, re.DOTALL)
    return {
        THREADS[who]: list(dict.fromkeys(re.findall(r"`([a-z_/]+\.py)`", text)))
        for who, text in paragraphs
    }


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
@pytest.mark.parametrize("title", ["Lookup", "Gradient"])
def test_the_page_names_the_files_of_a_batch_in_their_order(walks, title):
    walk = walks[["Lookup", "Gradient"].index(title)]
    expected = files_on_the_page(title)
    found = {thread: [] for thread in expected}
    for call in walk.calls:
        if call.function.file not in found[call.thread]:
            found[call.thread].append(call.function.file)
    polls = "embedding server connections"  # in any order, as messages come
    for of_threads in (expected, found):
        of_threads[polls].sort()
    for thread, files in expected.items():
        assert found[thread] == files, thread
