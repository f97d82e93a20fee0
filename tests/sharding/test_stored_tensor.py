"""The rows of tables on the servers in state dicts, beside those of plain TorchRec."""

import copy
import logging

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.optim.warmup import WarmupOptimizer

from persia_torchrec import (
    Adagrad,
    Adam,
    AdmitFrequency,
    DynamicDim,
    TableSettings,
    load_tables,
    remote_sharders,
)
from persia_torchrec.client import bulk
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.errors import BatchError, ConfigError
from persia_torchrec.sharding.state_dict import without_rows
from persia_torchrec.sharding.stored_tensor import StoredTensor
from tests.support.remote_job import CPU, META, ids_of, kjt_of, shard

pytestmark = pytest.mark.slow

NUM_ROWS = 20
TERM, WORD = "bags.embedding_bags.term", "words.embeddings.word"
ROWWISE = Adagrad(0.5, vectorwise_shared=True)
IDS = {"ad": [[1, 2], [19]], "query": [[2], []], "page": [[3, 3], [0]]}
REJECTED = r"'term'.*(shared_rows=3|dynamic).*save_checkpoint and load_checkpoint"
FAR = {**IDS, "ad": [[2**40], [-1, 7]]}


class Model(nn.Module):
    """Bags, sequences, and something dense."""

    def __init__(self, device=META):
        super().__init__()
        term = EmbeddingBagConfig(
            NUM_ROWS, 4, name="term", feature_names=["ad", "query"]
        )
        word = EmbeddingConfig(
            num_embeddings=NUM_ROWS,
            embedding_dim=4,
            name="word",
            feature_names=["page"],
            data_type=DataType.FP16,
        )
        self.bags = EmbeddingBagCollection(tables=[term], device=device)
        self.words = EmbeddingCollection(tables=[word], device=device)
        self.over = nn.Linear(12, 1)

    def forward(self, ids):
        words = self.words(ids)["page"].values().float().sum(0, keepdim=True)
        pooled = self.bags(ids).values()
        return self.over(torch.cat([pooled, words.expand(len(pooled), 4)], dim=1))


@pytest.fixture
def blocks(monkeypatch):
    """Let a block have three rows of four weights; count the rows that are read."""
    monkeypatch.setattr(bulk, "_BLOCK_BYTES", 3 * 4 * 4)
    read, num_rows = EmbeddingClient.read, []

    def counted(self, table, ids, **settings):
        num_rows.append(len(ids))
        return read(self, table, ids, **settings)

    monkeypatch.setattr(EmbeddingClient, "read", counted)
    return num_rows


def put_on_servers(job, optimizer=ROWWISE, **settings):
    sharders = remote_sharders(job.client, optimizer, **settings)
    return job.shard(Model(), sharders)


def train(model, ids=IDS, num_steps=3):
    for _ in range(num_steps):
        model(kjt_of(ids)).square().sum().backward()


def rows_of(job, table="term"):
    return torch.from_numpy(job.read(table, range(NUM_ROWS)).copy())


def plain():
    torch.manual_seed(1)
    return Model(CPU)


def copied(state):
    return {key: torch.empty_like(value).copy_(value) for key, value in state.items()}


def assert_same(state, expected):
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(state[key], value), key


class TestStateDict:
    def test_a_table_is_a_tensor_of_num_embeddings(self, job):
        model = put_on_servers(job)
        train(model)
        state, expected = model.state_dict(), plain().state_dict()
        assert state.keys() == expected.keys()
        for key, value in expected.items():
            assert state[key].shape == value.shape
            assert state[key].dtype == value.dtype
        rows = state[f"{TERM}.weight"]
        trained = rows_of(job)[:, :4]
        assert torch.equal(rows[[1, 2, 19]], trained[[1, 2, 19]])
        # An id without a row has what its row would begin with.
        bound = NUM_ROWS**-0.5
        assert 0 < rows[4:19].abs().max() <= bound
        assert job.client.count_ids("term")[0] == 3
        train(model, {**IDS, "ad": [[4], [5]]}, 1)
        assert torch.equal(rows[0:1], model.state_dict()[f"{TERM}.weight"][0:1])

    def test_it_loads_into_a_plain_model_and_back(self, job):
        model = put_on_servers(job)
        train(model)
        state, other = copied(model.state_dict()), plain()
        other.load_state_dict(model.state_dict())
        assert_same(other.state_dict(), state)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(2)
        result = model.load_state_dict(dict(other.state_dict()))
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        assert_same(model.state_dict(), other.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(model(kjt_of(IDS)), other(kjt_of(IDS)))

    def test_it_loads_from_and_into_a_sharded_plain_model(self, job):
        model = put_on_servers(job)
        fused = ParameterConstraints(
            sharding_types=["table_wise"], compute_kernels=["fused"]
        )
        other = shard(
            nn.ModuleDict({"bags": plain().bags}),
            EmbeddingBagCollectionSharder(),
            constraints={"term": fused},
        )
        key = f"{TERM}.weight"
        (piece,) = other.state_dict()[key].local_shards()
        piece.tensor.copy_(torch.arange(80.0).reshape(20, 4))
        model.load_state_dict(other.state_dict(), strict=False)
        assert torch.equal(rows_of(job)[:, :4], piece.tensor)
        expected = piece.tensor.clone()
        piece.tensor.zero_()
        other.load_state_dict({key: model.state_dict()[key]}, strict=False)
        assert torch.equal(other.state_dict()[key].local_shards()[0].tensor, expected)

    def test_assigned_rows_are_on_the_servers(self, job):
        rows = put_on_servers(job).state_dict()[f"{TERM}.weight"]
        rows.zero_()
        rows[5:7] = 1.0
        rows[3].fill_(2.0)
        rows[[8, 9], 1] = torch.tensor([3.0, 4.0])
        rows[10:12, 1:3] += 5.0
        for row in rows[12:14].unbind():
            row.view(2, 2).T[0].copy_(torch.tensor([6.0, 7.0]))
        expected = torch.zeros(NUM_ROWS, 4)
        expected[5:7], expected[3], expected[10:12, 1:3] = 1.0, 2.0, 5.0
        expected[8, 1], expected[9, 1] = 3.0, 4.0
        expected[12:14] = torch.tensor([6.0, 0.0, 7.0, 0.0])
        torch.testing.assert_close(rows_of(job)[:, :4], expected)
        assert np.array_equal(rows.numpy(), expected.numpy())
        assert rows.tolist() == expected.tolist()
        assert rows.cpu().sum() == expected.sum()
        assert "20, 4" in repr(rows)

    def test_transfer_learning_writes_its_shards(self, job):
        # As examples/transfer_learning of TorchRec does.
        model, weights = put_on_servers(job), torch.rand(NUM_ROWS, 4)
        for name, tensor in model.state_dict().items():
            if not name.startswith(TERM):
                continue
            for piece in tensor.local_shards():
                row, column = piece.metadata.shard_offsets
                num_rows, dim = piece.metadata.shard_sizes
                part = weights[row : row + num_rows, column : column + dim]
                piece.tensor.data.copy_(part)
        assert torch.equal(rows_of(job)[:, :4], weights)

    def test_torch_save_takes_the_rows_and_warns_with_their_size(
        self, job, tmp_path, caplog
    ):
        model = put_on_servers(job)
        train(model)
        with caplog.at_level(logging.WARNING):
            torch.save(model.state_dict(), tmp_path / "model.pt")
        assert "0.0 MB of table 'term'" in caplog.text
        loaded = torch.load(tmp_path / "model.pt", weights_only=True)
        assert {type(value) for value in loaded.values()} == {torch.Tensor}
        assert_same(loaded, copied(model.state_dict()))
        kept = copy.deepcopy(model.state_dict())
        train(model)
        assert_same(kept, loaded)

    def test_rows_of_another_shape_are_rejected_with_the_call_that_takes_them(
        self, job
    ):
        model = put_on_servers(job)
        state = {f"{TERM}.weight": torch.zeros(3, 4)}
        with pytest.raises(BatchError, match=r"\(20, 4\).*\(3, 4\).*load_weights"):
            model.load_state_dict(state, strict=False)


class TestIds:
    """Tables with ids that are not below num_embeddings."""

    def test_rows_come_with_their_ids(self, job):
        model = put_on_servers(job)
        train(model, FAR)
        state = model.state_dict()
        ids = state[f"{TERM}.ids"]
        assert ids.tolist() == [2, 7, 2**40, -1]
        assert state[f"{TERM}.weight"].shape == (4, 4)
        expected = job.read("term", [2, 7, 2**40, -1])[:, :4]
        assert np.array_equal(state[f"{TERM}.weight"].numpy(), expected)
        assert state[f"{WORD}.weight"].shape == (NUM_ROWS, 4)
        assert f"{WORD}.ids" not in state

    def test_they_are_loaded_into_other_servers(self, job):
        model = put_on_servers(job)
        train(model, FAR)
        state = copied(model.state_dict())
        job.client.clear()
        result = model.load_state_dict(dict(state))
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        assert_same(model.state_dict(), state)

    @pytest.mark.parametrize("is_fresh", [False, True])
    def test_distributed_checkpoints_save_and_load_them(
        self, job, tmp_path, blocks, is_fresh
    ):
        model = put_on_servers(job, state_dict_rows="ids" if is_fresh else "auto")
        for first in range(0, 10, 2):
            train(model, {**IDS, "ad": [[-1 - first], [100 + first]]}, 1)
        dcp.save({"model": model}, checkpoint_id=tmp_path)
        assert max(blocks) <= 3
        expected = copied(model.state_dict())
        assert expected[f"{TERM}.weight"].shape == (11, 4)
        if is_fresh:
            job.client.clear()
        else:
            train(model, FAR)  # more rows than the checkpoint has
        dcp.load({"model": model}, checkpoint_id=tmp_path)
        ids = expected[f"{TERM}.ids"].numpy().view(np.uint64)
        rows = job.client.read("term", ids)[:, :4]
        assert np.array_equal(rows, expected[f"{TERM}.weight"].numpy())
        if is_fresh:
            assert_same(model.state_dict(), expected)

    @pytest.mark.parametrize("num_rows", [4, NUM_ROWS])
    def test_a_checkpoint_of_ids_needs_a_model_that_has_some(
        self, job, tmp_path, num_rows
    ):
        # Without ids it would be rows 0, 1, ... if there are num_embeddings of them.
        model = put_on_servers(job)
        train(model, {**IDS, "query": [[], []], "ad": [range(100, 100 + num_rows), []]})
        state = {"model": model, "optimizer": model.fused_optimizer}
        dcp.save(state, checkpoint_id=tmp_path)
        expected = copied(model.state_dict())
        assert expected[f"{TERM}.weight"].shape == (num_rows, 4)
        job.client.clear()
        for part in state:
            with pytest.raises(CheckpointException, match=r"Size mismatch.*term\."):
                dcp.load({part: state[part]}, checkpoint_id=tmp_path)
        with pytest.raises(CheckpointException, match=r"Size mismatch.*term\.weight"):
            dcp.load({"model": plain()}, checkpoint_id=tmp_path)
        assert job.client.count_ids("term")[0] == 0
        dcp_to_torch_save(tmp_path, tmp_path / "model.pt")
        model.load_state_dict(torch.load(tmp_path / "model.pt")["model"])
        assert_same(model.state_dict(), expected)

    def test_a_model_that_asks_for_ids_takes_plain_rows_too(self, job):
        model = put_on_servers(job, state_dict_rows="ids")
        assert model.state_dict()[f"{TERM}.weight"].shape == (0, 4)
        state = plain().state_dict()
        model.load_state_dict(dict(state))
        assert torch.equal(rows_of(job)[:, :4], state[f"{TERM}.weight"])
        assert model.state_dict()[f"{TERM}.ids"].tolist() == list(range(NUM_ROWS))


class TestDistributedCheckpoint:
    def test_it_goes_block_by_block(self, job, tmp_path, blocks):
        model = put_on_servers(job)
        train(model)
        blocks.clear()
        dcp.save({"model": model}, checkpoint_id=tmp_path)
        assert max(blocks) == 2  # of D + 1 floats
        assert sum(blocks) == 2 * NUM_ROWS
        expected = copied(model.state_dict())
        train(model)
        job.client.clear()
        dcp.load({"model": model}, checkpoint_id=tmp_path)
        assert_same(model.state_dict(), expected)

    def test_plain_checkpoints_are_loaded_and_ours_by_plain_models(self, job, tmp_path):
        model, other = put_on_servers(job), plain()
        dcp.save({"model": other}, checkpoint_id=tmp_path / "plain")
        dcp.load({"model": model}, checkpoint_id=tmp_path / "plain")
        assert_same(model.state_dict(), other.state_dict())
        train(model)
        dcp.save(model.state_dict(), checkpoint_id=tmp_path / "ours")
        state = other.state_dict()
        dcp.load(state, checkpoint_id=tmp_path / "ours")
        assert_same(state, copied(model.state_dict()))


class TestMoreThanRows:
    """Tables with rows that tensors cannot hold."""

    @pytest.mark.parametrize(
        "settings",
        [
            TableSettings(shared_rows=3, admission=AdmitFrequency(2)),
            TableSettings(dynamic=DynamicDim(blocks=2)),
        ],
        ids=["shared rows", "dynamic"],
    )
    def test_their_state_is_rejected_with_the_call_that_saves_it(self, job, settings):
        model = put_on_servers(job, tables={"term": settings})
        # A schedule does not look at the state.
        optimizer = WarmupOptimizer(CombinedOptimizer([model.fused_optimizer]), [])
        train(model)
        for state in (model.state_dict, optimizer.state_dict):
            with pytest.raises(ConfigError, match=REJECTED):
                state()
        with pytest.raises(ConfigError, match=REJECTED):
            dcp.save({"model": model}, checkpoint_id="unused")
        with without_rows():
            assert isinstance(model.state_dict()[f"{TERM}.weight"], str)

    def test_weights_beyond_the_first_block_are_not_dropped(self, job):
        settings = TableSettings(dynamic=DynamicDim(blocks=2))
        model = put_on_servers(job, tables={"term": settings})
        with pytest.raises(ConfigError, match=REJECTED):
            model.load_state_dict(plain().state_dict())
        with pytest.raises(ConfigError, match=REJECTED):
            load_tables(job.client, plain().state_dict(), ["term"])


class TestOptimizer:
    """Its state, in the shapes and with the names of TorchRec's fused optimizers."""

    @pytest.mark.parametrize(
        ("optimizer", "shapes"),
        [
            (ROWWISE, {"momentum1": (20,)}),
            (Adagrad(0.5), {"momentum1": (20, 4)}),
            (Adam(0.5), {"momentum1": (20, 4), "exp_avg_sq": (20, 4)}),
        ],
    )
    def test_its_state_is_saved_and_loaded(self, job, tmp_path, optimizer, shapes):
        model = put_on_servers(job, optimizer)
        train(model)
        state = model.fused_optimizer.state_dict()["state"]
        found = {name: tuple(t.shape) for name, t in state[f"{TERM}.weight"].items()}
        assert found == {f"term.{name}": shape for name, shape in shapes.items()}
        dcp.save({"optimizer": model.fused_optimizer}, checkpoint_id=tmp_path)
        expected = rows_of(job)
        assert expected[1, 4:].abs().sum() > 0
        train(model)
        model.fused_optimizer.load_state_dict({"state": copied_states(state)})
        dcp.load({"optimizer": model.fused_optimizer}, checkpoint_id=tmp_path)
        seen = [1, 2, 19]
        assert torch.equal(rows_of(job)[seen, 4:], expected[seen, 4:])

    def test_a_table_whose_rows_have_ids_has_them_in_the_state_too(self, job):
        model = put_on_servers(job)
        train(model, FAR)
        optimizer = model.fused_optimizer
        state = copied_states(optimizer.state_dict()["state"])
        assert state[f"{TERM}.weight"]["term.ids"].tolist() == [2, 7, 2**40, -1]
        expected = job.read("term", [2, 7, 2**40, -1])[:, 4:]
        train(model, FAR)
        optimizer.load_state_dict({"state": state})
        rows = job.client.read("term", ids_of([2, 7, 2**40, -1]))[:, 4:]
        assert np.array_equal(rows, expected)

    def test_the_step_of_adam_can_be_set(self, job):
        model = put_on_servers(job, Adam(0.1))
        model.fused_optimizer.set_optimizer_step(41)
        train(model, num_steps=1)
        assert job.client.step("term") == 42


def copied_states(states):
    return {key: copied(state) for key, state in states.items()}


def test_rows_are_left_out_where_a_flag_reports_it(job):
    model = put_on_servers(job, state_dict_rows="none")
    train(model)
    state = model.state_dict()
    assert isinstance(state[f"{TERM}.weight"], str)
    assert model.fused_optimizer.state_dict() == {"state": {}}
    model.load_state_dict(dict(state))


def test_a_reset_gives_rows_their_initial_weights(job):
    model = put_on_servers(job)
    start = copied(model.state_dict())
    train(model)
    assert not torch.equal(
        model.state_dict()[f"{TERM}.weight"], start[f"{TERM}.weight"]
    )
    for module in (model.module.bags, model.module.words):
        module.reset_parameters()
    for key in (f"{TERM}.weight", f"{WORD}.weight"):
        assert isinstance(model.state_dict()[key], StoredTensor)
        assert torch.equal(model.state_dict()[key], start[key])


@pytest.mark.parametrize(
    "settings",
    [
        TableSettings(admission=AdmitFrequency(2), shared_rows=3),
        TableSettings(dynamic=DynamicDim(2, period=2)),
    ],
    ids=["shared rows", "blocks"],
)
def test_a_reset_gives_rows_what_they_began_with(job, settings):
    model = put_on_servers(job, Adam(0.1), tables={"term": settings})
    ids = ids_of(range(NUM_ROWS))
    start = torch.tensor(job.client.read("term", ids, initial=True))
    train(model)
    before = rows_of(job)
    has_row = before.any(dim=1)
    assert has_row[IDS["ad"][0]].all()
    model.module.bags.reset_parameters()
    after, first = rows_of(job), settings.dynamic is None
    width = 4 if first else 2
    assert torch.equal(after[has_row, :width], start[has_row, :width])
    assert not after[~has_row].any()
    assert not after[:, 4:].any()  # the state
    has_second = before[:, width:4].any(dim=1)
    assert has_second.any() != first
    assert after[has_second, width:4].all()
    assert not torch.equal(after[:, width:4], before[:, width:4]) or first
    if settings.shared_rows:  # others would begin as the shared row has become
        rows = torch.tensor(job.client.read("term", ids, initial=True)[:, :4])
        split = job.client.split(ids, "term")
        [read] = job.client.pull([("term", split)])
        assert torch.equal(rows, torch.tensor(read[split.inverse]))
        assert not torch.equal(rows[4], start[4, :4])
