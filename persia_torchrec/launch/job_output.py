"""What the terminal of ``persia-torchrec run`` shows of a job: a view of its logs.

    the logs of all roles --torchx--> write() --> one line per event that matters
                                             |--> the line of progress, in its place
                                             `--> left out: details, and warnings of
                                                  frameworks about themselves

The logs are complete. ``persia-torchrec run --verbose`` shows all of them.
"""

import re
import threading
from typing import NamedTuple, TextIO

_PREFIX = re.compile(r"(?:\x1b\[[\d;]*m)*(\w+)/(\d+)(?:\x1b\[[\d;]*m)* ")
_RECORD = re.compile(
    r"(?:\x1b\[[\d;]*m)?\d{4}-\d\d-\d\d (\d\d:\d\d:\d\d),\d+ ([A-Z]+) ([\w.]+)"
    r"(?: \[[^\]]*\])?: (.*?)(?:\x1b\[0m)?$"
)
_PROGRESS = "persia_torchrec.job.progress"
_DETAILS = {  # whose records of INFO are for the log alone
    "persia_torchrec.job.survivable_memory",
    "persia_torchrec.rpc.peers",
    "persia_torchrec.server",
    "persia_torchrec.server.increments",
    "persia_torchrec.server.handlers",
    "persia_torchrec.sharding.table_control",
    "persia_torchrec.store.memory_file",
}
_WORKS = "trainer", "loader"  # roles of users' scripts, whose lines are all shown
_FRAMEWORKS = "torch|torchrec|fbgemm_gpu|torchmetrics|tensordict|torchx|numba|pyre"
_WARNINGS = (
    re.compile(rf"(WARNING|INFO|DEBUG):({_FRAMEWORKS})[.:]"),
    re.compile(rf"\S*/site-packages/({_FRAMEWORKS})\w*/\S+:\d+: \w*Warning:"),
    re.compile(rf"(\[rank\d+\]:)?[IW]\d{{4}} .* ({_FRAMEWORKS})/\S+:\d+\]"),
)
_OF_PYTHON = re.compile(r"\S*/site-packages/\S+:\d+: \w*Warning:")
_SHADES = {"WARNING": "33", "ERROR": "31", "CRITICAL": "1;31"}


class _Said(NamedTuple):
    """What has become of the line before, of one process."""

    is_shown: bool = True
    is_python_warning: bool = False  # whose second line is the line of code


class Console:
    """A file for the lines of all processes; any thread may write.

    Args:
        target: to which the view goes; on a terminal the line of progress stays last.
    """

    def __init__(self, target: TextIO) -> None:
        self._target, self._is_terminal = target, target.isatty()
        self._lock = threading.Lock()
        self._said: dict[str, _Said] = {}  # guarded by _lock
        self._progress = ""  # guarded by _lock

    def write(self, text: str) -> int:
        """Take a line of one process, behind ``role/index``, and show it or not."""
        prefix = _PREFIX.match(text)
        with self._lock:
            if prefix is None:
                if text:
                    self._print(text)
                return len(text)
            role, who, line = prefix[1], prefix[0], text[prefix.end() :].rstrip("\n")
            record = _RECORD.match(line)
            if record is None:
                self._take_raw(role, who, line)
            else:
                self._take_record(who, *record.groups())
        return len(text)

    def flush(self) -> None:
        """Flush the target."""
        self._target.flush()

    def close(self) -> None:
        """Leave the line of progress where it is; what is written later comes below."""
        with self._lock:
            if self._progress:
                self._target.write("\n")
            self._progress = ""
            self._target.flush()

    def _take_record(self, who: str, at: str, level: str, name: str, text: str) -> None:
        is_detail = level in ("INFO", "DEBUG") and name in _DETAILS
        self._said[who] = _Said(is_shown=not is_detail)
        if is_detail:
            return
        if name == _PROGRESS and level == "INFO" and self._is_terminal:
            self._redraw(f"{at} {text}")
            return
        word = "" if level == "INFO" else f"{level} "
        shade = _SHADES.get(level, "") if self._is_terminal else ""
        line = f"{at} {word}{text}"
        self._print(f"{who}\x1b[{shade}m{line}\x1b[0m\n" if shade else f"{who}{line}\n")

    def _take_raw(self, role: str, who: str, line: str) -> None:
        """Take a line that is no record: of a script, a framework, a long record."""
        before = self._said.get(who, _Said())
        is_of_framework = any(pattern.match(line) for pattern in _WARNINGS)
        is_code = before.is_python_warning and line.startswith("  ")
        if is_of_framework or (is_code and not before.is_shown):
            is_python = is_of_framework and _OF_PYTHON.match(line) is not None
            self._said[who] = _Said(is_shown=False, is_python_warning=is_python)
            return
        if role in _WORKS or line.startswith("ready "):
            self._said[who] = _Said()
        elif not before.is_shown:
            return
        self._print(f"{who}{line}\n")

    def _print(self, text: str) -> None:
        clear = "\r\x1b[K" if self._progress else ""
        self._target.write(f"{clear}{text}{self._progress}")

    def _redraw(self, text: str) -> None:
        self._progress = text
        self._target.write(f"\r\x1b[K{text}")
        self._target.flush()
