"""``torchx run -s kubernetes`` in a cluster whose pods are processes on hosts.

Each pod has an address, a process table and a name of its own, as in a cluster.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from torchx.runner import get_runner

from tests.support.components import (
    COMPONENTS,
    ROLES_FILE,
    WORDS,
    load,
    roles_file_of,
)
from tests.support.hosts import Hosts
from tests.support.persia_scripts import Scripts
from tests.support.processes import DEADLINE_S, Processes, wait_until
from tests.support.repository import ROOT
from tests.support.volcano import NAMESPACE, QUEUE, Cluster

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

CFG = f"queue={QUEUE},namespace={NAMESPACE}"
EXAMPLE = ROOT / "examples/adult_income"
SECRETS = {"persia-job-token": {"token": "0123456789abcdef"}}
PORT = "29400"  # each pod has all
# Path and variables of the container image; a checkpoint folder that all pods share.
IMAGE = {"PYTHONPATH": str(ROOT), "NUM_BATCHES": "600"}
SCHEMAS = ROOT / "build/schemas"
VERSIONS = "1.25", "1.37"
VALIDATE = """
import json, sys
from kubernetes_validate import ValidationError, validate
for pod in json.load(sys.stdin):
    for version in sys.argv[1:]:
        validate(pod, version, strict=True)
        pod["spec"]["restartPolicyy"] = "Never"
        try:
            validate(pod, version, strict=True)
        except ValidationError:
            del pod["spec"]["restartPolicyy"]
        else:
            sys.exit("an unknown field must be an error")
"""


class Torchx:
    """The command line, with the cluster's kubeconfig."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self._folder = folder
        self._variables = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(folder),
            "KUBECONFIG": str(cluster.kubeconfig),
        }

    def __call__(self, *words: str, status: int = 0) -> str:
        """Run a command; return what it has printed."""
        ended = subprocess.run(
            [sys.executable, "-m", "torchx.cli.main", *words],
            cwd=self._folder,
            env=self._variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=DEADLINE_S,
        )
        assert ended.returncode == status, ended.stdout
        return ended.stdout

    def submit(self, *arguments: str, waits: bool = False, status: int = 0) -> str:
        """Submit a job by ``torchx run``; return what it has printed."""
        wait = ["--wait", "--log"] if waits else []
        run = ["run", "-s", "kubernetes", "-cfg", CFG, "--workspace", "", *wait]
        component = "persia.train"
        given = [*arguments, "--port", PORT, "--image", "registry/job:7"]
        return self(*run, component, *given, status=status)


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a cluster of so many hosts."""
    with contextlib.ExitStack() as stack:

        def start(num, **volumes):
            hosts = stack.enter_context(Hosts(num)).all
            processes = stack.enter_context(Processes(tmp_path))
            given = {"secrets": SECRETS, "hosts": hosts, "claims": volumes}
            cluster = stack.enter_context(Cluster(processes, IMAGE, **given))
            return cluster, Torchx(tmp_path, cluster)

        yield start


def scripts(folder, *more):
    """Write PERSIA's scripts; return the arguments of a small job of them."""
    Scripts(folder)
    return [
        *("--nn_worker", "train.py", "--data_loader", "data_loader.py"),
        *("--embedding_config", "embedding_config.yml"),
        *("--global_config", "global_config.yml"),
        *("--python", sys.executable, *more),
    ]


@pytest.mark.skipif("PERSIA_DATA_DIR" not in os.environ, reason="needs UCI's files")
def test_the_example_learns_and_torchx_reports_of_it(tmp_path, start):
    cluster, torchx = start(6, census=Path(os.environ["PERSIA_DATA_DIR"]))
    data = tmp_path / "data"
    words = f"all.volumes=census:{data}:ro all.env.PERSIA_DATA_DIR={data}"
    printed = torchx.submit(
        *("--nn_worker", f"{EXAMPLE}/train.py"),
        *("--data_loader", f"{EXAMPLE}/data_loader.py"),
        *("--embedding_config", f"{EXAMPLE}/embedding_config.yml"),
        *("--global_config", f"{EXAMPLE}/global_config.yml"),
        *("--python", sys.executable, "--servers", "2"),
        *("--roles_file", roles_file_of(words)),
        waits=True,
    )
    (handle,) = re.findall(r"kubernetes://\S+", printed)[:1]
    assert "test AUC 0.89" in printed
    assert "SUCCEEDED" in torchx("status", handle)
    log = torchx("log", f"{handle}/trainer/0")
    assert "trained 255 steps" in log
    assert handle.rpartition("/")[2] in torchx("list", "-s", "kubernetes")
    assert cluster.jobs


def test_a_job_whose_pod_is_evicted_starts_again_and_resumes(tmp_path, start):
    folder = tmp_path / "runs"
    folder.mkdir()
    cluster, torchx = start(5, runs=folder)
    runs = tmp_path / "shared"
    words = f"all.volumes=runs:{runs} all.env.PERSIA_CHECKPOINT_DIR={runs}"
    words += " all.env.PERSIA_CHECKPOINT_INTERVAL_S=1"
    given = scripts(tmp_path, "--roles_file", roles_file_of(words))
    handle = torchx.submit(*given).split()[-1]
    (name,) = cluster.jobs
    assert name in handle

    def has_checkpoint():
        return any(folder.glob("*/checkpoints/*/manifest.json"))

    wait_until(has_checkpoint, "a checkpoint", details=cluster.output)
    cluster.evict(name, "server-0")
    job = cluster.jobs[name]
    wait_until(lambda: job.num_retries == 1, "it restarts", details=cluster.output)
    wait_until(lambda: job.phase == "Completed", "it ends", details=cluster.output)
    output = cluster.output()
    assert "training resumes from" in output
    assert "continues with what an earlier start of the job" in output
    trained = re.search(r"rank 0: trained (\d+) batches", output)
    assert trained is not None, output
    assert int(trained[1]) < int(IMAGE["NUM_BATCHES"])
    assert "SUCCEEDED" in torchx("status", handle)


def test_a_job_that_always_fails_is_started_again_as_often_as_asked(tmp_path, start):
    cluster, torchx = start(5)
    given = scripts(tmp_path, "--max_retries", "2", "--restarts", "0")
    (tmp_path / "train.py").write_text("raise ValueError('a bug of its own')")
    printed = torchx.submit(*given, waits=True, status=1)
    (job,) = cluster.jobs.values()
    assert (job.phase, job.num_retries) == ("Failed", 2)
    last = job.pods["coordinator-0"].running.output().splitlines()[-1]
    assert "job failed: trainer 0: ValueError: a bug of its own" in last, printed
    assert len(list(tmp_path.glob("*-trainer-0-0.*.log"))) == 2


def test_a_job_is_cancelled(tmp_path, start):
    cluster, torchx = start(5)
    handle = torchx.submit(*scripts(tmp_path)).split()[-1]
    wait_until(
        lambda: "current idx: 5 " in cluster.output(),
        "it trains",
        details=cluster.output,
    )
    (job,) = cluster.jobs.values()
    torchx("cancel", handle)
    wait_until(lambda: not cluster.jobs, "it is gone", details=cluster.output)
    assert all(pod.phase == "Failed" for pod in job.pods.values())


@pytest.mark.skipif(
    not (SCHEMAS / "installed").exists(), reason="`make cluster` installs it"
)
def test_all_pods_fit_the_schemas_of_kubernetes(tmp_path):
    roles_file = tmp_path / "roles.yml"
    roles_file.write_text(ROLES_FILE)
    pods = []
    for name, given in COMPONENTS.items():
        more = {"image": "registry/job:7"}
        if name == "train":
            secrets = " loader.secrets.PASSWORD=census/password"
            more |= {"roles_file": str(roles_file), "roles": WORDS + secrets}
        pods += pods_of(name, {**given, **more})
    subprocess.run(
        [SCHEMAS / "bin/python", "-c", VALIDATE, *VERSIONS],
        input=json.dumps(pods),
        text=True,
        check=True,
        timeout=DEADLINE_S,
    )


def pods_of(name, arguments):
    """Return the pods of a component's job, as Kubernetes gets them."""
    with get_runner() as runner:
        info = runner.dryrun(load(name)(**arguments), "kubernetes", {"queue": QUEUE})
    job = yaml.safe_load(str(info))
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            **task["template"],
            "metadata": {**task["template"]["metadata"], "name": task["name"]},
        }
        for task in job["spec"]["tasks"]
    ]
