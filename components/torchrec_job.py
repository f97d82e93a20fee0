"""A job of a TorchRec script: coordinator, embedding servers, trainers. No YAML.

torchx run -s local_cwd components/torchrec_job.py:train --script "train.py --epochs 2"
    --embedding_servers 2

The script finds the servers by EmbeddingClient.of_job().
"""

from typing import Dict, Optional

import torchx.specs as specs

from persia_torchrec.launch import roles
from persia_torchrec.wire.ports import free_port


def train(
    script: str,
    embedding_servers: int = 1,
    nn_workers: int = 1,
    nn_worker_gpus: int = 0,
    nproc_per_node: int = 1,
    capacity: int = 1_000_000,
    eviction: str = "lru",
    incremental_dir: str = "",
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
    """Train a TorchRec model whose embedding tables live on servers.

    Args:
        script: the trainers' script and its arguments, as "train.py --epochs 2"
        embedding_servers: number of servers; ids are sharded over them by hash
        nn_workers: number of replicas with trainers, as of machines
        nn_worker_gpus: GPUs that each of these asks the scheduler for
        nproc_per_node: trainers that torchrun starts in each of them
        capacity: rows of each server, of all tables together
        eviction: which row leaves a full server: the least recently (lru) or the least
            frequently (lfu) used
        incremental_dir: folder to which servers write what changes; none by default
        port: TCP port of the job's address book; 0 takes one that is free on the
            machine that runs torchx, so name one on a cluster
        python: interpreter, looked up in PATH where the roles run
        image: container image; not used by local_cwd
        env: further variables for every role, as NAME=value,NAME=value
        imports: modules that servers import, separated by commas, which register
            optimizers, initializers or admissions of their own
        roles_file: a file of what each role asks the scheduler for, on the machine that
            runs torchx: processors, memory, GPUs, volumes, variables, image, replicas
        set: the same in words, over the file: "server.cpu=8 server.memory=64Gi"
        join_timeout_s: seconds that each wait of the start may take
        recover: start what is killed again, and trainers all together; a script with
            recoverable() continues from its last checkpoint. False: the job fails
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
    return specs.AppDef(
        name=roles.APP_NAME,
        roles=[
            roles.coordinator(
                job, num_servers=embedding_servers, num_trainers=nn_workers
            ),
            roles.embedding_servers(
                job,
                embedding_servers,
                eviction,
                capacity=capacity,
                incremental_dir=incremental_dir or None,
            ),
            roles.scripts(job, "trainer", script, nn_workers, gpus=nn_worker_gpus),
        ],
    )
