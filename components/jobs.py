"""The components of torchx: whole jobs, and one role by itself.

    torchx run -s local_cwd persia.train --nn_worker train.py
        --data_loader data_loader.py --embedding_config embedding_config.yml
        --global_config global_config.yml
    torchx run -s local_cwd persia.train_torchrec --script train.py
        --servers 2
    torchx run -s local_cwd persia.serve --checkpoint runs/7 --http_port 8080
        --embedding_config embedding_config.yml --global_config global_config.yml
    torchx run -s local_cwd persia.embedding_server --host 127.0.0.1 --port 29400
        --servers 2 --embedding_config embedding_config.yml
        --global_config global_config.yml

An entry point gives torchx these names; as a file it is ``components/jobs.py:train``.
Arguments that several commands take are declared in
``persia_torchrec/parsing/settings.py``, with which a test compares these; those that
components share are fields of ``JobSettings``; ``--help`` after a name lists all.
coordinator starts a job of roles that are started one by one, by embedding_server,
embedding_worker, data_loader and nn_worker.

torchx lists each function of this module, and runs a file in a namespace of its own: so
it imports modules, and no function of them, and has no ``__file__``.
"""

from typing import Any

from torchx import specs

from persia_torchrec.launch import arguments, roles
from persia_torchrec.persia import global_config

_CONFIGS = ("embedding_config", "global_config")


@arguments.component(
    roles.JobSettings,
    *_CONFIGS,
    "nproc_per_node",
    *roles.OF_JOB,
    "memory_dir",
    "run_dir",
    "optimizer_engine",
)
def train(
    nn_worker: str,
    data_loader: str,
    servers: int = 1,
    embedding_workers: int = 1,
    data_loaders: int = 1,
    trainers: int = 1,
    gpus: int = 0,
    eviction: str = "lru",
    **shared: Any,
) -> specs.AppDef:
    """Train a model whose embeddings live on servers.

    Args:
        nn_worker: the trainers' script and its arguments, as "train.py --epochs 2", or
            "-m package.train"
        data_loader: the data loaders' script and its arguments, as "loader.py --epochs
            2", or "-m package.loader"
        servers: number of embedding servers; ids are sharded over them by hash
        embedding_workers: number of embedding workers; a training of TorchRec models
            has 0, as its data loaders send the ids to the trainers
        data_loaders: number of data loaders; 0 if the trainers read their own data
        trainers: number of trainers (NN workers), of all machines together, a multiple
            of nproc_per_node; by default those of one machine
        gpus: GPUs that each machine with trainers asks the scheduler for
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
            servers=servers,
            embedding_workers=embedding_workers,
            data_loaders=data_loaders,
            trainers=trainers,
        ),
        roles.embedding_servers(job, servers, eviction),
        *workers,
        *loaders,
        roles.scripts(job, "trainer", nn_worker, trainers, gpus=gpus),
    )


@arguments.component(
    roles.JobSettings,
    "nproc_per_node",
    *roles.OF_JOB,
    "memory_dir",
    "run_dir",
    "optimizer_engine",
)
def train_torchrec(
    script: str,
    servers: int = 1,
    trainers: int = 1,
    gpus: int = 0,
    capacity: int = 1_000_000,
    eviction: str = "lru",
    increments_dir: str = "",
    **shared: Any,
) -> specs.AppDef:
    """Train a TorchRec model whose embedding tables live on servers.

    Args:
        script: the trainers' script and its arguments, as "train.py --epochs 2", or
            "-m package.train"
        servers: number of embedding servers; ids are sharded over them by hash
        trainers: number of trainers (NN workers), of all machines together, a multiple
            of nproc_per_node; by default those of one machine
        gpus: GPUs that each machine with trainers asks the scheduler for
        capacity: rows of each server, of all tables together; beyond that, rows are
            evicted
        eviction: which row leaves a full server: the least recently (lru) or the least
            frequently (lfu) used
        increments_dir: folder to which servers write what changes, or of a checkpoint
            that is served, which they follow; none by default
    """
    job = roles.JobSettings(**shared)
    return roles.app(
        roles.coordinator(job, servers=servers, trainers=trainers),
        roles.embedding_servers(
            job,
            servers,
            eviction,
            capacity=capacity,
            increments_dir=increments_dir or None,
        ),
        roles.scripts(job, "trainer", script, trainers, gpus=gpus),
    )


@arguments.component(roles.JobSettings, *_CONFIGS, *roles.OF_JOB)
def serve(
    checkpoint: str,
    servers: int = 1,
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
        checkpoint: folder of a checkpoint with a model, or of a run, for its latest; or
            its URL; where the roles run
        servers: number of embedding servers; ids are sharded over them by hash
        embedding_workers: number of embedding workers; a training of TorchRec models
            has 0, as its data loaders send the ids to the trainers
        predictors: number of inference servers, which answer HTTP
        http_host: address that inference servers listen on; 0.0.0.0 for all
        http_port: port of the first inference server; the next one has the next
        follow_model: load the dense model of each later checkpoint once it is complete
        device: where inference servers predict: cpu, cuda, or auto, a GPU where there
            is one; those of one host take its GPUs in turn
        allow_torchscript: take TorchScript, which is a program, also from a URL and
            from a folder that other users may write to
    """
    job = roles.JobSettings(**shared)
    global_config.reject_inference("coordinator", job.global_config)
    return roles.app(
        roles.coordinator(
            job,
            servers=servers,
            embedding_workers=embedding_workers,
            predictors=predictors,
        ),
        roles.embedding_servers(job, servers, checkpoint=checkpoint),
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


@arguments.component(
    roles.JobSettings,
    *_CONFIGS,
    *roles.OF_ROLE,
    "nproc_per_node",
    "recovery_timeout_s",
    "grace_s",
)
def coordinator(
    host: str,
    port: int,
    servers: int = 1,
    embedding_workers: int = 1,
    data_loaders: int = 1,
    trainers: int = 1,
    predictors: int = 0,
    **shared: Any,
) -> specs.AppDef:
    """Start the coordinator of a job whose roles are started one by one.

    A count of 0 is of a role that the job lacks.

    Args:
        host: host of the job's address book, where its coordinator runs
        port: TCP port of the job's address book
        servers: number of embedding servers; ids are sharded over them by hash
        embedding_workers: number of embedding workers; a training of TorchRec models
            has 0, as its data loaders send the ids to the trainers
        data_loaders: number of data loaders; 0 if the trainers read their own data
        trainers: number of trainers (NN workers), of all machines together, a multiple
            of nproc_per_node; by default those of one machine
        predictors: number of inference servers, which answer HTTP
    """
    job = roles.JobSettings(host=host, port=port, **shared)
    global_config.reject_inference("coordinator", job.global_config)
    return roles.app(
        roles.coordinator(
            job,
            servers=servers,
            embedding_workers=embedding_workers,
            data_loaders=data_loaders,
            trainers=trainers,
            predictors=predictors,
        )
    )


@arguments.component(
    roles.JobSettings,
    *_CONFIGS,
    *roles.OF_ROLE,
    "imports",
    "memory_dir",
    "optimizer_engine",
    replicas="servers",
)
def embedding_server(
    host: str, port: int, servers: int = 1, eviction: str = "lru", **shared: Any
) -> specs.AppDef:
    """Start the embedding servers, one process per shard.

    Args:
        host: host of the job's address book, where its coordinator runs
        port: TCP port of the job's address book
        servers: number of embedding servers; ids are sharded over them by hash
        eviction: which row leaves a full server: the least recently (lru) or the least
            frequently (lfu) used
    """
    job = roles.JobSettings(host=host, port=port, **shared)
    return roles.app(roles.embedding_servers(job, servers, eviction))


@arguments.component(
    roles.JobSettings,
    *_CONFIGS,
    *roles.OF_ROLE,
    "imports",
    replicas="embedding_workers",
)
def embedding_worker(
    host: str, port: int, embedding_workers: int = 1, **shared: Any
) -> specs.AppDef:
    """Start the embedding workers.

    Args:
        host: host of the job's address book, where its coordinator runs
        port: TCP port of the job's address book
        embedding_workers: number of embedding workers; a training of TorchRec models
            has 0, as its data loaders send the ids to the trainers
    """
    job = roles.JobSettings(host=host, port=port, **shared)
    return roles.app(roles.embedding_workers(job, embedding_workers))


@arguments.component(
    roles.JobSettings,
    *_CONFIGS,
    *roles.OF_ROLE,
    script="data_loader",
    replicas="data_loaders",
)
def data_loader(
    host: str, port: int, data_loader: str = "", data_loaders: int = 1, **shared: Any
) -> specs.AppDef:
    """Start the data loaders.

    Args:
        host: host of the job's address book, where its coordinator runs
        port: TCP port of the job's address book
        data_loader: the data loaders' script and its arguments, as "loader.py --epochs
            2", or "-m package.loader"
        data_loaders: number of data loaders; 0 if the trainers read their own data
    """
    job = roles.JobSettings(host=host, port=port, **shared)
    global_config.reject_inference("data loader", job.global_config)
    return roles.app(roles.scripts(job, "loader", data_loader, data_loaders))


@arguments.component(
    roles.JobSettings,
    *_CONFIGS,
    *roles.OF_ROLE,
    "nproc_per_node",
    script="nn_worker",
    replicas="trainers",
)
def nn_worker(
    host: str,
    port: int,
    nn_worker: str = "",
    trainers: int = 1,
    gpus: int = 0,
    **shared: Any,
) -> specs.AppDef:
    """Start the trainers (NN workers), one process per device.

    Args:
        host: host of the job's address book, where its coordinator runs
        port: TCP port of the job's address book
        nn_worker: the trainers' script and its arguments, as "train.py --epochs 2", or
            "-m package.train"
        trainers: number of trainers (NN workers), of all machines together, a multiple
            of nproc_per_node; by default those of one machine
        gpus: GPUs that each machine with trainers asks the scheduler for
    """
    job = roles.JobSettings(host=host, port=port, **shared)
    global_config.reject_inference("NN worker", job.global_config)
    return roles.app(roles.scripts(job, "trainer", nn_worker, trainers, gpus=gpus))
