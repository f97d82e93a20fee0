"""Whole jobs on a private Slurm: started again, side by side, and such that serve."""

import json
import re
import secrets
import shutil
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from persia_torchrec.checkpoint import catalog
from persia_torchrec.rpc.addresses import open_listening
from tests.support import served_model as serving
from tests.support.components import roles_file_of
from tests.support.faults import kill
from tests.support.ports import draw_port, draw_ports
from tests.support.processes import DEADLINE_S, is_running, wait_until
from tests.support.repository import ROOT
from tests.support.slurm import (
    TORCHX_RUN,
    WAITING_TRAINER,
    SlurmJob,
    adult_income,
    private_slurm,
    waiting_job,
)

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

trained = serving.trained
EXACT = {"REPRODUCIBLE": "1", "EMBEDDING_STALENESS": "1"}
TRAINS_FOR_EVER = """
import itertools, time, torch, torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from persia_torchrec import SGD, EmbeddingClient, recoverable, remote_sharders

dist.init_process_group("gloo")
client = EmbeddingClient.of_job()
sharders = remote_sharders(client, SGD(lr=1.0))
table = EmbeddingBagConfig(1000, 4, "item", feature_names=["item"])
collection = EmbeddingBagCollection(tables=[table], device="meta")
model = DistributedModelParallel(collection, sharders=sharders)
with recoverable(None, {"model": model}, client, sharders) as run:
    for _ in run.skip(itertools.count()):
        ids = KeyedJaggedTensor(["item"], torch.arange(4), lengths=torch.ones(4).int())
        model(ids).values().sum().backward()
        time.sleep(0.02)
        run.step()
        print(f"step {run.num_steps}.", flush=True)
"""
OFTEN = {"PERSIA_CHECKPOINT_INTERVAL_S": "1", "PACE_S": "0.02"}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with private_slurm(tmp_path_factory.mktemp("slurm"), num_nodes=12) as slurm:
        yield slurm


def auc_of(job):
    return re.findall(r"test AUC (0\.\d+)", job.output())


def resumes(slurm, job):
    time.sleep(0.5)  # Slurm begins nothing in a cluster where nothing happens
    slurm.look_for_jobs()
    return "training resumes from" in job.output()


def test_a_killed_step_starts_the_job_again_which_ends_as_the_one_beside_it(
    slurm, tmp_path
):
    folders = [tmp_path / "killed", tmp_path / "undisturbed"]
    killed, undisturbed = (
        adult_income(slurm, folder, **EXACT, **OFTEN) for folder in folders
    )
    with killed, undisturbed:
        for job, folder in zip((killed, undisturbed), folders, strict=True):
            job.has_printed("automatic checkpoint ")
            if job is killed:
                job.kill_step("server", 1)
            (folder / "go").touch()
        assert undisturbed.wait() == {"COMPLETED"}
        wait_until(
            lambda: resumes(slurm, killed),
            "the job resumes",
            details=killed.output,
        )
        assert killed.wait() == {"COMPLETED"}
    assert "continues with what an earlier start of the job" in killed.output()
    assert auc_of(killed) == auc_of(undisturbed)


def test_a_job_serves_a_checkpoint_and_a_killed_predictor_returns(
    slurm, trained, tmp_path
):
    port = draw_port()
    (tmp_path / "global.yml").write_text("{}")
    job = SlurmJob(
        slurm,
        tmp_path,
        *(*TORCHX_RUN, "persia.serve"),
        *("--checkpoint", trained.checkpoint),
        *("--embedding_config", trained.embedding_config),
        *("--global_config", "global.yml", "--servers", 2),
        *("--http_port", port, "--port", draw_port()),
    )
    with job:
        job.has_printed(f"ready http://127.0.0.1:{port}")
        predicts_what_was_evaluated(port, trained)
        for module, index in (("serving", 0), ("server", 1), ("worker", 0)):
            kill(job.pid(module, index))
        job.has_printed(" is back, failover took ", times=3)
        job.has_printed(f"ready http://127.0.0.1:{port}", times=2)
        predicts_what_was_evaluated(port, trained)
        job.torchx("cancel", job.handle)
        assert job.wait() == {"CANCELLED"}


def test_the_script_of_the_page_serves_without_a_coordinator(slurm, trained, tmp_path):
    page = (ROOT / "docs/launching.md").read_text()
    script = re.search(r"```sh\n(#!/bin/bash\n#SBATCH.*?)```", page, re.DOTALL)[1]
    script = re.sub(r"\$\{node\[\d\]\}:", "127.0.0.1:", script)  # where all run
    ports = draw_ports(4)
    for number, port in zip((8080, 8887, 8888, 8889), ports, strict=True):
        script = script.replace(str(number), str(port))
    path = tmp_path / "serve.sh"
    path.write_text(script)
    shutil.copy(trained.embedding_config, tmp_path / "embedding_config.yml")
    (tmp_path / ".persia_torchrec").mkdir()
    for name in ("job_token", "http_token"):
        token = tmp_path / ".persia_torchrec" / name
        token.touch(0o600)
        token.write_text(secrets.token_hex(32))
    headers = {"Authorization": f"Bearer {token.read_text()}"}
    submit = ("sbatch", "--parsable", path)
    variables = {"CHECKPOINT": str(trained.checkpoint)}
    with SlurmJob(slurm, tmp_path, *submit, variables=variables) as job:
        job.has_printed(f"ready http://0.0.0.0:{ports[0]}")
        predicts_what_was_evaluated(ports[0], trained, **headers)
        kill(job.pid("server", 1))
        job.has_printed("restarting it")
        predicts_what_was_evaluated(ports[0], trained, **headers)
        slurm.call("scancel", job.id)
        assert job.wait() == {"CANCELLED"}


def test_a_cancelled_job_leaves_nothing_behind(slurm, tmp_path):
    port, shared = draw_port(), set(Path("/dev/shm").iterdir())
    env = "NICS=eth0,eth1,NOTE=it's,LOG_LEVEL=DEBUG"
    arguments = (
        "--port",
        port,
        "--env",
        env,
        "--roles_file",
        roles_file_of("all.cpu=2"),
    )
    exported = {"LOG_LEVEL": "ERROR", "PERSIA_STORE_HOST": "10.99.99.99"}
    with waiting_job(slurm, tmp_path, WAITING_TRAINER, *arguments, **exported) as job:
        job.has_printed("the trainer waits, with eth0,eth1 it's DEBUG")
        job.has_printed("it has 2 processors")
        assert "RUNNING" in job.torchx("status", job.handle)
        pids = job.pids()
        job.torchx("cancel", job.handle)
        assert job.wait() == {"CANCELLED"}
        assert not any(map(is_running, pids))
    assert set(Path("/dev/shm").iterdir()) <= shared
    open_listening(port=port).close()


@pytest.mark.parametrize(
    ("scancel", "number", "variables"),
    [
        ([], "SIGTERM", {}),
        (["--signal=USR1"], "SIGUSR1", {}),
        (None, "SIGUSR1", {"SBATCH_SIGNAL": "USR1@60", "SBATCH_TIMELIMIT": "3"}),
    ],
    ids=["cancelled", "signalled", "time limit"],
)
def test_a_job_that_must_leave_takes_a_last_checkpoint(
    slurm, tmp_path, scancel, number, variables
):
    (tmp_path / "train.py").write_text(TRAINS_FOR_EVER)
    component = "persia.train_torchrec"
    words = (*TORCHX_RUN, component, "--script", "train.py", "--max_retries", 0)
    run = ("--run_dir", tmp_path / "run", "--port", draw_port())
    with SlurmJob(slurm, tmp_path, *words, *run, variables=variables) as job:
        if scancel is not None:
            job.has_printed("step 20.")
            slurm.call("scancel", *scancel, job.id)
        assert job.wait() <= {"CANCELLED", "FAILED", "TIMEOUT"}
    output = job.output()
    steps = [int(step) for step in re.findall(r"step (\d+)\.", output)]
    latest = catalog.find_checkpoint(tmp_path / "run")
    assert catalog.Manifest.read(latest).step == len(steps) + 1, output
    assert f"told to end ({number}); the last checkpoint is" in output
    assert "restarting it" not in output


def test_a_job_that_raises_has_failed_and_reports_where_its_log_is(slurm, tmp_path):
    never = ("--restarts", "0", "--max_retries", "0")
    arguments = (*never, "--port", draw_port())
    with waiting_job(
        slurm, tmp_path, "raise ValueError('a mistake')", *arguments
    ) as job:
        assert job.wait() == {"FAILED"}
        assert "FAILED" in job.torchx("status", job.handle)
    last = (tmp_path / f"slurm-{job.id}-coordinator-0.err").read_text().splitlines()[-1]
    log = tmp_path / f"slurm-{job.id}-trainer-0.err"
    assert last.endswith(f"trainer 0: ValueError: a mistake; its log: {log}")
    assert "Traceback" in log.read_text()


def predicts_what_was_evaluated(port, trained, **headers):
    for batch, expected in zip(serving.EVALUATION, trained.expected, strict=True):
        found = predictions_of(port, batch, **headers)
        np.testing.assert_allclose(found, expected, atol=1e-6)


def predictions_of(port, batch, **headers):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/predict",
        data=batch.to_bytes(),
        headers={"Content-Type": "application/octet-stream", **headers},
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        return json.load(answer)["predictions"]
