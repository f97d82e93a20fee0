"""Random faults of a job that goes on, and what each screen says of them.

    status   its table, its first line and its exit code
    JSON     status --json, and /status.json of the page
    page     as a browser shows it, where chromium is installed: one look of ten
    metrics  persia_members and persia_problem_seconds

All must be as the journal of this test and /proc say, at the latest 5 s after a limit:
processes are stopped, killed, cut off, or hang in their main threads. No screen is
compared with another one.
"""

import contextlib
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from persia_torchrec.command import main
from persia_torchrec.job import supervisor
from persia_torchrec.job.status import STATES
from tests.support.faults import Relay
from tests.support.ports import draw_port
from tests.support.processes import DEADLINE_S, children_of
from tests.support.repository import ROOT

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

SILENT_S = STALLED_S = 4
LATE_S = 5.0  # after a limit: all screens agree
BACK_S = 20.0  # a process has started again, on a busy machine
SIZES = {"server": 2, "worker": 1, "trainer": 2}
ELSEWHERE = "worker 0", "trainer 1"  # as on another host: no end of it is known here
WRONG = "lost", "killed", "stalled"
LOOKS_OF_A_BROWSER = 10  # one of so many

COORDINATOR = f"""
import sys
from persia_torchrec import timeouts
from persia_torchrec.job import coordinator
timeouts.STALLED_S = {STALLED_S}
sys.exit(coordinator.main(sys.argv[1:]))
"""
MEMBER = """
import pathlib, sys, time
from persia_torchrec import processes
from persia_torchrec.job.member import JobMember
from persia_torchrec.logger import get_default_logger

get_default_logger()
role, index, size, port = sys.argv[1], *map(int, sys.argv[2:5])
if sys.argv[5:]:
    processes.process_table = lambda: "that of another host"
hang = pathlib.Path(f"hang-{role}-{index}")
num_steps = int(50 * time.monotonic())  # as one that continues beyond its last one
with JobMember(role, index, size, store=("127.0.0.1", port, "")) as member:
    member.progress = lambda: num_steps
    member.register(f"tcp://127.0.0.1:{port}")
    while not member.ended.is_set():
        num_steps += not hang.exists()
        time.sleep(0.02)
"""


@dataclass
class Watched:
    """A process of the job, as this test knows it."""

    role: str
    index: int
    supervisor: int
    relay: Relay
    hang: Path

    @property
    def who(self):
        return f"{self.role} {self.index}"

    def pid(self):
        """Return its number, which is that of a grandchild of its supervisor; or 0."""
        above = children_of(self.supervisor)
        below = [pid for one in above for pid in children_of(one)]
        return below[0] if below else 0

    def supervisors(self):
        return [self.supervisor, *children_of(self.supervisor)]

    def state(self):
        """Return what it must be, by /proc and by what this test has done to it."""
        pid = self.pid()
        if not pid:
            return "lost" if self.who in ELSEWHERE else "killed"
        if not self.relay.is_open.is_set():
            return "lost"
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if stat[0] in "Tt":
                return "lost"
        return "stalled" if self.hang.exists() else "running"


class Watcher:
    """A job, and all that says how it is."""

    def __init__(self, processes, monkeypatch):
        monkeypatch.setenv("XDG_STATE_HOME", str(processes.folder / "state"))
        first = draw_port()
        env = {"PERSIA_METRICS_PORT": str(first)}
        env["XDG_STATE_HOME"] = str(processes.folder / "state")
        self.port, self.url = draw_port(), f"http://127.0.0.1:{first}"
        flags = ["--port", str(self.port), "--silent-s", str(SILENT_S)]
        flags += ["--heartbeat-s", "0.1", "--linger-s", "0"]
        flags += [f"--num-{role}s={size}" for role, size in SIZES.items()]
        words = ["--host", "all", "--port", str(self.port), "--", sys.executable]
        self.coordinator = processes.start(
            *("coordinator", supervisor.main, [*words, "-c", COORDINATOR, *flags]),
            env=env,
        )
        self.coordinator.has_printed("is open at port")
        (processes.folder / "member.py").write_text(MEMBER)
        self.members = [
            self._start(processes, role, index)
            for role, size in SIZES.items()
            for index in range(size)
        ]
        self.num_looks = 0

    def _start(self, processes, role, index):
        relay = Relay(f"tcp://127.0.0.1:{self.port}")
        port = relay.address.rpartition(":")[2]
        place = [role, str(index), str(SIZES[role]), port]
        place += ["elsewhere"] if f"{role} {index}" in ELSEWHERE else []
        running = processes.start(
            *(f"{role}-{index}", supervisor.main),
            ["--", sys.executable, str(processes.folder / "member.py"), *place],
            env={"PYTHONPATH": str(ROOT)},
        )
        hang = processes.folder / f"hang-{role}-{index}"
        return Watched(role, index, running.pid, relay, hang)

    def close(self):
        for one in self.members:
            one.relay.close()

    def screens(self):
        """Return by screen the state of each process, and whether a hand is needed."""
        found = Screens()
        for name, text in (
            ("status --json", _command("status", "--json")[0]),
            ("/status.json", self._get("/status.json")),
        ):
            told = json.loads(text)
            states = {f"{m['role']} {m['index']}": m["state"] for m in told["members"]}
            wrong = {p["who"] for p in told["problems"] if p["is_wrong"]}
            found[name] = states, wrong
        text, code = _command("status")
        rows = re.findall(rf"(?m)^(\w+ \d) +({'|'.join(STATES)})\b", text)
        first = text.partition("\n")[0]
        found["status"] = dict(rows), set(re.findall(r"^\w+ \d+(?= )", first))
        found.exit_code = code
        metrics = self._get("/metrics")
        counted = re.findall(r'(?m)^persia_members\{.*state="(\w+)".*\} (\d+)', metrics)
        wrong = re.findall(r'(?m)^persia_problem_seconds\{.*member="(.*?)"', metrics)
        found["metrics"] = Counter({k: int(float(n)) for k, n in counted}), set(wrong)
        if self.num_looks % LOOKS_OF_A_BROWSER == 0 and shutil.which("chromium"):
            found["page"] = self._page()
        return found

    def _get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=DEADLINE_S) as answer:
            return answer.read().decode()

    def _page(self):
        """Return what a browser shows once the page has its first answer."""
        words = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu"]
        more = ["--virtual-time-budget=3000", "--dump-dom", self.url]
        text = subprocess.run(
            [*words, *more],
            capture_output=True,
            text=True,
            check=True,
            timeout=DEADLINE_S,
        ).stdout
        cell = r'<td class="text">(\w+ \d+)</td><td [^>]*data-name="state">(\w+)</td>'
        wrong = re.findall(r'<p class="bad">(\w+ \d+) ', text)
        return dict(re.findall(cell, text)), set(wrong)

    def kill_coordinator(self):
        """Kill the coordinator, which its supervisor starts again."""
        [inner] = children_of(self.coordinator.pid)
        [pid] = children_of(inner)
        os.kill(pid, signal.SIGKILL)
        for one in self.members:  # as the kernel does it
            one.relay.break_both_ends()

    def find_disagreement(self, *, all_run):
        """Return what a screen says otherwise than /proc and this test, or "".

        Of processes that are all to run, one that does not is a disagreement, too.
        """
        try:
            return self._find_disagreement(all_run)
        except (OSError, ValueError, http.client.HTTPException) as exc:
            return f"no answer: {exc!r}"

    def _find_disagreement(self, all_run):
        expected = {one.who: one.state() for one in self.members}
        wrong = {who for who, state in expected.items() if state in WRONG}
        if all_run and wrong:
            return f"{expected}, of which all are to run"
        screens, truth = self.screens(), {one.who: one.state() for one in self.members}
        if truth != expected:
            return f"{expected} has become {truth}"
        expected["coordinator 0"] = "running"
        for name, (states, told) in screens.items():
            is_first = name in ("status", "page")  # which may show one of several
            is_right = bool(told) == bool(wrong) and told <= wrong
            if name == "metrics":
                is_right &= +states == Counter(expected.values())
            else:
                is_right &= states == expected
            if not is_right or (not is_first and told != wrong):
                return f"{name}: {states}, {told}; expected {expected}, {wrong}"
        code = screens.exit_code
        return "" if code == bool(wrong) else f"exit code {code}, expected {wrong}"

    def agrees(self, within_s, what, *, all_run=True):
        """Look until all screens agree with the truth; return the seconds until then.

        The last look begins when the time is over: a browser may take seconds.
        """
        begun_s, passed_s = time.monotonic(), 0.0
        self.num_looks += 1
        while told := self.find_disagreement(all_run=all_run):
            assert passed_s < within_s, f"{what}: not within {within_s} s\n{told}"
            passed_s = time.monotonic() - begun_s
        return passed_s


class Screens(dict):
    """What the screens say: by name, states and who is wrong."""

    exit_code = 0


class Fault:
    """Something that a process suffers, from here to :meth:`end`."""

    def __init__(self, kind, victim):
        self.kind, self.victim, self.pid = kind, victim, victim.pid()
        if kind in ("stopped", "stopped for a moment"):
            os.kill(self.pid, signal.SIGSTOP)
        elif kind == "killed":
            for pid in victim.supervisors():  # else it is back at once
                os.kill(pid, signal.SIGSTOP)
            os.kill(self.pid, signal.SIGKILL)
        elif kind == "cut":
            victim.relay.is_open.clear()
        else:
            victim.hang.touch()

    def end(self, command):
        """End it; return whether the command that was printed has done it."""
        self.victim.hang.unlink(missing_ok=True)
        self.victim.relay.is_open.set()
        if self.kind == "killed":
            for pid in reversed(self.victim.supervisors()):
                os.kill(pid, signal.SIGCONT)
        kill = ["persia-torchrec", "kill", *self.victim.who.split()]
        if command[: len(kill)] == kill:
            result = CliRunner().invoke(main, command[1:])
            if self.victim.who not in ELSEWHERE:
                assert "is started again" in result.output, result.output
                return True
            assert f"kill -KILL {self.pid}\n" in result.output
        if self.kind.startswith("stopped"):
            os.kill(self.pid, signal.SIGCONT)
        return False


def _command(*words):
    """Return what the command prints, and its exit code."""
    result = CliRunner().invoke(main, words)
    assert not isinstance(result.exception, Exception), result.output
    return result.stdout, result.exit_code


def test_all_screens_say_what_processes_do(
    processes, monkeypatch, draw, kills, record_property
):
    num_faults, late_s = kills(200), []
    watcher = Watcher(processes, monkeypatch)
    with contextlib.closing(watcher), (processes.folder / "journal").open("w") as out:
        watcher.agrees(BACK_S + LATE_S, "the job begins")
        for number in range(num_faults):
            if draw.random() < 0.05:
                out.write(f"{time.time():.1f} {number}: the coordinator is killed\n")
                watcher.kill_coordinator()
                watcher.agrees(BACK_S + LATE_S, "the coordinator is back")
                continue
            victims = draw.sample(watcher.members, 2 if draw.random() < 0.25 else 1)
            faults = []
            for victim in victims:
                kinds = ["killed", "stopped", "stopped", "stopped for a moment"]
                kinds += ["cut"] * 2
                kinds += ["hung"] * 3 if victim.role == "trainer" else []
                faults.append(Fault(draw.choice(kinds), victim))
            told = ", ".join(f"{one.victim.who} is {one.kind}" for one in faults)
            out.write(f"{time.time():.1f} {number}: {told}\n")
            out.flush()
            for one in faults:
                if one.kind == "stopped for a moment":
                    time.sleep(0.3)
                    os.kill(one.pid, signal.SIGCONT)
            seconds = watcher.agrees(SILENT_S + LATE_S, told, all_run=False)
            late_s.append(seconds - SILENT_S)
            first, _, _ = _command("status")[0].partition("\n")
            _, _, command = first.partition(". Run: ")
            words = shlex.split(command) if draw.random() < 0.5 else []
            restarts = [one.end(words) for one in faults]
            is_back = any(restarts) or any(
                one.kind in ("killed", "cut") for one in faults
            )
            seconds = watcher.agrees(
                LATE_S + (BACK_S if is_back else 0.0), f"{told}; it is over"
            )
            out.write(f"{time.time():.1f} {number}: over after {seconds:.1f} s\n")
    measured = f"{max(late_s):.1f} s after the limit at most"
    record_property("measured", measured)
