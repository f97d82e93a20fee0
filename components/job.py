"""The whole job: coordinator, embedding servers and workers, data loaders, NN workers.

torchx run -s local_cwd components/job.py:train --nn_worker train.py
    --data_loader data_loader.py --embedding_config embedding_config.yml
    --global_config global_config.yml --embedding_servers 2
"""

from typing import Dict, Optional

import torchx.specs as specs

from persia_torchrec.launch import roles
from persia_torchrec.wire.ports import free_port


def train(
    nn_worker: str,
    data_loader: str,
    embedding_config: str,
    global_config: str,
    embedding_servers: int = 1,
    embedding_workers: int = 1,
    data_loaders: int = 1,
    nn_workers: int = 1,
    nn_worker_gpus: int = 0,
    nproc_per_node: int = 1,
    eviction: str = "lru",
    port: int = 0,
    python: str = "python3",
    image: str = "",
    env: Optional[Dict[str, str]] = None,
    imports: str = "",
    roles_file: str = "",
    set: str = "",
    join_timeout_s: float = 600.0,
    recover: bool = True,
    memory_dir: str = "auto",
    recovery_timeout_s: float = 600.0,
    max_restarts: int = 3,
    max_retries: int = 3,
    resume_dir: str = "",
) -> specs.AppDef:
    """Train a model whose embeddings live on servers.

    Args:
        nn_worker: the NN workers' script and its arguments, as "train.py --epochs 2"
        data_loader: the data loaders' script and its arguments
        embedding_config: path of embedding_config.yml, where the roles run
        global_config: path of global_config.yml, where the roles run
        embedding_servers: number of servers; ids are sharded over them by hash
        embedding_workers: number of embedding workers
        data_loaders: number of data loaders; 0 if the NN workers read their own data
        nn_workers: number of replicas with NN workers, as of machines
        nn_worker_gpus: GPUs that each of these asks the scheduler for
        nproc_per_node: NN workers that torchrun starts in each of them
        eviction: which row leaves a full server: the least recently (lru) or the least
            frequently (lfu) used
        port: TCP port of the job's address book; 0 takes one that is free on the
            machine that runs torchx, so name one on a cluster
        python: interpreter, looked up in PATH where the roles run
        image: container image; not used by local_cwd
        env: further variables for every role, as NAME=value,NAME=value
        imports: modules that servers and workers import, separated by commas, which
            register optimizers, initializers or admissions of their own
        roles_file: a file of what each role asks the scheduler for, on the machine that
            runs torchx: processors, memory, GPUs, volumes, variables, image, replicas
        set: the same in words, over the file: "server.cpu=8 server.memory=64Gi"
        join_timeout_s: seconds that each wait of the start may take
        recover: start what is killed again, and NN workers all together, from their
            last automatic checkpoint; the job continues. False: it fails
        memory_dir: where the rows of servers are that recover: auto for the fastest
            memory there is, a folder of each host, or private: with the process
        recovery_timeout_s: seconds after which the job fails if a process that recovers
            is not back
        max_restarts: how often such a process may end without a trained batch between
        max_retries: how often Slurm or Kubernetes may start the whole job again, as if
            a host was lost; Kubernetes does once less. 0: never
        resume_dir: folder of the automatic checkpoints. A job that is started with that
            of another continues it. By default each job has one of its own
    """
    job = roles.JobSettings(
        embedding_config=embedding_config,
        global_config=global_config,
        port=port or free_port(""),
        python=python,
        image=image,
        env=env or {},
        imports=imports,
        settings=roles.read_settings(roles_file, set),
        join_timeout_s=join_timeout_s,
        nproc_per_node=nproc_per_node,
        recover=recover,
        recovery_timeout_s=recovery_timeout_s,
        max_restarts=max_restarts,
        max_retries=max_retries,
        memory_dir=memory_dir,
        resume_dir=resume_dir,
    )
    loaders = (
        [roles.scripts(job, "loader", data_loader, data_loaders)]
        if job.num_replicas("loader", data_loaders)
        else []
    )
    return specs.AppDef(
        name=roles.APP_NAME,
        roles=[
            roles.coordinator(
                job,
                num_servers=embedding_servers,
                num_workers=embedding_workers,
                num_loaders=data_loaders,
                num_trainers=nn_workers,
            ),
            roles.embedding_servers(job, embedding_servers, eviction),
            roles.embedding_workers(job, embedding_workers),
            *loaders,
            roles.scripts(job, "trainer", nn_worker, nn_workers, gpus=nn_worker_gpus),
        ],
    )
