"""Run a user's script as a trainer or a data loader of a job.

``python -m persia_torchrec.launch.script trainer|loader SCRIPT [ARGUMENTS...]``

The script runs in this process as ``__main__``, as ``python SCRIPT ARGUMENTS...``
would run it. Around it the process is a member of the job: what the script raises,
or a status other than 0 that it exits with, ends the whole job; when the script is
through, the process stays until the job is finished, because Slurm ends a job soon
after the first of its processes ends. A data loader is interrupted when the job is
finished before its script is.
"""

import argparse
import logging
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from persia_torchrec import env
from persia_torchrec.config import refuse_inference
from persia_torchrec.errors import ConfigError, JobError, PersiaError
from persia_torchrec.launch.rendezvous import set_up_rendezvous
from persia_torchrec.logger import get_default_logger
from persia_torchrec.wire.membership import JobMember
from persia_torchrec.wire.signals import end_by_signals

logger = logging.getLogger("persia_torchrec.launch.script")  # also as __main__

ROLES = ("trainer", "loader")

_ROLE_NAMES = {"trainer": "NN worker", "loader": "data loader"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script as a member of the job; return the status to exit with."""
    role, script, arguments = _parse(argv)

    def run() -> None:
        try:
            _require_script(script)
        except ConfigError as exc:
            raise SystemExit(str(exc)) from exc
        run_script(script, arguments)

    return take_part(role, script, run)


def take_part(role: str, name: str, work: Callable[[], object]) -> int:
    """Do a trainer's or a data loader's work as a member of the job.

    The main thread calls this, and the process ends soon after.

    Args:
        role: one of ``ROLES``.
        name: of the work, for the log.
        work: called when the process is a member; what it raises ends the job.

    Returns:
        The status to exit with.
    """
    end_by_signals()
    get_default_logger()
    # torchrun has numbered the trainers and brought them together already.
    by_torchrun = role == "trainer" and env.is_started_by_torchrun()
    index = env.get_rank() if by_torchrun else env.get_replica_index()
    size = env.get_world_size() if by_torchrun else env.get_replica_size()
    try:
        refuse_inference(_ROLE_NAMES[role], env.global_config_path())
        is_expendable = role == "loader"
        member = JobMember.join(
            role, index, size, store=_job_store(), expendable=is_expendable
        )
    except PersiaError as exc:
        logger.error("%s", exc)
        return 1
    with member:
        if role == "trainer" and not by_torchrun:
            try:
                set_up_rendezvous(member.book, index, size)
            except PersiaError as exc:
                raise SystemExit(str(exc)) from exc
        work()
        if not member.job_has_ended:
            logger.info("%s: %s is through, waiting for the job", member.who, name)
        member.report_done()
        try:
            member.wait_for_end()
        except JobError:
            raise SystemExit(1) from None  # the member has logged why
    return 0


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Run a script in this process as ``python SCRIPT ARGUMENTS...`` would.

    Returns when the script ends, or exits with status 0.

    Raises:
        SystemExit: the script exits with another status, or a message.
    """
    sys.argv = [script, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as exc:
        if exc.code is not None and exc.code != 0:
            raise


def _parse(argv: Sequence[str] | None) -> tuple[str, str, list[str]]:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__spec__.name}",
        description="Run a user's script as a member of a job.",
    )
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("script", help="the user's Python script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    parsed = parser.parse_args(argv)
    return parsed.role, parsed.script, parsed.arguments


def _job_store() -> env.JobStore:
    store = env.job_store()
    if store is None:
        raise ConfigError(
            "PERSIA_STORE_PORT must name the port of the job's address book. "
            "Received: none. Start the job with torchx, which sets it, or set it for "
            "persia-launcher."
        )
    return store


def _require_script(script: str) -> None:
    if not Path(script).exists():
        raise ConfigError(
            f"The script must exist. Received: {script!r}, looked for in {Path.cwd()}."
        )


if __name__ == "__main__":
    sys.exit(main())
