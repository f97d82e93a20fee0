"""Every component, with arguments that it takes, and settings of roles."""

import functools
import itertools
import shlex
import tempfile
from pathlib import Path

import yaml
from persia_torchrec.components import jobs

_FOLDER, _NUMBERS = tempfile.TemporaryDirectory(), itertools.count()
CONFIGS = {"embedding_config": "embedding.yml", "global_config": "global.yml"}
SCRIPTS = {"nn_worker": "train.py --epochs 2", "data_loader": "'my loader.py'"}
JOB = {"port": 29400, "image": "registry/job:7"}
BOOK = {"host": "10.0.0.7", **JOB}
SCHEDULERS = ["local_cwd", "slurm", "kubernetes"]

COMPONENTS = {
    "train": {**SCRIPTS, **CONFIGS, **JOB},
    "train_torchrec": {"script": "train.py --epochs 2", **JOB},
    "serve": {**CONFIGS, "checkpoint": "runs/7", **JOB},
    "coordinator": {**BOOK, **CONFIGS},
    "embedding_server": {**BOOK, **CONFIGS, "servers": 2},
    "embedding_worker": {**BOOK, **CONFIGS},
    "data_loader": {**BOOK, **CONFIGS, "data_loader": "loader.py"},
    "nn_worker": {**BOOK, **CONFIGS, "nn_worker": "train.py", "gpus": 1},
}


def load(name):
    """Return a component; its ``roles`` are words of a roles file, over that given.

    As ``server.cpu=8 all.env.NAME=value``.
    """
    component = getattr(jobs, name)

    @functools.wraps(component)
    def call(*, roles="", **given):
        if roles:
            path = given.get("roles_file")
            file = yaml.safe_load(Path(path).read_text()) if path else {}
            sections = {name: section or {} for name, section in file.items()}
            given["roles_file"] = roles_file_of(roles, sections)
        return component(**given)

    return call


def roles_file_of(words, content=None):
    """Write a roles file of words, over the content of one; return its path."""
    content = content or {}
    for word in shlex.split(words):
        key, _, value = word.partition("=")
        role, _, name = key.partition(".")
        section, (kind, _, rest) = content.setdefault(role, {}), name.partition(".")
        if kind == "pod":
            *outer, last = _pod_path(rest)
            section = section.setdefault(kind, {})
            for one in outer:
                section = section.setdefault(one, {})
            section[last] = value if outer == ["labels"] else yaml.safe_load(value)
        elif rest:
            section.setdefault(kind, {})[rest] = value
        elif name == "volumes":
            section[name] = [*section.get(name, []), *value.split(",")]
        else:
            section[name] = int(value) if value.isdecimal() else value
    path = Path(_FOLDER.name, f"{next(_NUMBERS)}.yml")
    path.write_text(yaml.safe_dump(content))
    return str(path)


def _pod_path(path):
    name, _, rest = path.partition(".")
    return [name, rest] if name == "labels" else path.split(".")


def cfg_of(scheduler, folder):
    return {
        "local_cwd": {"log_dir": str(folder)},
        "slurm": {"partition": "debug"},
        "kubernetes": {"queue": "default"},
    }[scheduler]


ROLES_FILE = """
all: {image: "registry/job:7", volumes: ["census:/data:ro"], env: {LOG_LEVEL: INFO}}
coordinator: {cpu: 500m, memory: 2Gi}
server: {replicas: 3, cpu: 8, memory: 64Gi, volumes: ["/mnt/ssd:/rows"]}
loader: {image: "registry/loader:1"}
trainer: {replicas: 2, gpus: 1, env: {CUBLAS_WORKSPACE_CONFIG: ":4096:8"}}
predictor:
"""
WORDS = "server.cpu=16 loader.env.LOG_LEVEL='a b' worker.volumes=a:/b,/c:/d:ro"
