"""The whole job: coordinator, embedding servers and workers, data loaders, NN workers.

torchx run -s local_cwd components/job.py:train --nn_worker train.py
    --data_loader data_loader.py --embedding_config embedding_config.yml
    --global_config global_config.yml --embedding_servers 2

Arguments that components share are fields of JobSettings in launch/roles.py; all are
listed by: torchx run components/job.py:train --help
"""

from typing import Any

import torchx.specs as specs

from persia_torchrec.launch import roles
from persia_torchrec.launch.arguments import reads_variables
from persia_torchrec.parsing.command_line import offers


@reads_variables(
    nn_worker="PERSIA_NN_WORKER_ENTRY", data_loader="PERSIA_DATALOADER_ENTRY"
)
@offers(
    roles.JobSettings,
    *("embedding_config", "global_config", "nproc_per_node"),
    *(*roles.OF_JOB, "memory_dir", *roles.OF_RESUME, "optimizer_engine"),
)
def train(
    nn_worker: str,
    data_loader: str,
    embedding_servers: int = 1,
    embedding_workers: int = 1,
    data_loaders: int = 1,
    nn_workers: int = 1,
    nn_worker_gpus: int = 0,
    eviction: str = "lru",
    **shared: Any,
) -> specs.AppDef:
    """Train a model whose embeddings live on servers.

    Args:
        nn_worker: the NN workers' script and its arguments, as "train.py --epochs 2",
            or "-m package.train"
        data_loader: the data loaders' script and its arguments, in the same form
        embedding_servers: number of servers; ids are sharded over them by hash
        embedding_workers: number of embedding workers; 0 if the NN workers have
            TorchRec models, to which data loaders send the ids themselves
        data_loaders: number of data loaders; 0 if the NN workers read their own data
        nn_workers: number of replicas with NN workers, as of machines
        nn_worker_gpus: GPUs that each of these asks the scheduler for
        eviction: which row leaves a full server: the least recently (lru) or the least
            frequently (lfu) used
    """
    job = roles.JobSettings(**shared)
    loaders = (
        [roles.scripts(job, "loader", data_loader, data_loaders)]
        if job.num_replicas("loader", data_loaders)
        else []
    )
    workers = (
        [roles.embedding_workers(job, embedding_workers)]
        if job.num_replicas("worker", embedding_workers)
        else []
    )
    return roles.app(
        roles.coordinator(
            job,
            num_servers=embedding_servers,
            num_workers=embedding_workers,
            num_loaders=data_loaders,
            num_trainers=nn_workers,
        ),
        roles.embedding_servers(job, embedding_servers, eviction),
        *workers,
        *loaders,
        roles.scripts(job, "trainer", nn_worker, nn_workers, gpus=nn_worker_gpus),
    )
