"""The examples of PERSIA's documentation run, with data of our own.

Of the pages on the contexts, on the training context and on customization: each call
has the names and the order of its arguments there. Where an example cannot have run as
it stands, in PERSIA either, this is what is written here:

| on the page | here |
|---|---|
| `IDTypeFeature(data, "user_id")` | the name first, as the signature has it |
| `Dataloder`, `Dataloader` | `DataLoader` |
| `StreamDataset` | `StreamingDataset` |
| `PersiaDataset` | `IterableDataset` |
| `DataLoader(..., is_training=False)` | without: batches say `requires_grad=False` |
| `np.bool` | `np.bool_`: NumPy had taken the other away until 2.0 |
| `np.hstack` of shapes `(5,)` and `(5, 1)` | both `(5, 1)` |
| `ctr_with_name`, `datalaoder`, `loader` | the variable that was assigned |
| `persia_context`, `batch` | `infer_ctx`, `persia_training_batch` |
| `PersiaBatch(id_type_features=x, y, z, ...)` | all by name |
| commas left out between arguments | with commas |
| `TrainCtx`, `EmbeddingConfig` not imported | imported |
| `TrainCtx(embedding_config=...)` alone | with optimizers and model |
| `test_dataset`, `test_interval` not defined | defined |
| `init_method="file"` alone | with the `sync_file` that it needs |
| a model moved by `model.cuda(device_id)`, `backend = "nccl"` | where there is CUDA |
"""

from pathlib import Path

import numpy as np
import pytest
import torch

import persia_torchrec
from persia_torchrec.ctx import (
    DataCtx,
    EmbeddingCtx,
    InferCtx,
    PreprocessMode,
    TrainCtx,
    eval_ctx,
)
from persia_torchrec.data import DataLoader, IterableDataset, StreamingDataset
from persia_torchrec.embedding.optim import SGD, Adagrad, Adam
from persia_torchrec.embedding.table_defaults import EmbeddingConfig
from persia_torchrec.persia.batch import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia_torchrec.persia.distributed import BaguaDistributedOption, DDPOption
from persia_torchrec.persia.global_config import load_global_config
from tests.integration.persia_page_scripts import Scripts
from tests.support.local_job import LocalJob, Sending

pytestmark = pytest.mark.slow

TWO_SLOTS = """
feature_index_prefix_bit: 8
slots_config:
  user_id: {dim: 4}
  photo_id: {dim: 4, sqrt_scaling: true}
"""
ONE_SLOT = """
slots_config:
  id_type_feature: {dim: 4}
"""
BATCH_SIZE = 5


class DNN(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(4 + 4 + 1 + 1 + 2, 1)

    def forward(
        self,
        non_id_type_feature_tensors: list[torch.Tensor],
        id_type_feature_embedding_tensors: list[torch.Tensor],
    ):
        height, income, both, image = non_id_type_feature_tensors
        assert (image.dtype, image.shape) == (torch.uint8, (BATCH_SIZE, 224, 224, 3))
        dense = [height / 200, income / 40_000, both / 40_000]
        columns = torch.cat([*dense, *id_type_feature_embedding_tensors], dim=1)
        return torch.sigmoid(self.out(columns))


def make_id_type_features():
    id_type_features = []
    user_id_batch_data = [
        np.array([700, 701], dtype=np.uint64),
        np.array([700], dtype=np.uint64),
        np.array([], dtype=np.uint64),
        np.array([700, 701, 724], dtype=np.uint64),
        np.array([700] * 200, dtype=np.uint64),
    ]
    id_type_features.append(IDTypeFeature("user_id", user_id_batch_data))
    photo_id_batch_data = [
        np.array([2**44, 701], dtype=np.uint64),
        np.array([8000], dtype=np.uint64),
        np.array([5], dtype=np.uint64),
        np.array([9, 701, 1], dtype=np.uint64),
        np.array([8001] * 200, dtype=np.uint64),
    ]
    id_type_features.append(IDTypeFeature("photo_id", photo_id_batch_data))
    return id_type_features


def make_non_id_type_features():
    non_id_type_features = []
    height_batch_data = np.array([[150], [190], [171], [168], [2]], dtype=np.float32)
    non_id_type_features.append(NonIDTypeFeature(height_batch_data, name="height"))
    income_batch_data = np.array([[9], [80], [700], [0], [4e4]], dtype=np.float32)
    non_id_type_features.append(NonIDTypeFeature(income_batch_data, name="income"))
    income_with_height = np.hstack([height_batch_data, income_batch_data])
    non_id_type_features.append(
        NonIDTypeFeature(income_with_height, name="income_with_height")
    )
    image_data = np.ones((5, 224, 224, 3), dtype=np.uint8)
    non_id_type_features.append(NonIDTypeFeature(image_data, name="LSVR_image"))
    return non_id_type_features


def make_labels():
    labels = []
    ctr_batch_data = np.array([1, 0, 0, 1, 0], dtype=np.bool_)
    labels.append(Label(ctr_batch_data, name="ctr"))
    income_batch_data = np.array([[9], [80], [700], [0], [4e4]], dtype=np.float32)
    labels.append(Label(income_batch_data, name="income"))
    ctr_with_income = np.hstack([ctr_batch_data.reshape(-1, 1), income_batch_data])
    labels.append(Label(ctr_with_income, "ctr_with_income"))
    return labels


def make_loader(num_batches=3):
    for _ in range(num_batches):
        yield make_non_id_type_features(), make_id_type_features(), make_labels()


class TrainData(IterableDataset):
    def __iter__(self):
        for non_id_type_features, id_type_features, labels in make_loader():
            yield PersiaBatch(
                id_type_features,
                non_id_type_features=non_id_type_features,
                labels=labels,
                requires_grad=True,
            )


@pytest.fixture
def job(tmp_path, monkeypatch):
    with LocalJob(tmp_path, monkeypatch, TWO_SLOTS) as job:
        yield job


@pytest.fixture
def device_id():
    """Return None, as the page has it for the CPU."""


@pytest.fixture
def model():
    return DNN()


def train(ctx, dataloader):
    """Train as the page on TrainCtx does; return the batches and the last loss."""
    loss_fn = torch.nn.BCELoss(reduction="mean")
    batches = []
    for persia_training_batch in dataloader:
        output, labels = ctx.forward(persia_training_batch)
        loss = loss_fn(output, labels[0].float().reshape(-1, 1))
        scaled_loss = ctx.backward(loss)
        assert torch.equal(scaled_loss, loss)
        batches.append(persia_training_batch)
    return batches


class TestDataTypes:
    def test_id_type_features_may_have_samples_without_ids(self):
        user_id, photo_id = make_id_type_features()
        assert user_id.lengths.tolist() == [2, 1, 0, 3, 200]
        assert photo_id.batch_size == 5

    def test_an_image_and_joined_columns_are_features(self):
        shapes = [feature.data.shape for feature in make_non_id_type_features()]
        assert shapes == [(5, 1), (5, 1), (5, 2), (5, 224, 224, 3)]

    def test_each_label_keeps_its_dtype(self, job, model):
        with job.train_ctx(model) as ctx:
            for batch in DataLoader(TrainData()):
                _, _, labels = ctx.prepare_features(batch)
        assert [label.dtype for label in labels] == [torch.bool, *[torch.float32] * 2]
        assert [tuple(label.shape) for label in labels] == [(5,), (5, 1), (5, 2)]
        assert labels[2][:, 0].tolist() == labels[0].tolist() == [1, 0, 0, 1, 0]
        assert torch.equal(labels[2][:, 1:], labels[1])


class TestDataCtx:
    def test_a_loader_sends_and_a_trainer_receives(self, job, model):
        def batches():
            for non_id_type_features, id_type_features, labels in make_loader():
                yield PersiaBatch(
                    id_type_features=id_type_features,
                    non_id_type_features=non_id_type_features,
                    labels=labels,
                    requires_grad=True,
                )

        sending = Sending()
        buffer_size = 15
        streaming_dataset = StreamingDataset(buffer_size)
        data_loader = DataLoader(streaming_dataset)
        with job.train_ctx(model) as ctx:
            received = iter(data_loader)
            sending.start(job.data_ctx(), batches())
            assert len(train(ctx, received)) == 3
        sending.join()

    def test_a_batch_may_have_no_ids_at_all(self, tmp_path, monkeypatch):
        empty = IDTypeFeature("id_type_feature", np.array([[]] * 5, dtype=np.uint64))
        id_type_features = [empty]
        persia_batch = PersiaBatch(id_type_features, requires_grad=False)
        with LocalJob(tmp_path, monkeypatch, ONE_SLOT) as job, job.train_ctx() as ctx:
            batches = iter(DataLoader(StreamingDataset()))
            with DataCtx(10, None) as data_ctx:
                data_ctx.send_data(persia_batch)
            (batch,) = batches
            assert not batch.is_training
            _, (embedding,), labels = ctx.prepare_features(batch)
            assert embedding.tolist() == [[0.0] * 4] * 5
            assert labels is None
            assert job.num_rows() == 0


class TestEmbeddingCtx:
    def test_a_model_is_evaluated_outside_of_a_training(self, job, model, device_id):
        with job.train_ctx(model) as training:
            train(training, DataLoader(TrainData()))
            with eval_ctx() as inner:
                expected = self.outputs_of(inner)
        rows = job.num_rows()
        with EmbeddingCtx(PreprocessMode.EVAL, model=model, device_id=device_id) as ctx:
            assert self.outputs_of(ctx) == expected
        assert job.num_rows() == rows > 0

    @staticmethod
    def outputs_of(ctx):
        outputs = []
        for non_id_type_features, id_type_features, labels in make_loader():
            persia_batch = PersiaBatch(
                id_type_features,
                non_id_type_features=non_id_type_features,
                labels=labels,
                requires_grad=False,
            )
            persia_training_batch = ctx.get_embedding_from_data(persia_batch)
            (output, label) = ctx.forward(persia_training_batch)
            assert label[0].tolist() == [1, 0, 0, 1, 0]
            outputs.append(output.flatten().tolist())
        return outputs


class TestInferCtx:
    def test_embeddings_come_from_workers_by_their_addresses(
        self, tmp_path, monkeypatch, device_id
    ):
        with LocalJob(tmp_path, monkeypatch, ONE_SLOT, num_workers=3) as job:
            config = EmbeddingConfig((1, 2))
            with job.train_ctx(embedding_config=config) as ctx:
                ids = IDTypeFeatureWithSingleID(
                    "id_type_feature", np.array([4, 5], np.uint64)
                )
                label = Label(np.zeros((2, 1), dtype=np.float32))
                batch = ctx.start_lookup(
                    PersiaBatch([ids], labels=[label]),
                    DataLoader(TrainData())._settings,
                )
                ctx.backward(ctx.forward(batch)[0].sum())
            id_type_feature = IDTypeFeatureWithSingleID(
                "id_type_feature", np.array([4, 5, 6], np.uint64)
            )
            persia_batch = PersiaBatch([id_type_feature], requires_grad=False)
            ports = [worker.address.rpartition(":")[2] for worker in job.workers]
            embedding_worker_address_list = [f"localhost: {port}" for port in ports]
            with InferCtx(
                embedding_worker_address_list, device_id=device_id
            ) as infer_ctx:
                infer_ctx.wait_for_serving()
                for _ in embedding_worker_address_list:  # in turn
                    persia_training_batch = infer_ctx.get_embedding_from_bytes(
                        persia_batch.to_bytes(),
                    )
                    (
                        non_id_type_feature_tensors,
                        id_type_feature_embedding_tensors,
                        label_tensors,
                    ) = infer_ctx.prepare_features(persia_training_batch)
                    assert non_id_type_feature_tensors == []
                    assert label_tensors is None
                    (embedding,) = id_type_feature_embedding_tensors
                    expected = job.read("id_type_feature", 4, 5, 6)
                    assert embedding.tolist() == expected.tolist()
                    assert embedding[:2].all()


class TestTrainCtx:
    def test_optimizers_first_and_the_rest_by_name(self, job, model, device_id):
        embedding_optimizer = persia_torchrec.embedding.optim.SGD(lr=1e-3)
        dense_optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        before = model.out.weight.clone()
        with TrainCtx(
            embedding_optimizer,
            dense_optimizer,
            mixed_precision=False,
            model=model,
            device_id=device_id,
        ) as ctx:
            dataloader = DataLoader(TrainData())
            assert len(train(ctx, dataloader)) == 3
        assert not torch.equal(model.out.weight, before)
        assert job.num_rows() == 3 + 7

    @pytest.mark.parametrize("optimizer", [SGD(1e-3), Adagrad(1e-3), Adam(1e-3)])
    def test_every_embedding_optimizer_trains(self, job, model, optimizer):
        with job.train_ctx(model, optimizer, embedding_config=EmbeddingConfig()) as ctx:
            train(ctx, DataLoader(TrainData()))
            initial = job.read("user_id", 700)
            train(ctx, DataLoader(TrainData()))
        assert not np.array_equal(job.read("user_id", 700), initial)

    def test_the_embedding_config_reports_how_rows_start_and_end(self, job, model):
        embedding_config = EmbeddingConfig(
            emb_initialization=(-1, 1), admit_probability=0.8, weight_bound=1
        )
        with job.train_ctx(model, SGD(1e3), embedding_config=embedding_config) as ctx:
            train(ctx, DataLoader(TrainData()))
        users = job.read("user_id", 700, 701, 724)
        photos = job.read("photo_id", 2**44, 701, 8000, 5, 9, 1, 8001)
        rows = np.abs(np.vstack([users, photos]))
        assert rows.max() == 1
        # Each id is drawn in every batch that has it, until it has a row.
        assert rows.any(axis=1).sum() == job.num_rows() <= len(rows)

    def test_a_distributed_option_of_ddp(self, job, model, tmp_path):
        backend = "gloo"
        ddp_option = DDPOption(backend=backend, init_method="tcp")
        self.train_with(model, ddp_option)
        sync_file = str(tmp_path / "sync")
        DDPOption(backend="nccl", init_method="file", sync_file=sync_file)

    @pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad", "async"])
    def test_a_distributed_option_of_bagua(self, job, model, algorithm):
        bagua_args = {}
        bagua_option = BaguaDistributedOption(algorithm, **bagua_args)
        self.train_with(model, bagua_option)

    @staticmethod
    def train_with(model, option):
        embedding_optimizer = SGD(lr=1e-3)
        dense_optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        before = model.out.weight.clone()
        with TrainCtx(
            embedding_optimizer,
            dense_optimizer,
            mixed_precision=False,
            model=model,
            distributed_option=option,
        ) as ctx:
            train(ctx, DataLoader(TrainData()))
        assert not torch.equal(model.out.weight, before)


class TestCheckpoints:
    def test_dump_and_load_take_their_arguments_by_name_and_by_position(
        self, job, model, tmp_path
    ):
        dst_dir = str(tmp_path / "checkpoint")
        with job.train_ctx(model) as ctx:
            train(ctx, DataLoader(TrainData()))
            ctx.dump_checkpoint(
                dst_dir,
                dense_model_filename="d.pt",
                jit_dense_model_filename="j.pt",
                opt_filename="o.pt",
                blocking=False,
                with_jit_model=False,
            )
            ctx.wait_for_dump_embedding()
            rows, num_rows = job.read("user_id", 700), job.num_rows()
            ctx.clear_embeddings()
            ctx.load_checkpoint(dst_dir, None, "d.pt", "o.pt", False)
            ctx.wait_for_load_embedding()
            assert np.array_equal(job.read("user_id", 700), rows)
            ctx.clear_embeddings()
        with eval_ctx(model) as ctx:
            ctx.load_checkpoint(dst_dir, None, "d.pt", True)
            assert sum(ctx.get_embedding_size()) == num_rows
            ctx.dump_checkpoint(str(tmp_path / "second"), "e.pt", "f.pt", True, False)
        assert list((tmp_path / "second").glob("*/e.pt"))


def test_the_global_config_of_the_page_can_be_read(tmp_path):
    path = Path(tmp_path / "global_config.yml")
    path.write_text(
        "common_config:\n  job_type: Train\n"
        "embedding_parameter_server_config:\n  capacity: 4321\n"
    )
    assert load_global_config(path).embedding_parameter_server.capacity == 4321


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.slow
def test_the_complete_example_runs_as_a_job(tmp_path):
    with Scripts(tmp_path).start() as job:
        ended = job.wait()
    assert ended.status == 0, ended.output
    assert ended.line(r"tested (\d+) times") == "4"
    within = ended.line(r"accuracy within the training (\S+)")
    assert ended.line(r"accuracy after the training (\S+)") == within
    assert float(within) > 0.75
