"""Hosts by IPv4, IPv6 and names: who listens, who connects, who is unknown."""

import contextlib
import socket
import time
from contextlib import closing

import pytest

from persia_torchrec import env
from persia_torchrec.errors import DiscoveryError, ServerError, WireError
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.rpc.addresses import (
    family_of,
    free_port,
    interface_of,
    join_address,
    local_address,
    open_listening,
)
from persia_torchrec.rpc.connections import Connections
from persia_torchrec.rpc.listener import Listener
from persia_torchrec.rpc.listener_thread import Service
from persia_torchrec.rpc.messages import Header, Kind
from tests.support.script_jobs import Job
from tests.support.servers import DEADLINE_S

UNKNOWN = "no-such-host.invalid"


def has_ipv6():
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


pytestmark = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


def ask(address):
    with closing(Connections("server", [address])) as connections:
        reply = connections[0].send(
            Header(Kind.HELLO), [b""], timeout_s=DEADLINE_S, what="a question"
        )
        return bytes(reply.frames()[1])


def answering(host):
    return closing(Service("server", lambda *_: [b"answer"], host=host))


@pytest.mark.parametrize(
    ("host", "shown"),
    [("::1", "[::1]"), ("[::1]", "[::1]"), ("localhost", None), ("127.0.0.1", None)],
)
def test_a_service_is_reached_by_the_address_that_it_tells(host, shown):
    with answering(host) as service:
        assert ask(service.address) == b"answer"
        if shown:
            assert service.address.startswith(f"tcp://{shown}:")


def test_all_addresses_are_those_of_both_kinds(monkeypatch):
    monkeypatch.setenv("PERSIA_JOB_TOKEN", "0" * 64)
    with answering("*") as service:
        port = service.address.rpartition(":")[2]
        for host in ("127.0.0.1", "[::1]", "localhost"):
            assert ask(f"tcp://{host}:{port}") == b"answer"


def test_an_address_book_is_found_by_ipv6(monkeypatch):
    monkeypatch.setenv("PERSIA_JOB_TOKEN", "0" * 64)
    with closing(AddressBook.host(0, everywhere=True)) as host:
        for name in ("::1", "127.0.0.1", "localhost"):
            with closing(AddressBook.join(name, host.port)) as book:
                assert book.greeting == host.greeting
    with (
        closing(AddressBook.host(0)) as host,
        closing(AddressBook.join("::1", host.port)) as book,
    ):
        assert book.greeting == host.greeting


@pytest.mark.multiprocess
def test_a_job_whose_coordinator_is_supervised_is_one_by_ipv6(processes):
    everywhere = {"PERSIA_JOB_TOKEN": "0" * 64}
    job = Job(processes, recovers=True, trainer=1, env=everywhere)
    at = {**everywhere, "PERSIA_STORE_HOST": "::1"}
    trainer = job.start("trainer", "print('trained')", env=at)
    assert trainer.status() == 0, trainer.output()
    assert job.coordinator.status() == 0, job.coordinator.output()


def test_a_host_is_ipv4_if_it_has_such_an_address(monkeypatch):
    four, six = socket.AF_INET, socket.AF_INET6
    assert [family_of(host) for host in ("10.0.0.1", "fd00::2")] == [four, six]
    found = {"both": [six, four], "six": [six]}
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *_, **__: [(one,) for one in found[host]]
    )
    assert [family_of(host) for host in ("both", "six")] == [four, six]


def test_an_address_holds_ipv6_in_brackets(monkeypatch):
    assert join_address("fd00::2", 7) == "[fd00::2]:7"
    assert join_address("10.0.0.1", 7) == "10.0.0.1:7"
    for address in ("tcp://[fd00::2]:7", "[fd00::2]:7"):
        assert env.host_of(address) == "fd00::2"
    monkeypatch.setenv("PERSIA_STORE_PORT", "7")
    monkeypatch.setenv("PERSIA_STORE_HOST", "[fd00::2]")
    assert env.job_store().host == "fd00::2"


def test_ports_and_interfaces_of_ipv6_are_found():
    with closing(open_listening("::1", free_port("::1"))) as listening:
        assert listening.family is socket.AF_INET6
    assert interface_of("::1") == "lo"
    assert interface_of("fd00::dead:beef") is None
    assert local_address("::1") == "127.0.0.1"


def test_to_listen_on_an_unknown_host_is_an_error():
    with pytest.raises(WireError, match=f"the host '{UNKNOWN}' is unknown here"):
        Listener(UNKNOWN, 0)


def test_a_request_to_an_unknown_host_fails_at_once_and_names_it():
    begun = time.monotonic()
    with pytest.raises(ServerError, match=f"the host '{UNKNOWN}' is unknown here"):
        ask(f"tcp://{UNKNOWN}:7000")
    assert time.monotonic() < begun + DEADLINE_S


def test_a_host_that_may_become_known_is_named_while_it_is_waited_for(caplog):
    addresses = [f"tcp://{UNKNOWN}:7000"]
    with closing(Connections("server", addresses, recovery_s=60)):
        assert f"the host '{UNKNOWN}' is unknown here" in caplog.text


def test_a_coordinator_whose_host_is_unknown_is_named_at_once(caplog):
    with pytest.raises(DiscoveryError, match=UNKNOWN):
        AddressBook.join(UNKNOWN, 7000, timeout_s=0.5)
    assert f"the coordinator's host '{UNKNOWN}' is unknown here" in caplog.messages[0]
    assert len(caplog.messages) == 1
