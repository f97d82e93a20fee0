"""A device that pools wrongly is found out by the first batch, and pools plainly then.

The way of a GPU, and its check, run on the CPU here.
"""

import contextlib
import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)

from persia_torchrec import (
    SGD,
    RemoteEmbeddingBagCollectionSharder,
    RemoteEmbeddingCollectionSharder,
    remote_sharders,
)
from persia_torchrec.sharding import first_batch, on_device
from persia_torchrec.sharding.first_batch import PlainBatch
from persia_torchrec.sharding.training_blocks import join
from tests.support import two_trainers
from tests.support.places import CPU, GPU_PLACES
from tests.support.processes import Processes
from tests.support.remote_job import META, RemoteJob, Servers, remote_modules
from tests.support.synchronising import Spy
from tests.support.two_trainers import ADAM, CASES, EPOCHS

SHARDERS = RemoteEmbeddingBagCollectionSharder, RemoteEmbeddingCollectionSharder
NUM_STEPS, NUM_IDS = 4, 12
THE_LINE = "pools the first batch wrongly"


@pytest.fixture
def way_of_a_gpu(monkeypatch):
    for sharder in SHARDERS:
        monkeypatch.setattr(sharder, "POOLS_ON", {"cpu", "cuda"})
        monkeypatch.setattr(sharder, "COMPARES_ON", {"cpu", "cuda"})


class Faulty:
    """The device's sums, wrong by a factor; of the backward pass alone if asked."""

    right = staticmethod(on_device._sum_bags)

    def __init__(self, error, is_forward=True):
        self._error, self._is_forward = error, is_forward

    def __call__(self, matrix, rows, starts, weights):
        sums = self.right(matrix, rows, starts, weights)
        # What the forward pass sums are rows, below 1 here; gradients are above it.
        is_forward = bool((matrix.abs() < 1).all())
        return sums * (1 + self._error) if is_forward == self._is_forward else sums


class Model(nn.Module):
    """Tables of two dims, with all poolings, and weighted bags."""

    def __init__(self, is_weighted=False):
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                NUM_IDS, 4, name="term", feature_names=["ad", "query"], pooling=MEAN
            ),
            EmbeddingBagConfig(NUM_IDS, 8, name="user", feature_names=["user"]),
            EmbeddingBagConfig(NUM_IDS, 4, name="shop", feature_names=["ad"]),
        ]
        self.bags = EmbeddingBagCollection(
            tables=configs, is_weighted=is_weighted, device=META
        )

    def forward(self, ids):
        return self.bags(ids).values()


class Sequences(nn.Module):
    """A row for each id."""

    def __init__(self):
        super().__init__()
        configs = [
            EmbeddingConfig(NUM_IDS, 4, name="term", feature_names=["ad", "query"]),
            EmbeddingConfig(NUM_IDS, 4, name="user", feature_names=["user"]),
        ]
        self.rows = EmbeddingCollection(tables=configs, device=META)

    def forward(self, ids):
        features = self.rows(ids).values()
        return torch.cat([feature.values().flatten() for feature in features])


MEAN = PoolingType.MEAN
MODELS = {
    "bags": Model,
    "weighted bags": lambda: Model(is_weighted=True),
    "sequences": Sequences,
}


def batches(place=CPU):
    """Yield batches; in one of them an id comes in each bag."""
    rng = np.random.default_rng(7)
    for step in range(NUM_STEPS):
        lengths = rng.integers(0, 4, 3 * 6)
        ids = rng.integers(0, NUM_IDS if step != 1 else 1, lengths.sum())
        weights = rng.random(len(ids), dtype=np.float32)
        arrays = ids, weights, lengths.astype(np.int32)
        ids, weights, lengths = [torch.from_numpy(a).to(place) for a in arrays]
        given = ["ad", "query", "user"], ids, weights.requires_grad_()
        yield KeyedJaggedTensor(*given, lengths=lengths)


class Training:
    """What some steps of a model came to."""

    def __init__(self, job, make, num=NUM_STEPS, *, device=CPU, place=CPU, **settings):
        self.sharders = remote_sharders(job.client, SGD(0.1), **settings)
        model = nn.Sequential(make())
        self.model = job.shard(model, self.sharders, device=device)
        self.outputs, self.of_weights = [], []
        for ids in itertools.islice(batches(place), num):
            output = self.model(ids)
            (10 * output.sum() + (output**2).sum()).backward()
            self.outputs.append(output.detach().cpu().numpy())
            if ids.weights().grad is not None:
                self.of_weights.append(ids.weights().grad.cpu().numpy())
        names = [n for m in remote_modules(self.model) for n in m.remote_tables.specs]
        for sharder in self.sharders:
            getattr(sharder, "flush", lambda: None)()
        self.rows = [job.read(name, range(NUM_IDS)) for name in names]

    def require_same(self, other):
        for what in ("outputs", "of_weights", "rows"):
            pairs = zip(getattr(self, what), getattr(other, what), strict=True)
            for found, right in pairs:
                np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5)

    @property
    def first_batch(self):
        return remote_modules(self.model)[0].remote_tables.first_batch


def train_alone(make):
    """Return a training on servers of its own."""
    with RemoteJob() as job:
        return Training(job, make)


def lines(caplog):
    return [r.getMessage() for r in caplog.records if THE_LINE in r.getMessage()]


@pytest.mark.parametrize(
    ("make", "is_forward"),
    [
        pytest.param(
            make, is_forward, id=f"{name}, {'rows' if is_forward else 'grads'}"
        )
        for name, make in MODELS.items()
        for is_forward in (True, False)
        if not (make is Sequences and is_forward)  # each row is given as it is
    ],
)
def test_wrong_sums_are_noticed_and_nothing_wrong_is_learnt(
    way_of_a_gpu, monkeypatch, caplog, make, is_forward
):
    right = train_alone(make)
    assert lines(caplog) == []
    monkeypatch.setattr(on_device, "_sum_bags", Faulty(0.01, is_forward))
    found = train_alone(make)
    assert found.first_batch.is_plain
    assert not found.first_batch.is_open
    (line,) = lines(caplog)
    assert "feature by feature from now on" in line
    found.require_same(right)


def test_wrong_gradients_of_weights_are_noticed(way_of_a_gpu, monkeypatch, caplog):
    make = MODELS["weighted bags"]
    right = train_alone(make)
    kernel = on_device.torchrec_api.weights_gradient
    monkeypatch.setattr(
        on_device.torchrec_api, "weights_gradient", lambda *args: -kernel(*args)
    )
    found = train_alone(make)
    found.require_same(right)
    assert len(found.of_weights) == NUM_STEPS
    assert len(lines(caplog)) == 1


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_right_sums_are_checked_once(way_of_a_gpu, job, monkeypatch, caplog, make):
    pooled, pool = [], PlainBatch.pool

    def note(self, weights):
        pooled.append(self)
        return pool(self, weights)

    monkeypatch.setattr(PlainBatch, "pool", note)
    found = Training(job, make)
    assert not found.first_batch.is_plain
    assert not found.first_batch.is_open
    assert len(pooled) == 1
    assert lines(caplog) == []


def test_an_evaluation_pools_plainly_after_that(way_of_a_gpu, job, monkeypatch):
    monkeypatch.setattr(on_device, "_sum_bags", Faulty(0.5))
    found = Training(job, Model)
    found.model.eval()
    (ids, *_) = batches()
    with torch.no_grad():
        faulty = found.model(ids)
        monkeypatch.undo()
        for sharder in found.sharders:
            if hasattr(sharder, "remote_tables"):
                sharder.remote_tables.first_batch.is_plain = False
        torch.testing.assert_close(faulty + 0, found.model(ids) + 0)


@pytest.mark.parametrize(
    ("wire_dtype", "error", "is_noticed"),
    [
        (torch.float32, 1e-4, True),
        (torch.float16, 5e-3, False),
        (torch.bfloat16, 5e-2, True),
    ],
)
def test_halves_may_differ_by_more(
    way_of_a_gpu, job, monkeypatch, wire_dtype, error, is_noticed
):
    monkeypatch.setattr(on_device, "_sum_bags", Faulty(error))
    found = Training(job, Model, 1, wire_dtype=wire_dtype)
    assert found.first_batch.is_plain == is_noticed


def test_gradients_that_are_not_finite_are_no_difference(way_of_a_gpu, job):
    found = Training(job, Model, 0)
    for module in remote_modules(found.model):
        module.skip_non_finite = True
    (ids, *_) = batches()
    output = found.model(ids)
    (output.sum() * torch.inf).backward()
    assert not found.first_batch.is_open
    assert not found.first_batch.is_plain


def test_the_first_batch_waits_once_for_the_device(way_of_a_gpu, job):
    found = Training(job, Model, 0, staleness=4)
    waits = []
    for ids in batches():
        with Spy() as spy:
            (found.model(ids) + 0).sum().backward()
        waits.append(len(spy.found))
    assert waits == [1, 0, 0, 0]


def test_sums_that_cancel_out_are_no_difference():
    summed = torch.tensor([[1.0], [-1.0]])
    found, plain = torch.tensor([[1e-7]]), torch.tensor([[0.0]])
    assert first_batch._difference(found, plain, summed) < 1e-6
    assert first_batch._difference(found + 1, plain, summed) > 0.9


@pytest.mark.parametrize("which", ["found", "plain"])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_rows_finite_in_only_one_way_differ(which, value):
    both = {"found": torch.zeros(2, 2), "plain": torch.zeros(2, 2)}
    both[which][0, 1] = value
    assert first_batch._difference(**both, summed=torch.ones(1)) == torch.inf


@pytest.mark.parametrize(("device", "place"), GPU_PLACES)
def test_a_gpu_pools_as_the_plain_way_does(job, caplog, device, place):
    for make in MODELS.values():
        found = Training(job, make, device=device, place=place)
        assert not found.first_batch.is_open
        assert not found.first_batch.is_plain
    assert lines(caplog) == []


def be_trainer(rank, addresses, folder):
    """Be one of two trainers with the way of a GPU; the sums of rank 1 are wrong."""
    for sharder in SHARDERS:
        sharder.POOLS_ON = sharder.COMPARES_ON = {"cpu"}
    if rank == 1:
        on_device._sum_bags = lambda *given: 1.5 * Faulty.right(*given)
    two_trainers.TRAININGS["tables alone"] = without_dense_half
    two_trainers.run_trainer(rank, 2, addresses, folder)


def without_dense_half(addresses, _):
    """Train tables alone; rank 0 has no data, and answers each pass of rank 1."""
    with two_trainers.Counting(addresses) as trainer:
        (module,) = remote_modules(trainer.model)
        module.skip_non_finite = True  # as on a GPU, a pass has an end of its own
        agreement = module.remote_tables.agreement
        answered, answer = [], agreement.main_hook
        agreement.main_hook = lambda: answered.append(answer())
        with join(trainer.model):
            for _ in range(3 * dist.get_rank()):
                trainer.step()
        trainer.learnt()
        return {"num_steps": trainer.num_steps(), "num_answered": len(answered)}


TRAININGS = ["uneven", "Adam", "scaled", "scaled, uneven", "tables alone"]


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """Return what two trainers have learnt, by training and rank; and their logs."""
    folder = tmp_path_factory.mktemp("trainers")
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(Servers()) for name in TRAININGS}
        addresses = {name: started.addresses for name, started in servers.items()}
        processes = stack.enter_context(Processes(folder))
        trainers = [
            processes.start(f"trainer {rank}", be_trainer, rank, addresses, folder)
            for rank in range(2)
        ]
        for trainer in trainers:
            assert trainer.status() == 0, trainer.output()
        logs = [trainer.output() for trainer in trainers]
    files = {
        (name, rank): np.load(folder / f"{name} {rank}.npz")
        for name in TRAININGS
        for rank in range(2)
    }
    return files, logs


@pytest.mark.multiprocess
def test_all_trainers_pool_plainly_if_one_pools_wrongly(learnt):
    _, logs = learnt
    assert [log.count(THE_LINE) for log in logs] == [len(TRAININGS)] * 2


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "optimizer", "epochs"),
    [
        pytest.param("Adam", ADAM, [(50, 50)], id="as many batches"),
        pytest.param("uneven", CASES["Adagrad"].optimizer, EPOCHS, id="none at first"),
    ],
)
def test_trainers_of_which_one_pools_wrongly_learn_what_is_right(
    learnt, name, optimizer, epochs
):
    files, _ = learnt
    with RemoteJob() as job:
        addresses = job.servers.addresses
        right = two_trainers.both_alone(addresses, optimizer, epochs)
    for rank in range(2):
        for half in ("dense", "rows"):
            np.testing.assert_allclose(files[name, rank][half], right[half], atol=1e-4)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["scaled", "scaled, uneven"])
def test_the_loss_scale_and_the_first_batch_are_agreed_on_together(learnt, name):
    files, _ = learnt
    first, second = (files[name, rank]["scales"] for rank in range(2))
    assert second.tolist()[:5] == [1024.0, 1024.0, 512.0, 512.0, 512.0]
    np.testing.assert_array_equal(first[:4], second[:4])


@pytest.mark.multiprocess
def test_without_a_dense_half_a_trainer_without_data_answers_each_pass(learnt):
    files, _ = learnt
    for rank in range(2):
        of_trainer = files["tables alone", rank]
        assert of_trainer["num_steps"] == 3 / 2  # of one trainer of two
        assert of_trainer["num_answered"] == (3 if rank == 0 else 0)
