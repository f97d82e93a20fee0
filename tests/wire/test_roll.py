import dataclasses
import subprocess
import sys

import pytest

from persia_torchrec.wire.discovery import AddressBook
from persia_torchrec.wire.roll import Roll


@pytest.fixture
def book():
    book = AddressBook.host(0, loopback=True)
    yield book
    book.close()


def test_a_member_is_known_once_it_has_signed(book):
    roll = Roll(book, "server", 0)
    assert roll.signature() is None
    roll.sign()
    signature = Roll(book, "server", 0).signature()
    assert signature is not None
    assert not signature.process_is_gone()
    assert Roll(book, "server", 1).signature() is None


def test_every_beat_is_seen(book):
    roll, reader = Roll(book, "server", 0), Roll(book, "server", 0)
    roll.sign()
    first = reader.num_beats()
    roll.beat()
    assert reader.num_beats() == first + 1


def test_a_member_that_signs_anew_has_not_left(book):
    roll = Roll(book, "server", 0)
    roll.sign()
    before = roll.signature()
    roll.leave()
    assert roll.has_left(before)
    roll.sign()
    assert roll.has_left(before)
    assert not roll.has_left(roll.signature())


def test_who_is_done_says_so(book):
    roll = Roll(book, "trainer", 0)
    assert not roll.is_done()
    roll.done()
    assert Roll(book, "trainer", 0).is_done()


def test_a_process_that_has_ended_is_gone_even_before_it_is_waited_for(book):
    roll = Roll(book, "server", 0)
    roll.sign()
    with subprocess.Popen(
        [sys.executable, "-S", "-c", ""], stdout=subprocess.PIPE
    ) as process:
        process.stdout.read()
        signature = dataclasses.replace(roll.signature(), pid=process.pid)
        while process.returncode is None and not signature.process_is_gone():
            pass
        assert process.returncode is None
    assert signature.process_is_gone()


def test_a_process_of_another_machine_is_not_known_to_be_gone(book):
    roll = Roll(book, "server", 0)
    roll.sign()
    elsewhere = dataclasses.replace(
        roll.signature(), pid=2**22 + 1, process_table="another boot"
    )
    assert not elsewhere.process_is_gone()
