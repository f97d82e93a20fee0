"""Ordinary tensors become tables on the servers, and tables become tensors again."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards
from torchrec import EmbeddingBagCollection

from persia_torchrec import SGD, Adagrad
from persia_torchrec.client import bulk
from persia_torchrec.client.client import BatchNumber
from persia_torchrec.embedding.optim import Adam
from persia_torchrec.errors import BatchError, ConfigError
from persia_torchrec.routing.route import farmhash64
from persia_torchrec.sharding.state_dict import (
    load_tables,
    plain_state_dict,
    read_table,
)
from persia_torchrec.table import TableSpec
from tests.support.models import sequences_of, tables_of
from tests.support.servers import ids_of

pytestmark = pytest.mark.slow

ROWWISE = Adagrad(0.1, vectorwise_shared=True)
SPECS = [
    TableSpec(name="user", dim=4, optimizer=ROWWISE),
    TableSpec(name="item", dim=2, optimizer=Adam(0.1)),
    TableSpec(name="plain", dim=3, optimizer=SGD(0.1)),
    TableSpec(name="halves", dim=3, optimizer=SGD(0.1), weight_dtype="bf16"),
]


def sharded(whole, *offsets):
    """Return a tensor of two equal shards, which begin at the offsets."""
    size = [whole.shape[0] - offsets[1][0], whole.shape[1] - offsets[1][1]]
    shards = [
        Shard.from_tensor_and_offsets(
            whole[row : row + size[0], column : column + size[1]].clone(),
            [row, column],
            rank=0,
        )
        for row, column in offsets
    ]
    return init_from_local_shards(shards, *whole.shape)


@pytest.fixture
def client(servers):
    client = servers.client(servers.start(2))
    client.add_tables(SPECS)
    return client


def matrix(num, dim, sign=1.0):
    """Return a tensor whose numbers tell row and column."""
    return sign * (torch.arange(num)[:, None] + torch.arange(dim) / 8)


def numbers(num):
    return np.arange(num, dtype=np.uint64)


class TestLoad:
    @pytest.mark.parametrize(
        "key",
        [
            "plain",
            "plain.weight",
            "embedding_bags.plain.weight",
            "sparse.ebc.embedding_bags.plain.weight",
            "embeddings.plain.weight",
        ],
    )
    def test_a_weight_is_found_behind_any_path(self, client, key):
        state_dict = {
            key: matrix(9, 3),
            "over.weight": matrix(9, 3),
            "embedding_bags.explain.weight": matrix(9, 3),
            "project.plain.weight": matrix(8, 8),
        }
        assert load_tables(client, state_dict, ["plain"]) == {"plain": 9}
        assert np.array_equal(client.read("plain", numbers(9)), matrix(9, 3).numpy())

    @pytest.mark.parametrize(
        "module", [nn.EmbeddingBag(7, 3), nn.Embedding(7, 3), nn.Embedding(7, 3).half()]
    )
    def test_the_weight_of_a_module_of_torch_is_a_table(self, client, module):
        load_tables(client, {"plain": module.weight}, ["plain"])
        expected = module.weight.detach().float().numpy()
        assert np.array_equal(client.read("plain", numbers(7)), expected)

    def test_state_and_step_come_along(self, client):
        state_dict = {
            "embedding_bags.user.weight": matrix(5, 4),
            "embeddings.item.weight": matrix(6, 2),
        }
        sums = torch.arange(5.0)
        means, squares = matrix(6, 2, 0.5), matrix(6, 2, 0.25)
        states = {
            "embedding_bags.user.weight": {"user.momentum1": sums},
            "embeddings.item.weight": {
                "step": torch.tensor(50.0),
                "exp_avg": means,
                "exp_avg_sq": squares,
            },
        }
        load_tables(
            client, state_dict, ["user", "item"], optimizer_state={"state": states}
        )
        user = torch.from_numpy(client.read("user", numbers(5)))
        assert torch.equal(user, torch.cat([matrix(5, 4), sums[:, None]], dim=1))
        item = torch.from_numpy(client.read("item", numbers(6)))
        assert torch.equal(item, torch.cat([matrix(6, 2), means, squares], dim=1))
        assert (client.step("user"), client.step("item")) == (0, 50)

    @pytest.mark.usefixtures("group")
    def test_all_shards_by_rows_are_loaded(self, client):
        weight = sharded(matrix(6, 3), (0, 0), (3, 0))
        assert load_tables(client, {"plain": weight}, ["plain"]) == {"plain": 6}
        assert np.array_equal(client.read("plain", numbers(6)), matrix(6, 3).numpy())

    @pytest.mark.usefixtures("group")
    def test_shards_by_columns_are_rejected(self, client):
        weight = sharded(matrix(6, 4), (0, 0), (0, 2))
        message = (
            r"sharded by rows\. Received: a shard of \(6, 2\) of \(6, 4\)\. Gather"
        )
        with pytest.raises(BatchError, match=message):
            load_tables(client, {"user": weight}, ["user"])

    @pytest.mark.usefixtures("group")
    def test_state_that_is_sharded_otherwise_than_the_weights_is_rejected(self, client):
        weight = sharded(matrix(6, 4), (0, 0), (3, 0))
        state = {"state": {"user": {"sum": torch.zeros(6)}}}
        with pytest.raises(BatchError, match=r"alike\. Received: \[2, 1\] shards here"):
            load_tables(client, {"user": weight}, ["user"], optimizer_state=state)

    def test_the_step_may_be_given(self, client):
        load_tables(client, {"item": matrix(2, 2)}, ["item"], step=7)
        assert client.step("item") == 7

    def test_ids_may_be_given_for_a_table(self, client):
        tensors = {"plain": matrix(9, 3), "halves": matrix(9, 3)}
        load_tables(client, tensors, ["plain", "halves"], ids={"plain": farmhash64})
        hashed = farmhash64(numbers(9))
        assert np.array_equal(client.read("plain", hashed), matrix(9, 3).numpy())
        assert np.array_equal(client.read("halves", numbers(9)), matrix(9, 3).numpy())

    def test_a_file_that_is_mapped_is_read_block_by_block(
        self, client, tmp_path, monkeypatch
    ):
        torch.save({"plain": matrix(50, 3)}, tmp_path / "model.pt")
        mapped = torch.load(tmp_path / "model.pt", mmap=True)
        monkeypatch.setattr(bulk, "_BLOCK_BYTES", 7 * 3 * 4)
        load_tables(client, mapped, ["plain"])
        assert np.array_equal(client.read("plain", numbers(50)), matrix(50, 3).numpy())
        assert client.counters()[0]["requests_write"] == 8  # of seven rows each

    @pytest.mark.parametrize(
        ("state_dict", "message"),
        [
            ({}, r"table 'plain' once.*Received: \[\]"),
            ({"project.plain.weight": 1}, r"Received: \['project\.plain\.weight'\]"),
            (
                {"plain": 1, "a.embeddings.plain.weight": 2},
                r"Received: \['a\.embeddings\.plain\.weight', 'plain'\]",
            ),
            ({"plain": 1}, r"must hold a tensor\. Received: <class 'int'>"),
        ],
    )
    def test_a_table_that_is_not_there_once_is_rejected(
        self, client, state_dict, message
    ):
        with pytest.raises(ConfigError, match=message):
            load_tables(client, state_dict, ["plain"])

    @pytest.mark.parametrize(
        ("state", "error", "message"),
        [
            ({"state": {"user": {}}}, ConfigError, r"'user'\. Received: none"),
            ({"state": {"item": {}}}, ConfigError, r"_state must hold table 'user'"),
            (
                {"state": {"user": {"sum": matrix(3, 4)}}},
                *(BatchError, r"state of Adagrad.*\(3, 1\).*Received: \(3, 4\)"),
            ),
            (
                {"state": {"user": {"sum": torch.zeros(2)}}},
                *(BatchError, "same number of rows.*'state': 2"),
            ),
            (
                {"user": {"sum": torch.zeros(3)}},
                *(ConfigError, r"with 'state'\. Received: \['user'\]"),
            ),
        ],
    )
    def test_other_state_than_the_optimizer_keeps_is_rejected(
        self, client, state, error, message
    ):
        given = {"user": matrix(3, 4)}, ["user"]
        with pytest.raises(error, match=message):
            load_tables(client, *given, optimizer_state=state)


class TestRead:
    def test_tensors_come_back_as_they_were_loaded(self, client):
        means, squares = matrix(6, 2, 0.5), matrix(6, 2, 0.25)
        state = {"state": {"item": {"step": 9, "m": means, "v": squares}}}
        load_tables(client, {"item": matrix(6, 2)}, ["item"], optimizer_state=state)
        read = read_table(client, "item", 6)
        assert torch.equal(read.weights, matrix(6, 2))
        assert torch.equal(read.state, torch.cat([means, squares], dim=1))
        assert read.is_present.all()
        assert read.step == 9

    @pytest.mark.parametrize("table", [spec.name for spec in SPECS])
    def test_missing_rows_are_what_they_would_start_with(self, client, table):
        dim = client.table(table).dim
        written = np.ones((2, dim), dtype=np.float32)
        client.write(table, ids_of(1, 4), written)
        read = read_table(client, table, 6, missing="initial")
        assert read.is_present.tolist() == [False, True, False, False, True, False]
        assert (read.weights[[1, 4]] == 1).all()
        # What a training lookup makes of them.
        split = client.split(numbers(6))
        (rows,) = client.pull([(table, split)], batch=BatchNumber(1, 1))
        assert np.array_equal(read.weights.numpy(), rows[split.inverse])
        full = client.read(table, numbers(6))
        assert np.array_equal(read.state.numpy(), full[:, dim:])

    def test_missing_rows_may_be_zeros(self, client):
        client.write("user", ids_of(1), np.ones((1, 4), dtype=np.float32))
        read = read_table(client, "user", 3, missing="zeros")
        assert read.weights.tolist() == [[0] * 4, [1] * 4, [0] * 4]
        assert read.state[[0, 2]].tolist() == [[0], [0]]

    def test_ids_say_which_row_is_which(self, client):
        load_tables(
            client, {"plain": matrix(20, 3)}, ["plain"], ids={"plain": farmhash64}
        )
        read = read_table(client, "plain", 20, ids=farmhash64)
        assert torch.equal(read.weights, matrix(20, 3))
        backwards = farmhash64(numbers(20))[::-1]
        read = read_table(client, "plain", 20, ids=backwards)
        assert torch.equal(read.weights, matrix(20, 3).flip(0))

    @pytest.mark.parametrize("ids", [None, farmhash64, ids_of(7, 5, 6)])
    def test_an_id_that_belongs_to_no_row_is_rejected(self, client, ids):
        client.write("plain", ids_of(3), np.ones((1, 3), dtype=np.float32))
        with pytest.raises(BatchError, match=r"'plain'.*3 rows\. Received: id 3\."):
            read_table(client, "plain", 3, ids=ids)

    def test_ids_that_repeat_are_rejected(self, client):
        with pytest.raises(BatchError, match=r"distinct id\. Received: 5 for"):
            read_table(client, "plain", 3, ids=ids_of(5, 7, 5))

    def test_a_table_of_no_rows_is_empty(self, client):
        read = read_table(client, "user", 0)
        assert (read.weights.shape, read.state.shape) == ((0, 4), (0, 1))


class Model(nn.Module):
    """Both kinds of collections, at some depth, and something dense."""

    def __init__(self, device):
        super().__init__()
        bags = tables_of(["user"], 8, 4) + tables_of(["item"], 9, 2)
        bags = EmbeddingBagCollection(tables=bags, device=device)
        rows = sequences_of(["plain"], 7, 3, device=device)
        self.sparse = nn.ModuleDict({"bags": bags, "rows": rows})
        self.over = nn.Linear(2, 1)


def test_a_models_state_goes_to_the_servers_and_comes_back(client):
    torch.manual_seed(0)
    model = Model("cpu")
    expected = {k: v.clone() for k, v in model.state_dict().items()}
    load_tables(client, model.state_dict(), ["user", "item", "plain"])
    tables = plain_state_dict(client, Model("meta"))
    assert set(tables) == set(expected) - {"over.weight", "over.bias"}
    with torch.no_grad():
        for name in tables:
            model.get_parameter(name).zero_()
    assert model.load_state_dict(tables, strict=False).unexpected_keys == []
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name])


def test_no_weight_is_read_of_a_model_without_collections(client):
    assert plain_state_dict(client, nn.Linear(2, 1)) == {}
