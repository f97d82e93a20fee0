"""A job that trains, whose processes but for the NN worker are killed."""

import contextlib
import os
import random
import signal
import sys
import time

import pytest

from persia_torchrec.wire.address_book import AddressBook
from persia_torchrec.wire.member_record import MemberRecord
from tests.forked_jobs import ROOT
from tests.integration.persia_scripts import Scripts
from tests.processes import wait_until

NUM_KILLS = 12
NAMES = ["server 0", "server 1", "worker 0", "worker 1", "loader 0", "coordinator 0"]

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def test_every_batch_is_trained_once_however_often_its_carriers_are_killed(tmp_path):
    draw = random.Random(15)
    scripts = Scripts(tmp_path)
    with scripts.start(
        *("--recover", "True", "--python", sys.executable),
        *("--embedding_servers", "2", "--embedding_workers", "2"),
        *("--max_restarts", "1000"),
        num_batches=1500,
        PYTHONPATH=str(ROOT),
    ) as job:
        job.has_printed("current idx: 5 ")
        with contextlib.closing(AddressBook.join("localhost", job.port)) as book:
            for _ in range(NUM_KILLS):
                role, index = draw.choice(NAMES).split()
                record = MemberRecord(book, role, int(index))
                before = record.process()
                os.kill(before.pid, signal.SIGKILL)
                wait_until(
                    lambda record=record, before=before: record.process() != before,
                    f"{record.who} is back",
                    details=job.output,
                )
                time.sleep(2 * draw.random())  # it is killed anywhere
            assert book.state() == ("running", "")
        ended = job.wait()
    assert ended.status == 0, ended.output
    assert ended.line(r"rank 0: trained (\d+) batches") == "1500"
