"""A job whose processes are on three hosts, with addresses of their own."""

import re

import pytest

from tests.support.hosts import Hosts
from tests.support.persia_scripts import Scripts

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@pytest.mark.long
def test_a_job_on_three_hosts_trains_each_batch_once(tmp_path):
    """Of each pair of roles that connect, two processes are on different hosts."""
    with Hosts(3) as network:
        one, two, three = network.all
        hosts = {
            "coordinator": one,
            "server 0": one,
            "server 1": two,
            "worker": three,
            "loader": two,
            "trainer 0": two,
            "trainer 1": three,
        }
        sizes = ["--servers", "2", "--trainers", "2"]
        scripts = Scripts(tmp_path)
        with scripts.start(*sizes, num_batches=41, hosts=hosts) as job:
            ended = job.wait()
    assert ended.status == 0, ended.output
    for member in ("server 0", "server 1", "worker 0"):
        host = hosts.get(member, hosts["worker"])
        assert f"ready tcp://{host.address}:" in ended.logs[member]
    results = r"rank (\d): trained (\d+) batches, accuracy 0\.\d+, dense (\w+)"
    (one, two) = sorted(re.findall(results, ended.output))
    assert (one[:2], two[:2]) == (("0", "21"), ("1", "20"))
    assert one[2] == two[2]
