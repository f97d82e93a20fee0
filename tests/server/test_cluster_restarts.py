"""Servers that are killed while several trainers use them, and started again."""

import os
from contextlib import closing

import pytest

from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.errors import ServerError
from persia_torchrec.job import supervisor
from persia_torchrec.server.cluster import EmbeddingCluster
from tests.support.processes import wait_until
from tests.support.restarted_servers import train_through_kills

pytestmark = pytest.mark.multiprocess


def test_no_update_is_lost_or_applied_twice_while_servers_are_killed(servers):
    train_through_kills(servers, num_kills=3)


def test_a_server_that_cannot_start_again_is_given_up(monkeypatch, caplog):
    monkeypatch.setattr(supervisor, "MAX_FAILED", 0)
    with EmbeddingCluster.local(servers=1, capacity=10, restarts=True) as cluster:
        client = EmbeddingClient.connect(cluster.addresses, recovery_s=1.0)
        os.pwrite(cluster.kept[0].memory, b"\0" * 8, 0)  # no memory of a store
        cluster.processes[0].kill()
        with closing(client), pytest.raises(ServerError, match="away for 1 s"):
            client.counters()
        wait_until(
            lambda: "giving up on embedding server" in caplog.text, "it is given up"
        )
