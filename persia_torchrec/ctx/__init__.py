"""PERSIA's contexts: ``with TrainCtx(...) as ctx:`` around a training loop.

``DataCtx`` sends batches from a data loader process. ``TrainCtx`` trains on them in the
trainer; ``eval_ctx`` within it evaluates, and changes nothing on the servers.
``InferCtx`` looks embeddings up outside of any job.
"""

from persia_torchrec.ctx.data_ctx import DataCtx
from persia_torchrec.ctx.embedding_ctx import EmbeddingCtx, eval_ctx
from persia_torchrec.ctx.infer_ctx import InferCtx
from persia_torchrec.ctx.lookup_ctx import PreprocessMode
from persia_torchrec.ctx.train_ctx import TrainCtx

__all__ = [
    "DataCtx",
    "EmbeddingCtx",
    "InferCtx",
    "PreprocessMode",
    "TrainCtx",
    "eval_ctx",
]
