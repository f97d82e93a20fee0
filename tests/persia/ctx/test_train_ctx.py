import logging
import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from persia_torchrec import Constant, Uniform
from persia_torchrec.ctx import TrainCtx, eval_ctx
from persia_torchrec.data import DataLoader
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.embedding.table_defaults import EmbeddingConfig
from persia_torchrec.errors import BatchError, ConfigError
from persia_torchrec.persia.batch import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia_torchrec.persia.worker.process import tell_slots
from persia_torchrec.sharding.trainer_metrics import TrainerMetrics
from persia_torchrec.table import TableSettings
from tests.support.local_job import Batches, LocalJob, SumOfEmbeddings, batch_of
from tests.support.script_jobs import INFER
from tests.support.servers import DEADLINE_S, ids_of

pytestmark = pytest.mark.slow

THREE_SLOTS = """
feature_index_prefix_bit: 8
slots_config:
  user: {dim: 2}
  item: {dim: 3, sqrt_scaling: true}
  basket: {dim: 3}
feature_groups:
  things: [item, basket]
"""


class WantsTenColumns(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(10, 1)

    def forward(self, non_id_tensors, embeddings):
        return self.linear(torch.cat(embeddings, dim=1))


def train(ctx, batches, **settings):
    """Take a step on the sum of the outputs of each batch."""
    for batch in DataLoader(Batches(batches), **settings):
        output, _ = ctx.forward(batch)
        ctx.backward(output.sum())


class TestASTep:
    def test_every_occurrence_of_an_id_moves_its_row(self, job):
        config = EmbeddingConfig(emb_initialization=(5, 5))
        with job.train_ctx(embedding_config=config) as ctx:
            train(ctx, [batch_of([1, 2], [2, 2], []), batch_of([3])])
        assert job.read("item", 1, 2, 3)[:, 0].tolist() == [4, 2, 4]

    def test_the_dense_half_moves_too_and_its_gradient_is_cleared(self, job):
        model = SumOfEmbeddings()
        with job.train_ctx(model, lr=0.25) as ctx:
            train(ctx, [batch_of([1], [2]), batch_of([1])])
        assert model.bias.item() == -0.25 * 3
        assert model.bias.grad is None

    def test_rows_start_where_the_embedding_config_says(self, job):
        config = EmbeddingConfig(emb_initialization=(0.5, 0.5))
        with job.train_ctx(optimizer=SGD(0.0), embedding_config=config) as ctx:
            train(ctx, [batch_of([1])])
        assert job.read("item", 1).tolist() == [[0.5] * 4]

    def test_weights_grow_no_further_than_their_bound(self, job):
        config = EmbeddingConfig(weight_bound=2)
        with job.train_ctx(embedding_config=config) as ctx:
            train(ctx, [batch_of([1])] * 5)
        assert job.read("item", 1).tolist() == [[-2.0] * 4]

    def test_backward_returns_the_loss(self, job):
        with job.train_ctx() as ctx:
            for batch in DataLoader(Batches([batch_of([1])])):
                output, _ = ctx.forward(batch)
                loss = output.sum()
                assert ctx.backward(loss) is loss

    def test_several_batches_may_share_a_backward_pass(self, job):
        config = EmbeddingConfig(emb_initialization=(5, 5))
        with job.train_ctx(embedding_config=config) as ctx:
            loader = DataLoader(Batches([batch_of([1]), batch_of([1, 1])]))
            outputs = [ctx.forward(batch)[0] for batch in loader]
            ctx.backward(sum(output.sum() for output in outputs))
        assert job.read("item", 1).tolist() == [[2.0] * 4]

    def test_a_batch_that_wants_no_gradient_moves_the_dense_half_alone(self, job):
        model = SumOfEmbeddings()
        with job.train_ctx(model) as ctx:
            train(ctx, [batch_of([1], requires_grad=False)], embedding_staleness=1)
        assert job.num_rows() == 0
        assert model.bias.item() != 0

    def test_no_more_batches_are_under_way_than_the_bound(self, job):
        with job.train_ctx() as ctx:
            train(ctx, [batch_of([1])] * 30, embedding_staleness=2, num_workers=4)
        most = [c["open_batches_max"] for c in job.client.counters()]
        assert max(most) <= 2


class TestABatch:
    @pytest.fixture
    def job(self, tmp_path, monkeypatch):
        with LocalJob(tmp_path, monkeypatch, THREE_SLOTS) as job:
            yield job

    @pytest.fixture
    def batch(self):
        return PersiaBatch(
            [
                IDTypeFeature("basket", [ids_of(1, 2), ids_of()]),
                IDTypeFeatureWithSingleID("user", ids_of(1, 7)),
                IDTypeFeature("item", [ids_of(1, 2), ids_of(2)]),
            ],
            non_id_type_features=[
                NonIDTypeFeature(np.array([[1.5], [2]], dtype=np.float32)),
                NonIDTypeFeature(np.array([3, 4], dtype=np.uint8), name="age"),
            ],
            labels=[
                Label(np.array([[True], [False]]), name="bought"),
                Label(np.array([[0.5], [7]], dtype=np.float64), name="seconds"),
            ],
            meta=b"page 7",
        )

    def test_a_model_of_another_width_learns_slots_and_dims(self, job, batch):
        """The note is in the error of a step, and in that of an evaluation."""
        expected = (
            "The model got non-ID features as (2, 1), (2,), and 3 slots, in this "
            "order: basket of dim 3 as (2, 3); user of dim 2 as (2, 2); item of dim 3 "
            "as (2, 3). Their last dimensions add up to 8. embedding_config.yml sets "
            "the dims."
        )
        with job.train_ctx(WantsTenColumns()) as ctx:
            evaluated = ctx.get_embedding_from_data(batch)
            for trained in DataLoader(Batches([batch])):
                for one in (evaluated, trained):
                    with pytest.raises(RuntimeError, match="cannot be mult") as error:
                        ctx.forward(one)
                    assert error.value.__notes__ == [expected]

    def test_it_becomes_tensors_in_the_order_of_the_batch(self, job, batch):
        with job.train_ctx() as ctx:
            for looked_up in DataLoader(Batches([batch])):
                assert looked_up.meta == b"page 7"
                dense, embeddings, labels = ctx.prepare_features(looked_up)
        assert [d.dtype for d in dense] == [torch.float32, torch.uint8]
        assert [d.tolist() for d in dense] == [[[1.5], [2.0]], [3, 4]]
        assert [label.dtype for label in labels] == [torch.bool, torch.float64]
        assert [label.tolist() for label in labels] == [[[1], [0]], [[0.5], [7]]]
        assert [tuple(e.shape) for e in embeddings] == [(2, 3), (2, 2), (2, 3)]
        assert all(e.dtype == torch.float32 and e.requires_grad for e in embeddings)
        user = job.read("user", 1, 7)
        one, two = job.read("item", 1, 2)
        expected = [[one + two, 0 * one], user, [(one + two) / 2**0.5, two]]
        for embedding, rows in zip(embeddings, expected, strict=True):
            np.testing.assert_allclose(embedding.detach(), np.array(rows), rtol=1e-6)

    @pytest.mark.parametrize("requires_grad", [True, False])
    def test_embeddings_outside_of_a_loader_want_a_gradient_that_moves_nothing(
        self, job, batch, requires_grad
    ):
        batch.requires_grad = requires_grad
        with job.train_ctx() as ctx:
            for looked_up in (
                ctx.get_embedding_from_data(batch),
                ctx.get_embedding_from_bytes(batch.to_bytes()),
            ):
                _, embeddings, _ = ctx.prepare_features(looked_up)
                sum(e.sum() for e in embeddings).backward()
                assert all(torch.equal(e.grad, torch.ones_like(e)) for e in embeddings)
        assert job.num_rows() == 0

    def test_prepared_features_train_a_users_model(self, job, batch):
        with job.train_ctx() as ctx:
            for looked_up in DataLoader(Batches([batch])):
                _, (_, user, _), _ = ctx.prepare_features(looked_up)
                before = job.read("user", 1, 7)
                ctx.backward((user * torch.tensor([[1.0], [2.0]])).sum())
        moved = before - job.read("user", 1, 7)
        np.testing.assert_allclose(moved, [[1, 1], [2, 2]], rtol=1e-5)

    def test_without_labels_there_are_none(self, job, batch):
        plain = PersiaBatch(batch.id_type_features, requires_grad=False)
        with job.train_ctx() as ctx:
            for looked_up in DataLoader(Batches([plain])):
                assert ctx.forward(looked_up)[1] is None

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            (["user", "item", "baskets"], r"unknown \['baskets'\]"),
            (["user", "item", "basket", "ad"], r"unknown \['ad'\]"),
        ],
    )
    def test_its_features_must_be_the_slots(self, job, names, message):
        features = [IDTypeFeatureWithSingleID(name, ids_of(1)) for name in names]
        batch = PersiaBatch(features, requires_grad=False)
        with job.train_ctx(), pytest.raises(BatchError, match=message):
            next(iter(DataLoader(Batches([batch]))))


class Tower(NamedTuple):
    click: torch.Tensor
    buy: torch.Tensor


class Towers(nn.Module):
    """Two outputs, of which each step may use another."""

    def __init__(self) -> None:
        super().__init__()
        self.click = nn.Linear(4, 1)
        self.buy = nn.Linear(4, 1)

    def forward(self, non_id_tensors, embeddings):
        (item,) = embeddings
        return Tower(self.click(item), self.buy(item))


class Turns(Towers):
    """Takes one of its halves in turn; the other is not part of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, non_id_tensors, embeddings):
        self.step += 1
        both = [self.click, self.buy]
        return both[self.step % 2](embeddings[0])


@pytest.mark.parametrize(("given", "told"), [(None, [3, 5, None]), (9, [9, 9, 9])])
def test_the_last_step_is_given_or_follows_from_the_length_of_a_dataset(
    job, monkeypatch, given, told
):
    monkeypatch.setattr(TrainerMetrics, "last_step", None)
    batches, seen = [batch_of([1])], []
    with job.train_ctx(last_step=given) as ctx:
        for dataset in (batches * 3, batches * 2, iter(batches)):
            for batch in DataLoader(dataset):
                ctx.backward(ctx.forward(batch)[0].sum())
            seen.append(TrainerMetrics.last_step)
    assert seen == told


def test_a_context_that_trains_is_rejected_in_an_inference_job(tmp_path, monkeypatch):
    (tmp_path / "global_config.yml").write_text(INFER)
    monkeypatch.setenv("PERSIA_GLOBAL_CONFIG", str(tmp_path / "global_config.yml"))
    dense = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    with pytest.raises(ConfigError, match="NN worker must belong to a job that trains"):
        TrainCtx(SGD(0.1), dense)


def test_the_last_step_must_be_one(job):
    with pytest.raises(ConfigError, match=r"last_step must be >= 1\. Received: 0"):
        job.train_ctx(last_step=0)


class TestAModel:
    def test_it_may_return_several_tensors(self, job):
        model = Towers()
        before = [tower.weight.clone() for tower in (model.click, model.buy)]
        with job.train_ctx(model) as ctx:
            for batch in DataLoader(Batches([batch_of([1])] * 2)):
                output, _ = ctx.forward(batch)
                assert isinstance(output, Tower)
                ctx.backward(output.click.sum() + output.buy.sum())
        after = [tower.weight for tower in (model.click, model.buy)]
        assert not any(map(torch.equal, before, after))

    def test_it_need_not_use_the_same_parameters_in_every_step(self, job):
        model = Turns()
        before = model.click.weight.clone(), model.buy.weight.clone()
        with job.train_ctx(model) as ctx:
            train(ctx, [batch_of([1])] * 4)
        assert not torch.equal(model.click.weight, before[0])
        assert not torch.equal(model.buy.weight, before[1])


class TestTheEndOfTheBlock:
    def test_every_update_is_applied(self, job):
        config = EmbeddingConfig(emb_initialization=(0, 0), weight_bound=0)
        with job.train_ctx(embedding_config=config) as ctx:
            train(ctx, [batch_of([1])] * 50, embedding_staleness=10)
        assert job.read("item", 1).tolist() == [[-50.0] * 4]

    def test_a_batch_without_its_backward_pass_does_not_hold_it_up(self, job):
        started = time.monotonic()
        with job.train_ctx() as ctx:
            for step, batch in enumerate(DataLoader(Batches([batch_of([1])] * 20))):
                if step == 3:
                    break
                output, _ = ctx.forward(batch)
                ctx.backward(output.sum())
        assert batch.is_training  # and is still held here
        assert time.monotonic() - started < DEADLINE_S / 2

    def test_data_that_do_not_come_do_not_hold_it_up(self, job):
        go_on = threading.Event()

        def stalls():
            yield from [batch_of([1])] * 5
            go_on.wait(3 * DEADLINE_S)

        started = time.monotonic()
        with job.train_ctx() as ctx:
            for step, batch in enumerate(DataLoader(Batches(stalls))):
                output, _ = ctx.forward(batch)
                ctx.backward(output.sum())
                if step == 2:
                    break
        assert time.monotonic() - started < DEADLINE_S / 2
        go_on.set()

    def test_an_exception_propagates_and_the_servers_remain(self, job):
        def divide(ctx):
            for batch in DataLoader(Batches([batch_of([1])] * 20)):
                ctx.backward(ctx.forward(batch)[0].sum() / (1 // 0))

        with pytest.raises(ZeroDivisionError), job.train_ctx() as ctx:
            divide(ctx)
        with job.train_ctx() as ctx:
            train(ctx, [batch_of([1])] * 3, embedding_staleness=1)
        assert job.num_rows() == 1

    def test_a_loop_that_was_left_can_be_followed_by_another(self, job):
        go_on = threading.Event()

        def stalls():
            yield from [batch_of([1])] * 5
            go_on.wait(3 * DEADLINE_S)

        with job.train_ctx() as ctx:
            for batch in DataLoader(Batches(stalls), embedding_staleness=1):
                ctx.backward(ctx.forward(batch)[0].sum())
                break
            train(ctx, [batch_of([2])] * 5, embedding_staleness=1)
        go_on.set()
        assert (job.read("item", 2) < -4).all()


class TestTheServers:
    def test_their_rows_can_be_counted_and_dropped_in_the_middle(self, job):
        with job.train_ctx() as ctx:
            batches = [batch_of([number]) for number in range(20)]
            for step, batch in enumerate(DataLoader(Batches(batches))):
                ctx.backward(ctx.forward(batch)[0].sum())
                if step == 2:
                    assert sum(ctx.get_embedding_size()) >= 3
                    assert len(ctx.get_embedding_size()) == 2
                    ctx.clear_embeddings()
        assert 0 < job.num_rows() <= 17


class TestSettings:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"mixed_precision": True}, r"mixed_precision must be False on the CPU"),
            (
                {"device_id": 99},
                r"device_id must be the index of a CUDA device.*Received: 99",
            ),
            ({"grad_scalar_update_factor": 1}, r"factor must be > 1.*Received: 1"),
            ({"backward_buffer_size": 0}, r"ward_buffer_size must be >= 1.*: 0"),
            ({"backward_workers_size": 0}, r"workers_size must be >= 1.*: 0"),
            ({"grad_update_buffer_size": 0}, r"update_buffer_size must be >= 1.*: 0"),
            ({"threadpool_worker_size": 0}, r"threadpool_worker_size must be >= 1"),
        ],
    )
    def test_invalid_settings_are_rejected(self, job, settings, message):
        with pytest.raises(ConfigError, match=message):
            job.train_ctx(**settings)

    def test_mixed_precision_is_the_default_and_needs_a_gpu(self, job):
        model = SumOfEmbeddings()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ConfigError, match="Pass mixed_precision=False, or a devi"):
            TrainCtx(SGD(0.1), optimizer, model=model)

    @pytest.mark.parametrize("has_file", [True, False])
    def test_outside_a_job_it_reports_what_is_missing(self, job, monkeypatch, has_file):
        monkeypatch.delenv("PERSIA_STORE_PORT")
        if not has_file:
            monkeypatch.delenv("PERSIA_EMBEDDING_CONFIG")
        with pytest.raises(ConfigError, match=r"PERSIA_STORE_PORT is not set\. Start"):
            job.train_ctx()

    def test_without_a_file_the_slots_equal_those_of_the_workers(
        self, job, monkeypatch
    ):
        tell_slots(job.book, Path(os.environ["PERSIA_EMBEDDING_CONFIG"]))
        monkeypatch.delenv("PERSIA_EMBEDDING_CONFIG")
        with job.train_ctx() as ctx:
            train(ctx, [batch_of([1], [2])])
        assert job.num_rows() == 2

    def test_the_staleness_bound_may_change_between_two_loops(self, job):
        config = EmbeddingConfig(emb_initialization=(5, 5))
        with job.train_ctx(embedding_config=config) as ctx:
            train(ctx, [batch_of([1])] * 3, embedding_staleness=1)
            train(ctx, [batch_of([1])] * 3, embedding_staleness=5)
        assert job.read("item", 1).tolist() == [[5.0 - 6] * 4]


class TestSettingsThatChange:
    def test_a_schedule_moves_the_servers_rate_as_it_would_torchs(self, job):
        config = EmbeddingConfig(emb_initialization=(0, 0))
        with job.train_ctx(embedding_config=config) as ctx:
            schedule = torch.optim.lr_scheduler.StepLR(
                ctx.embedding_optimizer, step_size=2, gamma=0.5
            )
            for batch in DataLoader(Batches([batch_of([1])] * 6)):
                output, _ = ctx.forward(batch)
                ctx.backward(output.sum())
                schedule.step()
        assert job.read("item", 1)[0, 0] == -(1 + 1 + 0.5 + 0.5 + 0.25 + 0.25)

    @pytest.mark.parametrize("num_workers", [1, 2])
    def test_a_rate_set_between_steps_holds_from_the_next(
        self, tmp_path, monkeypatch, num_workers
    ):
        config = EmbeddingConfig(emb_initialization=(0, 0))
        with LocalJob(tmp_path, monkeypatch, num_workers=num_workers) as job:
            with job.train_ctx(embedding_config=config) as ctx:
                loader = DataLoader(Batches([batch_of([1])] * 3), embedding_staleness=1)
                for lr, batch in zip((1, 2, 4), loader, strict=True):
                    ctx.embedding_optimizer.param_groups[0]["lr"] = lr
                    output, _ = ctx.forward(batch)
                    ctx.backward(output.sum())
            assert job.read("item", 1)[0, 0] == -7

    def test_the_servers_get_a_new_embedding_config_between_updates(self, job):
        with job.train_ctx(embedding_config=EmbeddingConfig((0, 0))) as ctx:
            train(ctx, [batch_of([1])] * 3)
            ctx.configure_embedding_parameter_servers(
                EmbeddingConfig((5, 5), weight_bound=2)
            )
            assert job.read("item", 1)[0, 0] == -3
            train(ctx, [batch_of([1, 2])])
        assert job.read("item", 1, 2)[:, 0].tolist() == [-2, 2]

    def test_no_new_ids_are_admitted_once_the_probability_is_0(self, job):
        with job.train_ctx() as ctx:
            train(ctx, [batch_of([1])])
            ctx.configure_embedding_parameter_servers(
                EmbeddingConfig(admit_probability=0)
            )
            train(ctx, [batch_of([1, 2, 3])])
            assert job.num_rows() == 1
            assert job.total("rejected") == 2

    def test_a_frequent_id_gets_a_row_sooner_or_later_and_rare_ones_seldom(self, job):
        config, rare = EmbeddingConfig((5, 5), admit_probability=0.2), range(100, 130)
        with job.train_ctx(optimizer=SGD(0.0), embedding_config=config) as ctx:
            train(ctx, [batch_of([1, one]) for one in rare])
        assert job.read("item", 1).all()
        num_rare = job.read("item", *rare).all(axis=1).sum()
        assert 1 <= num_rare <= 12  # 6 of 30 are expected
        assert job.num_rows() == 1 + num_rare

    def test_a_new_config_leaves_the_scheduled_rate_alone(self, job):
        with job.train_ctx(embedding_config=EmbeddingConfig((0, 0))) as ctx:
            ctx.embedding_optimizer.param_groups[0]["lr"] = 3.0
            train(ctx, [batch_of([1])])
            ctx.configure_embedding_parameter_servers(EmbeddingConfig((1, 1)))
            train(ctx, [batch_of([1])])
        assert job.read("item", 1)[0, 0] == -6


class TestWhatUsersForget:
    @pytest.fixture
    def warnings(self, caplog):
        """Return the loggers of all warnings of ours so far."""
        caplog.set_level(logging.INFO, "persia_torchrec")
        return lambda: [
            record.name.removeprefix("persia_torchrec.")
            for record in caplog.records
            if record.levelno == logging.WARNING and record.name.startswith("persia_")
        ]

    @pytest.mark.parametrize("staleness", [1, 4])
    def test_batches_without_a_backward_pass_are_one_warning(
        self, job, warnings, staleness
    ):
        batches = [batch_of([n]) for n in range(20)]
        with job.train_ctx() as ctx:
            for batch in DataLoader(Batches(batches), embedding_staleness=staleness):
                ctx.forward(batch)
            del batch
            deadline = time.monotonic() + DEADLINE_S
            while ctx.summary().num_dropped < 20:
                assert time.monotonic() < deadline
                time.sleep(0.005)
        # A client of an earlier test in this process may reconnect.
        own = [name for name in warnings() if name != "client.shards"]
        assert own == ["pipeline.staleness"]

    def test_an_evaluation_and_a_loop_that_breaks_off_are_no_warning(
        self, job, warnings
    ):
        model, many = SumOfEmbeddings(), [batch_of([n]) for n in range(40)]
        with job.train_ctx(model) as ctx:
            settings = {"embedding_staleness": 20, "forward_buffer_size": 20}
            for batch in DataLoader(Batches(many), **settings):
                output, _ = ctx.forward(batch)
                ctx.backward(output.sum())
                break  # and those ahead are dropped
            with eval_ctx(model=model) as evaluation:
                wanted = [batch_of([n], requires_grad=False) for n in range(20)]
                for batch in DataLoader(Batches(wanted)):
                    evaluation.forward(batch)
            assert ctx.summary().num_dropped == 0
        assert warnings() == []

    def test_gradients_of_evicted_rows_are_warned_of_while_training_and_at_its_end(
        self, tmp_path, monkeypatch, warnings, caplog
    ):
        with LocalJob(tmp_path, monkeypatch, capacity_rows=4) as job:
            batches = [batch_of(list(range(n, n + 20))) for n in range(40)]
            with job.train_ctx() as ctx:
                train(ctx, batches, embedding_staleness=1)
                ctx.embeddings.flush()
                assert caplog.text.count("came after the eviction of their rows") == 1
            summary = ctx.summary()
        assert warnings()[-1] == "sharding.table_control"
        assert summary.num_gradients == 40 * 20
        assert summary.num_evicted == 40 * (20 - 8)  # two servers
        assert summary.share_evicted == 0.6

    def test_the_end_of_a_training_logs_its_staleness(self, job, caplog):
        caplog.set_level(logging.INFO, "persia_torchrec.sharding")
        with job.train_ctx() as ctx:
            train(ctx, [batch_of([1])] * 30, embedding_staleness=3)
            assert ctx.summary().max_lacking == 2
            rows = f"rows=1 on {len(ctx.get_embedding_size())} servers, "
        summary = ctx.summary()
        assert summary.num_lookups == 30
        assert 0 < summary.mean_staleness <= 2
        assert 0 <= summary.share_waited <= 1
        (told,) = [r for r in caplog.records if r.name.endswith("table_control")]
        assert told.levelno == logging.INFO
        assert told.args[:4] == (rows, 30, summary.mean_staleness, 2)


class TestSettingsOfSingleTables:
    def test_each_group_trains_by_its_own(self, tmp_path, monkeypatch):
        tables = {
            "things": TableSettings(optimizer=SGD(10.0), initializer=Constant(3.0))
        }
        with LocalJob(tmp_path, monkeypatch, THREE_SLOTS) as job:
            config = EmbeddingConfig((0, 0), weight_bound=100)
            with job.train_ctx(embedding_config=config, tables=tables) as ctx:
                train(ctx, [three_slots()])
                # What the group was given by itself stays.
                ctx.configure_embedding_parameter_servers(EmbeddingConfig((5, 5)))
                assert ctx.embedding_optimizer.learning_rates() == {
                    "user": 1.0,
                    "things": 10.0,
                }
                specs = ctx.embeddings.sharder.remote_tables.specs
            assert job.read("user", 1)[0, 0] == -1
            # Its id is in both slots of the group.
            assert job.read("basket", 1)[0, 0] == 3 - 10 - 10
            assert specs["things"].initializer == Constant(3.0)
            assert specs["user"].initializer == Uniform(5, 5)

    def test_an_unknown_group_is_rejected(self, job):
        with pytest.raises(
            ConfigError, match=r"\['item'\]\. Received: 'itm'\. Is 'item"
        ):
            job.train_ctx(tables={"itm": TableSettings(weight_bound=1.0)})


def three_slots():
    features = [IDTypeFeature(name, [ids_of(1)]) for name in ("user", "item", "basket")]
    label = Label(np.zeros((1, 1), dtype=np.float32))
    return PersiaBatch(features, labels=[label])
