"""Records of a test's log."""

import logging

import pytest

from persia_torchrec.rpc import silences


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return warnings, but those of waits, which a loaded machine makes long."""
    return [
        record
        for record in caplog.records
        if record.levelno == logging.WARNING and record.name != silences.__name__
    ]
