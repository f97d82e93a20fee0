"""Loggers for the user's scripts, under PERSIA's names."""

import logging
import re
import sys
from pathlib import Path

from persia_torchrec import env
from persia_torchrec.errors import ConfigError, without_secrets

_LINE_FORMAT = "%(asctime)s %(levelname)s %(name)s{}: %(message)s"

_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_LINES = "\n\t"  # of a traceback, or of a table

_PACKAGE = "persia_torchrec"
_CONSOLE = "persia_torchrec console"  # the name of the handlers that print
_COLOURS = {
    logging.DEBUG: "\x1b[36m",  # cyan
    logging.WARNING: "\x1b[33m",  # yellow
    logging.ERROR: "\x1b[31m",  # red
    logging.CRITICAL: "\x1b[1;31m",  # bold red
}


def printable(text: str, keep: str = _LINES) -> str:
    r"""Return a text for a terminal, in which control characters are escaped.

    So names and paths of others cannot colour, move or hide what a terminal shows, nor
    reverse it. ``keep`` are those that stay; none, where a line must stay one.

    Example:
        >>> printable("a\x1b[31mred\n"), printable("a\r\nb", keep="")
        ('a\\x1b[31mred\n', 'a\\r\\nb')
    """
    if text.isprintable():
        return text
    return _CONTROLS.sub(
        lambda one: one[0] if one[0] in keep else repr(one[0])[1:-1], text
    )


def get_logger(name: str) -> logging.Logger:
    """Return the logger of that name as it is, without setting anything up."""
    return logging.getLogger(name)


def get_default_logger(
    name: str = _PACKAGE,
    *,
    log_file: str | Path | None = None,
    level: str | None = None,
) -> logging.Logger:
    """Return the logger of that name, printing to stderr.

    Lines have the job's id (``PERSIA_JOB_ID``) behind the logger's name, and are
    coloured by level when stderr is a terminal. Asking again for the same
    name prints no line twice, and only adds ``log_file`` if that is a new one.

    Args:
        name: the logger's; the default shows what this package itself logs.
        log_file: a file to which the same lines are appended, without colour.
        level: from which level up it prints; all by default, as in PERSIA. A logger of
            this package prints from ``LOG_LEVEL`` up, or, where that is unset, from
            this level or INFO.
    """
    logger = logging.getLogger(name)
    if name.partition(".")[0] == _PACKAGE:
        level = env.log_level(level or "INFO")
    logger.setLevel(level or "DEBUG")
    logger.propagate = False  # a logger above that prints would print it again
    if not any(handler.name == _CONSOLE for handler in logger.handlers):
        console = logging.StreamHandler(sys.stderr)
        console.name = _CONSOLE
        on_terminal = sys.stderr.isatty()
        formatter = _ColourFormatter if on_terminal else _Formatter
        console.setFormatter(formatter(_line_format()))
        logger.addHandler(console)
    if log_file is not None:
        _add_file("log_file", log_file, logger, logging.NOTSET)
    return logger


def setLogger(
    name: str,
    log_level: int = logging.DEBUG,
    log_filename: str = "train.log",
    enable_file_logger: bool = False,
    err_redirect_filepath: str = "error.log",
    enable_err_redirect: bool = False,
    err_redirect_level: int = logging.INFO,
) -> logging.Logger:
    """Return the logger of that name, printing to stderr from ``log_level`` up.

    Args:
        name: the logger's.
        log_level: of :mod:`logging`; ``LOG_LEVEL`` does not change it.
        log_filename: with ``enable_file_logger``, to which the same lines are appended.
        enable_file_logger: whether they are.
        err_redirect_filepath: with ``enable_err_redirect``, to which lines above
            ``err_redirect_level`` are appended.
        enable_err_redirect: whether they are.
        err_redirect_level: the highest level that is left out there.
    """
    logger = get_default_logger(name)
    logger.setLevel(log_level)
    if enable_file_logger:
        _add_file("log_filename", log_filename, logger, logging.NOTSET)
    if enable_err_redirect:
        path, above = err_redirect_filepath, err_redirect_level + 1
        _add_file("err_redirect_filepath", path, logger, above)
    return logger


def _add_file(
    argument: str, path: str | Path, logger: logging.Logger, level: int
) -> None:
    """Append lines from a level up to a file, unless that is done already."""
    path = str(Path(path).absolute())
    if path in [getattr(handler, "baseFilename", None) for handler in logger.handlers]:
        return
    try:
        file = logging.FileHandler(path, encoding="utf-8")
    except OSError as exc:
        must = f"{argument} must be a path that can be written."
        raise ConfigError(f"{must} Received: {path} ({exc}).") from exc
    file.setFormatter(_Formatter(_line_format()))
    file.setLevel(level)
    logger.addHandler(file)


def _line_format() -> str:
    """Return the format of a line, with the job's id: several jobs share a host."""
    job = env.job_id()
    return _LINE_FORMAT.format(f" [{job}]".replace("%", "%%") if job else "")


class _Formatter(logging.Formatter):
    """Escapes what is not printable, and leaves passwords out of URLs."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(without_secrets(super().format(record)))


class _ColourFormatter(_Formatter):
    """Wraps each line into the colour of its level."""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        colour = _COLOURS.get(record.levelno)
        return line if colour is None else f"{colour}{line}\x1b[0m"
