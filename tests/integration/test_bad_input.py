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
    Adagrad,
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
def job():
    with RemoteJob() as job:
        yield job


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


class TestBatches:
    """A rejected batch leaves the model as it was: the next one trains."""

    def test_float_ids_are_rejected(self, model):
        batch = KeyedJaggedTensor(
            ["ad", "query"],
            torch.tensor([1.0, 2.0]),
            lengths=torch.tensor([1, 1]),
        )
        with pytest.raises(BatchError, match=r"Received: torch\.float32"):
            model(batch).values()
        assert trains(model)

    def test_a_missing_feature_is_named(self, model):
        message = r"must have the feature 'query'\. Received: \['ad', 'user'\]"
        with pytest.raises(BatchError, match=message):
            model(kjt_of({"ad": [[1]], "user": [[2]]})).values()
        assert trains(model)

    def test_lengths_that_do_not_sum_up_to_the_ids_are_rejected(self, model):
        batch = KeyedJaggedTensor(
            ["ad", "query"], torch.arange(5), lengths=torch.tensor([1, 1])
        )
        with pytest.raises(BatchError, match="sum up to the number of ids, 5"):
            model(batch).values()
        assert trains(model)

    def test_negative_lengths_are_rejected(self, model):
        batch = KeyedJaggedTensor(
            ["ad", "query"], torch.arange(2), lengths=torch.tensor([3, -1, 0, 0])
        )
        with pytest.raises(BatchError, match="'ad': lengths must not be negative"):
            model(batch).values()
        assert trains(model)

    def test_features_of_different_batch_sizes_are_rejected(self, model):
        batch = KeyedJaggedTensor(
            keys=["ad", "query"],
            values=torch.arange(3),
            lengths=torch.ones(3, dtype=torch.int32),
            stride_per_key_per_rank=[[1], [2]],
        )
        with pytest.raises(BatchError, match="must have the same number of samples"):
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

    def test_an_init_fn_by_position_is_rejected(self, job):
        module = Bags([table(init_fn=nn.init.eye_)])
        with pytest.raises(
            ConfigError, match=r"'term': weights that init_fn makes must not"
        ):
            job.put_on_servers(module)

    def test_integer_weights_are_rejected(self, job):
        module = Bags([table(data_type=DataType.INT8)])
        with pytest.raises(ConfigError, match=r"'term': data_type must be FP32, FP16"):
            job.put_on_servers(module)

    def test_the_weights_of_a_known_table_cannot_change_their_type(self, job, model):
        message = r"'term' has dim 4, weights fp32 .*Received: dim 4, weights bf16"
        with pytest.raises(RemoteError, match=message):
            job.put_on_servers(Bags([table(data_type=DataType.BF16)]))
        assert trains(model)

    def test_the_dim_of_a_known_table_cannot_change(self, job, model):
        message = r"'term' has dim 4, weights fp32 and optimizer sgd.*Received: dim 8"
        with pytest.raises(RemoteError, match=message) as error:
            job.put_on_servers(Bags([table(dim=8)]))
        assert error.value.kind == "ConfigError"
        assert trains(model)

    def test_the_dim_of_a_known_table_cannot_change_for_sequences(self, job, model):
        sequences = EmbeddingConfig(100, 8, name="term", feature_names=["ad"])
        module = nn.Sequential(EmbeddingCollection(tables=[sequences], device=META))
        sharder = RemoteEmbeddingCollectionSharder(job.client, SGD(1.0))
        with pytest.raises(RemoteError, match=r"'term' has dim 4.*Received: dim 8"):
            job.shard(module, [sharder])
        assert trains(model)

    def test_the_optimizer_of_a_known_table_cannot_change_its_state(self, job, model):
        message = r"optimizer sgd \(0 state.*Received: dim 4, .* optimizer adam \(8 "
        with pytest.raises(RemoteError, match=message):
            job.put_on_servers(Bags([table()]), Adam())
        assert trains(model)

    def test_the_learning_rate_of_a_known_table_may_change(self, job, model):
        assert trains(model)
        before = job.read("term", [1])
        job.put_on_servers(Bags([TABLE]), SGD(0.0))
        assert trains(model)
        assert (job.read("term", [1]) == before).all()


class TestSharders:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
    def test_a_wire_dtype_other_than_16_or_32_bit_floats_is_rejected(self, job, dtype):
        message = rf"wire_dtype must be one of .*torch\.float32.*Received: {dtype}"
        with pytest.raises(ConfigError, match=message):
            RemoteEmbeddingBagCollectionSharder(job.client, wire_dtype=dtype)

    def test_a_negative_staleness_is_rejected(self, job):
        with pytest.raises(ConfigError, match=r"staleness must be >= 0\. Received: -1"):
            RemoteEmbeddingBagCollectionSharder(job.client, Adagrad(), -1)


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


def push_and_flush(module, loss):
    loss.backward()
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

    def test_a_lookup_names_the_stopped_server(self):
        with RemoteJob() as job:
            model = job.put_on_servers(Bags([TABLE]))
            job.servers.stop()
            message = r"embedding server \d at tcp.*lookup of table 'term'"
            with pytest.raises(ServerError, match=message):
                model(kjt_of(BATCH)).values()

    def test_a_backward_pass_names_the_stopped_server(self):
        with RemoteJob() as job:
            model = job.put_on_servers(Bags([TABLE]))
            loss = model(kjt_of(BATCH)).values().sum()
            job.servers.stop()
            message = r"embedding server \d at tcp.*update of table 'term'"
            with pytest.raises(ServerError, match=message):
                loss.backward()
            with pytest.raises(ServerError, match="update of table 'term'"):
                model(kjt_of(BATCH)).values()

    def test_a_failed_push_is_reported_by_the_next_call(self):
        with RemoteJob() as job:
            model = job.put_on_servers(Bags([TABLE]), staleness=4)
            (module,) = remote_modules(model)
            loss = model(kjt_of(BATCH)).values().sum()
            job.servers.stop()
            with pytest.raises(ServerError, match="update of table 'term'"):
                push_and_flush(module, loss)
            with pytest.raises(ServerError, match="update of table 'term'"):
                model(kjt_of(BATCH)).values()

    def test_a_closed_client_is_an_error(self, job, model):
        loss = model(kjt_of(BATCH)).values().sum()
        job.client.close()
        with pytest.raises(ServerError, match="the connections are closed"):
            loss.backward()
        with pytest.raises(ServerError, match="the connections are closed"):
            model(kjt_of(BATCH)).values()
