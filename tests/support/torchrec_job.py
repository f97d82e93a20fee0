"""The job of ``torchrec_script.py``: what it prints, and what it should."""

import re

import torch.distributed as dist

from persia_torchrec import EmbeddingClient, EmbeddingCluster
from tests.support import torchrec_script
from tests.support.repository import ROOT

SCRIPT = ROOT / "tests/support/torchrec_script.py"


def print_without_a_job(folder):
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    with EmbeddingCluster.local(2) as cluster:
        client = EmbeddingClient.connect(cluster.addresses)
        total, rows = torchrec_script.train(client, folder)
    print(f"of 2 servers: losses {total:.6f}, rows {rows:.4f}")


def printed_by(output):
    found = re.search(r"of 2 servers: losses (\d+\.\d+), rows (-?\d+\.\d+)", output)
    assert found is not None, output
    return [float(number) for number in found.groups()]
