"""What a process carries after use: a client and a data loader have no store."""

import json
import os
import subprocess
import sys

import pytest

from persia_torchrec.data import DataLoader, StreamingDataset
from persia_torchrec.job.requests import JobTimings
from persia_torchrec.server.cluster import EmbeddingCluster
from tests.support.local_job import LocalJob
from tests.support.servers import DEADLINE_S

LOOKS_UP = """
import sys
import numpy as np
from persia_torchrec.client.client import BatchNumber, EmbeddingClient
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.table import TableSpec

client = EmbeddingClient.connect(sys.argv[1:])
client.add_tables([TableSpec(name="item", dim=4, optimizer=SGD(1.0))])
item, number = ("item", client.split(np.arange(9, dtype=np.uint64))), BatchNumber(1, 0)
[rows] = client.pull([item], batch=number)
assert client.outcome(client.push([item], [rows], number)).num_missed == 0
assert client.num_rows() == [9] and not client.read("item", item[1].ids).any()
client.close()
"""

STREAMS = """
import numpy as np
from persia_torchrec.persia.stream import BatchSender, Inbox
from persia_torchrec.persia.batch import IDTypeFeature, PersiaBatch

inbox = Inbox(1, 0, 1)
receiver = inbox.listen("127.0.0.1")
sender = BatchSender([receiver.address], loader=0, num_loaders=1)
sender.begin()
ids = IDTypeFeature("item", [np.arange(3, dtype=np.uint64)])
sender.send(1, PersiaBatch([ids], requires_grad=False), 0)
sender.end()
assert inbox.take(60, in_order=True).batch_size == 1
assert inbox.take(60, in_order=True) is None
sender.close()
receiver.close()
"""

LOADS = """
import numpy as np
from persia_torchrec.ctx import DataCtx
from persia_torchrec.persia.batch import IDTypeFeature, Label, PersiaBatch
from persia_torchrec.persia.feed import end_all

ids = IDTypeFeature("item", [np.arange(3, dtype=np.uint64)])
label = Label(np.zeros((1, 1), dtype=np.float32))
with DataCtx() as ctx:
    ctx.send_data(PersiaBatch([ids], labels=[label]))
end_all()  # as the job does when the script ends
"""

TELLS = """
import json, os, sys
print(json.dumps(sorted(sys.modules)), flush=True)
os._exit(0)  # as a member of a job it would wait for the end
"""


def modules_after(*command, env=None):
    """Return what a new interpreter has imported, which tells it at its end."""
    done = subprocess.run(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=env,
        timeout=DEADLINE_S,
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def require_no_store(modules, max_own):
    own = {name for name in modules if name.partition(".")[0] == "persia_torchrec"}
    rooms = {name.split(".")[1] for name in own if "." in name}
    assert not rooms & {"store", "server"}, sorted(own)
    assert len(own) <= max_own, sorted(own)


@pytest.mark.multiprocess
def test_a_client_that_has_looked_ids_up_has_no_store():
    with EmbeddingCluster.local(servers=1) as cluster:
        modules = modules_after("-c", LOOKS_UP + TELLS, *cluster.addresses)
    require_no_store(modules, 69)  # with requests and status of a job, shared memory


@pytest.mark.multiprocess
def test_both_ends_of_a_stream_of_batches_have_neither_store_nor_client():
    modules = modules_after("-c", STREAMS + TELLS)
    require_no_store(modules, 29)
    assert "persia_torchrec.client" not in modules


@pytest.mark.multiprocess
@pytest.mark.parametrize("start", [(), ("-m", "persia_torchrec.job.script", "loader")])
def test_a_data_loader_that_has_sent_a_batch_compiles_nothing(
    tmp_path, monkeypatch, start
):
    script = tmp_path / "load.py"
    script.write_text(LOADS + TELLS)
    with LocalJob(tmp_path, monkeypatch) as job, job.train_ctx() as ctx:
        batches = iter(DataLoader(StreamingDataset(1), embedding_staleness=1))
        env = {**os.environ, "REPLICA_INDEX": "0", "REPLICA_SIZE": "1"}
        del env["PERSIA_MEMBER"]  # it becomes a member, by the coordinator's timings
        job.book.publish(JobTimings())
        modules = modules_after(*start, str(script), env=env)
        for batch in batches:
            ctx.backward(ctx.forward(batch)[0].sum())
        assert job.num_rows() == 3
    require_no_store(modules, 61)
    assert not modules & {"numba", "llvmlite", "torch"}
