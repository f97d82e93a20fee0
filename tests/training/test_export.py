"""A model of TorchRec is exported, and predicts from its file what it gave before."""

import json
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.models.dlrm import DLRM

from persia_torchrec import MixedSharder, Placement, export_for_serving, remote_sharders
from persia_torchrec.embedding.optim import Adagrad
from persia_torchrec.errors import CheckpointError, ConfigError
from persia_torchrec.persia.batch import IDTypeFeature, NonIDTypeFeature, PersiaBatch
from persia_torchrec.persia.predict_requests import features_of
from persia_torchrec.serving.embeddings import CollectionsReader, host_checkpoint
from persia_torchrec.serving.predictor import Predictor, Trust, load_model
from persia_torchrec.sharding.dense_half import load_served
from tests.support.processes import Processes
from tests.support.remote_job import shard
from tests.support.serving_process import Serving, ask, predict

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("group")]

KEYS = list("abc")


def bags(dim=8, **features):
    """Return a collection with a table for each name, of these features."""
    tables = [
        EmbeddingBagConfig(100, dim, name, feature_names=list(of))
        for name, of in features.items()
    ]
    return EmbeddingBagCollection(tables=tables, device="meta")


class Bags(nn.Module):
    """DLRM, with two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.dlrm = DLRM(bags(one="a", two="bc"), 2, [4, 8], [8, 1])

    def forward(self, numbers, ids):
        logits = self.dlrm(numbers, ids)
        return {"click": torch.sigmoid(logits), "buy": logits.squeeze(1)}


class Sequences(nn.Module):
    """Sums a sequence, by lengths that its collection gives; reads ids, too."""

    def __init__(self) -> None:
        super().__init__()
        tables = [EmbeddingConfig(100, 4, "sequence", feature_names=["c"])]
        self.rows = EmbeddingCollection(tables=tables, device="meta")
        self.bags = bags(one="ab")
        self.norm = nn.BatchNorm1d(22)
        self.top = nn.Linear(22, 1)

    def forward(self, ids, numbers):
        rows = self.rows(ids)["c"]
        num = numbers.shape[0]
        owners = torch.repeat_interleave(torch.arange(num), rows.lengths())
        sums = torch.zeros(num, 4).index_add(0, owners, rows.values())
        parts = [self.bags(ids).values(), sums, numbers]
        return self.top(self.norm(torch.cat(parts, 1)))


class Deciding(Bags):
    """Makes a decision by its inputs, which no export can keep."""

    def forward(self, numbers, ids):
        output = super().forward(numbers, ids)["click"]
        return output + 1 if float(numbers.sum()) > 0 else output


def batch(num, seed):
    """Return numbers, ids as TorchRec has them, and the same as PERSIA has them."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 4, (3, num)).astype(np.int32)
    ids = random.integers(0, 50, lengths.sum())
    numbers = random.standard_normal((num, 2)).astype(np.float32)
    kjt = KeyedJaggedTensor(
        KEYS, torch.from_numpy(ids), lengths=torch.from_numpy(lengths.reshape(-1))
    )
    parts = np.split(ids.astype(np.uint64), np.cumsum(lengths.sum(1))[:-1])
    features = map(IDTypeFeature.from_flat, KEYS, parts, lengths)
    dense = [NonIDTypeFeature(numbers)]
    return (
        torch.from_numpy(numbers),
        kjt,
        PersiaBatch([*features], dense, requires_grad=False),
    )


class Trained:
    """A model that has taken some steps, and its arguments for a batch."""

    def __init__(self, servers, model, placement=None):
        self.client = servers.client(servers.start(2))
        remote = remote_sharders(self.client, Adagrad(0.1))
        if placement is not None:
            remote = [MixedSharder(remote[0], placement)]
        self.model = shard(model, *remote)
        for seed in range(3):
            output = self.model(*self.arguments(*batch(8, seed)))
            values = output.values() if isinstance(output, dict) else [output]
            sum(value.square().sum() for value in values).backward()
        self.model.eval()

    def arguments(self, numbers, kjt, *_):
        is_first = isinstance(self.model.module, Sequences)
        return (kjt, numbers) if is_first else (numbers, kjt)

    def predicted(self, *of):
        with torch.no_grad():
            output = self.model(*self.arguments(*of))
        values = output.values() if isinstance(output, dict) else [output]
        return torch.cat([v.reshape(len(v), -1) for v in values], 1).numpy()

    def export(self, path, example=None, **settings):
        example = example or self.arguments(*batch(5, 9))
        return export_for_serving(self.model, path, self.client, example, **settings)


@pytest.mark.parametrize(
    ("kind", "factory"),
    [
        (Bags, None),
        pytest.param(Sequences, None, marks=pytest.mark.long),
        pytest.param(Sequences, f"{__name__}:Sequences", marks=pytest.mark.long),
        (Deciding, f"{__name__}:Deciding"),
    ],
)
def test_predictions_equal_those_of_the_model(servers, tmp_path, kind, factory):
    trained = Trained(servers, kind())
    batches = [batch(num, num) for num in (1, 2, 7, 300)]
    expected = [trained.predicted(*one) for one in batches]
    path = trained.export(tmp_path, factory=factory).path
    trained.model(*trained.arguments(*batches[0]))  # what follows is not in it
    trust = Trust() if factory is None else Trust((factory,))
    model = load_model(path, "serving_model.pt", trust=trust)
    opened = partial(CollectionsReader, collections=model.collections)
    with host_checkpoint(path, opened) as reader:
        predictor = Predictor(reader, model)
        for one, due in zip(batches, expected, strict=True):
            np.testing.assert_allclose(
                predictor.predict(features_of(one[2])), due, atol=1e-6
            )


@pytest.mark.multiprocess
def test_it_is_served_over_http_by_name(servers, tmp_path):
    trained = Trained(servers, Bags())
    trained.export(tmp_path / "run")
    one = batch(6, 6)
    with Processes(tmp_path) as processes:
        serving = Serving(processes, "--checkpoint", str(tmp_path / "run"))
        due = trained.predicted(*one).tolist()
        assert predict(serving.address, one[2].to_bytes()) == [
            pytest.approx(row, abs=1e-6) for row in due
        ]
        about = ask(serving.address, "/v2/models/model")[1]
        names = [tensor["name"] for tensor in about["inputs"]]
        assert names == [f"{k}{end}" for k in KEYS for end in ("", ".lengths")] + [
            "numbers"
        ]
        assert about["outputs"][0]["shape"] == [-1, 2]
        dense = one[2].non_id_type_features[0].data
        inputs = [("numbers", "FP32", dense.tolist())]
        for feature in one[2].id_type_features:
            inputs.append((feature.name, "UINT64", feature.ids.tolist()))
            lengths = feature.lengths.tolist()
            inputs.append((f"{feature.name}.lengths", "INT32", lengths))
        request = {
            "inputs": [
                {"name": n, "datatype": kind, "shape": np.shape(data), "data": data}
                for n, kind, data in reversed(inputs)
            ]
        }
        body = json.dumps(request).encode()
        status, answer = ask(serving.address, "/v2/models/model/infer", body)
        assert status == 200, answer
        flat = [value for row in due for value in row]
        assert answer["outputs"][0]["data"] == pytest.approx(flat, abs=1e-6)
        serving.process.send(signal.SIGTERM)
        assert serving.process.status() == 0


def test_a_failed_export_names_the_remedy(servers, tmp_path):
    deciding = Trained(servers, Deciding())
    with pytest.raises(ConfigError, match="must have collections on the servers"):
        export_for_serving(nn.Linear(1, 1), tmp_path, deciding.client, ())
    with pytest.raises(ConfigError, match='have a factory="module:function"'):
        deciding.export(tmp_path)
    with pytest.raises(ConfigError, match="factory must name a function"):
        deciding.export(tmp_path, factory="nowhere:Model")
    numbers, kjt, _ = batch(5, 5)
    weights = torch.ones(len(kjt.values()))
    weighted = KeyedJaggedTensor(KEYS, kjt.values(), weights, lengths=kjt.lengths())
    for example, why in (
        ((numbers,), "one KeyedJaggedTensor"),
        ((numbers, kjt, 3), "one KeyedJaggedTensor"),
        ((numbers, weighted), "must have no weights"),
        (batch(1, 1)[:2], "at least 2 samples"),
    ):
        with pytest.raises(ConfigError, match=why):
            deciding.export(tmp_path, example)
    assert not list(tmp_path.iterdir())


def test_several_keyed_jagged_tensors_are_joined_by_the_line_of_the_error(
    servers, tmp_path
):
    trained = Trained(servers, Bags())
    _, kjt, _ = batch(5, 5)
    numbers, ids = kjt.split([1, len(KEYS) - 1])
    with pytest.raises(ConfigError, match=r"Let forward take one") as caught:
        trained.export(tmp_path, (numbers, ids))
    line = str(caught.value).rpartition(": ")[2]
    assert line == "KeyedJaggedTensor.concat([numbers, ids])"
    joined = eval(line, {"numbers": numbers, "ids": ids, **globals()})
    assert joined.keys() == kjt.keys()
    assert torch.equal(joined.values(), kjt.values())
    assert torch.equal(joined.lengths(), kjt.lengths())


def test_tables_on_the_trainers_cannot_be_served(servers, tmp_path):
    trained = Trained(servers, Bags(), placement=Placement(local={"one"}))
    with pytest.raises(ConfigError, match="all its tables on the servers"):
        trained.export(tmp_path)


def test_a_damaged_file_is_named(servers, tmp_path):
    trained = Trained(servers, Bags())
    path = trained.export(tmp_path).path
    file = Path(path) / "serving_model.pt"
    with pytest.raises(CheckpointError, match="must be a file of export_for_serving"):
        load_served(file.read_bytes()[:1000], "serving_model.pt")
    with file.open("r+b") as damaged:
        damaged.truncate(1000)
    with pytest.raises(CheckpointError, match="must be the file of its manifest"):
        load_model(path, "serving_model.pt")
