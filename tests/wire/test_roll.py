import dataclasses
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from persia_torchrec.errors import JobMismatchError
from persia_torchrec.wire.discovery import AddressBook
from persia_torchrec.wire.roll import Roll
from tests.processes import DEADLINE_S

SILENT_S = 10.0


@pytest.fixture
def book():
    book = AddressBook.host(0, loopback=True)
    yield book
    book.close()


def test_a_member_is_known_once_it_has_signed(book):
    roll = Roll(book, "server", 0)
    assert roll.signature() is None
    roll.sign(SILENT_S)
    signature = Roll(book, "server", 0).signature()
    assert signature is not None
    assert not signature.process_is_gone()
    assert Roll(book, "server", 1).signature() is None


def test_every_beat_is_seen(book):
    roll, reader = Roll(book, "server", 0), Roll(book, "server", 0)
    roll.sign(SILENT_S)
    first = reader.num_beats()
    roll.beat()
    assert reader.num_beats() == first + 1


def test_a_member_that_signs_anew_has_not_left(book):
    roll = Roll(book, "server", 0)
    roll.sign(SILENT_S)
    before = roll.signature()
    roll.leave()
    assert roll.has_left(before)
    roll.sign(SILENT_S)
    assert roll.has_left(before)
    assert not roll.has_left(roll.signature())


@pytest.fixture
def alive(book):
    """A member that beats, in a place that others want."""
    member = Roll(book, "server", 0)
    member.sign(SILENT_S)
    stop = threading.Event()

    def beat():
        while not stop.wait(0.02):
            member.beat()

    beating = threading.Thread(target=beat)
    beating.start()
    yield member
    stop.set()
    beating.join()


def test_the_place_of_a_member_that_lives_is_taken(book, alive):
    before = alive.signature()
    message = (
        rf"place of server 0 in job '{book.greeting.job_id}', at port {book.port}, "
        rf"must be free\. Received: process {before.pid} has it in a job that is "
        r"running\. .* another \(--port"
    )
    with pytest.raises(JobMismatchError, match=message):
        Roll(book, "server", 0).sign(SILENT_S)
    assert alive.signature() == before
    Roll(book, "server", 1).sign(SILENT_S)


def test_who_was_quicker_keeps_the_place(book):
    comers = [Roll(book, "server", 0) for _ in range(8)]
    refused = []

    def sign(comer):
        try:
            comer.sign(SILENT_S)
        except JobMismatchError:
            refused.append(comer)

    stop = threading.Event()
    threads = [threading.Thread(target=sign, args=(comer,)) for comer in comers]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and not stop.wait(0.01):
        book.increase("beats/server/0")
    for thread in threads:
        thread.join()
    assert len(refused) == len(comers) - 1


def test_a_member_whose_process_is_gone_is_replaced_at_once(book):
    roll = Roll(book, "server", 0)
    roll.sign(SILENT_S)
    signature = json.loads(roll.signature().text)
    book.put("member/server/0", json.dumps(signature | {"pid": 2**22 + 1}))
    Roll(book, "server", 0).sign(3600)
    assert roll.signature().pid == signature["pid"]


def test_a_member_of_another_machine_is_replaced_when_it_was_silent(book):
    roll = Roll(book, "server", 0)
    roll.sign(SILENT_S)
    signature = json.loads(roll.signature().text)
    elsewhere = signature | {"process_table": "another boot"}
    book.put("member/server/0", json.dumps(elsewhere))
    Roll(book, "server", 0).sign(0.2)
    assert json.loads(roll.signature().text)["process_table"] != "another boot"


def test_who_has_left_a_finished_job_is_not_replaced(book):
    roll = Roll(book, "trainer", 0)
    roll.sign(SILENT_S)
    book.finish()
    roll.leave()
    with pytest.raises(JobMismatchError, match="in a job that is finished"):
        Roll(book, "trainer", 0).sign(SILENT_S)
    assert roll.has_left(roll.signature())
    Roll(book, "loader", 0).sign(SILENT_S)  # which was late


def test_who_is_done_says_so(book):
    roll = Roll(book, "trainer", 0)
    assert not roll.is_done()
    roll.done()
    assert Roll(book, "trainer", 0).is_done()


def test_a_process_that_has_ended_is_gone_even_before_it_is_waited_for(book):
    roll = Roll(book, "server", 0)
    roll.sign(SILENT_S)
    with subprocess.Popen(
        [sys.executable, "-S", "-c", ""], stdout=subprocess.PIPE
    ) as process:
        process.stdout.read()
        signature = dataclasses.replace(roll.signature(), pid=process.pid)
        while process.returncode is None and not signature.process_is_gone():
            pass
        assert process.returncode is None
    assert signature.process_is_gone()


def test_only_the_process_that_has_signed_is_killed(book):
    roll = Roll(book, "server", 0)
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"]) as process:
        start = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")")[-1].split()
        roll.sign(SILENT_S)
        own = dataclasses.replace(roll.signature(), pid=process.pid)
        signature = dataclasses.replace(own, start=start[19])
        before = dataclasses.replace(signature, start="1")  # its number, once
        elsewhere = dataclasses.replace(signature, process_table="another boot")
        for other in (before, elsewhere):
            assert not other.kill()
        assert before.process_is_gone()
        assert process.poll() is None
        process.send_signal(signal.SIGSTOP)
        assert signature.kill()
        assert process.wait(DEADLINE_S) == -signal.SIGKILL
    assert not signature.kill()


def test_a_process_of_another_machine_is_not_known_to_be_gone(book):
    roll = Roll(book, "server", 0)
    roll.sign(SILENT_S)
    elsewhere = dataclasses.replace(
        roll.signature(), pid=2**22 + 1, process_table="another boot"
    )
    assert not elsewhere.process_is_gone()
