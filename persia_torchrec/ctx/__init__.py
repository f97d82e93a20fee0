"""PERSIA's contexts: ``with TrainCtx(...) as ctx:`` around a training loop.

``DataCtx`` sends batches from a data loader process. ``TrainCtx`` trains on them in the
trainer; ``eval_ctx`` within it, or anywhere else in the job, evaluates. ``InferCtx``
looks embeddings up outside of any job. ``cnt_ctx()`` is the one that is entered.
"""

from persia_torchrec.ctx.base_ctx import BaseCtx as BaseCtx
from persia_torchrec.ctx.base_ctx import PreprocessMode as PreprocessMode
from persia_torchrec.ctx.base_ctx import cnt_ctx as cnt_ctx
from persia_torchrec.ctx.data_ctx import DataCtx as DataCtx
from persia_torchrec.ctx.embedding_ctx import EmbeddingCtx as EmbeddingCtx
from persia_torchrec.ctx.embedding_ctx import InferCtx as InferCtx
from persia_torchrec.ctx.embedding_ctx import eval_ctx as eval_ctx
from persia_torchrec.ctx.train_ctx import TrainCtx as TrainCtx
