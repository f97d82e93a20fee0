"""One role by itself, for a job whose coordinator is running.

torchx run components/roles.py:embedding_server --host 127.0.0.1 --port 29400
    --embedding_config embedding_config.yml --global_config global_config.yml
    --replicas 2

The functions are embedding_server, embedding_worker, data_loader and nn_worker.
"""

from typing import Any

import torchx.specs as specs

from persia_torchrec.launch import roles
from persia_torchrec.launch.arguments import reads_variables
from persia_torchrec.parsing.command_line import offers

_SHARED = ("embedding_config", "global_config", *roles.OF_ROLE)


@reads_variables()
@offers(roles.JobSettings, *_SHARED, "imports", "memory_dir", "optimizer_engine")
def embedding_server(
    host: str, port: int, replicas: int = 1, eviction: str = "lru", **shared: Any
) -> specs.AppDef:
    """Start the embedding servers, one process per shard.

    Args:
        host: host of the job's address book, where its coordinator runs
        port: TCP port of the job's address book
        replicas: number of servers; ids are sharded over them by hash
        eviction: which row leaves a full server: the least recently (lru) or the least
            frequently (lfu) used
    """
    job = roles.JobSettings(host=host, port=port, **shared)
    return roles.app(roles.embedding_servers(job, replicas, eviction))


@reads_variables()
@offers(roles.JobSettings, *_SHARED, "imports")
def embedding_worker(
    host: str, port: int, replicas: int = 1, **shared: Any
) -> specs.AppDef:
    """Start the embedding workers.

    Args:
        host: host of the job's address book, where its coordinator runs
        port: TCP port of the job's address book
        replicas: number of embedding workers
    """
    job = roles.JobSettings(host=host, port=port, **shared)
    return roles.app(roles.embedding_workers(job, replicas))


@reads_variables(script="PERSIA_DATALOADER_ENTRY")
@offers(roles.JobSettings, *_SHARED)
def data_loader(
    host: str, port: int, script: str, replicas: int = 1, **shared: Any
) -> specs.AppDef:
    """Start the data loaders.

    Args:
        host: host of the job's address book, where its coordinator runs
        port: TCP port of the job's address book
        script: the data loaders' script and its arguments, as "loader.py --epochs 2",
            or "-m package.loader"
        replicas: number of data loaders
    """
    job = roles.JobSettings(host=host, port=port, **shared)
    return roles.app(roles.scripts(job, "loader", script, replicas))


@reads_variables(script="PERSIA_NN_WORKER_ENTRY")
@offers(roles.JobSettings, *_SHARED, "nproc_per_node")
def nn_worker(
    host: str, port: int, script: str, replicas: int = 1, gpus: int = 0, **shared: Any
) -> specs.AppDef:
    """Start the NN workers, one process per device.

    Args:
        host: host of the job's address book, where its coordinator runs
        port: TCP port of the job's address book
        script: the NN workers' script and its arguments, as "train.py --epochs 2",
            or "-m package.train"
        replicas: number of replicas with NN workers, as of machines
        gpus: GPUs that each of these asks the scheduler for
    """
    job = roles.JobSettings(host=host, port=port, **shared)
    return roles.app(roles.scripts(job, "trainer", script, replicas, gpus=gpus))
