"""One role by itself, for a job whose coordinator is running.

torchx run components/roles.py:embedding_server --host 127.0.0.1 --port 29400
    --embedding_config embedding_config.yml --global_config global_config.yml
    --replicas 2

The functions are embedding_server, embedding_worker, data_loader and nn_worker.
"""

from typing import Dict, Optional

import torchx.specs as specs

from persia_torchrec.launch import roles


def embedding_server(
    host: str,
    port: int,
    embedding_config: str,
    global_config: str,
    replicas: int = 1,
    eviction: str = "lru",
    python: str = "python3",
    image: str = "",
    env: Optional[Dict[str, str]] = None,
    imports: str = "",
    roles_file: str = "",
    set: str = "",
    join_timeout_s: float = 600.0,
    recover: bool = True,
    memory_dir: str = "auto",
) -> specs.AppDef:
    """Start the embedding servers, one process per shard.

    Args:
        host: host of the job's address book, where its coordinator runs
        port: TCP port of the job's address book
        embedding_config: path of embedding_config.yml, where the role runs
        global_config: path of global_config.yml, where the role runs
        replicas: number of servers; ids are sharded over them by hash
        eviction: which row leaves a full server: the least recently (lru) or the least
            frequently (lfu) used
        python: interpreter, looked up in PATH where the role runs
        image: container image; not used by local_cwd
        env: further variables for the role, as NAME=value,NAME=value
        imports: modules that the role imports, separated by commas, which register
            optimizers, initializers or admissions of their own
        roles_file: a file of what the role asks the scheduler for, on the machine that
            runs torchx: processors, memory, GPUs, volumes, variables, image, replicas
        set: the same in words, over the file: "server.cpu=8 server.memory=64Gi"
        join_timeout_s: seconds that each wait of the start may take
        recover: start a server again when it is killed, with its rows
        memory_dir: where the rows are then: auto for the fastest memory there is, a
            folder of each host, or private: with the process
    """
    asked = roles.read_settings(roles_file, set)
    job = _job(
        *(host, port, embedding_config, global_config),
        *(python, image, env, join_timeout_s, asked, imports, recover, memory_dir),
    )
    return _app(roles.embedding_servers(job, replicas, eviction))


def embedding_worker(
    host: str,
    port: int,
    embedding_config: str,
    global_config: str,
    replicas: int = 1,
    python: str = "python3",
    image: str = "",
    env: Optional[Dict[str, str]] = None,
    imports: str = "",
    roles_file: str = "",
    set: str = "",
    join_timeout_s: float = 600.0,
    recover: bool = True,
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
        imports: modules that the role imports, separated by commas, which register
            optimizers, initializers or admissions of their own
        roles_file: a file of what the role asks the scheduler for, on the machine that
            runs torchx: processors, memory, GPUs, volumes, variables, image, replicas
        set: the same in words, over the file: "server.cpu=8 server.memory=64Gi"
        join_timeout_s: seconds that each wait of the start may take
        recover: start a worker again when it is killed
    """
    asked = roles.read_settings(roles_file, set)
    job = _job(
        *(host, port, embedding_config, global_config),
        *(python, image, env, join_timeout_s, asked, imports, recover),
    )
    return _app(roles.embedding_workers(job, replicas))


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
    roles_file: str = "",
    set: str = "",
    join_timeout_s: float = 600.0,
    recover: bool = True,
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
        roles_file: a file of what the role asks the scheduler for, on the machine that
            runs torchx: processors, memory, GPUs, volumes, variables, image, replicas
        set: the same in words, over the file: "server.cpu=8 server.memory=64Gi"
        join_timeout_s: seconds that each wait of the start may take
        recover: start a data loader again when it is killed
    """
    asked = roles.read_settings(roles_file, set)
    job = _job(
        *(host, port, embedding_config, global_config),
        *(python, image, env, join_timeout_s, asked, "", recover),
    )
    return _app(roles.scripts(job, "loader", script, replicas))


def nn_worker(
    host: str,
    port: int,
    script: str,
    embedding_config: str,
    global_config: str,
    replicas: int = 1,
    gpus: int = 0,
    nproc_per_node: int = 1,
    python: str = "python3",
    image: str = "",
    env: Optional[Dict[str, str]] = None,
    roles_file: str = "",
    set: str = "",
    join_timeout_s: float = 600.0,
    recover: bool = True,
) -> specs.AppDef:
    """Start the NN workers, one process per device.

    Args:
        host: host of the job's address book, where its coordinator runs
        port: TCP port of the job's address book
        script: the NN workers' script and its arguments, as "train.py --epochs 2"
        embedding_config: path of embedding_config.yml, where the role runs
        global_config: path of global_config.yml, where the role runs
        replicas: number of replicas with NN workers, as of machines
        gpus: GPUs that each of these asks the scheduler for
        nproc_per_node: NN workers that torchrun starts in each of them
        python: interpreter, looked up in PATH where the role runs
        image: container image; not used by local_cwd
        env: further variables for the role, as NAME=value,NAME=value
        roles_file: a file of what the role asks the scheduler for, on the machine that
            runs torchx: processors, memory, GPUs, volumes, variables, image, replicas
        set: the same in words, over the file: "server.cpu=8 server.memory=64Gi"
        join_timeout_s: seconds that each wait of the start may take
        recover: start all NN workers again when one fails or is killed, from their last
            automatic checkpoint
    """
    asked = roles.read_settings(roles_file, set)
    job = _job(
        *(host, port, embedding_config, global_config),
        *(python, image, env, join_timeout_s, asked, "", recover),
        nproc_per_node=nproc_per_node,
    )
    return _app(roles.scripts(job, "trainer", script, replicas, gpus=gpus))


def _job(
    host: str,
    port: int,
    embedding_config: str,
    global_config: str,
    python: str,
    image: str,
    env: Optional[Dict[str, str]],
    join_timeout_s: float,
    settings: Dict[str, roles.RoleSettings],
    imports: str = "",
    recover: bool = True,
    memory_dir: str = "auto",
    nproc_per_node: int = 1,
) -> roles.JobSettings:
    return roles.JobSettings(
        embedding_config=embedding_config,
        global_config=global_config,
        port=port,
        host=host,
        python=python,
        image=image,
        env=env or {},
        imports=imports,
        settings=settings,
        join_timeout_s=join_timeout_s,
        recover=recover,
        memory_dir=memory_dir,
        nproc_per_node=nproc_per_node,
    )


def _app(role: specs.Role) -> specs.AppDef:
    return specs.AppDef(name=roles.APP_NAME, roles=[role])
