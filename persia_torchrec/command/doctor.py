"""``persia-torchrec doctor``: what of this machine fits, and what mends the rest."""

import ctypes
import os
import resource
import shutil
import socket
import stat
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import click

from persia_torchrec import env
from persia_torchrec.command import console
from persia_torchrec.command.console import as_json
from persia_torchrec.errors import PersiaError
from persia_torchrec.job import job_list
from persia_torchrec.rpc import auth
from persia_torchrec.rpc.addresses import free_port
from persia_torchrec.version import __version__, require_set_that_fits

_LEAST_DESCRIPTORS = 4096
_LEAST_SHM_BYTES = 2**30
_UNSYNCHRONIZED = 5  # of adjtimex
_HUGE = Path("/sys/kernel/mm/transparent_hugepage")


class Check(NamedTuple):
    """One line: ``state`` is ok, bad (it will not work) or note (it may be faster)."""

    check: str
    state: str
    found: str
    mend: str = ""


@click.command()
@as_json
def doctor(is_json: bool) -> None:
    """Look at this machine: versions, GPU, ports, token, memory, limits and clock.

    The exit code is 1 where something will not work.

    persia-torchrec doctor
    """
    checks = [check for look in _LOOKS for check in look()]
    if is_json:
        console.show_json([check._asdict() for check in checks])
    else:
        console.show([check._asdict() for check in checks], Check._fields[:3])
        for check in checks:  # of their own lines, to be copied
            if check.mend:
                click.echo(f"\n{check.check}: {check.mend}")
    sys.exit(any(check.state == "bad" for check in checks))


def _versions() -> Iterator[Check]:
    python = ".".join(map(str, sys.version_info[:3]))
    is_known = (3, 11) <= sys.version_info < (3, 14)
    told = "" if is_known else "use Python 3.11 to 3.13"
    yield Check("python", "ok" if is_known else "note", python, told)
    names = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "torchx")
    found = [f"persia_torchrec {__version__}"]
    for name in names:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    try:
        require_set_that_fits()
    except ImportError as exc:
        yield Check("versions", "bad", ", ".join(found), str(exc))
    else:
        yield Check("versions", "ok", ", ".join(found))


def _gpu() -> Iterator[Check]:
    try:
        import torch  # the command starts without it
    except ImportError:
        return
    if torch.cuda.is_available():
        yield Check("GPU", "ok", torch.cuda.get_device_name(0))
    elif shutil.which("nvidia-smi") is None:
        yield Check("GPU", "ok", "none")
    else:
        mend = "pip install the wheel with [cuda] in place of [cpu]"
        yield Check("GPU", "note", f"torch {torch.__version__} sees none", mend)


def _ports() -> Iterator[Check]:
    try:
        port = free_port("")
        name = socket.gethostname()
        socket.getaddrinfo(name, port)
    except (OSError, PersiaError) as exc:
        mend = (
            "have /etc/hosts name this host, and the loopback be up: ip link set lo up"
        )
        yield Check("ports", "bad", str(exc), mend)
    else:
        yield Check("ports", "ok", f"{name} has a name, port {port} is free")


def _token() -> Iterator[Check]:
    name = "PERSIA_JOB_TOKEN"
    mend = f"set {name}_FILE to a file"
    try:
        path, why = env.token_path(name), ""
        if path is None:
            why = auth.weakness(env.job_token())
            yield Check("token", "note", f"in {name}, which children see")
        elif env.text(f"{name}_FILE") is None and not Path(path).exists():
            yield Check("token", "ok", f"none yet: the first job makes {path}")
        else:
            mend = f"chmod 600 {path}"
            why = auth.weakness(env.read_token(path, name))
            mode = stat.S_IMODE(Path(path).stat().st_mode)
            if not why:
                yield Check("token", "ok", f"{path}, {mode:o}")
        if why:
            mend = (
                f"(umask 077; openssl rand -hex 32 > FILE), and name it by {name}_FILE"
            )
            yield Check("token", "note", why, mend)
    except (OSError, PersiaError) as exc:
        yield Check("token", "bad", str(exc), mend)


def _memory() -> Iterator[Check]:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as exc:
        yield Check("shared memory", "bad", str(exc), "--memory_dir a folder of a disk")
        return
    found = f"/dev/shm has {console.size(free)} free"
    is_small = free < _LEAST_SHM_BYTES
    mend = (
        "mount -o remount,size=50% /dev/shm; of docker: --shm-size" if is_small else ""
    )
    yield Check("shared memory", "note" if is_small else "ok", found, mend)
    for name in ("enabled", "shmem_enabled"):
        try:
            text = (_HUGE / name).read_text()
        except OSError:
            continue
        chosen = text.partition("[")[2].partition("]")[0]
        is_off = chosen in ("never", "deny")
        mend = f"echo advise > {_HUGE / name}" if is_off else ""
        if name == "enabled" and is_off:
            mend = f"echo madvise > {_HUGE / name}"
        yield Check(f"huge pages, {name}", "note" if is_off else "ok", chosen, mend)


def _limits() -> Iterator[Check]:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_few = most != resource.RLIM_INFINITY and most < _LEAST_DESCRIPTORS
    mend = "ulimit -Hn 65536, or LimitNOFILE= of the service" if is_few else ""
    yield Check("descriptors", "note" if is_few else "ok", f"{most} at most", mend)
    folder = job_list.jobs_folder()
    above = folder
    while above is not None and not above.exists():
        above = above.parent
    is_writable = above is not None and os.access(above, os.W_OK)
    mend = (
        "" if is_writable else "set XDG_STATE_HOME to a folder that can be written to"
    )
    yield Check("list of jobs", "ok" if is_writable else "note", str(folder), mend)


def _clock() -> Iterator[Check]:
    buffer = ctypes.create_string_buffer(512)
    state = ctypes.CDLL(None).adjtimex(buffer)
    if state == _UNSYNCHRONIZED:
        mend = "timedatectl set-ntp true: hosts of a job must agree within 300 s"
        yield Check("clock", "note", f"{job_list.now()}, not synchronized", mend)
    else:
        yield Check("clock", "ok", job_list.now())


_LOOKS = (_versions, _gpu, _ports, _token, _memory, _limits, _clock)
