"""What a TorchRec user can do wrong ends in an error that says so, and in no hang."""

import time

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply
from torchrec import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)

from persia_torchrec import (
    SGD,
    Adam,
    RemoteEmbeddingBagCollectionSharder,
    RemoteEmbeddingCollectionSharder,
)
from persia_torchrec.errors import (
    BatchError,
    ConfigError,
    RemoteError,
    ServerError,
)
from persia_torchrec.server.config import ServerConfig
from tests.support.ports import draw_port
from tests.support.remote_job import META, Bags, RemoteJob, kjt_of, remote_modules
from tests.support.servers import DEADLINE_S, RunningServer, once_the_port_is_free

TABLE = EmbeddingBagConfig(100, 4, name="term", feature_names=["ad", "query"])
BATCH = {"ad": [[1, 2], []], "query": [[3], [1]]}


@pytest.fixture
def model(job):
    return job.put_on_servers(Bags([TABLE]))


def table(**changes):
    settings = {"name": "term", "feature_names": ["ad"], **changes}
    return EmbeddingBagConfig(100, settings.pop("dim", 4), **settings)


def trains(model):
    """Return whether a good batch still trains."""
    (module,) = remote_modules(model)
    output = model(kjt_of(BATCH)).values()
    output.sum().backward()
    module.pipeline.flush()
    return torch.isfinite(output).all()


def jagged(ids, lengths, **more):
    return KeyedJaggedTensor(
        ["ad", "query"], ids, lengths=torch.tensor(lengths), **more
    )


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        pytest.param(
            jagged(torch.tensor([1.0, 2.0]), [1, 1]),
            r"Received: torch\.float32",
            id="float ids",
        ),
        pytest.param(
            kjt_of({"ad": [[1]], "user": [[2]]}),
            r"must have the feature 'query'\. Received: \['ad', 'user'\]",
            id="a missing feature",
        ),
        pytest.param(
            jagged(torch.arange(5), [1, 1]),
            "sum up to the number of ids, 5",
            id="lengths of other ids",
        ),
        pytest.param(
            jagged(torch.arange(2), [3, -1, 0, 0]),
            "'ad': lengths must not be negative",
            id="negative lengths",
        ),
        pytest.param(
            jagged(torch.arange(3), [1, 1, 1], stride_per_key_per_rank=[[1], [2]]),
            "must have the same number of samples",
            id="different batch sizes",
        ),
    ],
)
def test_a_rejected_batch_leaves_the_model_as_it_was(model, batch, message):
    with pytest.raises(BatchError, match=message):
        model(batch).values()
    assert trains(model)


class TestCollections:
    """What the servers cannot honour is rejected before anything is trained."""

    def test_an_optimizer_without_a_counterpart_is_rejected(self, job):
        module = Bags([table()])
        apply(torch.optim.Rprop, module.parameters(), {"lr": 0.1})
        message = r"'term': the opt.*Received: torch\..*\.Rprop\. .*torch\.optim\.SGD"
        with pytest.raises(ConfigError, match=message):
            job.put_on_servers(module)

    @pytest.mark.parametrize(
        ("changes", "optimizer", "message"),
        [
            pytest.param(
                {"data_type": DataType.BF16},
                SGD(1.0),
                r"'term' has dim 4, weights fp32 .*Received: dim 4, weights bf16",
                id="type of the weights",
            ),
            pytest.param(
                {"dim": 8},
                SGD(1.0),
                r"'term' has dim 4, weights fp32 and optimizer sgd.*Received: dim 8",
                id="dim",
            ),
            pytest.param(
                {},
                Adam(),
                r"optimizer sgd \(0 state.*Received: dim 4, .* optimizer adam \(8 ",
                id="optimizer's state",
            ),
        ],
    )
    def test_a_known_table_cannot_change(self, job, model, changes, optimizer, message):
        with pytest.raises(RemoteError, match=message) as error:
            job.put_on_servers(Bags([table(**changes)]), optimizer)
        assert error.value.kind == "ConfigError"
        assert trains(model)

    def test_the_dim_of_a_known_table_cannot_change_for_sequences(self, job, model):
        sequences = EmbeddingConfig(100, 8, name="term", feature_names=["ad"])
        module = nn.Sequential(EmbeddingCollection(tables=[sequences], device=META))
        sharder = RemoteEmbeddingCollectionSharder(job.client, SGD(1.0))
        with pytest.raises(RemoteError, match=r"'term' has dim 4.*Received: dim 8"):
            job.shard(module, [sharder])
        assert trains(model)

    def test_the_learning_rate_of_a_known_table_may_change(self, job, model):
        assert trains(model)
        before = job.read("term", [1])
        job.put_on_servers(Bags([TABLE]), SGD(0.0))
        assert trains(model)
        assert (job.read("term", [1]) == before).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"wire_dtype": dtype}, rf"wire_dtype must be one of .*Received: {dtype}")
        for dtype in (torch.float64, torch.int8)
    ]
    + [({"staleness": -1}, r"staleness must be >= 0\. Received: -1")],
)
def test_a_sharder_rejects_settings(job, settings, message):
    with pytest.raises(ConfigError, match=message):
        RemoteEmbeddingBagCollectionSharder(job.client, **settings)


def until_reached(call):
    """Call again while the connection is lost; raise any other error."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return call()
        except RemoteError:
            raise
        except ServerError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def push(module, loss, staleness):
    loss.backward()
    assert staleness > 0  # else the backward pass has raised
    module.pipeline.flush()


class TestServers:
    """Servers that are gone, or were."""

    def test_a_restarted_server_rejects_clients_of_the_previous_one(self):
        port = draw_port()
        with RemoteJob(num_servers=1, first_port=port) as job:
            model = job.put_on_servers(Bags([TABLE]))
            job.servers.stop()
            config = ServerConfig(shard=0, num_shards=1, capacity_rows=9, port=port)
            second = once_the_port_is_free(lambda: RunningServer(config))
            try:
                message = r"^embedding server 0 at \S+: RestartedError: it restarted"
                with pytest.raises(RemoteError, match=message):
                    until_reached(lambda: model(kjt_of(BATCH)).values())
            finally:
                second.stop()

    @pytest.mark.parametrize("staleness", [0, 4])
    def test_calls_name_the_stopped_server(self, staleness):
        with RemoteJob() as job:
            first, model = (
                job.put_on_servers(Bags([table(name=name)]), staleness=staleness)
                for name in ("first", "term")
            )
            (module,) = remote_modules(model)
            loss = model(kjt_of(BATCH)).values().sum()
            job.servers.stop()
            with pytest.raises(
                ServerError, match=r"server \d at tcp.*lookup of table 'f"
            ):
                first(kjt_of(BATCH)).values()
            message = r"embedding server \d at tcp.*update of table 'term'"
            with pytest.raises(ServerError, match=message):
                push(module, loss, staleness)
            with pytest.raises(ServerError, match="update of table 'term'"):
                model(kjt_of(BATCH)).values()

    def test_a_closed_client_is_an_error(self, job, model):
        loss = model(kjt_of(BATCH)).values().sum()
        job.client.close()
        with pytest.raises(ServerError, match="the connections are closed"):
            loss.backward()
        with pytest.raises(ServerError, match="the connections are closed"):
            model(kjt_of(BATCH)).values()
