"""Evaluation in a job, outside of a TrainCtx."""

import threading

import numpy as np
import pytest
import torch

from persia_torchrec import env
from persia_torchrec.ctx import EmbeddingCtx, PreprocessMode, cnt_ctx, eval_ctx
from persia_torchrec.data import DataLoader, StreamingDataset
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.embedding.table_defaults import EmbeddingConfig
from persia_torchrec.errors import (
    CheckpointError,
    ConfigError,
    PersiaError,
    RemoteError,
    RequestTimeoutError,
)
from persia_torchrec.table import TableSpec
from tests.persia.ctx.readers import evaluate_elsewhere
from tests.support.local_job import (
    Batches,
    LocalJob,
    Sending,
    SumOfEmbeddings,
    batch_of,
)
from tests.support.processes import Processes
from tests.support.servers import DEADLINE_S

pytestmark = pytest.mark.slow

TRAINING = [batch_of([1, step], [2]) for step in range(10)]
EVALUATION = [batch_of([number], [1, 2, 99]) for number in range(8)]


def train(ctx, batches=TRAINING):
    for batch in DataLoader(Batches(batches)):
        ctx.backward(ctx.forward(batch)[0].sum())


@pytest.fixture
def model():
    return SumOfEmbeddings()


@pytest.fixture
def trained(job, model):
    """Return the job, after a training that has ended."""
    with job.train_ctx(model, embedding_config=EmbeddingConfig((1, 2))) as ctx:
        train(ctx)
    return job


def evaluate(ctx):
    with torch.no_grad():
        return [
            ctx.forward(batch)[0].flatten().tolist()
            for batch in DataLoader(Batches(EVALUATION))
        ]


def settings_of(job):
    """Return what the servers have of the table, but for its name."""
    (spec,) = job.client.learn_tables()
    return spec


class TestAfterATraining:
    def test_rows_are_read_and_not_changed(self, trained, model):
        numbers, settings = range(99), settings_of(trained)
        rows, num_rows = trained.read("item", *numbers), trained.num_rows()
        with EmbeddingCtx(PreprocessMode.EVAL, model=model, device_id=None) as ctx:
            outputs = evaluate(ctx)
            assert ctx.get_embedding_size() == trained.client.num_rows()
        bias = model.bias.item()
        sums = [rows[number].sum() + bias for number in (1, 2)]
        np.testing.assert_allclose(outputs[1][0], sums[0], rtol=1e-5)
        np.testing.assert_allclose(outputs[1][1], sum(sums) - bias, rtol=1e-5)
        assert trained.num_rows() == num_rows
        assert np.array_equal(trained.read("item", *numbers), rows)
        assert settings_of(trained) == settings

    def test_it_gives_what_an_evaluation_within_the_training_gives(self, job, model):
        with job.train_ctx(model) as ctx:
            train(ctx)
            with eval_ctx() as inner:
                expected = evaluate(inner)
        with eval_ctx(model) as outside:
            assert evaluate(outside) == expected

    def test_a_batch_may_come_as_bytes_and_by_itself(self, trained, model):
        with eval_ctx(model=model) as ctx:
            batch = ctx.get_embedding_from_bytes(EVALUATION[1].to_bytes())
            _, (embedding,), labels = ctx.prepare_features(batch)
            expected = trained.read("item", 1).tolist()
            assert embedding[:1].tolist() == expected
            assert [label.tolist() for label in labels] == [[[0.0], [0.0]]]
            batch = ctx.get_embedding_from_data(EVALUATION[1])
            assert torch.equal(ctx.prepare_features(batch)[1][0], embedding)

    def test_it_may_be_entered_again(self, trained, model):
        ctx = eval_ctx(model)
        assert sum(ctx.get_embedding_size()) == trained.num_rows()
        with ctx:
            assert cnt_ctx() is ctx
            outputs = evaluate(ctx)
        with ctx:
            assert evaluate(ctx) == outputs
        with pytest.raises(PersiaError):
            ctx.get_embedding_size()

    def test_one_within_another_uses_its_connections(self, trained, model):
        with eval_ctx(model) as outer:
            num = len(threading.enumerate())
            with eval_ctx() as inner:
                assert inner.model is model
                assert len(threading.enumerate()) == num
                outputs = evaluate(inner)
            assert evaluate(outer) == outputs

    def test_one_that_was_made_before_a_training_sees_its_updates(self, trained):
        ctx = eval_ctx(SumOfEmbeddings())
        with trained.train_ctx(embedding_config=EmbeddingConfig((1, 2))) as training:
            train(training, [batch_of([500])])
            with ctx:
                batch = ctx.get_embedding_from_data(batch_of([500]))
                _, (embedding,), _ = ctx.prepare_features(batch)
                assert embedding.tolist() == trained.read("item", 500).tolist()
                assert embedding.any()
            assert cnt_ctx() is training

    def test_the_rows_can_be_dropped(self, trained):
        with eval_ctx() as ctx:
            ctx.clear_embeddings()
            assert sum(ctx.get_embedding_size()) == 0
        assert trained.num_rows() == 0

    def test_another_device_than_the_training_s_is_rejected_within_it(
        self, job, monkeypatch
    ):
        with job.train_ctx() as training:
            inner = eval_ctx()
            monkeypatch.setattr(inner, "device_id", 1)
            with pytest.raises(
                ConfigError, match=r"that of the enclosing context.*: 1"
            ):
                inner.__enter__()
            assert cnt_ctx() is training


class TestModes:
    def test_training_only_reads_and_keeps_the_gradient(self, trained, model):
        rows, num_rows = trained.read("item", 1, 2), trained.num_rows()
        with EmbeddingCtx(PreprocessMode.TRAIN, model) as ctx:
            for batch in DataLoader(Batches([batch_of([1], [1, 2], [99])])):
                assert not batch.is_training
                _, (embedding,), _ = ctx.prepare_features(batch)
                assert embedding.requires_grad
                (embedding**2).sum().backward()
                assert torch.equal(embedding.grad, 2 * embedding.detach())
                assert embedding.grad.any()
        assert trained.num_rows() == num_rows
        assert np.array_equal(trained.read("item", 1, 2), rows)

    @pytest.mark.parametrize("mode", [PreprocessMode.EVAL, PreprocessMode.INFERENCE])
    def test_the_others_want_no_gradient(self, trained, mode):
        with EmbeddingCtx(mode) as ctx:
            batch = ctx.get_embedding_from_data(EVALUATION[0])
            _, (embedding,), labels = ctx.prepare_features(batch)
        assert not embedding.requires_grad
        assert (labels is None) == (mode is PreprocessMode.INFERENCE)

    def test_without_a_model_it_only_looks_up(self, trained, tmp_path):
        with eval_ctx() as ctx:
            batch = ctx.get_embedding_from_data(EVALUATION[0])
            message = r"must have a model for this\. Received: model=None"
            with pytest.raises(ConfigError, match=message):
                ctx.forward(batch)
            with pytest.raises(ConfigError, match=message):
                ctx.dump_checkpoint(str(tmp_path / "checkpoint"))
            with pytest.raises(ConfigError, match=message):
                ctx.load_checkpoint(str(tmp_path / "checkpoint"))


class TestTheEmbeddingConfig:
    CONFIG = EmbeddingConfig((5, 5), admit_probability=0.5, weight_bound=3)

    def test_one_that_is_given_is_sent_when_the_context_is_entered(self, trained):
        before = settings_of(trained)
        ctx = eval_ctx(None, self.CONFIG)
        assert settings_of(trained) == before
        with ctx:
            after = settings_of(trained)
        assert after.initializer == self.CONFIG.initializer
        assert after.admission == self.CONFIG.admission
        assert after.weight_bound == 3
        assert after.optimizer == before.optimizer

    def test_the_rows_of_later_trainings_start_by_it(self, job):
        ctx_settings = {"optimizer": SGD(0.0), "embedding_config": EmbeddingConfig()}
        with job.train_ctx(**ctx_settings) as ctx:
            train(ctx)
            with eval_ctx(embedding_config=EmbeddingConfig((5, 5))):
                pass
            train(ctx, [batch_of([300])])
        assert job.read("item", 300).tolist() == [[5.0] * 4]

    def test_it_can_be_set_within_the_context(self, trained):
        with eval_ctx() as ctx:
            ctx.configure_embedding_parameter_servers(EmbeddingConfig((7, 8)))
        assert settings_of(trained).initializer == EmbeddingConfig((7, 8)).initializer

    def test_it_needs_tables(self, job):
        with (
            pytest.raises(ConfigError, match=r"servers without any.*load_embedding"),
            eval_ctx(embedding_config=self.CONFIG),
        ):
            pass
        assert cnt_ctx() is None


class TestCheckpoints:
    def test_a_fresh_job_evaluates_what_another_has_trained(
        self, tmp_path, monkeypatch, model
    ):
        checkpoint = str(tmp_path / "checkpoint")
        with LocalJob(tmp_path, monkeypatch) as job:
            with job.train_ctx(model, embedding_config=EmbeddingConfig((1, 2))) as ctx:
                train(ctx)
            with eval_ctx(model) as ctx:
                ctx.dump_checkpoint(checkpoint, with_jit_model=False)
                expected = evaluate(ctx)
        with LocalJob(tmp_path, monkeypatch, num_servers=3, num_workers=2) as job:
            other = SumOfEmbeddings()
            with eval_ctx(other) as ctx:
                ctx.load_checkpoint(checkpoint)
                np.testing.assert_allclose(evaluate(ctx), expected, rtol=1e-6)
                assert len(ctx.get_embedding_size()) == 3
            assert torch.equal(other.bias, model.bias)
            assert other.bias.any()
            assert job.num_rows() > 0

    def test_embeddings_and_states_go_by_themselves_and_behind(
        self, trained, model, tmp_path
    ):
        rows = trained.read("item", 1, 2)
        folder = str(tmp_path / "rows")
        with eval_ctx() as ctx:
            ctx.dump_embedding(folder, blocking=False)
            ctx.wait_for_dump_embedding()
            ctx.clear_embeddings()
            ctx.load_embedding(folder, blocking=False)
            ctx.wait_for_load_embedding()
            assert np.array_equal(trained.read("item", 1, 2), rows)
            ctx.dump_torch_state_dict(model, folder, "model.pt")
            other = SumOfEmbeddings()
            ctx.load_torch_state_dict(other, f"{folder}/model.pt")
            assert torch.equal(other.bias, model.bias)

    def test_dumps_and_loads_are_waited_for_at_the_end(self, trained, tmp_path):
        folder = str(tmp_path / "rows")
        rows = trained.read("item", 1, 2)
        with eval_ctx() as ctx:
            ctx.dump_embedding(folder, blocking=False)
        assert list((tmp_path / "rows").glob("*/manifest.json"))
        trained.client.clear()
        with eval_ctx() as ctx:
            ctx.load_embedding(folder, blocking=False)
        assert np.array_equal(trained.read("item", 1, 2), rows)

    def test_a_folder_without_a_checkpoint_is_rejected(self, trained, tmp_path):
        with eval_ctx() as ctx, pytest.raises(CheckpointError):
            ctx.load_embedding(str(tmp_path / "nothing"))

    def test_several_trainers_load_in_a_process_group(self, job, monkeypatch, tmp_path):
        env_of_second = {"RANK": "1", "WORLD_SIZE": "2"}
        for name, value in env_of_second.items():
            monkeypatch.setenv(name, value)
        with eval_ctx(SumOfEmbeddings()) as ctx:
            message = (
                r"The 2 trainers of a job must load together.*without a process group"
            )
            with pytest.raises(ConfigError, match=message):
                ctx.load_embedding(str(tmp_path))
            ctx.dump_checkpoint(str(tmp_path / "run"))  # the first one writes
            ctx.dump_torch_state_dict(ctx.model, str(tmp_path / "run"), "dense.pt")
        assert not (tmp_path / "run").exists()
        assert env.get_rank() == 1


class TestWhere:
    def test_it_must_be_in_a_job(self, monkeypatch):
        monkeypatch.delenv("PERSIA_STORE_PORT", raising=False)
        with pytest.raises(ConfigError, match=r"PERSIA_STORE_PORT is not set\. Start"):
            eval_ctx(model=SumOfEmbeddings())
        with pytest.raises(ConfigError, match="PERSIA_STORE_PORT is not set"):
            EmbeddingCtx(PreprocessMode.EVAL)

    def test_before_a_training_there_is_nothing_to_look_up(self, job):
        with eval_ctx(SumOfEmbeddings()) as ctx:
            ctx.wait_servers_ready()
            assert ctx.get_embedding_size() == [0, 0]
            message = r"needs the tables.*servers without any.*first TrainCtx"
            with pytest.raises(ConfigError, match=message):
                ctx.get_embedding_from_data(EVALUATION[0])
            with pytest.raises(ConfigError, match=message):
                evaluate(ctx)
            with job.train_ctx() as training:
                training.wait_servers_ready()
                ctx.wait_servers_ready(DEADLINE_S)
                batch = ctx.get_embedding_from_data(EVALUATION[0])
                assert ctx.prepare_features(batch)[1][0].tolist() == [[0.0] * 4] * 2

    def test_another_error_of_a_lookup_is_not_about_missing_tables(self, job):
        other = TableSpec(name="other", dim=4, optimizer=SGD(1.0))
        job.client.add_tables([other])
        with (
            eval_ctx(SumOfEmbeddings()) as ctx,
            pytest.raises(
                RemoteError, match=r"embedding worker 0 .*Known: \['other'\]"
            ),
        ):
            ctx.get_embedding_from_data(EVALUATION[0])

    @pytest.mark.parametrize("role", ["server", "worker"])
    def test_a_wait_names_the_server_that_does_not_answer(self, trained, role):
        ctx = eval_ctx()
        ctx.wait_servers_ready()
        if role == "server":
            trained.servers[0].stop()
        else:
            trained.workers[0].close()
        with pytest.raises(RequestTimeoutError, match=rf"embedding {role} 0 at tcp"):
            ctx.wait_servers_ready(0.1)
        ctx._disconnect()

    def test_data_loaders_may_send_what_is_evaluated(self, trained, model):
        sending = Sending()
        with eval_ctx(model) as ctx, torch.no_grad():
            num_rows = trained.num_rows()
            batches = iter(DataLoader(StreamingDataset(4), reproducible=True))
            sending.start(trained.data_ctx(), EVALUATION)
            outputs = [ctx.forward(batch)[0].flatten().tolist() for batch in batches]
            assert outputs == evaluate(ctx)
        sending.join()
        assert trained.num_rows() == num_rows
        assert len(trained.buffers[0]) == 0

    @pytest.mark.multiprocess
    def test_another_process_sees_a_running_training(self, job, tmp_path, model):
        config = EmbeddingConfig((1, 2))
        with (
            Processes(tmp_path) as processes,
            job.train_ctx(model, embedding_config=config) as ctx,
        ):
            train(ctx)
            with eval_ctx():  # waits for the updates
                pass
            rows = job.read("item", 1, 2)
            reader = processes.start(
                "reader",
                evaluate_elsewhere,
                env={"PERSIA_STORE_PORT": str(job.book.port)},
            )
            assert reader.process.join(DEADLINE_S * 3) is None
            assert reader.status() == 0, reader.output()
            sums = [float(text) for text in reader.output().split()[-2:]]
            np.testing.assert_allclose(sums, rows.sum(axis=1), rtol=1e-5)
            train(ctx)
