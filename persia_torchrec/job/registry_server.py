"""The coordinator's end of the address book: the keys, and what outlives the process.

A request is a message of kind BOOK with one JSON value:

    {"type": "get", "keys": [...]}                   answered by the values, or nulls
    {"type": "put", "key", "value"}                  answered by the value
    {"type": "swap", "key", "expected", "value"}     sets a key that holds ``expected``
                                                     (empty: that is not set); answered
                                                     by what it holds then
    {"type": "add", "key"}                           adds 1; answered by the number

All of them are idempotent but "add", whose numbers only have to grow. So a client whose
connection breaks sends its request again.

The connection that sets a ``member/`` key is that member's: the kernel closes it when
the process ends, and when its host stops to answer for ``SILENT_S``. A connection that
is not back within ``LOST_S`` is lost, until it is back.

A coordinator with a supervisor writes what is set to memory that outlives it, in lines
of JSON: ``["key", "value", "name of the member's connection"]``. The next one reads it,
and continues; of two lines of a key the later one holds. A key's last line is replaced
in its place where there is room, so that a number that changes every second takes no
more memory in a week than in an hour. Numbers of heartbeats are not written.
"""

import os
import re
import time

import msgspec

from persia_torchrec.errors import FrameError
from persia_torchrec.parsing.decoding import parse_json
from persia_torchrec.rpc.auth import Greeting
from persia_torchrec.rpc.messages import Frames, Header, Kind, decode_json
from persia_torchrec.rpc.server import ListenerThread, make_reply

COMPILING = "compiling"  # the key that processes increase while they compile
JOB_ID = "job/id"
LOST_S = 1.0  # how long a member's connection is not there when it is lost

_MEMBER, _LOST = "member/", "lost/"
_UNWRITTEN = ("beats/", COMPILING)
_MAX_KEYS = 2**18
_MAX_MEMBERS = 2**14
_MAX_TEXT = 2**20  # bytes of a request; characters of an answer
_MAX_BOOK = 2**28  # characters of all keys and values
_MAX_DIGITS = 18
_LOOK_S = 0.2
_BACK_S = 5.0  # within which members are connected to the next coordinator
_PAGE = 4096  # which a kill finds written or not, as a whole
_HEX = re.compile(r"(?:[0-9a-f]{2})*", re.ASCII)
_SPARE = 8  # bytes that a line may grow by; 1 at least


class Get(msgspec.Struct, tag="get"):
    """Ask for the values of keys."""

    keys: list[str]


class Put(msgspec.Struct, tag="put"):
    """Set a key."""

    key: str
    value: str


class Swap(msgspec.Struct, tag="swap"):
    """Set a key that holds what is expected."""

    key: str
    expected: str
    value: str


class Add(msgspec.Struct, tag="add"):
    """Add 1 to a number."""

    key: str


Request = Get | Put | Swap | Add


class Journal:
    """What is set in a book, in a file that outlives the process; without one, nothing.

    ``memory`` is the descriptor of the file. The thread that serves the book writes.
    """

    def __init__(self, memory: int | None = None) -> None:
        self.values: dict[str, str] = {}
        self.members: dict[str, bytes] = {}  # name of the connection, by key
        self._file: int | None = None
        self._places: dict[str, tuple[int, int]] = {}  # and length of a key's last line
        self._end = 0
        if memory is None:
            return
        self._file = os.open(f"/proc/self/fd/{memory}", os.O_RDWR)
        try:
            self._read(self._file)
        except FrameError:
            self.close()
            raise

    def write(self, key: str, value: str, name: bytes = b"") -> None:
        """Write what is set, and by which member's connection."""
        if self._file is None or key.startswith(_UNWRITTEN):
            return
        line = msgspec.json.encode((key, value, name.hex()))
        place, length = self._places.get(key, (0, 0))
        is_in_page = place // _PAGE == (place + length - 1) // _PAGE
        if len(line) >= length or not is_in_page:
            place, length = self._end, len(line) + _SPARE
            self._places[key] = place, length
            self._end += length
        os.pwrite(self._file, line.ljust(length - 1) + b"\n", place)

    def close(self) -> None:
        """Close the file, which stays. May be called twice."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _read(self, file: int) -> None:
        text = os.pread(file, os.fstat(file).st_size, 0)
        whole, newline, _ = text.rpartition(b"\n")
        os.truncate(file, len(whole + newline))  # of a line that was not finished
        for line in whole.splitlines():
            kind = tuple[str, str, str]
            key, value, name = parse_json(line, kind, "the address book", FrameError)
            if not _HEX.fullmatch(name):
                raise FrameError(
                    "A connection's name in the address book must be hexadecimal. "
                    f"Received: {name!r:.100}."
                )
            self.values[key] = value
            if name:
                self.members[key] = bytes.fromhex(name)
            self._places[key] = self._end, len(line) + 1
            self._end += len(line) + 1


class BookServer(ListenerThread):
    """The keys of a book, owned by one thread, which answers the requests."""

    encrypts = True

    def __init__(
        self, host: str, port: int, greeting: Greeting, journal: Journal
    ) -> None:
        self._journal = journal
        self._values = dict(journal.values)
        self._size = sum(len(k) + len(v) for k, v in self._values.items())
        self._members = dict(journal.members)  # name of the connection, by key
        back = time.monotonic() + _BACK_S
        self._absent_since = dict.fromkeys(self._members, back)
        self._next_look = 0.0
        if JOB_ID not in self._values:
            self._set(JOB_ID, greeting.job_id)
        super().__init__("address book", host, port, greeting)

    def close(self) -> None:
        """Stop; requests under way are answered first. May be called twice."""
        super().close()
        self._journal.close()

    def _begin(self, peer: bytes, header: Header, frames: Frames) -> None:
        def answer(header: Header, frames: Frames) -> Frames:
            if header.kind is not Kind.BOOK:
                raise FrameError(
                    "A message to the address book must be of kind BOOK. "
                    f"Received: {header.kind.name}."
                )
            size = sum(map(len, frames[1:]))
            if size > _MAX_TEXT:
                raise FrameError(
                    f"A request to the address book must have at most {_MAX_TEXT} "
                    f"bytes. Received: {size}."
                )
            request = decode_json(frames, Request)
            return [msgspec.json.encode(self._answer(peer, request))]

        self._listener.send(peer, *make_reply(answer, header, frames))

    def _answer(self, peer: bytes, request: Request) -> list[str | None]:
        values = self._values
        match request:
            case Get(keys):
                size = sum(len(values.get(key, "")) for key in keys)
                if size > _MAX_TEXT:
                    raise FrameError(
                        f"An answer must have at most {_MAX_TEXT} characters. "
                        f"Received: a request for {size}."
                    )
                return [values.get(key) for key in keys]
            case Put(key, value):
                self._set(key, value)
            case Swap(key, expected, value):
                is_member = key.startswith(_MEMBER)
                is_new = is_member and key not in self._members
                if is_new and len(self._members) >= _MAX_MEMBERS:
                    raise FrameError(f"A job must have at most {_MAX_MEMBERS} members.")
                if values.get(key, "") == expected:
                    self._set(key, value, peer if is_member else b"")
                if is_member and values.get(key) == value:
                    self._members[key] = peer
                    self._absent_since.pop(key, None)
            case Add(key):
                number = values.get(key, "0")
                if not (number.isdecimal() and len(number) <= _MAX_DIGITS):
                    raise FrameError(
                        f"What is added to must be a number. Received: {number!r:.50}."
                    )
                self._set(key, str(int(number) + 1))
        return [values.get(request.key, "")]

    def _set(self, key: str, value: str, name: bytes = b"") -> None:
        is_new, previous = key not in self._values, self._values.get(key, "")
        size = self._size + len(value) - len(previous) + is_new * len(key)
        if size > _MAX_BOOK or (is_new and len(self._values) >= _MAX_KEYS):
            raise FrameError(
                f"An address book must have at most {_MAX_KEYS} keys, and {_MAX_BOOK} "
                "characters."
            )
        self._size = size
        self._values[key] = value
        self._journal.write(key, value, name)

    def _work(self) -> bool:
        """Look which members are connected, and write down which are lost."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK_S
            for key, peer in self._members.items():
                lost = key.replace(_MEMBER, _LOST, 1)
                if self._listener.is_connected(peer):
                    self._absent_since.pop(key, None)
                    self._values.pop(lost, None)
                elif now - self._absent_since.setdefault(key, now) > LOST_S:
                    self._values[lost] = self._values[key]
        return False
