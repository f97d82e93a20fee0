"""Hypothesis profiles, the compiled loops, and the servers that several folders use.

``pytest --hypothesis-profile=nightly`` searches longer and with new random numbers.
"""

import atexit
import contextlib
import gc
import logging
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

# Before torch is imported: two tests at a time, on as many cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# By NVML torch counts GPUs without beginning with CUDA, after which nothing can fork.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# All processes of all tests are of one user, whose jobs have a token, and a list.
if "PERSIA_JOB_TOKEN_FILE" not in os.environ:  # else a worker of pytest-xdist
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp("state")
    atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
if "PERSIA_JOB_TOKEN_FILE" not in os.environ:  # else a worker of pytest-xdist
    _file, os.environ["PERSIA_JOB_TOKEN_FILE"] = tempfile.mkstemp("token")
    os.write(_file, secrets.token_hex(32).encode())
    os.close(_file)
    atexit.register(Path(os.environ["PERSIA_JOB_TOKEN_FILE"]).unlink)

import pytest
from hypothesis import settings

from persia_torchrec.cache.slot_map import warm_up as warm_up_cache
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.lookup.pooling import warm_up as warm_up_worker
from persia_torchrec.store.warm_up import warm_up as warm_up_store
from tests.support.gateway import Gateway
from tests.support.processes import Processes
from tests.support.servers import Servers

# Of other environments.
collect_ignore = [
    *("support/stock_client.py", "support/protocol_clients.py"),
    *("dropin/hstu.py", "dropin/own_tests.py"),
]

settings.register_profile(
    "ci",
    max_examples=30,
    stateful_step_count=30,
    derandomize=True,
    deadline=None,
    print_blob=True,
)
settings.register_profile(
    "nightly",
    max_examples=1000,
    stateful_step_count=50,
    deadline=None,
    print_blob=True,
)
settings.load_profile("ci")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the loops before the first test, whose deadline is too short for it.

    The workers of pytest-xdist start later and find the machine code on disk.
    """
    # A shell ignores it in what runs in the background, and processes of tests inherit
    # that; some tests send it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    is_worker = hasattr(session.config, "workerinput")
    if not (is_worker or session.config.option.collectonly):
        warm_up_store()
        warm_up_worker()
        warm_up_cache()


def pytest_collection() -> None:
    """Import all test modules without garbage collections, which find nothing there."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Keep what is imported out of the garbage collections during the tests.

    TorchRec alone has a million objects, of which each full one would visit each.
    """
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _freeze_imports():
    """Keep what a file of tests has imported out of later garbage collections."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _keep_what_mains_set():
    """Restore signals and the package's logger, which the mains of roles set up."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    handlers = {number: signal.getsignal(number) for number in numbers}
    package = logging.getLogger("persia_torchrec")
    level, propagates, printers = package.level, package.propagate, package.handlers[:]
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    package.setLevel(level)
    package.propagate, package.handlers[:] = propagates, printers


@pytest.fixture
def servers():
    with Servers() as servers:
        yield servers


@pytest.fixture
def processes(tmp_path):
    with Processes(tmp_path) as processes:
        yield processes


@pytest.fixture
def book():
    """The address book of a job, which has no coordinator."""
    with contextlib.closing(AddressBook.host(0)) as book:
        yield book


@pytest.fixture
def group():
    """A process group, of which this process is the only trainer."""
    from tests.support.groups import alone  # imports torch, which few tests need

    with alone():
        yield


@pytest.fixture
def gateway(monkeypatch):
    """A metrics gateway, which all processes of the job push to."""
    with Gateway() as gateway:
        monkeypatch.setenv("PERSIA_METRICS_GATEWAY_ADDR", gateway.address)
        yield gateway


@pytest.fixture
def path():
    """An empty file that this process holds open, for itself and for others."""
    file = os.memfd_create("store")
    yield f"/proc/{os.getpid()}/fd/{file}"
    os.close(file)


@pytest.fixture
def tmpfs(request):
    """The path of a file on a tmpfs, in a mount namespace of its own."""
    if shutil.which("unshare") is None:
        pytest.skip("needs util-linux' unshare")
    mount = f"mount -t tmpfs -o {request.param} tmpfs /tmp"
    child = subprocess.Popen(
        [
            "unshare",
            "--user",
            "--map-root-user",
            "--mount",
            "sh",
            "-c",
            f"{mount} && exec 3<>/tmp/memory && echo made; cat",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with child:
        if child.stdout.readline() != b"made\n":
            pytest.skip("needs user namespaces")
        yield f"/proc/{child.pid}/fd/3"
        child.stdin.close()
