"""Every component, with arguments that it takes, and settings of roles."""

from persia_torchrec.components import jobs

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
    "embedding_server": {**BOOK, **CONFIGS, "replicas": 2},
    "embedding_worker": {**BOOK, **CONFIGS},
    "data_loader": {**BOOK, **CONFIGS, "script": "loader.py"},
    "nn_worker": {**BOOK, **CONFIGS, "script": "train.py", "gpus": 1},
}


def load(name):
    return getattr(jobs, name)


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
