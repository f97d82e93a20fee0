import socket
from contextlib import closing

import pytest

from persia_torchrec.errors import ConfigError, WireError
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.persia.utils import find_free_port
from persia_torchrec.rpc.addresses import (
    free_port,
    free_port_from,
    interface_of,
    reserved_port_from,
)
from persia_torchrec.rpc.listener import Listener
from tests.support.ports import draw_port


def test_a_free_port_can_be_listened_on():
    with closing(socket.create_server(("127.0.0.1", free_port()))) as server:
        assert server.getsockname()[1] > 0


def test_a_port_in_use_is_skipped():
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        taken = server.getsockname()[1]
        found = find_free_port(taken, 7)
        assert found > taken
        assert (found - taken) % 7 == 0


def test_where_no_port_is_free_there_is_an_error():
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as server,
        pytest.raises(ConfigError, match=r"must be free\. None is"),
    ):
        free_port_from(server.getsockname()[1], 65_535)


@pytest.mark.parametrize(("first", "step"), [(0, 1), (65_536, 1), (10_000, 0)])
def test_a_port_out_of_range_is_rejected(first, step):
    with pytest.raises(ConfigError, match=f"Received: {first} and {step}"):
        free_port_from(first, step)


def test_a_reserved_port_is_skipped_but_can_be_listened_on():
    with reserved_port_from(draw_port()) as port, reserved_port_from(port) as other:
        assert free_port_from(port) > other > port
        listener = Listener("127.0.0.1", port)
        assert listener.address == f"tcp://127.0.0.1:{port}"
        with pytest.raises(WireError, match="Address already in use"):
            Listener("127.0.0.1", port)
        listener.close()
        book = AddressBook.host(other)
        book.close()


def test_the_interface_of_an_address_is_found_by_name():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") is None
