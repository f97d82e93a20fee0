"""The optimizers that an embedding server can apply.

They are frozen values that travel to the servers as plain JSON; the kernel beside each
class is what a server compiles. Names, arguments and
defaults of ``SGD``, ``Adagrad`` and ``Adam`` are PERSIA's; the formulas are those of
fbgemm's fused optimizers and of ``torch.optim``, so that a table moved onto a server
trains as it did before. ``AdagradDecay``, ``AdamAsync`` and ``FTRL`` are DeepRec's and
TensorFlow's. Where another's formula differs, the docstring says how. Of the optimizers
that are not PERSIA's, all arguments but ``lr`` are given by name.

In the formulas ``w`` is a row's weights, ``g`` its gradient summed over the batch,
``wd`` is ``weight_decay``. Only rows that are in a batch change; a row that is not in
the batch keeps its weights and its state.

Dimension key:
    D: embedding dim
"""

from persia_torchrec.embedding.optim_adam import (
    LAMB,
    Adam,
    AdamAsync,
    AdamW,
    RowwiseAdam,
    RowwiseLAMB,
)
from persia_torchrec.embedding.optim_sgd import (
    FTRL,
    LARS,
    SGD,
    Adagrad,
    AdagradDecay,
)
from persia_torchrec.embedding.setting import Optimizer, Registry

__all__ = [
    "FTRL",
    "LAMB",
    "LARS",
    "OPTIMIZERS",
    "SGD",
    "Adagrad",
    "AdagradDecay",
    "Adam",
    "AdamAsync",
    "AdamW",
    "Optimizer",
    "RowwiseAdam",
    "RowwiseLAMB",
]

OPTIMIZERS: Registry[Optimizer] = Registry(
    "An optimizer",
    SGD,
    Adagrad,
    AdagradDecay,
    LARS,
    FTRL,
    Adam,
    AdamW,
    RowwiseAdam,
    AdamAsync,
    LAMB,
    RowwiseLAMB,
)
"""Every optimizer that servers can apply.

Example:
    >>> OPTIMIZERS.from_json({"kind": "sgd", "lr": 0.5})
    SGD(lr=0.5, momentum=0.0, weight_decay=0.0)
"""
