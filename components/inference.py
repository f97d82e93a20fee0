"""A job that serves: coordinator, embedding servers and workers, inference servers.

torchx run -s local_cwd components/inference.py:serve --checkpoint runs/7
    --embedding_config embedding_config.yml --global_config global_config.yml
    --embedding_servers 2 --http_port 8080
"""

from typing import Dict, Optional

import torchx.specs as specs

from persia_torchrec.launch import roles
from persia_torchrec.wire.ports import free_port


def serve(
    checkpoint: str,
    embedding_config: str,
    global_config: str,
    embedding_servers: int = 1,
    embedding_workers: int = 1,
    predictors: int = 1,
    http_host: str = "127.0.0.1",
    http_port: int = 8080,
    follow_model: bool = False,
    port: int = 0,
    python: str = "python3",
    image: str = "",
    env: Optional[Dict[str, str]] = None,
    imports: str = "",
    roles_file: str = "",
    set: str = "",
    join_timeout_s: float = 600.0,
    recover: bool = True,
    recovery_timeout_s: float = 600.0,
    max_restarts: int = 3,
    max_retries: int = 3,
) -> specs.AppDef:
    """Predict over HTTP from a checkpoint, whose embeddings are sharded over servers.

    Args:
        checkpoint: folder of a checkpoint with a TorchScript model, or of a run, for
            its latest; or its URL; where the roles run
        embedding_config: path of the training's embedding_config.yml, where the roles
            run
        global_config: path of the training's global_config.yml, where the roles run;
            its capacity holds, and if it has enable_incremental_update, the servers
            follow the training
        embedding_servers: number of servers; any number may have written the checkpoint
        embedding_workers: number of embedding workers
        predictors: number of inference servers, which answer HTTP
        http_host: address that inference servers listen on; 0.0.0.0 for all
        http_port: port of the first inference server; the next one has the next
        follow_model: load the dense model of each later checkpoint
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
        recover: start what is killed again, at its port; the others answer meanwhile.
            False: the job fails
        recovery_timeout_s: seconds after which the job fails if a process that recovers
            is not back
        max_restarts: how often such a process may end within a minute
        max_retries: how often Slurm or Kubernetes may start the whole job again, as if
            a host was lost; Kubernetes does once less. 0: never
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
        recover=recover,
        recovery_timeout_s=recovery_timeout_s,
        max_restarts=max_restarts,
        max_retries=max_retries,
    )
    return specs.AppDef(
        name=roles.APP_NAME,
        roles=[
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
            ),
        ],
    )
