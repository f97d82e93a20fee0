import socket

import pytest
import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError

from persia_torchrec.errors import (
    BatchError,
    CheckpointError,
    DataflowError,
    RemoteError,
    RequestTimeoutError,
    ServerError,
)
from persia_torchrec.job import failures


def with_note(exc, note):
    exc.add_note(note)
    return exc


@pytest.mark.parametrize(
    ("exc", "cause"),
    [
        (ValueError("the table is round"), "ValueError: the table is round"),
        (with_note(ValueError("wide"), "slot a"), "ValueError: wide; slot a"),
        (KeyError(), "KeyError"),
        (KeyboardInterrupt("ended from outside"), "ended from outside"),
        (SystemExit("no data"), "no data"),
        (SystemExit(3), "exit status 3"),
        (SystemExit(0), None),
        (SystemExit(), None),
    ],
)
def test_a_failure_is_one_text(exc, cause):
    assert failures.describe(exc) == cause


@pytest.mark.parametrize(
    ("exc", "may_be"),
    [
        (None, True),
        (SystemExit(1), True),
        (DataflowError("no batch"), True),
        (BrokenPipeError(), True),
        (DistNetworkError("gone"), True),
        (RuntimeError("[gloo] Connection closed by peer"), True),
        (ValueError("an own bug"), False),
        (FileNotFoundError("train.npz"), False),
    ],
)
def test_only_what_other_processes_can_cause_may_be_a_consequence(exc, may_be):
    assert failures.may_be_consequence(exc) is may_be


@pytest.mark.parametrize(
    ("exc", "is_of_connection"),
    [
        (ServerError("it is gone", server="server 0"), True),
        (RequestTimeoutError("no reply", server="server 0"), True),
        (RemoteError("server 0: gone", server="worker 0", kind="ServerError"), True),
        (RemoteError("no such id", server="worker 0", kind="BatchError"), False),
        (RuntimeError("[gloo] Connection closed by peer"), True),
        (NotImplementedError("gloo has no such operation"), False),
    ],
)
def test_an_error_of_a_connection_may_have_its_cause_elsewhere(exc, is_of_connection):
    assert failures.is_of_connection(exc) is is_of_connection


@pytest.mark.parametrize(
    ("reason", "member"),
    [
        ("loader 0: RemoteError: embedding worker 1 at tcp://a:1: full", "loader 0"),
        ("coordinator: trainer 12 (process 7) was killed", "trainer 12"),
        ("coordinator: server 0, worker 1 did not join within 600 s", "server 0"),
        ("coordinator: it was told to end (SIGTERM)", None),
        ("The address book must be able to listen on port 29400", None),
    ],
)
def test_the_reason_of_a_failed_job_names_a_member_first(reason, member):
    assert failures.find_member(reason) == member


def test_a_launcher_whose_file_cannot_be_written_is_not_told(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    failures.tell_launcher("no data")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "absent" / "file"))
    failures.tell_launcher("no data")
    assert not list(tmp_path.iterdir())


class TestWhereALogIs:
    @pytest.mark.parametrize(
        ("place", "told"),
        [
            (f"{socket.gethostname()} /runs/a.log", "its log: /runs/a.log"),
            ("elsewhere /runs/a.log", "its log: /runs/a.log on host elsewhere"),
            ("elsewhere ", "its log is on host elsewhere"),
        ],
    )
    def test_it_is_a_file_or_a_host(self, place, told):
        assert failures.find_log("server 0", place) == told

    def test_before_it_has_joined_it_is_where_torchx_has_it(
        self, tmp_path, monkeypatch
    ):
        own = tmp_path / "coordinator" / "0" / "combined.log"
        its = tmp_path / "server" / "0" / "combined.log"
        its.parent.mkdir(parents=True)
        its.touch()
        monkeypatch.setattr(failures, "find_own_log", lambda: str(own))
        assert failures.find_log("server 0", None) == f"its log: {its}"
        assert failures.find_log("server 1", None) == ""
        monkeypatch.setattr(failures, "find_own_log", str)
        assert failures.find_log("server 0", None) == ""


def raised(exc, cause=None):
    """Return an exception as one that has been raised here."""
    with pytest.raises(type(exc)) as caught:
        raise exc from cause
    return caught.value


@pytest.mark.parametrize(
    "exc",
    [
        ValueError("the table is round"),
        KeyError("user"),
        FileNotFoundError("train.npz"),
        BatchError("ids must be flat"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("all elements of input should be between 0 and 1"),
    ],
)
def test_errors_of_a_script_repeat_at_the_same_line(exc):
    place = failures.find_place(raised(exc))
    assert place.startswith(f"{type(exc).__name__} at {__file__}:")


def test_the_line_is_that_of_the_script_and_not_of_a_library():
    with pytest.raises(RuntimeError) as caught:
        torch.nn.Linear(2, 2)(torch.ones(3))
    assert failures.find_place(caught.value).startswith(f"RuntimeError at {__file__}:")


@pytest.mark.parametrize(
    "exc",
    [
        None,
        SystemExit(1),
        KeyboardInterrupt(),
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."),
        RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"),
        RuntimeError("Timed out waiting 4000ms for send operation to complete"),
        RuntimeError("NCCL error: unhandled system error"),
        DistNetworkError("gone"),
        BrokenPipeError(),
        TimeoutError(),
        OSError(5, "Input/output error"),
        ServerError("it is gone", server="server 0"),
        RemoteError("rows", server="worker 0", kind="BatchError"),
        CheckpointError("trainer 1: disk full"),
    ],
)
def test_transient_errors_have_no_line(exc):
    assert failures.find_place(exc and raised(exc)) is None
    if exc is not None:  # nor has what is raised from it
        assert failures.find_place(raised(ValueError("no rows"), exc)) is None


def test_an_error_of_a_collective_has_no_line():
    with pytest.raises(ValueError, match="not been initialized") as caught:
        dist.all_reduce(torch.zeros(1))
    assert failures.find_place(caught.value) is None
