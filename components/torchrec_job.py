"""A job of a TorchRec script: coordinator, embedding servers, trainers. No YAML.

torchx run -s local_cwd components/torchrec_job.py:train
    --script "examples/train.py --epochs 2" --embedding_servers 2

The script finds the servers by EmbeddingClient.of_job().
"""

from typing import Any

import torchx.specs as specs

from persia_torchrec.launch import roles
from persia_torchrec.launch.arguments import reads_variables
from persia_torchrec.parsing.command_line import offers


@reads_variables()
@offers(
    roles.JobSettings,
    *("nproc_per_node", *roles.OF_JOB, "memory_dir"),
    *(*roles.OF_RESUME, "optimizer_engine"),
)
def train(
    script: str,
    embedding_servers: int = 1,
    nn_workers: int = 1,
    nn_worker_gpus: int = 0,
    capacity: int = 1_000_000,
    eviction: str = "lru",
    incremental_dir: str = "",
    **shared: Any,
) -> specs.AppDef:
    """Train a TorchRec model whose embedding tables live on servers.

    Args:
        script: the trainers' script and its arguments, as "train.py --epochs 2", or
            "-m package.train"
        embedding_servers: number of servers; ids are sharded over them by hash
        nn_workers: number of replicas with trainers, as of machines
        nn_worker_gpus: GPUs that each of these asks the scheduler for
        capacity: rows of each server, of all tables together
        eviction: which row leaves a full server: the least recently (lru) or the least
            frequently (lfu) used
        incremental_dir: folder to which servers write what changes; none by default
    """
    job = roles.JobSettings(**shared)
    return roles.app(
        roles.coordinator(job, num_servers=embedding_servers, num_trainers=nn_workers),
        roles.embedding_servers(
            job,
            embedding_servers,
            eviction,
            capacity=capacity,
            incremental_dir=incremental_dir or None,
        ),
        roles.scripts(job, "trainer", script, nn_workers, gpus=nn_worker_gpus),
    )
