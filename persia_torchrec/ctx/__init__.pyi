"""The names of the contexts, and where they are; see the package's own stub."""

from persia_torchrec.persia.ctx.base_ctx import (
    BaseCtx as BaseCtx,
    PreprocessMode as PreprocessMode,
    cnt_ctx as cnt_ctx,
)
from persia_torchrec.persia.ctx.data_ctx import DataCtx as DataCtx
from persia_torchrec.persia.ctx.embedding_ctx import (
    EmbeddingCtx as EmbeddingCtx,
    InferCtx as InferCtx,
    eval_ctx as eval_ctx,
)
from persia_torchrec.persia.ctx.train_ctx import TrainCtx as TrainCtx
