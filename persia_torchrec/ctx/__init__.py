"""PERSIA's contexts: ``with TrainCtx(...) as ctx:`` around a training loop.

``DataCtx`` sends batches from a data loader process. ``TrainCtx`` trains on them in the
trainer; ``eval_ctx`` within it, or anywhere else in the job, evaluates. ``InferCtx``
looks embeddings up outside of any job. ``cnt_ctx()`` is the one that is entered.
"""

from persia_torchrec.ctx.base_ctx import BaseCtx, PreprocessMode, cnt_ctx
from persia_torchrec.ctx.data_ctx import DataCtx
from persia_torchrec.ctx.embedding_ctx import EmbeddingCtx, eval_ctx
from persia_torchrec.ctx.infer_ctx import InferCtx
from persia_torchrec.ctx.train_ctx import TrainCtx

__all__ = [
    "BaseCtx",
    "DataCtx",
    "EmbeddingCtx",
    "InferCtx",
    "PreprocessMode",
    "TrainCtx",
    "cnt_ctx",
    "eval_ctx",
]
