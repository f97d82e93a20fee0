from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from persia_torchrec.embedding.optim import SGD
from persia_torchrec.embedding.table_defaults import EmbeddingConfig
from persia_torchrec.errors import BatchError, ConfigError, PersiaError
from persia_torchrec.lookup.bags import encode_bags
from persia_torchrec.persia.batch import Origin, decode_rest, encode_rest
from persia_torchrec.persia.distributed import DDPOption
from persia_torchrec.persia.engine import Engine, HybridModel
from persia_torchrec.persia.loader import LookupSettings
from persia_torchrec.persia.worker_client import RemoteWorkers
from tests.support.local_job import LocalJob, SumOfEmbeddings, batch_of
from tests.support.processes import Processes

SETTINGS = LookupSettings(forward_buffer_size=3, num_workers=1, embedding_staleness=1)


@contextmanager
def engine_of(model=None):
    engine = Engine(
        model or SumOfEmbeddings(),
        torch.device("cpu"),
        DDPOption(backend="gloo"),
        SGD(1.0),
        EmbeddingConfig(emb_initialization=(5, 5), weight_bound=0),
        {},
    )
    engine.backward_buffer_size = 2
    yield engine
    engine.close()


@pytest.fixture
def engine(job):
    with engine_of() as engine:
        yield engine


def step(engine, batch, *, settings=SETTINGS):
    """Train on one batch, its loss the sum of the outputs."""
    pull = engine.start_pull(batch, is_training=True, settings=settings)
    engine.run([], pull).sum().backward()
    engine.flush()


def scaled_step(engine, batch, factor, scale=1024.0):
    """Train under a loss scale; return whether gradients were left out."""
    pull = engine.start_pull(batch, is_training=True, settings=SETTINGS)
    loss = engine.run([], pull).sum() * factor
    has_skipped = engine.backward(loss, torch.tensor(scale))
    engine.flush()
    return has_skipped


def test_the_dense_half_is_replicated_and_the_rows_are_on_the_servers(job, engine):
    assert isinstance(engine.dmp._dmp_wrapped_module, DistributedDataParallel)
    names = [name for name, _ in engine.dmp.named_parameters()]
    assert names == ["dense.bias"]
    assert dist.get_world_size() == 1
    step(engine, batch_of([1], [2]))
    assert sum(engine.client.num_rows()) == 2


def test_a_batch_is_pulled_from_where_its_ids_wait(job, engine):
    loader = RemoteWorkers([job.workers[0].address])
    batch = batch_of([1], [1, 2])
    bags = batch.bags()
    origin = Origin(loader=4, number=1, worker=0)
    assert loader.buffer(0, origin, encode_bags(bags))
    referenced = decode_rest(bytearray(encode_rest(batch)), origin)
    pull = engine.start_pull(referenced, is_training=False)
    assert engine.embed(pull)["item"].tolist() == [[0.0] * 4] * 2
    assert len(job.buffers[0]) == 0
    loader.close()


def test_the_scale_of_the_loss_is_taken_out_again(job, engine):
    assert not scaled_step(engine, batch_of([1], [1]), factor=1024.0)
    assert job.read("item", 1).tolist() == [[3.0] * 4]


@pytest.mark.parametrize("factor", [float("inf"), float("nan")])
def test_under_a_scale_a_gradient_that_is_not_finite_is_left_out(job, engine, factor):
    assert scaled_step(engine, batch_of([1]), factor=factor)
    assert job.read("item", 1).tolist() == [[5.0] * 4]
    assert not scaled_step(engine, batch_of([1]), factor=1024.0)
    assert job.read("item", 1).tolist() == [[4.0] * 4]


@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_under_a_scale_of_0_all_gradients_are_left_out(job, engine, factor):
    """As torch's ``GradScaler.step`` does, which divides by it too."""
    assert scaled_step(engine, batch_of([1]), factor=factor, scale=0.0)
    assert job.read("item", 1).tolist() == [[5.0] * 4]


def test_at_a_scale_of_1_too_gradients_that_are_not_finite_are_left_out(job, engine):
    assert scaled_step(engine, batch_of([1]), factor=float("nan"), scale=1.0)
    assert engine.pipeline.tally.total.num_refused == 0


@pytest.mark.parametrize("has_key", [True, False])
def test_a_state_with_the_parameter_of_version_0_1_0_loads(job, engine, has_key):
    state = engine.dmp.state_dict()
    assert "never_used" not in state
    if has_key:
        state["never_used"] = torch.zeros(1)
    state["dense.bias"] = torch.full((1,), 7.0)
    found = engine.dmp.load_state_dict(state)
    assert found.unexpected_keys == found.missing_keys == []
    assert engine.dmp.module.dense.bias.item() == 7.0
    model = HybridModel(nn.Module(), SumOfEmbeddings())
    model.load_state_dict({"never_used": torch.zeros(1), "dense.bias": torch.ones(1)})
    assert model.dense.bias.item() == 1.0


def take_two_steps():
    with engine_of() as engine:
        for _ in range(2):
            step(engine, batch_of([1]))


@pytest.mark.multiprocess
def test_a_model_that_uses_all_parameters_is_not_told_of_it(job, tmp_path):
    """Torch does so once per process, past Python's filters of warnings."""
    with Processes(tmp_path) as processes:
        trainer = processes.start("trainer", take_two_steps)
        assert trainer.status() == 0, trainer.output()
        assert "find_unused_parameters" not in trainer.output()


def test_embeddings_train_under_a_dense_model_that_does_not(job):
    frozen = SumOfEmbeddings().requires_grad_(False)
    with engine_of(frozen) as engine:
        step(engine, batch_of([1]))
    assert job.read("item", 1).tolist() == [[4.0] * 4]


def test_gradients_whose_rows_are_gone_are_counted(tmp_path, monkeypatch):
    with (
        LocalJob(tmp_path, monkeypatch, capacity_rows=4) as job,
        engine_of() as engine,
    ):
        settings = SETTINGS._replace(embedding_staleness=2)
        late, other = (
            engine.start_pull(batch, is_training=True, settings=settings)
            for batch in (batch_of([1, 2]), batch_of(list(range(100, 140))))
        )
        for pull in (late, other):
            engine.run([], pull).sum().backward()
        engine.flush()
        assert job.total("gradients_missed") >= 2


def test_without_a_bound_as_many_batches_are_under_way_as_the_buffers_hold(job, engine):
    settings = SETTINGS._replace(embedding_staleness=None)
    pulls = [
        engine.start_pull(batch_of([number]), is_training=True, settings=settings)
        for number in range(5)  # 3 forward and 2 backward
    ]
    losses = [engine.run([], pull).sum() for pull in pulls]
    sum(losses).backward()
    engine.flush()
    assert max(c["open_batches_max"] for c in engine.client.counters()) == 5


def test_the_bound_does_not_change_while_a_batch_is_under_way(engine):
    pull = engine.start_pull(batch_of([1]), is_training=True, settings=SETTINGS)
    pull.wait()
    wider = SETTINGS._replace(embedding_staleness=7)
    with pytest.raises(ConfigError, match=r"while no batch is in flight\. Received: 1"):
        engine.start_pull(batch_of([1]), is_training=True, settings=wider)
    engine.run([], pull).sum().backward()
    step(engine, batch_of([1]), settings=wider)


def test_settings_of_a_loader_for_evaluation_do_not_touch_the_training(engine):
    pull = engine.start_pull(batch_of([1]), is_training=True, settings=SETTINGS)
    pull.wait()
    other = SETTINGS._replace(embedding_staleness=7, num_workers=3)
    engine.embed(engine.start_pull(batch_of([1]), is_training=False, settings=other))
    engine.run([], pull).sum().backward()
    assert engine._settings == SETTINGS


def test_features_that_are_not_slots_are_rejected(job, engine):
    message = r"\['item'\]\. Received: \['itme'\], unknown \['itme'\]"
    for is_training in (True, False):
        with pytest.raises(BatchError, match=message):
            engine.start_pull(batch_of([1], name="itme"), is_training=is_training)
    assert job.num_rows() == 0


def test_outside_a_job_there_is_nothing_to_train_with(job, monkeypatch):
    monkeypatch.delenv("PERSIA_STORE_PORT")
    with (
        pytest.raises(ConfigError, match=r"PERSIA_STORE_PORT is not set"),
        engine_of(),
    ):
        pass


def test_closing_twice_does_nothing_and_nothing_works_afterwards(engine):
    engine.close()
    engine.close()
    with pytest.raises(PersiaError, match="closed"):
        engine.start_pull(batch_of([1]), is_training=True)


def test_two_engines_one_after_the_other_find_the_same_rows(job):
    for expected in (4.0, 3.0):
        with engine_of() as engine:
            step(engine, batch_of([1]))
        np.testing.assert_array_equal(job.read("item", 1), [[expected] * 4])
