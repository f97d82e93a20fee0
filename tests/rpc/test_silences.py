import contextlib
import logging
from itertools import pairwise

import pytest

from persia_torchrec import timeouts
from persia_torchrec.rpc import silences
from persia_torchrec.rpc.connections import Connections
from persia_torchrec.rpc.listener import Listener
from persia_torchrec.rpc.messages import Header, Kind
from persia_torchrec.rpc.reply import Reply
from persia_torchrec.rpc.silences import Silences
from tests.support.processes import wait_until
from tests.support.servers import DEADLINE_S

NAMES = "embedding server 0 at a", "embedding server 1 at b"


class Waits:
    """Requests to two servers, looked at as time passes."""

    def __init__(self, caplog):
        self.silences = Silences(NAMES)
        self.now_s, self.oldest = 1000.0, [None] * len(NAMES)
        self._log = caplog

    def hears(self, server, now_s):
        """Note a message, as a client does."""
        known = self.silences.servers[server]
        known.answered_s = now_s
        if known.is_silent:
            known.end()

    def ask(self, *servers):
        for server in servers:
            self.oldest[server] = Reply(900, "update of table 'item'")
            self.oldest[server].begun_s = self.now_s

    def passes(self, seconds, *, answers=(), waits_for=""):
        """Let time pass; return the lines, and by when they were written."""
        lines, stop_s = [], self.now_s + seconds
        while self.now_s < stop_s:
            self.now_s += 1
            self._log.clear()
            for server in self.silences.look(self.now_s, self.oldest):
                if server in answers:
                    self.hears(server, self.now_s + 0.1)
                    self.silences.servers[server].note_answer(waits_for)
            lines += [(self.now_s - 1000, text) for text in self._log.messages]
        return lines

    def reply(self, *servers):
        self._log.clear()
        for server in servers:
            self.hears(server, self.now_s)
            self.silences.servers[server].heard_s = self.now_s
            self.oldest[server] = None
        return self._log.messages


@pytest.fixture
def waits(caplog):
    caplog.set_level(logging.WARNING)
    return Waits(caplog)


def test_servers_that_do_not_answer_are_named_at_twice_the_seconds(waits):
    waits.ask(0, 1)
    rest = "; pending request: update of table 'item'"
    both = ", ".join(NAMES)
    assert waits.passes(100) == [
        (10, f"no reply from {both} for 10 s{rest}"),
        (20, f"no reply from {both} for 20 s{rest}"),
        (40, f"no reply from {both} for 40 s{rest}"),
        (80, f"no reply from {both} for 80 s{rest}"),
    ]
    assert waits.reply(0, 1) == [f"{name} answers again" for name in NAMES]
    assert waits.passes(100) == []


def test_what_a_server_that_answers_waits_for_is_said_once_for_all(waits):
    waits.ask(0, 1)
    missing = "step 3 waits for the gradients of rank 1"
    lines = waits.passes(39, answers=(0, 1), waits_for=missing)
    what, both = "update of table 'item'", ", ".join(NAMES)
    assert lines == [
        (10, f"{what} has been pending for 10 s at {both}, which answers: {missing}"),
        (20, f"{what} has been pending for 20 s at {both}, which answers: {missing}"),
    ]
    assert waits.reply(0, 1) == []
    assert waits.passes(10) == [(40, f"replies after 39 s from {both}")]


def test_of_two_servers_the_one_that_hangs_is_told_from_the_one_that_answers(waits):
    waits.ask(0, 1)
    lines = waits.passes(15, answers=(1,))
    assert [text[:30] for _, text in lines] == [
        "no reply from embedding server",
        "update of table 'item' has bee",
    ]
    assert "server 0 at a for" in lines[0][1]
    assert lines[1][1].endswith("embedding server 1 at b, which answers")


def test_replies_that_come_in_between_are_no_silence(waits):
    for _ in range(20):
        waits.ask(0)
        assert waits.passes(9) == []
        assert waits.reply(0) == []


def test_waits_that_follow_one_another_are_said_once_a_minute(waits):
    times = []
    for _ in range(20):
        waits.ask(0)
        lines = waits.passes(12, answers=(0,))
        times += [when for when, text in lines if "pending" in text]
        waits.reply(0)
    assert len(times) == 4
    assert all(later - earlier >= 60 for earlier, later in pairwise(times))


def test_a_failed_request_is_no_answer(waits):
    waits.ask(0)
    assert len(waits.passes(12)) == 1
    waits.oldest[0] = None
    assert waits.passes(100) == []
    waits.ask(0)
    assert waits.reply(0) == ["embedding server 0 at a answers again"]


@pytest.mark.parametrize("recovery_s", [0.0, DEADLINE_S])
def test_a_listener_says_what_a_peer_waits_for(recovery_s, monkeypatch, caplog):
    monkeypatch.setattr(timeouts, "SAY_S", 0.05)
    monkeypatch.setattr(silences, "LOOK_S", 0.05)
    with contextlib.ExitStack() as stack:
        listener = Listener("127.0.0.1", 0)
        stack.callback(listener.close)
        listener.waits_for = lambda peer: f"a client of {len(peer)} bytes waits"
        connections = Connections("server", [listener.address], recovery_s=recovery_s)
        stack.callback(connections.close)
        reply = connections[0].send(
            Header(Kind.WRITE), [b""], timeout_s=DEADLINE_S, what="writing"
        )
        taken = []

        def is_said():
            if message := listener.receive(5):
                taken.append(message)
            return "writing has been pending for " in caplog.text

        wait_until(is_said, "the wait is said")
        assert "which answers: a client of" in caplog.text
        [(peer, header, _)] = taken
        listener.send(peer, Header(Kind.REPLY, header.request))
        assert reply.frames()
        wait_until(lambda: "replies after " in caplog.text, "its end is said")


def test_an_address_where_no_server_listens_is_named(monkeypatch, caplog):
    monkeypatch.setattr(timeouts, "SAY_S", 0.05)
    monkeypatch.setattr(silences, "LOOK_S", 0.05)
    connections = Connections("server", ["tcp://127.0.0.1:1"])
    with contextlib.closing(connections):
        connections[0].send(
            Header(Kind.HELLO), [b""], timeout_s=DEADLINE_S, what="connecting"
        )
        said = "no reply from server 0 at tcp://127.0.0.1:1 for "
        wait_until(lambda: said in caplog.text, "it is named")
