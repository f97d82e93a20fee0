"""What a process of a job does that does not train: it evaluates."""

from persia_torchrec.ctx import EmbeddingCtx, PreprocessMode
from tests.support.local_job import SumOfEmbeddings, batch_of


def evaluate_elsewhere() -> None:
    """Print the outputs for ids 1 and 2."""
    with EmbeddingCtx(PreprocessMode.EVAL, model=SumOfEmbeddings()) as ctx:
        ctx.wait_servers_ready()
        batch = ctx.get_embedding_from_data(batch_of([1], [2], requires_grad=False))
        output, _ = ctx.forward(batch)
    print(*output.flatten().tolist())
