"""One role: the data loaders of a job.

torchx run components/data_loader.py:data_loader --host 127.0.0.1 --port 29400
    --embedding_config embedding_config.yml --global_config global_config.yml
    --script data_loader.py
"""

from typing import Dict, Optional

import torchx.specs as specs

from persia_torchrec.launch import roles


def data_loader(
    host: str,
    port: int,
    script: str,
    embedding_config: str,
    global_config: str,
    replicas: int = 1,
    python: str = "python3",
    image: str = "",
    env: Optional[Dict[str, str]] = None,
) -> specs.AppDef:
    """Start the data loaders.

    Args:
        host: host of the job's address book, where its coordinator runs
        port: TCP port of the job's address book
        script: the data loaders' script and its arguments, as "loader.py --epochs 2"
        embedding_config: path of embedding_config.yml, where the role runs
        global_config: path of global_config.yml, where the role runs
        replicas: number of data loaders
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
        roles=[roles.data_loaders(job, script, replicas)],
    )
