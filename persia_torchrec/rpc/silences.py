"""Says for whom requests wait: servers that hang, or that wait for others themselves.

A request that has waited nearly ``SAY_S`` seconds makes the I/O thread ping its server:

    no answer     the server hangs, is cut off, or was never there
    an answer     the server says what the requests of this client wait for, such as the
                  trainers that have not reached a joint step

One line names all servers for which the same holds. The next one is due at twice the
seconds, and the end is a line, too. A reply to any request ends the wait for a server:
slow trainers are no silence. Steps that each wait for others are said once a minute.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from persia_torchrec import timeouts
from persia_torchrec.rpc.reply import Reply

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks for servers that do not answer
_PAUSE = 6  # times SAY_S after a line, until one says that the next wait is long


@dataclass(slots=True)
class Silence:
    """What is known of a server, by its name in logs.

    ``heard_s`` is when it replied to a request. A wait since ``since_s`` was said at
    ``line_s``, when it was ``said_s`` long; that is 0 when none was said. A ping was
    sent at ``pinged_s``, 0 for none; the server sent something at ``answered_s``, and
    said in the answer what it ``waits_for``. ``is_silent``: a line said that it does
    not answer; ``is_busy``: the last one said that it does, and lets a request wait.
    """

    name: str
    heard_s: float = 0.0
    since_s: float = 0.0
    said_s: float = 0.0
    line_s: float = -math.inf
    pinged_s: float = 0.0
    ping: int = 0
    answered_s: float = 0.0
    waits_for: str = ""
    is_silent: bool = False
    is_busy: bool = False

    def due_s(self, now_s: float) -> float:
        """Return the length of a wait that is said next."""
        is_next = self.is_busy and not self.said_s
        if is_next and now_s - self.line_s < _PAUSE * timeouts.SAY_S:
            return math.inf
        return max(timeouts.SAY_S, 2 * self.said_s)

    def has_ended(self, since_s: float) -> bool:
        """Forget a wait that was said and has ended; return whether to say so."""
        if not self.said_s or since_s <= self.since_s:
            return False
        self.said_s = self.pinged_s = 0.0
        return self.is_busy and self.heard_s > self.line_s

    def end(self) -> None:
        """Say that a server which was silent has sent something."""
        self.is_silent = False
        logger.warning("%s answers again", self.name)

    def note_answer(self, waits_for: str) -> None:
        """Note the answer to a ping: what this client's requests wait for."""
        self.ping, self.waits_for = 0, waits_for


class Silences:
    """The servers of one client, by their number; the I/O thread owns it.

    Attributes:
        servers: what is known of each. A caller's thread may set ``heard_s`` unless the
            server ``is_silent``: then the I/O thread says that it answers again.
        look_s: when to look for long waits again.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.look_s = 0.0
        self.servers = [Silence(name) for name in names]

    def look(self, now_s: float, oldest: Sequence[Reply | None]) -> list[int]:
        """Log which servers let their oldest request wait; return which to ping."""
        self.look_s, to_ping, ended = now_s + LOOK_S, [], []
        due: dict[tuple[bool, str], list[int]] = defaultdict(list)
        for server, one in enumerate(self.servers):
            reply = oldest[server]
            since_s = now_s if reply is None else max(one.heard_s, reply.begun_s)
            waited_s = now_s - since_s
            if one.has_ended(since_s):
                ended.append(server)
            due_s = one.due_s(now_s)
            if waited_s < due_s - LOOK_S or reply is None:
                continue
            if one.pinged_s <= since_s:  # not in this wait, or since its last line
                one.pinged_s, one.waits_for = now_s, ""
                to_ping.append(server)
            elif waited_s >= due_s:
                due[one.answered_s < one.pinged_s, one.waits_for].append(server)
                one.since_s, one.said_s = since_s, waited_s
                one.line_s, one.pinged_s = now_s, 0.0
        for (is_silent, waits_for), servers in due.items():
            reply = oldest[servers[0]]
            what = "" if reply is None else reply.what
            self._say(servers, what, waits_for, is_silent=is_silent)
        if ended:
            longest_s = max(s.heard_s - s.since_s for s in self._of(ended))
            logger.warning("replies after %.0f s from %s", longest_s, self._join(ended))
        return to_ping

    def _say(
        self, servers: Sequence[int], what: str, waits_for: str, *, is_silent: bool
    ) -> None:
        longest_s, names = max(s.said_s for s in self._of(servers)), self._join(servers)
        for one in self._of(servers):
            one.is_silent, one.is_busy = is_silent, not is_silent
        if is_silent:
            line = "no reply from %s for %.0f s; pending request: %s"
            logger.warning(line, names, longest_s, what)
            return
        logger.warning(
            "%s has been pending for %.0f s at %s, which answers%s",
            what,
            longest_s,
            names,
            f": {waits_for}" if waits_for else "",
        )

    def _of(self, servers: Sequence[int]) -> list[Silence]:
        return [self.servers[server] for server in servers]

    def _join(self, servers: Sequence[int]) -> str:
        return timeouts.some_of([one.name for one in self._of(servers)])
