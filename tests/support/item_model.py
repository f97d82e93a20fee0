"""A model of one feature, item, that adds its embedding up; item 7 has a row."""

import numpy as np
from torch import nn

from persia_torchrec.checkpoint.signature import ModelSignature
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.persia.slots import SlotsLookup
from persia_torchrec.persia.slots_reader import SlotsReader
from persia_torchrec.serving.models import Version
from persia_torchrec.serving.predictor import DenseModel, Predictor
from persia_torchrec.table import TableSpec
from tests.support.one_feature import FEATURE
from tests.support.servers import ids_of

INPUTS = [{"name": "item", "datatype": "INT64", "shape": [1], "data": [7]}]


class Sum(nn.Module):
    """Adds up the embedding of an item; gives it in columns."""

    def __init__(self, num_columns=1) -> None:
        super().__init__()
        self.num_columns = num_columns

    def forward(self, non_id_tensors, embeddings):
        return embeddings[0].sum(1, keepdim=True).repeat(1, self.num_columns)


def version_of(client, value, path="m.pt", num_columns=1, batching=None):
    """Return a version that predicts twice the value for item 7, in columns."""
    client.add_tables([TableSpec(name="item", dim=2, optimizer=SGD(1.0))])
    client.write("item", ids_of(7), np.full((1, 2), value, np.float32))
    reader = SlotsReader(SlotsLookup(client, [FEATURE]))
    signature = ModelSignature(("item",), (), (num_columns,))
    dense = DenseModel(Sum(num_columns), path, signature)
    return Version(Predictor(reader, dense, batching))
