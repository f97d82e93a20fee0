"""The components of torchx: whole jobs, and one role by itself.

    torchx run -s local_cwd persia.train --nn_worker train.py
        --data_loader data_loader.py --embedding_config embedding_config.yml
        --global_config global_config.yml
    torchx run -s local_cwd persia.train_torchrec --script train.py
        --embedding_servers 2
    torchx run -s local_cwd persia.serve --checkpoint runs/7 --http_port 8080
        --embedding_config embedding_config.yml --global_config global_config.yml
    torchx run -s local_cwd persia.embedding_server --host 127.0.0.1 --port 29400
        --replicas 2 --embedding_config embedding_config.yml
        --global_config global_config.yml

An entry point gives torchx these names; as a file it is ``components/jobs.py:train``.
Arguments that components share are fields of ``JobSettings``; ``--help`` after a name
lists all. coordinator starts a job of roles that are started one by one, by
embedding_server, embedding_worker, data_loader and nn_worker.

torchx lists each function of this module, and runs a file in a namespace of its own: so
it imports modules, and no function of them, and has no ``__file__``.
"""

from typing import Any

from torchx import specs

from persia_torchrec.launch import arguments, roles
from persia_torchrec.parsing import command_line
from persia_torchrec.persia import global_config

_SHARED = ("embedding_config", "global_config", *roles.OF_ROLE)


@arguments.reads_variables(
    nn_worker="PERSIA_NN_WORKER_ENTRY", data_loader="PERSIA_DATALOADER_ENTRY"
)
@command_line.offers(
    roles.JobSettings,
    "embedding_config",
    "global_config",
    "nproc_per_node",
    *roles.OF_JOB,
    "memory_dir",
    *roles.OF_RESUME,
    "optimizer_engine",
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
    global_config.reject_inference("coordinator", job.global_config)
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


@arguments.reads_variables()
@command_line.offers(
    roles.JobSettings,
    "nproc_per_node",
    *roles.OF_JOB,
    "memory_dir",
    *roles.OF_RESUME,
    "optimizer_engine",
)
def train_torchrec(
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


@arguments.reads_variables()
@command_line.offers(
    roles.JobSettings, "embedding_config", "global_config", *roles.OF_JOB
)
def serve(
    checkpoint: str,
    embedding_servers: int = 1,
    embedding_workers: int = 1,
    predictors: int = 1,
    http_host: str = "127.0.0.1",
    http_port: int = 8080,
    follow_model: bool = False,
    device: str = "auto",
    allow_torchscript: bool = False,
    **shared: Any,
) -> specs.AppDef:
    """Predict over HTTP from a checkpoint, whose embeddings are sharded over servers.

    The files are those of the training. The capacity of global_config.yml holds, and if
    it has enable_incremental_update, the servers follow the training.

    Args:
        checkpoint: folder of a checkpoint with a TorchScript model, or of a run, for
            its latest; or its URL; where the roles run
        embedding_servers: number of servers; any number may have written the checkpoint
        embedding_workers: number of embedding workers
        predictors: number of inference servers, which answer HTTP
        http_host: address that inference servers listen on; 0.0.0.0 for all
        http_port: port of the first inference server; the next one has the next
        follow_model: load the dense model of each later checkpoint
        device: where inference servers predict: cpu, cuda, or auto, a GPU where there
            is one; those of one host take its GPUs in turn
        allow_torchscript: take the model, which is a program, also from a URL and from
            a folder that other users may write to
    """
    job = roles.JobSettings(**shared)
    global_config.reject_inference("coordinator", job.global_config)
    return roles.app(
        roles.coordinator(
            job,
            num_servers=embedding_servers,
            num_workers=embedding_workers,
            num_predictors=predictors,
        ),
        roles.embedding_servers(job, embedding_servers, checkpoint=checkpoint),
        roles.embedding_workers(job, embedding_workers, learn_tables=True),
        roles.predictors(
            job,
            checkpoint,
            predictors,
            host=http_host,
            port=http_port,
            follow_model=follow_model,
            device=device,
            allow_torchscript=allow_torchscript,
        ),
    )


@arguments.reads_variables()
@command_line.offers(
    roles.JobSettings,
    *_SHARED,
    "nproc_per_node",
    "recovery_timeout_s",
    "max_restarts",
    "grace_s",
)
def coordinator(
    host: str,
    port: int,
    embedding_servers: int = 1,
    embedding_workers: int = 1,
    data_loaders: int = 1,
    nn_workers: int = 1,
    predictors: int = 0,
    **shared: Any,
) -> specs.AppDef:
    """Start the coordinator of a job whose roles are started one by one.

    Args:
        host: host of the job's address book, the one on which this starts
        port: TCP port of the job's address book
        embedding_servers: number of servers; ids are sharded over them by hash
        embedding_workers: number of embedding workers; 0 for none
        data_loaders: number of data loaders; 0 for none
        nn_workers: number of replicas with NN workers, as of machines; 0 for none
        predictors: number of inference servers; 0 for none
    """
    job = roles.JobSettings(host=host, port=port, **shared)
    global_config.reject_inference("coordinator", job.global_config)
    return roles.app(
        roles.coordinator(
            job,
            num_servers=embedding_servers,
            num_workers=embedding_workers,
            num_loaders=data_loaders,
            num_trainers=nn_workers,
            num_predictors=predictors,
        )
    )


@arguments.reads_variables()
@command_line.offers(
    roles.JobSettings, *_SHARED, "imports", "memory_dir", "optimizer_engine"
)
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


@arguments.reads_variables()
@command_line.offers(roles.JobSettings, *_SHARED, "imports")
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


@arguments.reads_variables(script="PERSIA_DATALOADER_ENTRY")
@command_line.offers(roles.JobSettings, *_SHARED)
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
    global_config.reject_inference("data loader", job.global_config)
    return roles.app(roles.scripts(job, "loader", script, replicas))


@arguments.reads_variables(script="PERSIA_NN_WORKER_ENTRY")
@command_line.offers(roles.JobSettings, *_SHARED, "nproc_per_node")
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
    global_config.reject_inference("NN worker", job.global_config)
    return roles.app(roles.scripts(job, "trainer", script, replicas, gpus=gpus))
