"""The network of the Adult example, as a PERSIA user writes it.

A model's ``forward`` takes two lists of tensors: the batch's non-id features, and one
pooled embedding per slot of ``embedding_config.yml``. It owns no embedding table; those
live on the embedding servers.

    5 numbers          Linear -> 16,  BatchNorm --+
                                                  +-> 256 -> 128 -> 1 -> sigmoid
    8 embeddings of 8  Linear -> 128, BatchNorm --+

There is no non-linearity before the sigmoid, as in PERSIA's own example.
"""

import torch
from torch import nn

NUM_DENSE = 5
NUM_SLOTS = 8
EMBEDDING_DIM = 8


class DNN(nn.Module):
    """Predict whether a person earns more than 50,000 dollars a year."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Sequential(nn.Linear(NUM_DENSE, 16), nn.BatchNorm1d(16))
        self.sparse = nn.Sequential(
            nn.Linear(NUM_SLOTS * EMBEDDING_DIM, 128), nn.BatchNorm1d(128)
        )
        self.top = nn.Sequential(
            nn.Linear(128 + 16, 256), nn.Linear(256, 128), nn.Linear(128, 1)
        )

    def forward(
        self,
        non_id_type_feature_tensors: list[torch.Tensor],
        embedding_tensors: list[torch.Tensor],
    ) -> torch.Tensor:
        """Return the probability of the label 1.

        Args:
            non_id_type_feature_tensors: one float32 ``(B, 5)``.
            embedding_tensors: eight ``(B, 8)``, in slot order, of any float dtype:
                embeddings may travel as float16.

        Returns:
            float32 ``(B, 1)``, in ``[0, 1]``.
        """
        dense = self.dense(non_id_type_feature_tensors[0])
        sparse = self.sparse(torch.cat(embedding_tensors, dim=1).float())
        return torch.sigmoid(self.top(torch.cat([sparse, dense], dim=1)))
