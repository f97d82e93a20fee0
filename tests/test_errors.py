"""Secrets in URLs are in no error, log line, reason, or file."""

import json
import logging
from dataclasses import replace

import fsspec
import pytest

from persia_torchrec.checkpoint.folder import Folder, require_received
from persia_torchrec.datasets.sources import Source, find_sources
from persia_torchrec.errors import (
    CheckpointError,
    DataError,
    RemoteError,
    without_secrets,
)
from persia_torchrec.job.failures import describe
from persia_torchrec.job.progress import look_at
from persia_torchrec.logger import get_default_logger

SECRET = "hunter2hunter2"
URL = f"http://user:{SECRET}@127.0.0.1:9/x"
SHOWN = "http://127.0.0.1:9/x"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            f"Could not read {URL}/manifest.json: no.",
            f"Could not read {SHOWN}/manifest.json: no.",
        ),
        (f"ftp://u:{SECRET}@h/a, sftp://u:p@{SECRET}@h:2/b", "ftp://h/a, sftp://h:2/b"),
        (f"https://{SECRET}@github.com/a", "https://github.com/a"),
        (f"HTTPS://h/a?sig={SECRET}&b=1. Next.", "HTTPS://h/a. Next."),
        (f"zip://a::http://u:{SECRET}@h/b", "zip://a::http://h/b"),
        (
            f'{{"a": "http://h/x?y={SECRET}", "b": "c@d"}}',
            '{"a": "http://h/x", "b": "c@d"}',
        ),
    ],
)
def test_urls_are_shown_without_user_password_and_query(text, shown):
    assert without_secrets(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        *("abfs://container@account/run", "s3://bucket/day-?.csv", "a@b:c", "a: b@c"),
        *("hdfs://h:9000/a/b@c", "tcp://127.0.0.1:80 and x:y@z", "http://h/a b?c"),
    ],
)
def test_other_texts_stay(text):
    assert without_secrets(text) == text


def test_a_message_of_a_library_gets_no_second_full_stop():
    for text, shown in (
        ("Received: it is damaged.. Write it again.", "it is damaged. Write it again."),
        ("Received: no file: 'a'..", "no file: 'a'."),
        ("Received: ../a, a.. and 1...", "../a, a. and 1..."),
        ("Received: and so on... Next.", "and so on... Next."),
    ):
        assert str(DataError(text)) == f"Received: {shown}"


def test_errors_reasons_and_pages_have_no_secret():
    with pytest.raises(CheckpointError) as caught:
        Folder(URL).read("manifest.json")
    told = [str(caught.value), look_at(URL).why]
    with pytest.raises(DataError) as caught:
        Source(URL, 1, filesystem=fsspec.filesystem("http")).open()
    told += [str(caught.value), str(RemoteError(URL, server=URL, kind="OSError"))]
    told += [describe(OSError(URL)), describe(SystemExit(URL))]
    assert all("127.0.0.1:9/x" in one for one in told)
    assert SECRET not in str(told)


def test_lines_and_tracebacks_of_logs_have_no_secret(tmp_path):
    logger = get_default_logger("secrets of urls", log_file=tmp_path / "log")
    try:
        raise OSError(URL)
    except OSError:
        logger.exception("reading %s", URL)
    for handler in logger.handlers:
        handler.close()
    logging.Logger.manager.loggerDict.pop(logger.name)
    text = (tmp_path / "log").read_text()
    assert text.count(SHOWN) == 2
    assert SECRET not in text


def test_files_of_a_checkpoint_have_no_secret(tmp_path):
    folder = Folder(tmp_path)
    folder.write_json("delta.json", {"increments": URL, "note": f'"{URL}?a=\\" b'})
    text = (tmp_path / "delta.json").read_text()
    assert SECRET not in text
    assert json.loads(text)["increments"] == SHOWN
    # who has the password reads it there
    assert require_received(SHOWN, [URL]) == URL
    assert require_received("http://127.0.0.1:10/x", [URL]) == "http://127.0.0.1:10/x"


def test_names_of_data_files_have_no_secret():
    given = Source(f"https://h/a.csv?sig={SECRET}", 1, filesystem="http")
    [source] = find_sources(given)
    assert source.name == "a.csv"
    others = [Source(f"http://u:{SECRET}@h/b/{name}", 1) for name in "cd"]
    others = [replace(one, filesystem="http") for one in others]
    assert [one.name for one in find_sources(others)] == ["c", "d"]
