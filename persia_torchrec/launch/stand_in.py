"""Stand in for the trainer of a job that trains in a process that is no member.

``python -m persia_torchrec.launch.stand_in``

A job lasts as long as its trainers work. Where a test or a notebook trains, it cannot
be a member, since a member is ended with its job. This process is one in its place: it
says that the work is done when its standard input is closed.
"""

import logging
import sys

from persia_torchrec import env
from persia_torchrec.errors import ConfigError, JobError, PersiaError
from persia_torchrec.logger import get_default_logger
from persia_torchrec.wire.membership import JobMember
from persia_torchrec.wire.signals import end_by_signals

logger = logging.getLogger("persia_torchrec.launch.stand_in")  # also as __main__


def main() -> int:
    """Be trainer 0 of the job; return the status to exit with."""
    end_by_signals()
    get_default_logger()
    try:
        store = env.job_store()
        if store is None:
            raise ConfigError(
                "PERSIA_STORE_PORT must name the port of the job's address book. "
                "Received: none."
            )
        with JobMember.join("trainer", 0, 1, store=store) as member:
            sys.stdin.read()
            member.report_done()
            member.wait_for_end()
    except JobError:
        return 1  # the member has logged why
    except PersiaError as exc:
        logger.error("%s", exc)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
