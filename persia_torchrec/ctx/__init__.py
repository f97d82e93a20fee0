"""PERSIA's contexts: ``with TrainCtx(...) as ctx:`` around a training loop.

``DataCtx`` sends batches from a data loader process. ``TrainCtx`` trains on them in the
trainer; ``eval_ctx`` within it, or anywhere else in the job, evaluates. ``InferCtx``
looks embeddings up outside of any job. ``cnt_ctx()`` is the one that is entered.

Each name of ``__init__.pyi`` is imported on first use: a data loader starts without
torch and TorchRec.
"""

from persia_torchrec import names_on_use

__getattr__, __dir__, __all__ = names_on_use(__name__, __file__)
