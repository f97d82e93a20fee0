"""A job that serves: coordinator, embedding servers and workers, inference servers.

torchx run -s local_cwd components/inference.py:serve --checkpoint runs/7
    --embedding_config embedding_config.yml --global_config global_config.yml
    --embedding_servers 2 --http_port 8080
"""

from typing import Any

import torchx.specs as specs

from persia_torchrec.launch import roles
from persia_torchrec.launch.arguments import reads_variables
from persia_torchrec.parsing.command_line import offers


@reads_variables()
@offers(roles.JobSettings, "embedding_config", "global_config", *roles.OF_JOB)
def serve(
    checkpoint: str,
    embedding_servers: int = 1,
    embedding_workers: int = 1,
    predictors: int = 1,
    http_host: str = "127.0.0.1",
    http_port: int = 8080,
    follow_model: bool = False,
    device: str = "auto",
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
    """
    job = roles.JobSettings(**shared)
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
        ),
    )
