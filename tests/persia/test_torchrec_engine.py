"""Which models are TorchRec's."""

import pytest
import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)

from persia_torchrec.persia.torchrec_engine import has_collections

META = torch.device("meta")
BAGS = [EmbeddingBagConfig(1, 4, "a", feature_names=["a"])]
SEQUENCES = [EmbeddingConfig(1, 4, "a", feature_names=["a"])]


@pytest.mark.parametrize(
    "collection",
    [
        EmbeddingBagCollection(tables=BAGS, device=META),
        EmbeddingCollection(tables=SEQUENCES, device=META),
    ],
)
def test_a_model_with_a_collection_anywhere_is_torchrecs(collection):
    assert has_collections(nn.Sequential(nn.Linear(1, 1), nn.Sequential(collection)))


def test_a_model_of_layers_alone_is_persias():
    assert not has_collections(nn.Sequential(nn.Linear(1, 1), nn.EmbeddingBag(3, 4)))
