"""DLRM and PLE of the examples, served: the AUC over HTTP is the model's."""

import contextlib
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics.functional.classification import binary_auroc
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM, DLRMTrain

from examples.ple.model import DenseModel, Losses, MultiTaskModel, make_collections
from persia_torchrec import export_for_serving, remote_sharders
from persia_torchrec.device.batches import TorchRecBatch
from persia_torchrec.embedding.optim import Adagrad
from persia_torchrec.persia.batch import IDTypeFeature, NonIDTypeFeature, PersiaBatch
from persia_torchrec.persia.predict_requests import DECODERS
from persia_torchrec.serving.embeddings import CollectionsReader, host_checkpoint
from persia_torchrec.serving.http_server import HttpConfig, PredictionServer
from persia_torchrec.serving.models import Models, Version
from persia_torchrec.serving.predictor import Predictor, load_model
from tests.support.remote_job import shard
from tests.support.serving_process import predict

pytestmark = [
    pytest.mark.long,
    pytest.mark.multiprocess,
    pytest.mark.usefixtures("group"),
]

KEYS, NUM_IDS, NUM_DENSE, BATCH = list("abcd"), 500, 3, 512


class Data:
    """A batch of random ids and numbers, and labels that follow from both."""

    def __init__(self, seed) -> None:
        random = np.random.default_rng(seed)
        self.lengths = random.integers(0, 3, (len(KEYS), BATCH)).astype(np.int32)
        self.ids = random.integers(0, NUM_IDS, self.lengths.sum())
        self.numbers = random.standard_normal((BATCH, NUM_DENSE)).astype(np.float32)
        bag_of = np.repeat(np.arange(self.lengths.size), self.lengths.reshape(-1))
        total = np.bincount(bag_of % BATCH, np.sin(self.ids), BATCH)
        score = total + self.numbers.sum(1) + random.standard_normal(BATCH)
        self.labels = torch.from_numpy((score > 0).astype(np.float32))

    def kjt(self):
        lengths = torch.from_numpy(self.lengths.reshape(-1))
        return KeyedJaggedTensor(KEYS, torch.from_numpy(self.ids), lengths=lengths)

    def body(self, *dense):
        ends = np.cumsum(self.lengths.sum(1))[:-1]
        parts = np.split(self.ids.astype(np.uint64), ends)
        features = map(IDTypeFeature.from_flat, KEYS, parts, self.lengths)
        given = list(map(NonIDTypeFeature, dense))
        return PersiaBatch([*features], given, requires_grad=False).to_bytes()


class DlrmExample:
    """The model of examples/dlrm, with fewer tables and layers."""

    def __init__(self) -> None:
        tables = [EmbeddingBagConfig(NUM_IDS, 8, k, feature_names=[k]) for k in KEYS]
        bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.model = DLRMTrain(DLRM(bags, NUM_DENSE, [16, 8], [16, 1]))

    def train(self, model, data):
        dense = torch.from_numpy(data.numbers)
        logits = model.module.model(dense, data.kjt()).squeeze(1)
        nn.functional.binary_cross_entropy_with_logits(logits, data.labels).backward()

    def served(self, model):
        return model.module.model

    def arguments(self, data):
        return torch.from_numpy(data.numbers), data.kjt()

    def body(self, data):
        return data.body(data.numbers)


class Scores(nn.Module):
    """What PLE predicts, without its losses: the logits of both tasks."""

    def __init__(self, model) -> None:
        super().__init__()
        self.collections, self.losses = model.collections, model.losses

    def forward(self, ids):
        pooled = [collection(ids).values() for collection in self.collections]
        return self.losses.logits(torch.cat(pooled, dim=1))


class PleExample:
    """The model of examples/ple, with fewer columns."""

    def __init__(self) -> None:
        collections = make_collections([(key, NUM_IDS) for key in KEYS])
        dense = DenseModel("ple", 16 * len(KEYS), corrected=True)
        self.model = MultiTaskModel(collections, Losses(dense))

    def train(self, model, data):
        labels = data.labels, 1 - data.labels
        model(TorchRecBatch(id_features=data.kjt(), labels=labels))[0].backward()

    def served(self, model):
        return Scores(model.module).eval()

    def arguments(self, data):
        return (data.kjt(),)

    def body(self, data):
        return data.body()


@pytest.mark.parametrize("kind", [DlrmExample, PleExample])
def test_the_auc_over_http_is_that_of_the_evaluation(servers, tmp_path, kind):
    torch.manual_seed(0)
    client, example = servers.client(servers.start(2)), kind()
    sharders = remote_sharders(client, Adagrad(0.1))
    model = shard(example.model, *sharders)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for seed in range(6):
        optimizer.zero_grad()
        example.train(model, Data(seed))
        optimizer.step()
    model.eval()
    served, tests = example.served(model), [Data(seed) for seed in range(100, 108)]
    with torch.no_grad():
        logits = [served(*example.arguments(data)).reshape(BATCH, -1) for data in tests]
    expected = torch.cat(logits)
    labels = torch.cat([data.labels for data in tests]).int()
    saved = export_for_serving(
        served, tmp_path, client, example.arguments(Data(200)), timeout_s=60
    )
    loaded = load_model(saved.path, "serving_model.pt")
    opened = partial(CollectionsReader, collections=loaded.collections)
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(host_checkpoint(saved.path, opened))
        models = Models()
        stack.callback(models.close)
        models.add("model").add(Version(Predictor(reader, loaded)))
        server = PredictionServer(models, HttpConfig(), DECODERS)
        stack.callback(server.close)
        found = [predict(server.address, example.body(data)) for data in tests]
    predicted = torch.tensor(np.concatenate(found).reshape(len(labels), -1)).float()
    assert predicted.shape == expected.shape
    torch.testing.assert_close(predicted, expected, atol=1e-6, rtol=1e-5)
    due, auc = (binary_auroc(s[:, 0].sigmoid(), labels) for s in (expected, predicted))
    assert abs(float(due) - float(auc)) <= 1e-6
    assert float(expected[:, 0].std()) > 1e-4  # there is an order to be kept
