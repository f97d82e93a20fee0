"""Run a user's script as a trainer or a data loader of a job.

    python -m persia_torchrec.job.script trainer train.py --epochs 2
    python -m persia_torchrec.job.script trainer -m package.train --epochs 2

A failure of the script ends the job. When the script has ended, the process stays
until the job is finished, because Slurm ends a job soon after its first process ends.

``trainer -`` is a proxy, whose work is done when its standard input is closed: a test
or a notebook that trains cannot be a member itself, since a member ends with its job.
"""

import argparse
import contextlib
import logging
import runpy
import shlex
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path

from persia_torchrec import env
from persia_torchrec.errors import ConfigError, JobError, PersiaError
from persia_torchrec.job.member import JobMember, tell_before_joining
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.job.signals import end_by_signals
from persia_torchrec.logger import get_default_logger
from persia_torchrec.rpc.addresses import local_address

logger = logging.getLogger("persia_torchrec.job.script")  # also as __main__

PROXY = "-"  # in place of a script
MODULE = "-m"  # before a module in place of a script

_ROLES = {"trainer": "NN worker", "loader": "data loader"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script as a member of the job; return the exit status."""
    about = "Run a user's script as a member of a job."
    parser = argparse.ArgumentParser(f"python -m {__spec__.name}", description=about)
    parser.add_argument("role", choices=_ROLES)
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT ...",
        help="the user's Python script, or -m and a module, and arguments",
    )
    parsed = parser.parse_args(argv)
    get_default_logger()
    try:
        script, *arguments = split_module(parsed.words)
    except ConfigError as exc:
        parser.error(str(exc))
    try:
        require_script(parsed.words)
    except ConfigError as exc:
        tell_before_joining(exc)  # and when it has joined, run_script tells the job
    work: Callable[[], object] = partial(
        run_script, script, arguments, is_module=parsed.words[0] == MODULE
    )
    if parsed.words[0] == PROXY:
        work = sys.stdin.read
    return run_member(parsed.role, script, work)


def split_module(words: Sequence[str]) -> list[str]:
    """Return a script, or the module behind ``-m``, and its arguments.

    Raises:
        ConfigError: the words begin with neither.
    """
    named = list(words[1:] if words[:1] == [MODULE] else words)
    if not named or (named[0].startswith("-") and list(words) != [PROXY]):
        raise ConfigError(
            "A script must be a file, or -m and the name of a module, and arguments "
            f"after it. Received: {shlex.join(words)!r}."
        )
    return named


def require_script(words: Sequence[str]) -> None:
    """Look for a script, or the module behind ``-m``, before anything waits for a job.

    A module is looked for in the working directory first.

    Raises:
        ConfigError: there is none, or the script is not Python.
    """
    script = split_module(words)[0]
    if words[0] == PROXY:
        return
    if words[0] != MODULE:
        if not Path(script).exists():
            raise ConfigError(
                f"The script must exist. Received: {script!r}, looked for in "
                f"{Path.cwd()}."
            )
        _require_python(Path(script))
        return
    here = [] if sys.flags.safe_path else [str(Path.cwd())]
    if PathFinder.find_spec(script.partition(".")[0], [*here, *sys.path]) is None:
        raise ConfigError(
            f"The module must exist. Received: {script!r}, looked for in {Path.cwd()} "
            "and among Python's packages."
        )


def _require_python(script: Path) -> None:
    """Reject a folder that Python does not run, a notebook, and a wrong syntax."""
    if script.suffix == ".ipynb":
        raise ConfigError(
            f"The script must be Python. Received: the notebook {str(script)!r}. "
            "Convert it into a script by jupyter nbconvert."
        )
    if script.is_dir() and not (script / "__main__.py").exists():
        raise ConfigError(
            "The script must be a file, or a folder with a __main__.py. Received: the "
            f"folder {str(script)!r}."
        )
    if script.suffix != ".py" or script.is_dir():
        return
    try:
        with warnings.catch_warnings(action="ignore"):  # the script's run has them
            compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as exc:  # of a byte 0 in Python 3.11
        line = (getattr(exc, "text", "") or "").strip()
        raise ConfigError(
            f"The script must be Python. Received: {exc}{line and f': {line}'}"
        ) from exc
    except OSError as exc:
        raise ConfigError(f"The script must be readable. Received: {exc}.") from exc


def run_member(role: str, script: str, work: Callable[[], object]) -> int:
    """Do work as a member of the job, in the main thread; return the exit status.

    What ``work`` raises ends the job. A proxy is the only trainer, whatever the
    environment says.
    """
    end_by_signals()
    get_default_logger()
    is_proxy = script == PROXY
    # torchrun has set the ranks of the trainers, and their rendezvous.
    by_torchrun = role == "trainer" and env.is_under_torchrun()
    if is_proxy:
        index, size = 0, 1
    elif by_torchrun:
        index, size = env.get_rank(), env.get_world_size()
    else:
        index, size = env.get_replica_index(), env.get_replica_size()
    try:
        store = env.require_job_store(f"A {_ROLES[role]}")
        member = JobMember(role, index, size, store=store, expendable=role == "loader")
    except PersiaError as exc:
        logger.error("%s", exc)
        return 1
    with member, contextlib.ExitStack() as until_the_end:
        if role == "trainer" and not by_torchrun and not is_proxy:
            try:
                until_the_end.enter_context(set_up_rendezvous(member.book, index, size))
            except PersiaError as exc:
                raise SystemExit(str(exc)) from exc
        if not by_torchrun or member.book.state()[0] != "finished":
            work()
        if not member.ended.is_set():
            work_name = "the block" if is_proxy else script
            logger.info("%s: %s has ended, waiting for the job", member.who, work_name)
        member.report_done()
        try:
            member.wait_for_end()
        except JobError:
            raise SystemExit(1) from None  # the member has logged why
    return 0


def run_script(
    script: str, arguments: Sequence[str], *, is_module: bool = False
) -> None:
    """Run a script as ``python SCRIPT ARGUMENTS...`` would; an exit by 0 is none.

    A module, as ``python -m MODULE``: it is looked for in the working directory first.
    """
    require_script([MODULE, script] if is_module else [script])
    sys.argv = [script, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str((Path(script).parent, Path())[is_module].resolve())
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as exc:
        if exc.code is not None and exc.code != 0:
            raise


@contextlib.contextmanager
def set_up_rendezvous(book: AddressBook, rank: int, world_size: int) -> Iterator[None]:
    """Set the variables of this trainer that ``torch.distributed`` reads.

    The local rank is among the trainers with the same host name. Waits until every
    trainer of the job has called this, or raises DiscoveryError. Within the block
    trainer 0 hosts the store at which they meet.
    """
    hosts = [f"trainer/{other}/host" for other in range(world_size)]
    book.tell(hosts[rank], socket.gethostname())
    store = None
    if rank == 0:
        # A data loader, or a script without torch, does not wait for its import.
        from persia_torchrec.job.rendezvous import host_store

        address = local_address(book.host_name)
        store = host_store(address)
        book.tell("trainer/master", f"{address} {store.port}")
    *host_names, master = book.ask([*hosts, "trainer/master"])
    address, _, port = master.rpartition(" ")
    env.set_variable("RANK", rank)
    env.set_variable("WORLD_SIZE", world_size)
    env.set_variable("LOCAL_RANK", host_names[:rank].count(host_names[rank]))
    env.set_variable("LOCAL_WORLD_SIZE", host_names.count(host_names[rank]))
    env.set_variable("MASTER_ADDR", address)
    env.set_variable("MASTER_PORT", port)
    env.set_variable("TORCHELASTIC_USE_AGENT_STORE", True)
    yield
    del store


if __name__ == "__main__":
    sys.exit(main())
