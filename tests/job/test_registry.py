import contextlib
import os
import socket
import time

import pytest

from persia_torchrec import timeouts
from persia_torchrec.errors import (
    ConfigError,
    DiscoveryError,
    FrameError,
    JobError,
    JobMismatchError,
    RemoteError,
)
from persia_torchrec.job import registry, state
from persia_torchrec.job.process_identity import ProcessIdentity
from persia_torchrec.job.registry import AddressBook, ExtendableDeadline
from persia_torchrec.job.registry_server import Journal
from persia_torchrec.job.requests import Beat, FindNotes, Found, Register, Report, View
from persia_torchrec.job.survivable_memory import TwoHalves
from persia_torchrec.rpc.addresses import local_address, open_listening
from persia_torchrec.rpc.connections import Connections
from persia_torchrec.rpc.listener_thread import Service
from persia_torchrec.rpc.messages import Header, Kind
from tests.support.ports import draw_port
from tests.support.processes import wait_until
from tests.support.servers import once_the_port_is_free
from tests.support.strangers import AS_ANOTHER_USER, be_stranger
from tests.support.threads import InThread

TIMEOUT_S = 120.0


@pytest.fixture
def host():
    book = AddressBook.host(0)
    yield book
    book.close()


@pytest.fixture
def book(host):
    book = AddressBook.join("localhost", host.port, timeout_s=TIMEOUT_S)
    yield book
    book.close()


def be_server(book, index=0):
    """Be a server of the job; return who that is."""
    own = ProcessIdentity.of_this_process()
    assert book.call(Register("server", index, own), str) == own.nonce
    return own


def test_a_role_is_found_by_index_once_all_of_it_has_registered(host, book):
    host.register("server", 1, 2, "tcp://127.0.0.1:2")
    waiting = InThread(lambda: book.addresses("server", timeout_s=TIMEOUT_S))
    host.register("server", 0, 2, "tcp://127.0.0.1:1")
    assert waiting.result() == ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"]


def test_a_role_that_was_restarted_is_found_at_its_new_address(host, book):
    book.register("worker", 0, 1, "tcp://127.0.0.1:1")
    assert host.addresses("worker", timeout_s=TIMEOUT_S) == ["tcp://127.0.0.1:1"]
    book.register("worker", 0, 1, "tcp://127.0.0.1:2")
    assert host.addresses("worker", timeout_s=TIMEOUT_S) == ["tcp://127.0.0.1:2"]


def test_a_wait_is_extended_while_a_process_of_the_job_compiles(host, book):
    waiting = InThread(lambda: book.addresses("server", timeout_s=1.0))
    compiled_at = time.monotonic() + 2.0
    own = be_server(host)

    def compiles_on():
        host.call(Beat("server", 0, own.nonce, is_compiling=True), View)
        return time.monotonic() > compiled_at

    wait_until(compiles_on, "it has compiled")
    host.register("server", 0, 1, "tcp://127.0.0.1:1")
    assert waiting.result() == ["tcp://127.0.0.1:1"]


def test_a_wait_for_the_address_book_ends_when_its_look_raises():
    def look():
        raise JobError("The coordinator has ended.")

    with pytest.raises(JobError, match=r"The coordinator has ended\."):
        AddressBook.join("127.0.0.1", draw_port(), timeout_s=60.0, look=look)


def test_an_address_without_a_listener_is_reported_within_the_deadline():
    port = draw_port()
    with pytest.raises(DiscoveryError, match=rf"127\.0\.0\.1:{port}.*refused"):
        AddressBook.join("127.0.0.1", port, timeout_s=0.5)


def test_a_port_that_is_held_without_a_listener_is_not_waited_for():
    """As the coordinator cannot listen there, and has ended."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        with pytest.raises(DiscoveryError, match="holds the port, and does not listen"):
            AddressBook.join("127.0.0.1", port, timeout_s=TIMEOUT_S)


def test_a_long_wait_reports_what_it_waits_for(host, monkeypatch, caplog):
    monkeypatch.setattr(timeouts, "SAY_S", 0.01)
    monkeypatch.setattr(registry, "_SOON_S", 0.01)
    caplog.set_level("INFO")
    host.register("server", 0, 2, "tcp://127.0.0.1:1")
    port = draw_port()
    for wait in (
        lambda: host.addresses("server", timeout_s=0.2),
        lambda: host.addresses("worker", timeout_s=0.2),
        lambda: host.ask(["trainer/1/host"], timeout_s=0.2),
        lambda: AddressBook.join("127.0.0.1", port, timeout_s=0.3),
    ):
        with pytest.raises(DiscoveryError):
            wait()
    assert {
        "1 of 2 roles: waiting for server 1, for 0 s",
        "1 of 1 roles: waiting for any worker, for 0 s",
        "1 of 1 notes: waiting for trainer 1 host, for 0 s",
        f"waiting for the coordinator at 127.0.0.1:{port}, for 0 s",
    } <= set(caplog.messages)
    many = [f"server {index}" for index in range(13)]
    assert timeouts.waiting_for(many, 14).endswith("server 11, ...")


def test_another_service_at_the_address_is_reported_within_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(DiscoveryError, match="Something else listens there"):
            AddressBook.join("127.0.0.1", port, timeout_s=0.5)


def test_a_server_without_an_address_book_is_reported():
    other = Service("other", lambda header, frames: [b"no JSON"])
    port = int(other.address.rpartition(":")[2])
    with pytest.raises(DiscoveryError, match=r"TOKEN.* Something else listens"):
        AddressBook.join("127.0.0.1", port, timeout_s=TIMEOUT_S)
    other.close()


ONE, NOWHERE = "tcp://127.0.0.1:1", "no-such-host.invalid"
REJECTED = {
    "an index beyond the size": (
        lambda book: book.register("server", 2, 2, ONE),
        *(ConfigError, r"server must be in \[0, 2\)\. Received: 2"),
    ),
    "a role of which two disagree on its size": (
        lambda book: [book.register("server", n, 2 + n, ONE) for n in range(2)],
        *(ConfigError, "Received: 3 from server 1, 2 from another"),
    ),
    "an id that no job can have, of the host": (
        lambda _: AddressBook.host(0, job_id="two words"),
        *(ConfigError, "PERSIA_JOB_ID"),
    ),
    "an id that no job can have, of a client": (
        lambda book: AddressBook.join("localhost", book.port, "two words"),
        *(ConfigError, "PERSIA_JOB_ID"),
    ),
    "an impossible port": (
        lambda _: AddressBook.host(65_536),
        *(ConfigError, r"\[0, 65535\]\. Received: 65536"),
    ),
    "a port that is taken": (
        lambda book: AddressBook.host(book.port),
        *(JobError, r"port {port}\. .*another job"),
    ),
    "processes that did not register in time": (
        lambda book: (
            book.register("server", 1, 4, ONE)
            or book.addresses("server", timeout_s=0.2)
        ),
        *(DiscoveryError, "Missing: server 0, server 2, server 3"),
    ),
    "a role without any registration": (
        lambda book: book.addresses("worker", timeout_s=0.1),
        *(TimeoutError, r"Every worker must .* within 0\.1 s"),
    ),
    "an unknown host": (
        lambda _: AddressBook.join(NOWHERE, 29400, timeout_s=0.3),
        *(DiscoveryError, r"no-such-host\.invalid:29400"),
    ),
    "an unknown machine": (
        lambda _: local_address(NOWHERE),
        *(DiscoveryError, r"'no-such-host\.invalid'"),
    ),
}


@pytest.mark.parametrize(("ask", "error", "message"), REJECTED.values(), ids=REJECTED)
def test_what_a_job_does_not_have_is_an_error_in_time(book, ask, error, message):
    with pytest.raises(error, match=message.format(port=book.port)):
        ask(book)


@pytest.mark.parametrize(
    ("role", "names", "other"),
    [
        ("trainer", "RANK and WORLD_SIZE", "SLURM_PROCID"),
        ("server", "REPLICA_INDEX and REPLICA_SIZE", "OMPI_COMM_WORLD_RANK"),
    ],
)
def test_processes_that_another_launcher_has_numbered_learn_what_to_set(
    book, monkeypatch, role, names, other
):
    monkeypatch.setenv(other, "1")
    book.claim_size(role, 0, 2)
    with pytest.raises(ConfigError, match=f"{other} is set, but .* by {names}"):
        book.claim_size(role, 0, 1)
    monkeypatch.setenv(names.partition(" ")[0], "1")
    with pytest.raises(ConfigError, match=f"^((?!{other}).)*$"):
        book.claim_size(role, 0, 1)


def test_a_client_without_an_id_joins_the_job_that_is_there(host, book):
    assert book.greeting == host.greeting
    assert host.greeting.job_id
    other = AddressBook.host(0)
    assert other.greeting != host.greeting
    other.close()


def test_a_client_of_another_job_learns_the_port_and_both_ids():
    host = AddressBook.host(0, job_id="ours")
    AddressBook.join("localhost", host.port, "ours", timeout_s=TIMEOUT_S).close()
    message = (
        rf"A client of tcp://127.0.0.1:{host.port} must belong to job 'ours'\. "
        r"Received: job 'theirs'\. .* \(--port, or PERSIA_STORE_PORT\)"
    )
    with pytest.raises(JobMismatchError, match=message):
        AddressBook.join("localhost", host.port, "theirs", timeout_s=TIMEOUT_S)
    host.fail("trainer 0", "its own bug")  # which is none of the other's business
    with pytest.raises(JobMismatchError, match=message):
        AddressBook.join("localhost", host.port, "theirs", timeout_s=TIMEOUT_S)
    host.close()


def test_notes_are_returned_once_all_are_published(host, book):
    host.tell("one", "1")
    with pytest.raises(DiscoveryError, match=r"Missing: two, three"):
        book.ask(["one", "two", "three"], timeout_s=0.1)
    host.tell("two", "2")
    assert book.ask(["two", "one"], timeout_s=TIMEOUT_S) == ["2", "1"]


def test_the_first_failure_stands(host, book):
    assert book.state() == ("running", "")
    book.fail("trainer 0", "the loss is not a number")
    book.fail("server 1", "lost trainer 0")
    host.finish()
    assert host.state() == ("failed", "trainer 0: the loss is not a number")


def test_a_finished_job_does_not_fail_any_more(host, book):
    host.finish()
    book.fail("loader 0", "too late")
    assert book.state() == ("finished", "")


def test_a_wait_for_a_role_ends_when_the_job_has_failed(host, book):
    host.fail("server 0", "out of memory")
    with pytest.raises(JobError, match="server 0: out of memory"):
        book.addresses("server", timeout_s=TIMEOUT_S)


def test_a_closed_book_raises(book):
    book.close()
    with pytest.raises(JobError, match="a closed one"):
        book.state()


def test_a_book_whose_host_has_ended_raises(host, book):
    host.close()
    with pytest.raises(JobError, match=rf"localhost:{host.port} must answer"):
        book.state()


def test_a_book_whose_port_another_job_has_taken_raises():
    host = AddressBook.host(0, job_id="ours")
    book = AddressBook.join("localhost", host.port, "ours", timeout_s=TIMEOUT_S)
    host.close()
    other = once_the_port_is_free(lambda: AddressBook.host(host.port, job_id="theirs"))
    with pytest.raises(JobError, match=r"must belong to job 'theirs'\. .*'ours'"):
        book.state()
    book.close()
    other.close()


def test_a_request_of_another_kind_is_rejected(host):
    address = f"tcp://127.0.0.1:{host.port}"
    server = Connections("address book", [address], encrypts=True)
    forward = Header(Kind.FORWARD)
    reply = server[0].send(forward, [b"{}"], timeout_s=TIMEOUT_S, what="a request")
    with pytest.raises(RemoteError, match=r"of kind BOOK\. Received: FORWARD"):
        reply.frames()
    server.close()


def test_a_value_that_is_too_large_is_rejected(host, book):
    with pytest.raises(JobError, match=r"at most 1048576 bytes\. Received: 10486"):
        book.tell("large", "x" * 2**20)
    with pytest.raises(DiscoveryError, match="Missing: large"):
        host.ask(["large"], timeout_s=0.0)


def test_a_full_book_rejects_new_keys_only(host, book, monkeypatch):
    monkeypatch.setattr(state, "MAX_KEYS", 1)
    book.tell("first", "1")
    with pytest.raises(JobError, match="at most 1 keys"):
        book.tell("second", "2")
    book.tell("first", "one")
    assert host.ask(["first"], timeout_s=TIMEOUT_S) == ["one"]


def test_an_answer_is_bounded(host, book):
    host.tell("large", "x" * 2**19)
    with pytest.raises(JobError, match="An answer must have at most"):
        book.call(FindNotes(["large"] * 3), Found)
    assert book.note("large") == "x" * 2**19


def test_a_book_is_bounded_by_its_characters(host, book, monkeypatch):
    monkeypatch.setattr(state, "MAX_CHARACTERS", 2000)
    book.tell("a", "x" * 1000)
    with pytest.raises(JobError, match="keys, and 2000 characters"):
        book.tell("b", "x" * 1000)
    book.tell("a", "x")
    book.tell("b", "x" * 1000)


def test_the_members_of_a_job_are_bounded(host, book, monkeypatch):
    monkeypatch.setattr(state, "MAX_MEMBERS", 1)
    own = be_server(book)
    with pytest.raises(JobError, match="must have at most 1 members"):
        be_server(book, 1)
    again = ProcessIdentity.of_this_process()
    request = Register("server", 0, again, own.nonce)
    assert book.call(request, str) == again.nonce


@pytest.mark.parametrize("left", [b"a" * 100, b"PJOB\0\0\0\0" + bytes(100)])
def test_a_memory_of_another_kind_is_rejected(left):
    memory = os.memfd_create("book")
    os.write(memory, left)
    with pytest.raises(FrameError, match="with two halves must begin with b'PJOB"):
        Journal(memory).read()
    os.close(memory)


def test_surviving_memory_must_hold_the_state_of_a_job():
    memory = os.memfd_create("book")
    TwoHalves(memory).write(b"\x91\x01")
    with pytest.raises(FrameError, match="must hold the state of its job"):
        Journal(memory).read()
    os.close(memory)


def test_a_book_for_all_interfaces_takes_a_free_port_too():
    host = AddressBook.host(0, everywhere=True)
    assert host.port > 0
    host.close()


def test_the_address_towards_this_machine_is_the_loopback():
    assert local_address("localhost") == "127.0.0.1"
    assert local_address("127.0.1.3") == "127.0.0.1"


def test_time_runs_out_at_the_deadline_where_no_process_compiles():
    patience = ExtendableDeadline(10.0, 0.0)
    assert [patience.is_over(False, now) for now in (0.0, 9.9, 10.0)] == [
        *(False, False),
        True,
    ]


def test_the_time_in_which_a_process_compiles_does_not_count():
    patience = ExtendableDeadline(10.0, 0.0)
    assert not patience.is_over(False, 9.0)
    for second in range(1, 100):
        assert not patience.is_over(True, 9.0 + second)
    assert not patience.is_over(False, 108.9)
    assert patience.is_over(False, 109.1)


def test_a_process_that_compiles_for_ever_extends_a_deadline_only_so_far():
    patience = ExtendableDeadline(10.0, 0.0)
    overs = [patience.is_over(True, float(second)) for second in range(2000)]
    assert overs.index(True) == 10 + timeouts.COMPILING_S


@pytest.fixture
def inherited(monkeypatch):
    """The socket and the memory of a process that has a supervisor."""
    memory = os.memfd_create("book")
    with open_listening() as listener:
        monkeypatch.setenv("PERSIA_LISTEN_FD", str(listener.fileno()))
        yield memory
    os.close(memory)


def host_again(memory):
    return AddressBook.host(0, memory=memory, recovery_s=TIMEOUT_S)


def test_the_next_host_of_a_book_finds_what_the_one_before_had(inherited):
    before = host_again(inherited)
    before.tell("text", "two\nlines")
    own = be_server(before)
    for number in range(300):  # in one place
        before.call(Report("trainer", 0, progress=number), bool)
    before.fail("trainer 0", "no data")
    before.close()
    num_pages = os.fstat(inherited).st_blocks
    after = host_again(inherited)
    assert (after.greeting, after.port) == (before.greeting, before.port)
    assert after.ask(["text"], timeout_s=TIMEOUT_S) == ["two\nlines"]
    assert after.state() == ("failed", "trainer 0: no data")
    assert after.member("server", 0).process == own
    assert after.member("trainer", 0).progress == 299
    assert os.fstat(inherited).st_blocks == num_pages <= 64
    after.tell("more", "1")
    after.close()
    last = host_again(inherited)
    assert last.ask(["text", "more"], timeout_s=TIMEOUT_S) == ["two\nlines", "1"]
    last.close()


def test_a_request_waits_for_the_next_host_of_the_book(inherited):
    host = host_again(inherited)
    book = AddressBook.join("localhost", host.port, timeout_s=TIMEOUT_S)
    book.tell("first", "1")
    host.close()
    waiting = InThread(book.tell, "second", "2")
    host = host_again(inherited)
    waiting.result()
    assert host.ask(["first", "second"], timeout_s=TIMEOUT_S) == ["1", "2"]
    book.close()
    host.close()


def test_a_member_that_is_back_is_not_lost(host):
    book = AddressBook.join("localhost", host.port, timeout_s=TIMEOUT_S)
    own = be_server(book)
    book.close()
    wait_until(lambda: host.member("server", 0).is_lost, "it is lost")
    again = AddressBook.join("localhost", host.port, timeout_s=TIMEOUT_S)
    again.call(Beat("server", 0, own.nonce), View)
    wait_until(lambda: not host.member("server", 0).is_lost, "it is back")
    again.close()


def send_a_large_command(port):
    """Send much in a connection's handshake; print how many MiB were accepted."""
    greeting = b"\xff" + bytes(8) + b"\x7f\3\1" + b"CURVE".ljust(20, b"\0") + bytes(32)
    num_mib, chunk = 0, bytes(2**20)
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as peer:
        peer.sendall(greeting + b"\6" + (300 * len(chunk)).to_bytes(8, "big"))
        with contextlib.suppress(ConnectionError):
            while num_mib < 300:
                peer.sendall(chunk)
                num_mib += 1
    print("accepted:", num_mib)


@AS_ANOTHER_USER
@pytest.mark.multiprocess
def test_a_stranger_cannot_fill_the_memory_of_the_address_book(host, processes):
    args = be_stranger, send_a_large_command, host.port
    stranger = processes.start("stranger", *args)
    assert stranger.status() == 0, stranger.output()
    # More than a frame may wait in the kernel.
    assert int(stranger.output().rpartition("accepted:")[2]) < 32
    host.tell("name", "value")
