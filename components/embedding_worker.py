"""One role: the embedding workers of a job.

torchx run components/embedding_worker.py:embedding_worker --host 127.0.0.1 --port 29400
    --embedding_config embedding_config.yml --global_config global_config.yml
"""

from typing import Dict, Optional

import torchx.specs as specs

from persia_torchrec.launch import roles


def embedding_worker(
    host: str,
    port: int,
    embedding_config: str,
    global_config: str,
    replicas: int = 1,
    python: str = "python3",
    image: str = "",
    env: Optional[Dict[str, str]] = None,
) -> specs.AppDef:
    """Start the embedding workers.

    Args:
        host: host of the job's address book, where its coordinator runs
        port: TCP port of the job's address book
        embedding_config: path of embedding_config.yml, where the role runs
        global_config: path of global_config.yml, where the role runs
        replicas: number of embedding workers
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
        roles=[roles.embedding_workers(job, replicas)],
    )
