"""``components/inference.py:serve``, through torchx, as a user starts it."""

import json
import os
import signal
import urllib.request

import numpy as np
import pytest

from persia_torchrec.wire.ports import free_port
from tests.integration.torchx_jobs import ROOT, TorchxJob
from tests.processes import wait_until
from tests.serving.conftest import EVALUATION

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.timeout(240),
]

START_S = 120.0


def serve(folder, trained, *arguments):
    (folder / "global_config.yml").write_text(
        "embedding_parameter_server_config:\n"
        "  capacity: 1000\n"
        "  enable_incremental_update: true\n"
        f"  incremental_dir: {folder / 'increments'}\n"
    )
    return TorchxJob(
        folder,
        str(ROOT / "components/inference.py:serve"),
        *("--embedding_config", str(trained.embedding_config)),
        *("--global_config", str(folder / "global_config.yml")),
        *arguments,
    )


def predictions_of(port, batch):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/predict",
        data=batch.to_bytes(),
        headers={"Content-Type": "application/octet-stream"},
    )
    with urllib.request.urlopen(request, timeout=START_S) as answer:
        return json.load(answer)["predictions"]


def test_two_inference_servers_predict_what_the_job_evaluated(tmp_path, trained):
    port = free_port()  # and hopefully the next one too
    arguments = ["--checkpoint", str(trained.checkpoint), "--http_port", str(port)]
    arguments += ["--embedding_servers", "2", "--predictors", "2"]
    arguments += ["--follow_model", "True"]
    with serve(tmp_path, trained, *arguments) as job:
        for number in range(2):
            line = f"ready http://127.0.0.1:{port + number}"
            wait_until(
                lambda line=line: line in job.output() or job.torchx.poll() is not None,
                line,
                START_S,
            )
            for batch, expected in zip(EVALUATION, trained.expected, strict=True):
                found = predictions_of(port + number, batch)
                np.testing.assert_allclose(found, expected, atol=1e-6)
        (coordinator,) = job.pids("persia_torchrec.launch.coordinator")
        os.kill(coordinator, signal.SIGTERM)
        ended = job.wait(START_S)
    assert ended.status == 0, ended.output
    assert "the job is finished" in ended.logs["coordinator 0"]


def test_a_checkpoint_that_is_not_there_ends_all_and_every_log_says_why(
    tmp_path, trained
):
    arguments = ["--checkpoint", str(tmp_path / "absent"), "--http_port", "8080"]
    with serve(tmp_path, trained, *arguments) as job:
        ended = job.wait(START_S)
    assert ended.status == 1
    assert set(ended.logs) == {"coordinator 0", "server 0", "worker 0", "predictor 0"}
    for name in ("coordinator 0", "server 0", "worker 0"):
        assert "must be a checkpoint, or hold one" in ended.logs[name], name
