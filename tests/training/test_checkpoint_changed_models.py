"""A checkpoint of a model that has changed since: what is loaded, and what is said."""

import numpy as np
import pytest
import torch
from torch import nn

from persia_torchrec import RemoteEmbeddingBagCollectionSharder
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.embedding.optim import Adagrad, Adam
from persia_torchrec.errors import CheckpointError, ConfigError, PersiaError
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.table import TableSettings
from persia_torchrec.training.checkpoint import load_checkpoint, save_checkpoint
from persia_torchrec.training.data_state import Buffers
from persia_torchrec.training.recoverable import recoverable
from tests.support.models import tables_of
from tests.support.remote_job import Bags, kjt_of, shard
from tests.support.servers import RunningServer

pytestmark = pytest.mark.slow

IDS = np.arange(20, dtype=np.uint64)


class Model(nn.Module):
    def __init__(self, tables, num_top):
        super().__init__()
        self.bags = Bags(tables)
        self.top = nn.Linear(num_top, 1)

    def forward(self, ids):
        return self.bags(ids).values()


class Run:
    """A model of some tables on servers of its own."""

    def __init__(self, servers, names, dim=4, optimizer=None, num_top=8, dtype="fp32"):
        running = servers if isinstance(servers, list) else [*servers.start(1)]
        self.client = EmbeddingClient.connect([running[0].address])
        self.names = names
        self.sharder = RemoteEmbeddingBagCollectionSharder(
            self.client,
            optimizer or Adagrad(0.1),
            tables=dict.fromkeys(names, TableSettings(weight_dtype=dtype)),
        )
        self.model = shard(Model(tables_of(names, 50, dim), num_top), self.sharder)
        top = self.model.module.top
        self.optimizer = torch.optim.Adam(top.parameters(), lr=0.1)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def train(self):
        bags = [[id_] for id_ in IDS.tolist()]
        out = self.model(kjt_of(dict.fromkeys(self.names, bags)))
        out.square().sum().backward()
        self.sharder.flush()

    def load(self, path, **rules):
        return load_checkpoint(path, self.state, self.client, **rules)

    def rows(self, name):
        return self.client.read(name, IDS, initial=False)

    def weights(self, name):
        return self.rows(name)[:, : self.client.table(name).dim]


@pytest.fixture
def start(servers, caplog, group):
    caplog.set_level("INFO")
    runs = []

    def start(*args, **settings):
        runs.append(Run(servers, *args, **settings))
        return runs[-1]

    yield start
    for run in runs:
        run.sharder.close()
        run.client.close()


@pytest.fixture
def saved(start, tmp_path):
    """A checkpoint of tables a and b, and its run."""
    run = start("ab")
    for parameter in run.model.module.top.parameters():
        parameter.grad = torch.ones_like(parameter)
    run.optimizer.step()
    run.train()
    save_checkpoint(tmp_path, run.state, run.client, [run.sharder])
    return run


def test_a_model_with_a_table_more_begins_that_again(saved, start, tmp_path, caplog):
    run = start("abc")
    run.train()
    run.load(tmp_path)
    for name in "ab":
        assert np.array_equal(run.rows(name), saved.rows(name))
    assert not run.rows("c").any()
    assert "table 'c' begins again: it is in no file" in caplog.text
    run.train()
    assert run.rows("c").any()


@pytest.mark.slow
def test_a_training_with_a_table_more_resumes(saved, start, tmp_path, caplog):
    first = start("ab")
    with recoverable(tmp_path / "run", first.state, first.client, first.sharder) as one:
        for _ in one.skip(range(2)):
            first.train()
            one.step()
        one.save()
    run = start("abc")
    args = tmp_path / "run", run.state, run.client, run.sharder
    with recoverable(*args) as again:
        assert list(again.skip(range(3))) == [2]
        assert np.array_equal(run.rows("a"), first.rows("a"))
    assert "table 'c' begins again" in caplog.text


def test_a_model_with_a_table_less_reports_it(saved, start, tmp_path, caplog):
    run = start("a")
    run.train()
    before = run.rows("a")
    with pytest.raises(CheckpointError, match=r"\['b'\] besides.*missing=\"skip\""):
        run.load(tmp_path)
    assert np.array_equal(run.rows("a"), before)
    run.load(tmp_path, missing="skip")
    assert np.array_equal(run.rows("a"), saved.rows("a"))
    assert "table 'b' is left out: the model does not have it" in caplog.text
    assert run.client.num_rows() == [len(IDS)]


def test_a_table_that_was_renamed_keeps_its_rows(saved, start, tmp_path):
    run = start(["a", "new"])
    with pytest.raises(CheckpointError, match=r"rename=\{'b': 'new'\}.*missing=\"skip"):
        run.load(tmp_path)
    run.load(tmp_path, rename={"b": "new"})
    assert np.array_equal(run.rows("a"), saved.rows("a"))
    assert np.array_equal(run.rows("new"), saved.rows("b"))
    run.load(tmp_path, missing="skip")
    assert not run.rows("new").any()


@pytest.mark.parametrize("rule", ["reset state", "reset table"])
def test_a_table_with_another_optimizer(saved, start, tmp_path, caplog, rule):
    run = start("ab", optimizer=Adam(0.1))
    with pytest.raises(CheckpointError, match=r"reset state\" keeps.*\"reset table\""):
        run.load(tmp_path)
    run.load(tmp_path, on_change=rule)
    if rule == "reset state":
        assert np.array_equal(run.weights("a"), saved.weights("a"))
        assert not run.rows("a")[:, 4:].any()
        assert "the optimizer state of table 'a' begins again" in caplog.text
    else:
        assert not run.rows("a").any()
    assert run.client.step("a") == 0
    run.train()


def test_a_table_with_another_dim(saved, start, tmp_path, caplog):
    run = start("ab", dim=6)
    for rules in ({}, {"on_change": "reset state"}):
        with pytest.raises(CheckpointError, match=r"\"reset table\" begins it again"):
            run.load(tmp_path, **rules)
    run.load(tmp_path, on_change="reset table")
    assert run.client.num_rows() == [0]
    assert "table 'a' begins again: it has dim 6" in caplog.text


@pytest.mark.parametrize(("dtype", "rtol"), [("fp16", 2.0**-11), ("bf16", 2.0**-8)])
def test_weights_are_converted_both_ways(saved, start, tmp_path, caplog, dtype, rtol):
    run = start("ab", dtype=dtype)
    run.load(tmp_path)
    np.testing.assert_allclose(run.weights("a"), saved.weights("a"), rtol=rtol)
    assert np.array_equal(run.rows("a")[:, 4:], saved.rows("a")[:, 4:])
    assert f"weights are converted from fp32 to {dtype}" in caplog.text
    save_checkpoint(tmp_path, run.state, run.client, [run.sharder])
    back = start("ab")
    back.load(tmp_path)
    assert np.array_equal(back.rows("a"), run.rows("a"))


def test_changed_parameters_of_the_dense_half(saved, start, tmp_path, caplog):
    run = start("ab", num_top=12)
    before = run.model.module.top.weight.detach().clone()
    message = r"top\.weight has shape \[1, 12\], and had \[1, 8\].*on_change"
    with pytest.raises(CheckpointError, match=message):
        run.load(tmp_path)
    run.load(tmp_path, on_change="reset state")
    top = run.model.module.top
    assert torch.equal(top.weight, before)
    assert torch.equal(top.bias, saved.model.module.top.bias)
    assert "these begin again" in caplog.text
    top(torch.ones(12)).sum().backward()
    run.optimizer.step()


def test_a_checkpoint_is_evaluated_without_naming_its_optimizer(
    start, servers, tmp_path, caplog
):
    trained = start("ab", optimizer=Adam(0.1))
    trained.train()
    save_checkpoint(tmp_path, trained.state, trained.client, [trained.sharder])
    client = servers.client(servers.start(1))
    client.checkpoints.load(tmp_path)
    sharder = RemoteEmbeddingBagCollectionSharder(client)
    tables = tables_of("ab", 50)
    model = shard(Model(tables, 8), sharder)
    assert "table 'a' keeps the servers' optimizer, Adam" in caplog.text
    load_checkpoint(tmp_path, {"model": model}, client)
    assert np.array_equal(client.read("a", IDS), trained.rows("a"))
    other = RemoteEmbeddingBagCollectionSharder(client, Adagrad(0.1))
    with pytest.raises(PersiaError, match="Give it the optimizer and the types"):
        shard(Model(tables, 8), other)
    sharder.close()


def test_a_checkpoint_of_another_optimizer_names_what_continues_it(
    start, servers, tmp_path
):
    trained = start("ab", optimizer=Adagrad())  # what was the default once
    trained.train()
    save_checkpoint(tmp_path, trained.state, trained.client, [trained.sharder])
    client = servers.client(servers.start(1))
    sharder = RemoteEmbeddingBagCollectionSharder(client)
    model = shard(Model(tables_of("ab", 50), 8), sharder)
    with pytest.raises(CheckpointError, match=r"optimizer Adagrad\(\) of the sharders"):
        load_checkpoint(tmp_path, {"model": model}, client)
    sharder.close()


@pytest.fixture
def restored(saved, start, tmp_path):
    """Return a function that starts a model on a server that restored its tables."""
    resumable = tmp_path / "run"
    with recoverable(resumable, saved.state, saved.client, saved.sharder) as one:
        for _ in one.skip(range(2)):
            saved.train()
            one.step()
    running = []

    def start_restored(**settings):
        config = ServerConfig(capacity_rows=1000)
        restores = {"before": lambda server: server.restore(str(resumable))}
        running.append(RunningServer(config, **restores))
        run = Run(running[-1:], "ab", **settings)
        started.append(run)
        return run

    started = []
    yield start_restored
    for run in started:
        run.sharder.close()
        run.client.close()
    for server in running:
        server.stop()


@pytest.mark.parametrize(
    ("settings", "on_change"),
    [({"optimizer": Adam(0.1)}, "reset state"), ({"dim": 6}, "reset table")],
)
def test_a_job_that_continues_takes_a_model_that_has_changed(
    saved, restored, tmp_path, caplog, settings, on_change
):
    run = restored(num_top=2 * settings.get("dim", 4), **settings)
    assert "its restored rows are dropped" in caplog.text
    args = tmp_path / "run", run.state, run.client, run.sharder
    with pytest.raises(CheckpointError, match='on_change="reset table" begins it'):
        recoverable(*args).__enter__()
    with recoverable(*args, on_change=on_change) as again:
        assert list(again.skip(range(3))) == [2]
        if on_change == "reset state":
            assert np.array_equal(run.weights("a"), saved.weights("a"))
        else:
            assert not run.weights("a").any()
    assert run.client.tables["a"].spec.dim == settings.get("dim", 4)


def test_rows_ahead_of_a_table_that_has_changed_begin_again_only_if_told(
    restored, tmp_path, caplog
):
    run = restored(optimizer=Adam(0.1))
    args = tmp_path / "run", run.state, run.client, run.sharder
    for on_change in ("error", "reset state"):
        rules = {"resume": "rows_ahead", "on_change": on_change}
        with pytest.raises(CheckpointError, match="begins"):
            recoverable(*args, **rules).__enter__()
    rules = {"resume": "rows_ahead", "on_change": "reset table"}
    with recoverable(*args, **rules):
        assert not run.weights("a").any()
    assert "table 'a' begins again" in caplog.text


def test_a_table_that_a_model_trains_is_not_dropped(start):
    run = start("ab")
    run.train()
    with pytest.raises(ConfigError, match=r"'a'.* a model of this process.*close\(\)"):
        run.client.drop_table("a")
    run.train()
    run.sharder.close()
    run.client.drop_table("a")
    assert run.client.num_rows() == [len(IDS)]


def test_buffers_of_another_shape_begin_again(caplog):
    norm = nn.BatchNorm1d(3)
    norm(torch.ones(2, 3))
    state, wider = Buffers(norm).state_dict(), nn.BatchNorm1d(4)
    message = r"running_mean has shape \[4\], and had \[3\]; .*on_change"
    with pytest.raises(CheckpointError, match=message):
        Buffers(wider).load_state_dict(state)
    Buffers(wider, resets=True).load_state_dict(state)
    assert wider.running_mean.tolist() == [0.0] * 4
    assert wider.num_batches_tracked == 1
    assert "reset to their initial values: running_mean has shape [4]" in caplog.text


def test_an_invalid_rule_is_rejected(saved, tmp_path):
    with pytest.raises(Exception, match="on_change must be one of"):
        saved.load(tmp_path, on_change="drop")
