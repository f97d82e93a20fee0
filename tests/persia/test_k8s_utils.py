import re
import shlex

import pytest
import yaml
from torchx.runner import get_runner

from persia_torchrec.persia import k8s_utils

JOB = """
apiVersion: persia.com/v1
kind: PersiaJob
metadata: {name: clicks, namespace: ads, labels: {team: a}}
spec:
  persiaEnv:
    PERSIA_GLOBAL_CONFIG: /conf/global.yml
    PERSIA_EMBEDDING_CONFIG: /conf/embedding.yml
    PERSIA_NN_WORKER_ENTRY: /src/the train.py
    PERSIA_DATALOADER_ENTRY: /src/loader.py
  env:
    - {name: PERSIA_NATS_URL, value: "nats://nats:4222"}
    - {name: PRICE, value: "$5 $(PERSIA_STORE_PORT)"}
    - {name: NICS, value: "eth0,eth1"}
    - {name: REPLICA_INDEX, value: "7"}
    - {name: NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
    - {name: PASSWORD, valueFrom: {secretKeyRef: {name: ads, key: password}}}
  logLevel: debug
  restartPolicy: OnFailure
  imagePullPolicy: Always
  volumes:
    - {name: data, persistentVolumeClaim: {claimName: clicks-2026, readOnly: true}}
    - {name: disk, hostPath: {path: /mnt/ssd}}
    - {name: cache, emptyDir: {}}
    - {name: slip, persistentVolumeClaim: clicks-2026}
  embeddingParameterServer:
    replicas: 2
    image: registry/ads:3
    resources: {limits: {cpu: "4", memory: 24Gi, ephemeral-storage: 9Gi}}
    volumeMounts:
      - {name: disk, mountPath: /rows}
      - {name: cache, mountPath: /cache}
  embeddingWorker:
    replicas: 3
    image: registry/ads:3
    resources: {requests: {cpu: 1}}
  nnWorker:
    replicas: 2
    nprocPerNode: 2
    image: persiaml/persia-cuda-runtime:latest
    resources: {limits: {cpu: "3", memory: 3Gi, nvidia.com/gpu: "2"}}
    env: [{name: CUBLAS_WORKSPACE_CONFIG, value: ":4096:8"}]
    volumeMounts: [{name: data, mountPath: /data, subPath: day}]
  dataloader:
    replicas: 1
    image: registry/ads:3
    volumeMounts: [{name: data, mountPath: /data}]
---
kind: NatsCluster
metadata: {name: nats}
---
kind: ConfigMap
"""
LEAST = """
kind: PersiaJob
apiVersion: persia.com/v1
metadata: {name: a}
spec:
  enableMetrics: false
  persiaEnv:
    PERSIA_GLOBAL_CONFIG: g
    PERSIA_EMBEDDING_CONFIG: e
    PERSIA_NN_WORKER_ENTRY: train.py
  embeddingParameterServer: {replicas: 1}
  embeddingWorker: {replicas: 1}
  nnWorker: {replicas: 1, nprocPerNode: 1}
"""


def convert(folder, capsys, job):
    """Run the command; return its command line, what it names, and the new file."""
    (folder / "job.yml").write_text(job)
    output = folder / "roles.yml"
    k8s_utils.main(["convert", str(folder / "job.yml"), "--output", str(output)])
    printed = capsys.readouterr()
    left = dict(re.findall(r"^not carried over: (.*?): (.*)$", printed.err, re.M))
    words = shlex.split(printed.out.replace("\\\n", ""))
    return words, left, yaml.safe_load(output.read_text())


def containers(command):
    """Do what a command line of torchx asks for; return each pod's container."""
    assert command[:3] == ["torchx", "run", "-s"]
    scheduler, _, cfg, _, workspace, component, *arguments = command[3:]
    assert workspace == ""
    cfg = dict(pair.split("=") for pair in cfg.split(","))
    with get_runner() as runner:
        job = runner.dryrun_component(
            component, arguments, scheduler=scheduler, cfg=cfg
        )
    tasks = yaml.safe_load(str(job))["spec"]["tasks"]
    return cfg, {t["name"]: t["template"]["spec"]["containers"][0] for t in tasks}


def test_a_persia_job_becomes_a_job_of_torchx(tmp_path, capsys):
    command, _, _ = convert(tmp_path, capsys, JOB)
    cfg, found = containers(command)
    assert cfg == {"queue": "default", "namespace": "ads"}
    assert [name.rpartition("-")[0] for name in found] == [
        *("coordinator", "server", "server", "worker", "worker", "worker"),
        *("loader", "trainer", "trainer"),
    ]
    limits = {name: c["resources"].get("limits") for name, c in found.items()}
    assert limits["server-1"] == {"cpu": "4000m", "memory": "25770M"}
    assert limits["worker-0"] == {"cpu": "1000m"}
    of_pod = {"cpu": "3000m", "memory": "3222M", "nvidia.com/gpu": "2"}
    assert limits["trainer-1"] == of_pod
    mounts = {
        name: [(m["mountPath"], m["readOnly"]) for m in c["volumeMounts"][1:]]
        for name, c in found.items()
    }
    assert mounts["server-0"] == [("/rows", False)]
    assert mounts["loader-0"] == [("/data", True)]
    assert mounts["trainer-0"] == mounts["coordinator-0"] == []
    for name, container in found.items():
        is_trainer = name.startswith("trainer")
        image = "persia-torchrec:cuda" if is_trainer else "registry/ads:3"
        assert container["image"] == image
        env = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert env["PRICE"] == "$5 $(PERSIA_STORE_PORT)"
        secret = {"secretKeyRef": {"name": "ads", "key": "password"}}
        assert {"name": "PASSWORD", "valueFrom": secret} in container["env"]
        assert env["LOG_LEVEL"] == "DEBUG"
        assert env["PERSIA_GLOBAL_CONFIG"] == "/conf/global.yml"
        assert env["PERSIA_EMBEDDING_CONFIG"] == "/conf/embedding.yml"
        assert ("CUBLAS_WORKSPACE_CONFIG" in env) == is_trainer
        assert env["NICS"] == "eth0,eth1"
        assert not env.keys() & {"NODE", "PERSIA_NATS_URL"}
    script = ["--nproc-per-node", "2", "--", "/src/the train.py"]
    assert found["trainer-0"]["command"][-4:] == script
    assert found["loader-0"]["command"][-2:] == ["loader", "/src/loader.py"]


@pytest.mark.parametrize("style", ["camel", "snake"])
def test_fields_of_earlier_versions_mean_the_present_ones(tmp_path, capsys, style):
    job = yaml.safe_load(next(iter(JOB.split("---"))))
    spec = job["spec"]
    files = list(spec.pop("persiaEnv").values())
    names = [n for n in k8s_utils.EARLIER_NAMES if ("_" in n) == (style == "snake")]
    spec |= dict(zip(names, files, strict=True))
    spec["dataloader"]["volumeMounts"][0]["read_only"] = True
    command, _, roles = convert(tmp_path, capsys, yaml.safe_dump(job))
    values = [f"/conf/{name}.yml" for name in ("global", "embedding")]
    assert {*values, "/src/loader.py"} <= {word.strip("'") for word in command}
    assert roles["loader"]["volumes"] == ["clicks-2026:/data:ro"]


def test_dropped_settings_are_named(tmp_path, capsys):
    _, left, _ = convert(tmp_path, capsys, JOB)
    server, trainer = "spec.embeddingParameterServer", "spec.nnWorker"
    assert set(left) == {
        *("NatsCluster", "ConfigMap", "metadata.name", "metadata.labels"),
        *(f"spec.env.{name}" for name in ("PERSIA_NATS_URL", "NODE")),
        *("spec.env.REPLICA_INDEX", "spec.enableMetrics", "spec.restartPolicy"),
        *("spec.imagePullPolicy", "spec.volumes.cache", "spec.volumes.slip"),
        f"{server}.resources.ephemeral-storage",
        f"{server}.volumeMounts.cache",
        "spec.embeddingWorker.resources.requests",
        *(f"{trainer}.{key}" for key in ("image", "volumeMounts.data")),
    }
    assert left["spec.env.PERSIA_NATS_URL"] == left["NatsCluster"]
    assert "subPath" in left["spec.nnWorker.volumeMounts.data"]


def test_a_job_without_loaders_and_images_is_converted(tmp_path, capsys):
    command, left, roles = convert(tmp_path, capsys, LEAST)
    assert roles == {}
    _, found = containers(command)
    assert list(found) == ["coordinator-0", "server-0", "worker-0", "trainer-0"]
    assert {c["image"] for c in found.values()} == {"persia-torchrec:cpu"}
    blocks = ("embeddingParameterServer", "embeddingWorker", "nnWorker")
    assert set(left) == {"metadata.name", *(f"spec.{name}.image" for name in blocks)}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("kind: PersiaJob", "kind: Job", "one document with kind: PersiaJob"),
        ("enableMetrics", "enableMetric", r"spec\.enableMetric is unknown\. Did you"),
        ("false", "maybe", r"spec\.enableMetrics must be true or false"),
        ("nnWorker: {replicas: 1", "nnWorker: {replicas: 0", "nnWorker must have repl"),
        (
            "  embeddingWorker: {replicas: 1}\n",
            "",
            "embeddingWorker must have replicas",
        ),
        ("nprocPerNode: 1", "nprocPerNode: x", "nprocPerNode must be an integer"),
        ("nprocPerNode: 1", "nprocPerNode: 0", "nprocPerNode must be >= 1"),
        ("{replicas: 1}", "{replicas: -1}", "replicas must be >= 0"),
        (
            "  embeddingWorker",
            "  env: [{name: SEED, value: 3}]\n  embeddingWorker",
            r"spec\.env\S*value must be a string.*3",
        ),
        (", nprocPerNode: 1", "", "nnWorker must have the key 'nprocPerNode'"),
        ("    PERSIA_NN_WORKER_ENTRY: train.py\n", "", "ENTRY must name a script"),
        (
            "{replicas: 1}\n  nn",
            "{replicas: 1, resources: {limits: {cpu: much}}}\n  nn",
            r"worker: cpu and memory must be numbers.*'much'",
        ),
    ],
)
def test_a_job_with_a_mistake_is_rejected(tmp_path, capsys, old, new, message):
    assert old in LEAST
    with pytest.raises(SystemExit, match=message):
        convert(tmp_path, capsys, LEAST.replace(old, new))
    assert not (tmp_path / "roles.yml").exists()


def test_a_file_is_not_overwritten(tmp_path, capsys):
    convert(tmp_path, capsys, LEAST)
    with pytest.raises(SystemExit, match="--output must be a new file"):
        convert(tmp_path, capsys, LEAST)


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["gencrd", "--output", "crd.yml"], "install Volcano"),
        (["operator"], "torchx run -s kubernetes"),
        (["server", "--port", "8080"], "torchx list"),
    ],
)
def test_commands_of_persia_say_what_to_use_in_their_place(words, instead):
    with pytest.raises(SystemExit, match=f"{words[0]} is not here.*{instead}"):
        k8s_utils.main(words)
