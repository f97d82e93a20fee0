"""Checkpoints as PERSIA's users type them: training continues exactly."""

import io
import uuid
from itertools import islice, repeat
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
import torch
from torch import nn

from persia_torchrec.checkpoint.catalog import Manifest
from persia_torchrec.ctx import InferCtx, eval_ctx
from persia_torchrec.data import DataLoader
from persia_torchrec.embedding import EmbeddingConfig
from persia_torchrec.embedding.optim import Adam
from persia_torchrec.errors import CheckpointError, ConfigError
from persia_torchrec.persia.ctx import train_ctx
from persia_torchrec.persia.utils import get_embedding_worker_services
from tests.support.local_job import ONE_SLOT, Batches, LocalJob, batch_of
from tests.support.servers import DEADLINE_S

pytestmark = pytest.mark.slow


class Dense(nn.Module):
    """A model that TorchScript takes."""

    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(4, 1)

    def forward(
        self, non_id_tensors: list[torch.Tensor], embeddings: list[torch.Tensor]
    ) -> torch.Tensor:
        return self.top(embeddings[0])


class Unscriptable(Dense):
    def forward(self, non_id_tensors, embeddings):
        return self.top(sum(e for e in embeddings))


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start one job after the other; the one before ends."""
    jobs = []

    def start(**settings):
        end()
        jobs.append(LocalJob(tmp_path, monkeypatch, **settings))
        return jobs[-1]

    def end():
        while jobs:
            jobs.pop().__exit__()

    yield start
    end()


def ctx_of(job, *, seed=0, model=None, dense_lr=0.05, lr=0.1, **settings):
    torch.manual_seed(seed)
    model = model or Dense()
    optimizer = torch.optim.Adam(model.parameters(), lr=dense_lr)
    ctx = job.train_ctx(model, Adam(lr), **settings)
    ctx.dense_optimizer = optimizer
    return ctx


def train(ctx, steps):
    """Return the losses of steps, whose batches their numbers say."""
    losses = []
    batches = [step_batch(step) for step in steps]
    for batch in DataLoader(Batches(batches), embedding_staleness=1, reproducible=True):
        output, labels = ctx.forward(batch)
        loss = (output - labels[0]).square().mean()
        ctx.backward(loss)
        losses.append(loss.item())
    return losses


def step_batch(step):
    ids = np.random.default_rng(step).integers(0, 30, (6, 2)).tolist()
    return batch_of(*ids, label=step % 2)


@pytest.mark.slow
@pytest.mark.parametrize(("num_servers", "probability"), [(1, 1.0), (3, 1.0), (2, 0.4)])
def test_a_resumed_run_has_the_losses_of_one_that_was_not_interrupted(
    start, tmp_path, num_servers, probability
):
    folder = str(tmp_path / "run")
    config = EmbeddingConfig(admit_probability=probability)  # drawn batch by batch
    with ctx_of(start(), embedding_config=config) as ctx:
        train(ctx, range(5))
        ctx.embedding_optimizer.param_groups[0]["lr"] = 0.02
        ctx.dense_optimizer.param_groups[0]["lr"] = 0.01
        ctx.dump_checkpoint(folder)
        expected = train(ctx, range(5, 10))
    job = start(num_servers=num_servers)
    with ctx_of(job, seed=1, embedding_config=config) as ctx:
        train(ctx, range(3))
        ctx.load_checkpoint(folder)
        assert train(ctx, range(5, 10)) == pytest.approx(expected, rel=1e-5)
        assert ctx.dense_optimizer.param_groups[0]["lr"] == 0.01
        assert ctx.embedding_optimizer.learning_rates() == {"item": 0.02}


def test_without_the_dense_optimizers_state_the_losses_would_differ(start, tmp_path):
    with ctx_of(start()) as ctx:
        train(ctx, range(5))
        ctx.dump_checkpoint(str(tmp_path / "run"))
        expected = train(ctx, range(5, 10))
    with ctx_of(start(), seed=1) as ctx:
        with eval_ctx() as inner:
            inner.load_checkpoint(str(tmp_path / "run"))
        assert train(ctx, range(5, 10)) != pytest.approx(expected, rel=1e-3)


def test_a_dump_runs_during_the_training_and_is_waited_for(start, tmp_path):
    with ctx_of(start()) as ctx:
        train(ctx, range(5))
        ctx.dump_checkpoint(str(tmp_path), blocking=False)
        before = ctx.model.top.bias.item()
        train(ctx, range(5, 8))
        ctx.wait_for_dump_embedding()
        assert ctx.model.top.bias.item() != before
        ctx.load_checkpoint(str(tmp_path), blocking=False)
        ctx.wait_for_load_embedding()
        assert ctx.model.top.bias.item() == before
        train(ctx, range(5, 8))


def test_the_end_of_the_training_waits_for_a_dump(start, tmp_path):
    job = start()
    with ctx_of(job) as ctx:
        train(ctx, range(5))
        ctx.dump_embedding(str(tmp_path), blocking=False)
    assert (tmp_path / "checkpoint-00000001" / "manifest.json").exists()


def fail_during_a_dump(job, folder):
    with ctx_of(job) as ctx:
        train(ctx, range(5))
        ctx.dump_embedding(folder, blocking=False)
        raise ValueError("a bug of the user's")


def test_an_exception_ends_the_training_and_frees_the_servers(start, tmp_path):
    job = start()
    with pytest.raises(ValueError, match="a bug of the user's"):
        fail_during_a_dump(job, str(tmp_path / "given up"))
    job.client.checkpoints.dump(str(tmp_path / "next"))


def dump_and_fail(ctx, folder):
    """Begin a dump that ends before its manifest, as an interrupted one does."""

    def fail(self, folder):
        raise CheckpointError("interrupted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Manifest, "write", fail)
        ctx.dump_checkpoint(folder, blocking=False)
        ctx.embeddings.checkpoints._dump._outcome.exception(timeout=DEADLINE_S)


def train_and_fail(job, folder):
    with ctx_of(job) as ctx:
        dump_and_fail(ctx, folder)


def test_the_end_of_the_training_reports_of_a_dump_that_failed(start, tmp_path):
    with pytest.raises(CheckpointError, match="interrupted"):
        train_and_fail(start(), str(tmp_path))


@pytest.mark.parametrize("tell", ["wait_for_dump_embedding", "dump_embedding"])
def test_an_interrupted_dump_is_an_error_and_leaves_the_previous_one(
    start, tmp_path, tell
):
    folder = str(tmp_path / "run")
    job = start()
    with ctx_of(job) as ctx:
        train(ctx, range(3))
        ctx.dump_checkpoint(folder)
        rows = job.read("item", *range(30))
        train(ctx, range(3, 6))
        dump_and_fail(ctx, folder)
        with pytest.raises(CheckpointError, match="interrupted"):
            getattr(ctx, tell)(*[folder] * (tell == "dump_embedding"))
        ctx.load_checkpoint(folder)
        np.testing.assert_array_equal(job.read("item", *range(30)), rows)


def test_a_checkpoint_of_other_dims_is_rejected_and_changes_nothing(start, tmp_path):
    with ctx_of(start()) as ctx:
        train(ctx, range(3))
        ctx.dump_checkpoint(str(tmp_path / "run"))
    job = start(embedding_config=ONE_SLOT.replace("dim: 4", "dim: 8"))
    model = nn.Linear(8, 1)
    with job.train_ctx(model) as ctx:
        before = model.weight.detach().clone()
        with pytest.raises(CheckpointError, match="dim"):
            ctx.load_checkpoint(str(tmp_path / "run"))
        assert torch.equal(model.weight, before)
        with pytest.raises(CheckpointError, match="dim"):
            ctx.load_embedding(str(tmp_path / "run"))


def test_a_state_of_another_model_is_rejected(start, tmp_path):
    with ctx_of(start()) as ctx:
        ctx.dump_torch_state_dict(nn.Linear(7, 7), str(tmp_path), "other.pt")
        with pytest.raises(CheckpointError, match=r"other.pt must fit the Dense"):
            ctx.load_torch_state_dict(ctx.model, str(tmp_path / "other.pt"))
        (tmp_path / "none.pt").write_bytes(b"nothing")
        with pytest.raises(CheckpointError, match=r"must be a file of torch.save"):
            ctx.load_torch_state_dict(ctx.model, str(tmp_path / "none.pt"))


def test_embeddings_alone_come_and_go_without_the_model(start, tmp_path):
    job = start()
    with ctx_of(job) as ctx:
        train(ctx, range(3))
        ctx.dump_embedding(str(tmp_path))  # waits for the updates so far
        rows = job.read("item", *range(30))
        train(ctx, range(3, 6))
        with pytest.raises(CheckpointError, match=r"dense.pt must exist"):
            ctx.load_checkpoint(str(tmp_path))
        bias = ctx.model.top.bias.item()
        ctx.load_embedding(str(tmp_path))
        np.testing.assert_array_equal(job.read("item", *range(30)), rows)
        assert ctx.model.top.bias.item() == bias


def dense_files(folder):
    return {file.name: file.read_bytes() for file in folder.glob("*.pt")}


def test_a_complete_dump_replaces_the_dense_files_at_persias_paths(start, tmp_path):
    # What fails leaves nothing, and the next one has its number.
    first, second = [tmp_path / f"checkpoint-{n:08d}" for n in (1, 2)]
    with ctx_of(start()) as ctx:
        train(ctx, range(2))
        ctx.dump_checkpoint(str(tmp_path), with_jit_model=True)
        at_first = dense_files(tmp_path)
        assert at_first == dense_files(first)
        assert at_first.keys() >= {"dense.pt", "jit_dense.pt", "opt.pt"}
        bias = ctx.model.top.bias.item()
        train(ctx, range(2, 4))
        dump_and_fail(ctx, str(tmp_path))
        assert dense_files(tmp_path) == at_first
        ctx.load_torch_state_dict(ctx.model, str(tmp_path / "dense.pt"))
        assert ctx.model.top.bias.item() == bias
        train(ctx, range(2, 4))
        with pytest.raises(CheckpointError, match="interrupted"):
            ctx.wait_for_dump_embedding()
        ctx.dump_checkpoint(str(tmp_path))
    jit = {"jit_dense.pt": at_first["jit_dense.pt"]}
    assert dense_files(tmp_path) == dense_files(second) | jit != at_first


class Handler:
    """What TorchServe calls, as PERSIA's page on inference shows it."""

    def initialize(self, context):
        folder = Path(context.system_properties["model_dir"])
        file = folder / context.manifest["model"]["serializedFile"]
        self.model = load_script(file.read_bytes())
        self.persia_context = InferCtx(get_embedding_worker_services(), device_id=None)
        self.persia_context.wait_for_serving()

    def preprocess(self, data):
        batch = bytes(data[0].get("batch"))
        batch = self.persia_context.get_embedding_from_bytes(batch, None)
        return self.persia_context.prepare_features(batch)

    def inference(self, data):
        non_id_tensors, embeddings, labels = data
        assert labels is None
        with torch.no_grad():
            return self.model(non_id_tensors, embeddings)

    def postprocess(self, data):
        return [data.flatten().tolist()]

    def handle(self, data, context):
        return self.postprocess(self.inference(self.preprocess(data)))


def test_a_handler_of_torchserve_predicts_as_the_evaluation(
    start, tmp_path, monkeypatch
):
    job, batch = start(), batch_of([1, 2], [3], [], requires_grad=False)
    with ctx_of(job) as ctx:
        train(ctx, range(5))
        ctx.dump_checkpoint(str(tmp_path), with_jit_model=True)
        with eval_ctx() as evaluation:
            looked_up = evaluation.get_embedding_from_data(batch)
            expected = evaluation.forward(looked_up)[0].flatten().tolist()
        address = job.workers[0].address.removeprefix("tcp://")
        monkeypatch.setenv("EMBEDDING_WORKER_SERVICE", address)
        handler = Handler()
        manifest = {"model": {"serializedFile": "jit_dense.pt"}}
        context = SimpleNamespace(
            system_properties={"model_dir": str(tmp_path)}, manifest=manifest
        )
        handler.initialize(context)
        answer = handler.handle([{"batch": bytearray(batch.to_bytes())}], context)
        handler.persia_context.close()
    assert answer == [expected]


def test_the_scripted_model_gives_the_same_output(start, tmp_path):
    with ctx_of(start()) as ctx:
        train(ctx, range(3))
        ctx.dump_checkpoint(str(tmp_path), with_jit_model=True)
        embeddings = [torch.arange(8.0).reshape(2, 4)]
        expected = ctx.model([], embeddings)
    file = tmp_path / "jit_dense.pt"
    assert torch.equal(load_script(file.read_bytes())([], embeddings), expected)


def test_a_model_that_cannot_be_scripted_begins_no_checkpoint(start, tmp_path):
    with ctx_of(start(), model=Unscriptable()) as ctx:
        with pytest.raises(ConfigError, match=r"Received: Unscriptable"):
            ctx.dump_checkpoint(str(tmp_path / "run"), with_jit_model=True)
        assert not (tmp_path / "run").exists()


def test_names_of_files_that_would_meet_are_rejected(start, tmp_path):
    with ctx_of(start()) as ctx:
        with pytest.raises(ConfigError, match="distinct names"):
            ctx.dump_checkpoint(str(tmp_path / "run"), opt_filename="dense.pt")
        with pytest.raises(ConfigError, match="plain one"):
            ctx.dump_checkpoint(str(tmp_path / "run"), "manifest.json")
        assert not (tmp_path / "run").exists()


def test_any_url_that_fsspec_knows_will_do(start, monkeypatch):
    monkeypatch.setenv("PERSIA_CKPT_DIR", "memory://any")  # servers take it from there
    # One server: two readers of a file in fsspec's memory disturb each other.
    url = f"memory://{uuid.uuid4()}/run"
    with ctx_of(start(num_servers=1)) as ctx:
        train(ctx, range(3))
        ctx.dump_checkpoint(url, with_jit_model=True)
        with fsspec.open(f"{url}/jit_dense.pt") as file:
            assert load_script(file.read()).top.bias.item() == ctx.model.top.bias.item()
        expected = train(ctx, range(3, 6))
    with ctx_of(start(num_servers=1), seed=1) as ctx:
        ctx.load_checkpoint(url)
        assert train(ctx, range(3, 6)) == expected
        ctx.dump_torch_state_dict(ctx.model, url, "jit.pt", is_jit=True)
        with fsspec.open(f"{url}/jit.pt") as file:
            assert load_script(file.read()).top.bias.item() == ctx.model.top.bias.item()


def test_the_loss_scale_is_kept(start, tmp_path):
    with ctx_of(start()) as ctx:
        ctx._scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
        train(ctx, range(3))
        ctx.dump_checkpoint(str(tmp_path))
        ctx._scaler = torch.amp.GradScaler("cpu")
        ctx.load_checkpoint(str(tmp_path))
        assert ctx._scaler.get_scale() == 512.0


def load_script(data):
    with pytest.warns((DeprecationWarning, FutureWarning), match=r"torch.jit"):
        return torch.jit.load(io.BytesIO(data))


def train_and_stop(job, batches, num, **settings):
    """Train some batches of a data set; the end of the block saves a checkpoint."""
    with ctx_of(job, checkpoint_interval_s=1000, **settings) as ctx:
        loader = DataLoader(Batches(batches), embedding_staleness=1, reproducible=True)
        for batch in islice(loader, num):
            output, _ = ctx.forward(batch)
            ctx.backward(output.sum())


@pytest.mark.parametrize("differs_at", [0, 2])
def test_a_resume_that_gets_other_batches_is_an_error(
    start, tmp_path, monkeypatch, differs_at
):
    monkeypatch.setenv("PERSIA_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(
        train_ctx, "_numbers", repeat(1)
    )  # as in processes of their own
    batches = [*map(step_batch, range(5))]
    others = [*batches]
    others[differs_at] = step_batch(7)
    job = start()
    train_and_stop(job, batches, 3)
    told = "another first batch" if not differs_at else "another batch 2"
    with pytest.raises(ConfigError, match=told):
        train_and_stop(job, others, 2)
    train_and_stop(job, batches, 1)
    train_and_stop(job, others, 1, on_other_batches="continue")
