"""One role: the NN workers of a job.

torchx run components/nn_worker.py:nn_worker --host 127.0.0.1 --port 29400
    --embedding_config embedding_config.yml --global_config global_config.yml
    --script train.py
"""

from typing import Dict, Optional

import torchx.specs as specs

from persia_torchrec.launch import roles


def nn_worker(
    host: str,
    port: int,
    script: str,
    embedding_config: str,
    global_config: str,
    replicas: int = 1,
    gpus: int = 0,
    python: str = "python3",
    image: str = "",
    env: Optional[Dict[str, str]] = None,
) -> specs.AppDef:
    """Start the NN workers, one process per device.

    Args:
        host: host of the job's address book, where its coordinator runs
        port: TCP port of the job's address book
        script: the NN workers' script and its arguments, as "train.py --epochs 2"
        embedding_config: path of embedding_config.yml, where the role runs
        global_config: path of global_config.yml, where the role runs
        replicas: number of NN workers, one process each
        gpus: GPUs that each NN worker asks the scheduler for
        python: interpreter, looked up in PATH where the role runs
        image: container image; not used by local_cwd
        env: further variables for the role, as NAME=value,NAME=value
    """
    job = roles.JobSettings(
        embedding_config=embedding_config,
        global_config=global_config,
        port=port,
        host=host,
        python=python,
        image=image,
        env=env or {},
    )
    return specs.AppDef(
        name=roles.APP_NAME,
        roles=[roles.nn_workers(job, script, replicas, gpus=gpus)],
    )
