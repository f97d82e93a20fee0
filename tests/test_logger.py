import io
import logging
import sys

import pytest

from persia_torchrec.errors import ConfigError
from persia_torchrec.logger import (
    get_default_logger,
    get_logger,
    printable,
    setLogger,
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def name(request):
    """A logger name of this test's own, its handlers closed afterwards."""
    yield request.node.name
    logger = logging.getLogger(request.node.name)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


@pytest.fixture(autouse=True)
def _level_is_unset(monkeypatch):
    monkeypatch.delenv("LOG_LEVEL", raising=False)


def test_a_logger_by_name_is_left_as_it_is(name):
    logger = get_logger(name)
    assert logger is logging.getLogger(name)
    assert not logger.handlers


def test_lines_go_to_stderr_from_debug_up(capsys, name):
    logger = get_default_logger(name)
    logger.debug("shown")
    logger.info("step %d", 3)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith(f" INFO {name}: step 3\n")
    assert err.count("\n") == 2


def test_what_a_terminal_would_obey_is_escaped(capsys, name, tmp_path):
    log = tmp_path / "log"
    logger = get_default_logger(name, log_file=log)
    logger.info("of %s", "a\x1b[31mred\x1b]0;title\x07\x9b\r\x7f")
    due = r"of a\x1b[31mred\x1b]0;title\x07\x9b\r\x7f" + "\n"
    assert capsys.readouterr().err.endswith(due)
    assert log.read_text().endswith(due)


def test_text_that_is_printable_stays():
    for text in ("", "a b", "line\n\tline", "\u00e9\u4e2d", "\\x1b"):
        assert printable(text) == text
    assert printable("a\nb\tc", keep="") == r"a\nb\tc"
    assert printable("a\u202eb\u2028") == r"a\u202eb\u2028"


def test_lines_of_a_job_have_its_id(capsys, monkeypatch, name):
    monkeypatch.setenv("PERSIA_JOB_ID", "train-7")
    get_default_logger(name).info("step %d", 3)
    assert capsys.readouterr().err.endswith(f" INFO {name} [train-7]: step 3\n")


def test_a_level_may_be_given(capsys, name):
    logger = get_default_logger(name, level="INFO")
    logger.debug("hidden")
    logger.info("shown")
    assert capsys.readouterr().err.count("\n") == 1


def test_the_environment_sets_the_level_of_this_package_alone(
    capsys, monkeypatch, name
):
    monkeypatch.setenv("LOG_LEVEL", "error")
    own = get_default_logger(f"persia_torchrec.{name}")
    own.warning("hidden")
    own.error("shown")
    own.handlers.clear()
    get_default_logger(name).info("test auc 0.89")
    err = capsys.readouterr().err
    assert "hidden" not in err
    assert "shown" in err
    assert "test auc" in err


def test_asking_twice_prints_no_line_twice(capsys, name):
    assert get_default_logger(name) is get_default_logger(name)
    child = get_default_logger(f"{name}.child")
    child.info("once")
    child.handlers.clear()
    assert capsys.readouterr().err.count("once") == 1


def test_without_a_name_it_shows_what_the_package_logs(capsys, monkeypatch):
    package = logging.getLogger("persia_torchrec")
    monkeypatch.setattr(package, "handlers", [])
    monkeypatch.setattr(package, "level", package.level)
    monkeypatch.setattr(package, "propagate", package.propagate)
    assert get_default_logger() is package
    logging.getLogger("persia_torchrec.store").info("evicted=3")
    assert "persia_torchrec.store: evicted=3" in capsys.readouterr().err


def test_lines_are_coloured_on_a_terminal_only(monkeypatch, name):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    logger = get_default_logger(name)
    logger.error("red")
    logger.info("plain")
    red, plain = terminal.getvalue().splitlines()
    assert red.startswith("\x1b[31m")
    assert red.endswith("red\x1b[0m")
    assert "\x1b" not in plain


def test_lines_go_to_a_file_too_when_one_is_given(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sys, "stderr", Terminal())
    path = tmp_path / "train.log"
    path.write_text("before\n")
    for _ in range(2):
        logger = get_default_logger(name, log_file=path)
    logger.error("once")
    before, line = path.read_text().splitlines()
    assert before == "before"
    assert line.endswith(f" ERROR {name}: once")
    assert "\x1b" not in line


def test_a_file_that_cannot_be_written_is_rejected(tmp_path, name):
    with pytest.raises(ConfigError, match="log_file must be a path that can be"):
        get_default_logger(name, log_file=tmp_path / "missing" / "train.log")


def test_persias_way_to_set_a_logger_up(tmp_path, capsys, monkeypatch, name):
    monkeypatch.setenv("LOG_LEVEL", "error")
    all_lines, errors = tmp_path / "train.log", tmp_path / "error.log"
    settings = {"enable_file_logger": True, "enable_err_redirect": True}
    for _ in range(2):
        logger = setLogger(
            name,
            logging.INFO,
            str(all_lines),
            err_redirect_filepath=str(errors),
            **settings,
        )
    logger.debug("hidden")
    logger.info("step")
    logger.warning("slow")
    assert [line.split()[-1] for line in all_lines.read_text().splitlines()] == [
        "step",
        "slow",
    ]
    assert errors.read_text().count("\n") == 1
    assert errors.read_text().endswith(f" WARNING {name}: slow\n")
    assert capsys.readouterr().err.count("\n") == 2
    with pytest.raises(ConfigError, match="err_redirect_filepath must be a path that"):
        setLogger(name, err_redirect_filepath="/no/e.log", enable_err_redirect=True)


def test_without_files_a_logger_prints_everything(capsys, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    setLogger(name).debug("shown")
    assert capsys.readouterr().err.endswith(f" DEBUG {name}: shown\n")
    assert list(tmp_path.iterdir()) == []
