"""Another user of this host, who does not have the job's token."""

import encodings.idna  # noqa: F401  # by which sockets read the names of hosts
import os
import pwd

import pytest

AS_ANOTHER_USER = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can be another user, too"
)


def be_stranger(act, *args):
    """Do something as another user. What that needs must be imported before."""
    users = {user.pw_uid for user in pwd.getpwall()}
    user = next(uid for uid in range(50_000, 60_000) if uid not in users)
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    for name in ("PERSIA_JOB_TOKEN", "PERSIA_JOB_TOKEN_FILE"):
        os.environ.pop(name, None)
    return act(*args)
