"""The inference server as a process, asked over HTTP."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from persia_torchrec import timeouts
from persia_torchrec.errors import ConfigError
from persia_torchrec.parsing.command_line import parse_flags
from persia_torchrec.persia.batch import PersiaBatch
from persia_torchrec.serving.__main__ import ServingFlags, find_dense, main
from tests.support.processes import (
    DEADLINE_S,
    Processes,
    children_of,
    is_running,
    wait_until,
)
from tests.support.repository import ROOT
from tests.support.served_model import EVALUATION, are_close
from tests.support.serving_process import BYTES, JSON, Serving, ask

PAGE = ROOT / "docs/serving.md"

pytestmark = pytest.mark.multiprocess


def to_json(batch):
    """Return a batch as JSON."""
    ids = {
        feature.name: [sample.tolist() for sample in feature.data]
        for feature in batch.id_type_features
    }
    dense = [feature.data.tolist() for feature in batch.non_id_type_features]
    value = {"id_type_features": ids, "non_id_type_features": dense}
    return json.dumps(value).encode()


def reordered(batch):
    """Return a batch as JSON, its ID features in another order."""
    value = json.loads(to_json(batch))
    ids = value["id_type_features"]
    value["id_type_features"] = dict(reversed(ids.items()))
    return json.dumps(value).encode()


@pytest.fixture(scope="module", params=["own servers", "workers"])
def serving(request, trained, tmp_path_factory):
    arguments = ["--checkpoint", str(trained.checkpoint), "--max-body-bytes", "20000"]
    if request.param == "workers":
        arguments += ["--workers", *trained.workers]
    else:
        arguments += ["--embedding-config", str(trained.embedding_config)]
    with Processes(tmp_path_factory.mktemp("serving")) as processes:
        serving = Serving(processes, *arguments)
        yield serving
        serving.process.send(signal.SIGTERM)
        assert serving.process.status() == 0


def test_predictions_equal_those_of_an_evaluation_in_the_job(serving, trained):
    for batch, expected in zip(EVALUATION, trained.expected, strict=True):
        bodies = (batch.to_bytes(), BYTES), (to_json(batch), JSON)
        for body, kind in (*bodies, (reordered(batch), JSON)):
            status, answer = ask(serving.address, "/predict", body, kind)
            assert status == 200
            np.testing.assert_allclose(answer["predictions"], expected, atol=1e-6)
    assert np.ptp(trained.expected) > 0.01


def test_the_health_page_shows_rows_and_model(serving, trained):
    status, health = ask(serving.address, "/health")
    assert status == 200
    assert health["ready"] is True
    assert health["rows"] == trained.num_rows > 0
    assert health["model"].endswith("/run/jit_dense.pt")
    assert health["uptime_s"] >= 0


@pytest.mark.parametrize(
    ("body", "kind", "status", "message"),
    [
        (b"nonsense", BYTES, 400, "FrameError"),
        (EVALUATION[0].to_bytes()[:-1], BYTES, 400, "FrameError"),
        (b"{", JSON, 400, "must be JSON"),
        (b"{}", "text/plain", 400, "Content-Type must be one of"),
        (b"x" * 20_001, BYTES, 413, "may have 20000 bytes"),
        (
            b'{"id_type_features": {"item": [[1]], "lats": [[1]]}}',
            JSON,
            400,
            r"\['item', 'last'\]\. Received: none for 'last'; unknown 'lats'",
        ),
        (
            b'{"id_type_features": {"item": [[1]], "last": [[1]]}, '
            b'"non_id_type_features": [[[NaN, 1]]]}',
            JSON,
            400,
            "must have finite numbers",
        ),
        (
            b'{"id_type_features": {"item": [[1]], "last": [[1]]}, '
            b'"non_id_type_features": [[[1, 1, 1]]]}',
            JSON,
            400,
            r"must be float32 of shape \('batch', 2\)\. Received: .* of \(1, 3\)",
        ),
        (
            b'{"id_type_features": {"item": [[1]]}}',
            JSON,
            400,
            r"must have each ID feature of the model.*Received: none for 'last'",
        ),
        (
            b'{"id_type_features": {"item": [[1]], "last": [[1]]}}',
            JSON,
            400,
            "each dense feature of the model.*Received: none for",
        ),
    ],
)
def test_an_invalid_request_is_rejected(serving, body, kind, status, message):
    received, answer = ask(serving.address, "/predict", body, kind)
    assert received == status
    assert answer.keys() == {"error"}
    assert re.search(message, answer["error"])
    assert ask(serving.address, "/health")[0] == 200


def test_an_unknown_path_is_not_found(serving):
    assert ask(serving.address, "/")[0] == 404
    status, answer = ask(serving.address, "/predictions", b"")
    assert status == 404
    assert "/predict (POST)" in answer["error"]


def test_sigterm_to_all_processes_drains_the_server_before_they_end(trained, tmp_path):
    with Processes(tmp_path) as processes:
        serving = Serving(
            processes,
            *("--checkpoint", str(trained.checkpoint)),
            *("--embedding-config", str(trained.embedding_config)),
            *("--servers", "2", "--drain-s", str(DEADLINE_S)),
        )
        body = PersiaBatch.to_bytes(EVALUATION[0])

        def predicts():
            status, answer = ask(serving.address, "/predict", body)
            return status == 200 and are_close(
                [answer["predictions"]], trained.expected[:1]
            )

        assert predicts()
        # To the process, by way of a thread that is not the main one.
        threads = Path(f"/proc/{serving.process.pid}/task").iterdir()
        servers = children_of(serving.process.pid)
        assert len(servers) == 2
        for pid in (max(int(thread.name) for thread in threads), *servers):
            os.kill(pid, signal.SIGTERM)
        wait_until(lambda: ask(serving.address, "/health")[0] == 503, "it is not ready")
        assert predicts()

        time.sleep(timeouts.SAME_SIGNAL_S)  # one within that is the same signal
        serving.process.send(signal.SIGTERM)  # which ends the drain
        assert serving.process.status() == 0
        assert not any(map(is_running, servers))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "absent.pt"], "must be a TorchScript model. .* no such file"),
        (["--model", "manifest.json"], "must be a TorchScript model, as"),
        (["--max-requests", "0"], "max_requests must be > 0"),
        (["--default-answer", "nan"], "default_answer must be finite"),
        (["--lookup-timeout-s", "0"], "lookup_timeout_s must be >= 0.001"),
        (["--batch-window-s", "-1"], "batch_window_s must be >= 0"),
        (["--drain-s", "-1"], "drain_s must be >= 0"),
        (["--workers-of-job"], "must belong to a job: PERSIA_STORE_PORT is not set"),
        ([], "--embedding-config, or PERSIA_EMBEDDING_CONFIG, is needed"),
        (
            ["--workers", "127.0.0.1:1", "--increments-dir", "increments"],
            r"--increments-dir cannot be combined with embedding workers",
        ),
    ],
)
def test_invalid_settings_are_rejected(trained, monkeypatch, capfd, arguments, message):
    monkeypatch.delenv("PERSIA_EMBEDDING_CONFIG", raising=False)
    monkeypatch.delenv("PERSIA_STORE_PORT", raising=False)
    command = ["serving", "--checkpoint", str(trained.checkpoint), *arguments]
    monkeypatch.setattr(sys, "argv", command)
    assert main() == 1
    assert re.search(message, capfd.readouterr().err)


def test_a_job_that_serves_one_checkpoint_takes_no_later_dense_model(tmp_path):
    served = tmp_path / "checkpoint-00000001"
    served.mkdir()
    flags = ServingFlags(checkpoint=str(tmp_path))
    assert find_dense(flags, None) == str(tmp_path)
    assert find_dense(flags, str(served)) == str(tmp_path)  # as it has none
    (served / "jit_dense.pt").touch()
    assert find_dense(flags, str(served)) == str(served)
    following = ServingFlags(checkpoint=str(tmp_path), follow_model=True)
    assert find_dense(following, None) == str(tmp_path)
    with pytest.raises(ConfigError, match="servers must follow the training"):
        find_dense(following, str(served))


def test_the_arguments_of_the_page_for_kserve_are_flags():
    (block,) = re.findall(r"```yaml\n(apiVersion.*?)```", PAGE.read_text(), re.S)
    (container,) = yaml.safe_load(block)["spec"]["predictor"]["containers"]
    assert container["command"] == ["python", "-m", "persia_torchrec.serving"]
    flags = parse_flags(ServingFlags, container["args"], prog="serving")
    assert (flags.http.address, flags.http.port) == ("0.0.0.0", 8080)
    assert container["ports"][0]["containerPort"] == flags.http.port
