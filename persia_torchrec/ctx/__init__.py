"""PERSIA's contexts: ``with TrainCtx(...) as ctx:`` around a training loop.

``DataCtx`` sends batches from a data loader process. ``TrainCtx`` trains on them in the
trainer; ``eval_ctx`` within it evaluates, and changes nothing on the servers.
"""

from persia_torchrec.ctx.data_ctx import DataCtx
from persia_torchrec.ctx.embedding_ctx import EmbeddingCtx, PreprocessMode, eval_ctx
from persia_torchrec.ctx.train_ctx import TrainCtx

__all__ = ["DataCtx", "EmbeddingCtx", "PreprocessMode", "TrainCtx", "eval_ctx"]
