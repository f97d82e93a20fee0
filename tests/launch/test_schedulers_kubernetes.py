"""What torchx asks Kubernetes for is what a cluster with Volcano accepts."""

import copy

import msgspec
import pytest
import yaml
from torchx.runner import get_runner

from persia_torchrec.errors import ConfigError
from tests.support.components import COMPONENTS, ROLES_FILE, WORDS, load
from tests.support.volcano_job import Job

pytestmark = pytest.mark.slow

TRAIN = "train"
SECRET = {"name": "persia-job-token", "key": "token"}


@pytest.fixture(scope="module")
def request_of():
    """Return a function that returns the job of a component, as torchx submits it."""
    with get_runner() as runner:

        def request_of(name, **changes):
            given = {**COMPONENTS[name], **changes}
            app = load(name)(**given)
            request = str(runner.dryrun(app, "kubernetes", {"queue": "default"}))
            return yaml.safe_load(request)

        yield request_of


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_cluster_accepts_every_component(request_of, tmp_path, name):
    msgspec.convert(request_of(name), Job)
    roles_file = tmp_path / "roles.yml"
    roles_file.write_text(ROLES_FILE)
    if name == TRAIN:
        given = {"roles_file": str(roles_file), "roles": WORDS, "nproc_per_node": 2}
        job = msgspec.convert(request_of(name, **given), Job)
        assert len(job.spec.tasks) == 8


def variables_of(job, task):
    (one,) = [t for t in job["spec"]["tasks"] if t["name"] == task]
    (container,) = one["template"]["spec"]["containers"]
    return {variable.pop("name"): variable for variable in container["env"]}


def test_pods_take_the_token_and_other_variables_of_secrets(request_of):
    words = "loader.secrets.PASSWORD=census/password loader.env.PASSWORD=none"
    job = request_of(TRAIN, roles=words)
    for task in [task["name"] for task in copy.deepcopy(job)["spec"]["tasks"]]:
        variables = variables_of(job, task)
        assert variables["PERSIA_JOB_TOKEN"] == {"valueFrom": {"secretKeyRef": SECRET}}
        assert "PERSIA_JOB_TOKEN_FILE" not in variables
        if task == "loader-0":
            secret = {"name": "census", "key": "password"}
            assert variables["PASSWORD"] == {"valueFrom": {"secretKeyRef": secret}}
        else:
            assert "PASSWORD" not in variables


def test_a_file_or_another_secret_takes_the_place_of_the_token(request_of):
    variables = variables_of(
        request_of(TRAIN, roles="all.secrets.PERSIA_JOB_TOKEN=ours/key"), "server-0"
    )
    secret = {"name": "ours", "key": "key"}
    assert variables["PERSIA_JOB_TOKEN"] == {"valueFrom": {"secretKeyRef": secret}}
    variables = variables_of(
        request_of(TRAIN, env={"PERSIA_JOB_TOKEN_FILE": "/mounted/token"}), "server-0"
    )
    assert variables["PERSIA_JOB_TOKEN_FILE"] == {"value": "/mounted/token"}
    assert "PERSIA_JOB_TOKEN" not in variables


def test_a_job_without_an_image_is_rejected(request_of):
    with pytest.raises(ConfigError, match="image must be named for Kubernetes"):
        request_of(TRAIN, image="")
    with pytest.raises(ConfigError, match="none for the role worker"):
        request_of(
            TRAIN, image="", roles="coordinator.image=a server.image=b trainer.image=c"
        )


PODS = """
all:
  pod:
    imagePullSecrets: [registry]
    labels: {example.com/team: ads}
    annotations: {example.com/note: "any text, at all"}
    nodeSelector: {pool: cpu}
    tolerations: [{key: spot, operator: Exists}]
    securityContext:
      runAsUser: 123456
      runAsNonRoot: true
      fsGroup: 2000
      seccompProfile: {type: RuntimeDefault}
      allowPrivilegeEscalation: false
      capabilities: {drop: [ALL]}
      readOnlyRootFilesystem: true
    terminationGracePeriodSeconds: 300
trainer:
  volumes: ["scratch:/tmp"]
  pod:
    nodeSelector: {pool: gpu}
    tolerations: [{key: nvidia.com/gpu, value: "1", effect: NoSchedule}]
"""


def pods_of(job):
    return {one["name"]: one["template"] for one in job["spec"]["tasks"]}


def test_pods_have_what_the_roles_file_says(request_of, tmp_path):
    roles_file = tmp_path / "roles.yml"
    roles_file.write_text(PODS)
    words = (
        "trainer.pod.securityContext.seccompProfile.type=Unconfined "
        "trainer.pod.labels.example.com/run=7 "
        "server.pod.affinity='{nodeAffinity: {}}' server.pod.runtimeClassName=gvisor"
    )
    job = request_of(TRAIN, roles_file=str(roles_file), roles=words)
    msgspec.convert(job, Job)
    pods = pods_of(job)
    exists = {"key": "spot", "operator": "Exists"}
    for name, pod in pods.items():
        spec, metadata = pod["spec"], pod["metadata"]
        is_trainer = name == "trainer-0"
        assert spec["imagePullSecrets"] == [{"name": "registry"}]
        assert metadata["labels"]["example.com/team"] == "ads"
        assert metadata["labels"]["torchx.pytorch.org/role-name"] == name[:-2]
        assert metadata["annotations"]["example.com/note"] == "any text, at all"
        assert metadata["annotations"]["sidecar.istio.io/inject"] == "false"
        assert spec["nodeSelector"] == {"pool": "gpu" if is_trainer else "cpu"}
        assert spec["terminationGracePeriodSeconds"] == 300
        assert spec["securityContext"] == {
            "runAsUser": 123456,
            "runAsNonRoot": True,
            "fsGroup": 2000,
            "seccompProfile": {
                "type": "Unconfined" if is_trainer else "RuntimeDefault"
            },
        }
        assert spec["containers"][0]["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }
        # torchrun and compiled loops keep files there
        mounts = {m["name"]: m for m in spec["containers"][0]["volumeMounts"]}
        assert mounts["mount-0" if is_trainer else "tmp"]["mountPath"] == "/tmp"
        volumes = {"name": "tmp", "emptyDir": {}} in spec["volumes"]
        assert volumes == (not is_trainer)
        gpu = {"key": "nvidia.com/gpu", "value": "1", "effect": "NoSchedule"}
        assert spec["tolerations"] == [exists, *([gpu] if is_trainer else [])]
    assert pods["trainer-0"]["metadata"]["labels"]["example.com/run"] == "7"
    spec = pods["server-0"]["spec"]
    assert spec["affinity"] == {"nodeAffinity": {}}
    assert spec["runtimeClassName"] == "gvisor"


def test_any_field_of_a_pod_may_be_given(request_of, tmp_path):
    """Lists of torchx's and those of the file add up."""
    roles_file = tmp_path / "roles.yml"
    roles_file.write_text(
        "all: {pod: {hostNetwork: true, dnsPolicy: ClusterFirstWithHostNet, volumes: "
        "[{name: scratch, hostPath: {path: /scratch}}], topologySpreadConstraints: "
        "[{maxSkew: 1, topologyKey: zone, whenUnsatisfiable: DoNotSchedule}]}}\n"
        "server: {pod: {hostNetwork: false, imagePullSecrets: [{name: registry}]}}\n"
    )
    for name, pod in pods_of(request_of(TRAIN, roles_file=str(roles_file))).items():
        spec = pod["spec"]
        assert spec["hostNetwork"] == (not name.startswith("server"))
        assert spec["dnsPolicy"] == "ClusterFirstWithHostNet"
        assert [one["name"] for one in spec["volumes"]][-1] == "scratch"
        assert "dshm" in {one["name"] for one in spec["volumes"]}
        assert spec["topologySpreadConstraints"][0]["maxSkew"] == 1
        secrets = [{"name": "registry"}] if name.startswith("server") else None
        assert spec.get("imagePullSecrets") == secrets


def test_pods_without_the_section_are_as_torchx_makes_them(request_of):
    for pod in pods_of(request_of(TRAIN)).values():
        assert pod["spec"].keys() == {
            *("containers", "nodeSelector", "restartPolicy", "volumes")
        }


@pytest.mark.parametrize(
    ("pod", "message"),
    [
        ("{toleration: []}", r"\.pod\.toleration is unknown\. Did you mean 'tol"),
        ("{tolerations: {key: a}}", r"\.pod\.tolerations must be a list"),
        ("{tolerations: [{key: a}, {kex: a}]}", r"tolerations\[1\]\.kex is unknown"),
        ("{securityContext: {fsgroup: 1}}", "fsgroup is unknown. Did you mean 'fsGr"),
        ("{securityContext: {runAsUser: root}}", "runAsUser must be an integer"),
        ("{securityContext: {runAsUser: true}}", "runAsUser must be an integer"),
        ("{securityContext: {privileged: 1}}", "privileged must be true or false"),
        ("{securityContext: [a]}", "securityContext must be a map"),
        ("{labels: {team: 7}}", r"labels\.team must be text. Received: 7"),
        ("{labels: [a]}", "labels must be a map"),
        ("{nodeSelector: {pool: 1}}", r"nodeSelector\.pool must be text"),
        ("{imagePullSecrets: [{nam: a}]}", r"imagePullSecrets\[0\]\.nam is unknown"),
        (
            "{labels: {torchx.pytorch.org/role-name: a}}",
            "that torchx sets to find its jobs. Received: torchx.pytorch.org/role-name",
        ),
    ],
)
def test_a_section_of_pods_with_a_mistake_is_rejected(
    request_of, tmp_path, pod, message
):
    roles_file = tmp_path / "roles.yml"
    roles_file.write_text(f"all: {{pod: {pod}}}")
    with pytest.raises(ConfigError, match=message):
        request_of(TRAIN, roles_file=str(roles_file))


@pytest.mark.parametrize("scheduler", ["local_cwd", "slurm"])
def test_secrets_are_rejected_where_there_are_none(scheduler):
    app = load(TRAIN)(
        **COMPONENTS[TRAIN], roles="loader.secrets.PASSWORD=census/password"
    )
    must = rf"secrets must be left out.*Received: PASSWORD, for {scheduler[:5]}.*shell"
    cfg = {"partition": "debug"} if scheduler == "slurm" else {}
    with get_runner() as runner, pytest.raises(ConfigError, match=must):
        runner.dryrun(app, scheduler, cfg)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("spec.tasks.0.replicaz", 1, "unknown field `replicaz`"),
        ("spec.tasks.0.policies.0.event", "PodLost", "Invalid enum value 'PodLost'"),
        ("spec.tasks.0.policies.0.exitCode", 3, "a policy must have event or exitCode"),
        ("spec.tasks.1.name", "coordinator-0", "tasks must be different"),
        ("spec.tasks.0.name", "emb_srv-0", "regex"),
        ("spec.minAvailable", 100, "minAvailable is too large"),
        ("spec.maxRetry", "3", "Expected `int`, got `str`"),
        ("spec.tasks.0.template.spec.restartPolicyy", "Never", "restartPolicyy"),
        ("spec.tasks.0.template.spec.restartPolicy", "Sometimes", "Invalid enum"),
        ("spec.tasks.0.template.spec.volumes.0.hostPath", {"path": "/a"}, "one kind"),
        ("spec.tasks.0.template.spec.volumes.0.name", "other", "no volume dshm"),
        ("spec.tasks.0.template.spec.containers.0.env.0.name", "VC_EMB-SRV", "regex"),
        ("spec.tasks.0.template.spec.containers.0.env.0.value", 8, "got `int`"),
        (
            "metadata.name",
            "persia-with-a-name-of-fifty-letters-and-some-more",
            "too long",
        ),
        ("apiVersion", "batch/v1", "Invalid enum value 'batch/v1'"),
    ],
)
def test_a_cluster_rejects_what_is_wrong(request_of, path, value, message):
    job = request_of(TRAIN)
    *keys, last = path.split(".")
    place = job
    for key in keys:
        place = place[int(key) if key.isdecimal() else key]
    place[last] = value
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(job, Job)
