"""``persia.serve``, through torchx, as a user starts it."""

import contextlib
import os
import shutil
import signal

import numpy as np
import pytest

from persia_torchrec.job.member_record import MemberRecord
from persia_torchrec.job.registry import AddressBook
from tests.support.faults import kill
from tests.support.forked_jobs import ForkedJob
from tests.support.ports import draw_port, draw_ports
from tests.support.processes import wait_until
from tests.support.served_model import EVALUATION
from tests.support.serving_process import predict
from tests.support.torchx_jobs import TorchxJob

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
]


def serve(start, component, folder, trained, port, *arguments):
    (folder / "global_config.yml").write_text(
        "embedding_parameter_server_config:\n  capacity: 1000\n"
    )
    return start(
        folder,
        component,
        *("--embedding_config", str(trained.embedding_config)),
        *("--global_config", str(folder / "global_config.yml")),
        *("--port", str(port)),
        *arguments,
    )


def write_a_later_checkpoint(run, servers):
    """Write one that has no rows."""
    client = servers.client(servers.start(1))
    client.checkpoints.load(run)
    client.clear()
    assert client.checkpoints.dump(run).path.endswith("checkpoint-00000002")


@pytest.mark.long
def test_two_inference_servers_predict_what_the_job_evaluated(
    tmp_path, trained, servers
):
    ports, run = draw_ports(2), tmp_path / "run"
    shutil.copytree(trained.checkpoint, run)
    arguments = ["--checkpoint", str(run), "--http_port", str(ports[0])]
    arguments += ["--servers", "2", "--predictors", "2"]
    own = draw_port()
    component = "persia.serve"
    with serve(TorchxJob, component, tmp_path, trained, own, *arguments) as job:

        def check(port):
            for batch, expected in zip(EVALUATION, trained.expected, strict=True):
                found = predict(f"http://127.0.0.1:{port}", batch.to_bytes())
                np.testing.assert_allclose(found, expected, atol=1e-6)

        for port in ports:
            job.has_printed(f"ready http://127.0.0.1:{port}")
            check(port)
        with contextlib.closing(AddressBook.join("localhost", own)) as book:
            killed = MemberRecord(book, "predictor", 0).process()
            kill(killed.pid)
            check(ports[1])
            job.has_printed("predictor 0 is back, failover took ")
            ready = f"ready http://127.0.0.1:{ports[0]}"
            wait_until(lambda: job.output().count(ready) == 2, "it is ready")
            check(ports[0])
            write_a_later_checkpoint(run, servers)
            kill(MemberRecord(book, "server", 0).process().pid)
            job.has_printed("server 0 is back, failover took ")
            for port in ports:  # of the checkpoint that the job has begun with
                check(port)
            coordinator = MemberRecord(book, "coordinator", 0).process()
            os.kill(coordinator.pid, signal.SIGTERM)
        ended = job.wait()
    assert ended.status == 0, ended.output
    assert "the job is finished" in ended.logs["coordinator 0"]


def test_a_missing_checkpoint_ends_all_roles_and_each_reports_which_failed(
    tmp_path, trained
):
    arguments = ["--checkpoint", str(tmp_path / "absent"), "--http_port"]
    arguments += [str(draw_port()), "--restarts", "0"]
    at = tmp_path, trained, draw_port()
    with serve(ForkedJob, "serve", *at, *arguments) as job:
        ended = job.wait()
    assert ended.status == 1
    assert set(ended.logs) == {"coordinator 0", "server 0", "worker 0", "predictor 0"}
    for name in ("coordinator 0", "server 0"):
        assert "must be a checkpoint, or hold one" in ended.logs[name], name
    assert "server 0 has failed" in ended.logs["worker 0"]
