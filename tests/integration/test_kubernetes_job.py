"""Jobs through torchx's Kubernetes scheduler, in a cluster whose pods are processes."""

import re

import pytest
from kubernetes import client, config
from kubernetes.client.rest import ApiException
from torchx.runner import get_runner
from torchx.specs import AppDef, AppState

from persia_torchrec.launch import roles
from tests.support.adult_income import TEST, TRAIN, write
from tests.support.ports import draw_port
from tests.support.processes import Processes, is_running, wait_until
from tests.support.repository import ROOT
from tests.support.volcano import NAMESPACE, QUEUE, Cluster

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:HTTPResponse.getheader:DeprecationWarning"),
]

EXAMPLE = ROOT / "examples/adult_income"
CFG = {"queue": QUEUE, "namespace": NAMESPACE}
COMPONENT = "persia.train"
ROLES_FILE = """
all: {image: "job:7", volumes: ["census:HERE:ro"], env: {PERSIA_DATA_DIR: HERE}}
server: {replicas: 2, cpu: 2, memory: 3Gi}
loader: {secrets: {PASSWORD: census/password}}
trainer: {volumes: ["/tmp:HERE-of-host"]}
"""
SIZES = {"coordinator": 1, "server": 2, "worker": 1, "loader": 1, "trainer": 1}
LOADER = """
import os
import runpy
import sys

assert os.environ["PASSWORD"] == "of the data"
sys.path.insert(0, EXAMPLE)
runpy.run_path(EXAMPLE + "/data_loader.py", run_name="__main__")
"""


@pytest.fixture
def folder(tmp_path):
    """Return a folder with what a job of few batches needs."""
    write(tmp_path / "claim", train=TRAIN * 200, test=TEST * 50)
    roles = ROLES_FILE.replace("HERE", str(tmp_path / "data"))
    (tmp_path / "roles.yml").write_text(roles)
    loader = LOADER.replace("EXAMPLE", repr(str(EXAMPLE)))
    (tmp_path / "loader.py").write_text(loader)
    return tmp_path


def arguments(folder, *more, script=f"{EXAMPLE}/train.py"):
    return [
        *("--nn_worker", script, "--data_loader", "loader.py"),
        *("--embedding_config", f"{EXAMPLE}/embedding_config.yml"),
        *("--global_config", f"{EXAMPLE}/global_config.yml"),
        *("--port", str(draw_port()), "--roles_file", str(folder / "roles.yml")),
        *more,
    ]


@pytest.fixture
def cluster(folder):
    secrets = {
        "census": {"password": "of the data"},
        "persia-job-token": {"token": "0123456789abcdef"},
    }
    claims = {"census": folder / "claim"}
    with (
        Processes(folder) as processes,
        Cluster(processes, {}, secrets=secrets, claims=claims) as cluster,
    ):
        yield cluster


@pytest.fixture
def runner(cluster):
    settings = client.Configuration()
    config.load_kube_config(str(cluster.kubeconfig), client_configuration=settings)
    with get_runner(client=client.ApiClient(settings)) as runner:
        yield runner


def test_the_example_runs_and_its_status_and_logs_are_there(folder, cluster, runner):
    given = arguments(folder, "--restarts", "0")
    handle = runner.run_component(COMPONENT, given, "kubernetes", CFG)
    status = runner.wait(handle, wait_interval=0.1)
    assert status.state == AppState.SUCCEEDED, cluster.output()
    replicas = {role.role: len(role.replicas) for role in status.roles}
    assert replicas == SIZES
    log = "".join(runner.log_lines(handle, "trainer", 0))
    assert "trained 4 steps" in log
    assert "test AUC" in log


@pytest.mark.long
def test_a_job_that_is_cancelled_ends_and_leaves_nothing(folder, cluster, runner):
    (folder / "wait.py").write_text("import time; print('waits'); time.sleep(600)")
    settings = roles.JobSettings(
        embedding_config="e",
        global_config="g",
        image="registry/job:7",
        port=draw_port(),
        restarts=0,
    )
    members = [
        roles.coordinator(settings, trainers=1),
        roles.scripts(settings, "trainer", "wait.py", 1),
    ]
    handle = runner.run(AppDef("persia", members), "kubernetes", CFG)
    wait_until(lambda: "waits" in cluster.output(), "it runs", details=cluster.output)
    assert runner.status(handle).state == AppState.RUNNING
    (job,) = cluster.jobs.values()
    runner.cancel(handle)
    wait_until(lambda: not cluster.jobs, "the job is gone", details=cluster.output)
    assert not any(is_running(pod.running.pid) for pod in job.pods.values())
    last = job.pods["coordinator-0"].running.output().splitlines()[-1]
    assert re.match(r".* job ended: it was told to end \(SIGTERM\)", last), last
    with pytest.raises(ApiException, match="404"):
        runner.status(handle)
