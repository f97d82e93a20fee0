"""Under a loss scale, the servers get the gradients of the loss that it scales."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torchrec import EmbeddingBagConfig
from torchrec.distributed.types import ShardingEnv

from persia_torchrec import SGD, RemoteEmbeddingBagCollectionSharder
from persia_torchrec.errors import ConfigError, JobError
from persia_torchrec.sharding.backward_pass import Agreement
from persia_torchrec.sharding.planned import dense_parameters
from persia_torchrec.sharding.table_control import SharderApi, TrainerTables
from tests.support.groups import run_trainers, trainer_of_group
from tests.support.models import Tower
from tests.support.places import GPU_PLACES
from tests.support.processes import Processes, wait_until
from tests.support.remote_job import CPU, META, Bags, kjt_of, remote_modules, shard

DIM = 4
ONE = ShardingEnv.from_local(1, 0)
TABLES = [EmbeddingBagConfig(10, DIM, name="term", feature_names=["ad"])]
IDS = kjt_of({"ad": [[0, 1], [2], []]})


class Trainer:
    """A model on the servers, its sharder, and a dense optimizer."""

    def __init__(self, job, device=CPU, **settings):
        torch.manual_seed(0)
        self.job = job
        self.sharder = RemoteEmbeddingBagCollectionSharder(
            job.client, SGD(1.0), **settings
        )
        # Of its dense layer, which autocast runs in 16 bits.
        self.model = shard(Tower(TABLES), self.sharder, device=device)
        (self.module,) = remote_modules(self.model)
        dense = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(dense, lr=0.1)

    def close(self):
        self.sharder.close()

    def use(self, **settings):
        self.scaler = torch.amp.GradScaler("cpu", **settings)
        self.sharder.use_grad_scaler(self.scaler)

    def step(self, dtype=torch.bfloat16, factor=1.0):
        """Train one step; the loss is the sum of the outputs times ``factor``."""
        with torch.autocast("cpu", dtype):
            outputs = self.model(IDS)
        self.optimizer.zero_grad()
        self.sharder.optimizer.zero_grad()
        self.scaler.scale(outputs.float().sum() * factor).backward()
        self.scaler.step(self.optimizer)
        self.scaler.step(self.sharder.optimizer)
        self.scaler.update()

    def rows(self):
        return self.job.read("term", range(3))

    def moves_of(self, **settings):
        """Return how far the rows go in a step."""
        before = self.rows()
        self.step(**settings)
        return before - self.rows()


@pytest.fixture
def trainer(job):
    trainer = Trainer(job)
    trainer.model(IDS)  # so that there are rows
    trainer.use(enabled=False)
    yield trainer
    trainer.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_equal_those_of_the_loss_without_the_scale(trainer, dtype):
    plain = trainer.moves_of(dtype=dtype, factor=0.0)
    assert not plain.any()
    weight = trainer.model.module.over.weight.detach().to(dtype).float().numpy()
    trainer.use(init_scale=2.0**14)
    moves = trainer.moves_of(dtype=dtype)
    np.testing.assert_allclose(moves, np.repeat(weight, 3, axis=0), rtol=2e-2)
    assert trainer.module.num_skipped == 0


def test_the_scale_of_the_moment_counts(trainer):
    trainer.use(init_scale=4.0, growth_interval=1, growth_factor=8.0)
    moves = [trainer.moves_of() for _ in range(3)]
    assert trainer.scaler.get_scale() == 4.0 * 8**3
    for move in moves[1:]:  # the dense weights have moved a little
        np.testing.assert_allclose(move, moves[0], atol=0.5)


def test_gradients_that_float16_cannot_hold_arrive_by_the_scale(job):
    """Where autocast computes in float16, small gradients flush to zero."""
    trainer = Trainer(job, wire_dtype=torch.float16)
    rate = 2.0**20  # so that such gradients move rows
    trainer.sharder.set_learning_rate(rate)
    trainer.model(IDS)
    factor = 2.0**-26
    trainer.use(enabled=False)
    assert not trainer.moves_of(dtype=torch.float16, factor=factor).any()
    trainer.use(init_scale=2.0**16)
    weight = trainer.model.module.over.weight.detach().numpy()
    moves = trainer.moves_of(dtype=torch.float16, factor=factor)
    expected = np.repeat(weight, 3, axis=0) * rate * factor
    np.testing.assert_allclose(moves, expected, rtol=1e-2)
    trainer.close()


class TestOverflow:
    def test_nothing_moves_and_the_scale_falls(self, trainer):
        trainer.use(init_scale=2.0**20)
        weights = dense_parameters(trainer.model)
        dense = [p.detach().clone() for p in weights]
        assert not trainer.moves_of(dtype=torch.float16, factor=1e4).any()
        for weight, before in zip(weights, dense, strict=True):
            assert torch.equal(weight, before)
        assert trainer.scaler.get_scale() == 2.0**19
        assert trainer.module.num_skipped == 1
        wait_until(lambda: trainer.job.total("open_batches") == 0, "the batch ends")

    def test_training_continues_when_the_scale_fits(self, trainer):
        trainer.use(init_scale=2.0**20)
        for _ in range(12):
            trainer.step(dtype=torch.float16, factor=1.0)
        skipped = trainer.module.num_skipped
        assert 0 < skipped < 12
        # The dense half overflows more often: each optimizer skips its own steps.
        assert trainer.scaler.get_scale() <= 2.0 ** (20 - skipped)
        assert trainer.moves_of(dtype=torch.float16).any()

    def test_the_scaler_hears_of_embeddings_whose_dense_half_is_finite(self, trainer):
        trainer.use(init_scale=2.0)
        pooled = trainer.model.module.bags(IDS).values()
        loss = trainer.scaler.scale(pooled.sum())
        pooled.register_hook(lambda grad: grad * torch.inf)
        loss.backward()
        trainer.scaler.step(trainer.sharder.optimizer)
        trainer.scaler.update()
        assert trainer.scaler.get_scale() == 1.0
        assert trainer.module.num_skipped == 1

    def test_one_bad_batch_of_several_is_enough_until_zero_grad(self, trainer):
        optimizer = trainer.sharder.optimizer
        (stand_in,) = optimizer.param_groups[0]["params"]
        trainer.use(init_scale=2.0)
        for factor, grad in [(1.0, 0), (torch.inf, torch.inf), (1.0, torch.inf)]:
            loss = trainer.model.module.bags(IDS).values().sum()
            (trainer.scaler.scale(loss) * factor).backward()
            assert stand_in.grad == grad
        assert trainer.module.num_skipped == 1
        optimizer.zero_grad()
        assert stand_in.grad is None


def overflow_and_recover(trainer, scaler, ids=IDS, *, is_late=False):
    """Return the loss scale at first, after an overflow, and after two good steps.

    A GPU that is late is far behind this thread when the scaler asks.
    """
    scales = [scaler.get_scale()]
    for factor in (torch.inf, 1.0, 1.0):
        pooled = trainer.model.module.bags(ids).values()
        pooled.register_hook(lambda grad, by=factor: grad * by)
        scaler.scale(pooled.sum()).backward()
        if is_late:
            torch.cuda._sleep(10**8)
        scaler.step(trainer.sharder.optimizer)
        scaler.update()
        trainer.sharder.optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def test_the_scale_falls_after_an_overflow_and_rises_again(trainer):
    trainer.use(init_scale=2.0, growth_interval=2)
    assert overflow_and_recover(trainer, trainer.scaler) == [2.0, 1.0, 1.0, 2.0]
    assert trainer.module.num_skipped == 1


@pytest.mark.parametrize(("device", "place"), GPU_PLACES)
def test_on_a_gpu_the_scale_falls_after_an_overflow_and_rises_again(job, device, place):
    trainer = Trainer(job, device)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0, growth_interval=2)
    trainer.sharder.use_grad_scaler(scaler)
    scales = overflow_and_recover(trainer, scaler, IDS.to(place), is_late=True)
    assert scales == [2.0, 1.0, 1.0, 2.0]
    trainer.close()


def test_placeholders_are_on_the_device_of_the_embeddings(trainer):
    """A scaler copies its findings from device to device without waiting."""
    control = SharderApi()
    tables = control.remote_tables = TrainerTables()
    tables.add(trainer.module.pipeline, trainer.module.spec.tables, ONE, META)
    optimizer = control.optimizer
    (placeholder,) = optimizer.param_groups[0]["params"]
    assert placeholder.device == META


def test_trainers_that_cannot_agree_have_no_loss_scale(job):
    sharder = RemoteEmbeddingBagCollectionSharder(job.client, SGD(1.0), update="each")
    sharder.use_grad_scaler(torch.amp.GradScaler("cpu"))
    two = ShardingEnv.from_local(2, 0)
    module = sharder.put_on_servers(Bags(TABLES).bags, two, CPU)
    pooled = module(IDS).values()
    with pytest.raises(ConfigError, match="must have a process group, to agree"):
        pooled.sum().backward()
    sharder.close()


def test_a_backward_pass_that_fails_leaves_the_next_one_alone(trainer):
    trainer.use(init_scale=2.0, growth_interval=2)
    weight = torch.ones(1, requires_grad=True)
    earlier = 2 * weight  # and so its backward pass is later

    def fail(_):
        raise ArithmeticError("behind the embeddings")

    earlier.register_hook(fail)
    pooled = trainer.model.module.bags(IDS).values()
    with pytest.raises(ArithmeticError, match="behind the embeddings"):
        trainer.scaler.scale(pooled.sum() + earlier.sum()).backward()
    trainer.sharder.optimizer.zero_grad()
    assert overflow_and_recover(trainer, trainer.scaler) == [2.0, 1.0, 1.0, 2.0]


@pytest.mark.slow
@pytest.mark.parametrize("factor", [torch.nan, 0.0, 1.0])
def test_at_a_scale_of_0_steps_are_skipped_as_in_plain_torch(trainer, caplog, factor):
    """Which has no floor either, and divides by 0 without an error."""
    trainer.use(init_scale=0.0)
    for _ in range(45):
        assert not trainer.moves_of(factor=factor).any()
    assert trainer.module.num_skipped == 45
    assert trainer.scaler.get_scale() == 0.0
    lines = [r.message for r in caplog.records if "no row was updated" in r.message]
    assert len(lines) == 1


def test_skipped_steps_that_are_not_in_a_row_are_nothing_to_warn_of(trainer, caplog):
    trainer.use(init_scale=2.0)
    for number in range(40):
        trainer.step(factor=1.0 if number % 20 == 19 else torch.nan)
    assert not [r for r in caplog.records if "no row was updated" in r.message]


def test_a_loss_scale_is_not_read_in_a_step(trainer, monkeypatch):
    def read(_):
        raise AssertionError("a GPU would be waited for")

    trainer.use(init_scale=8.0)
    monkeypatch.setattr(torch.amp.GradScaler, "get_scale", read)
    trainer.step()


def test_without_a_scaler_a_bad_gradient_is_the_servers_to_reject(trainer):
    pooled = trainer.model.module.bags(IDS).values()
    (pooled[0].sum() * torch.inf).backward()
    trainer.sharder.flush()
    assert trainer.module.num_skipped == 0
    assert trainer.module.pipeline.tally.total.num_refused == 2  # ids 0 and 1


def test_without_a_dense_half_the_agreement_itself_counts_who_still_trains(job):
    agreement = Agreement(dist.GroupMember.WORLD, CPU)
    agreement.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with Join([agreement]):
        assert [agreement.any(is_true) for is_true in (True, False)] == [True, False]
    assert agreement.scaler.get_scale() == 2.0


def agree(rank, folder):
    """Be one of two trainers that agree once; rank 1 ends before the second time."""
    with trainer_of_group(rank, 2, folder / "group"):
        agreement = Agreement(dist.GroupMember.WORLD, CPU)
        assert agreement.any(rank == 1)
        if rank == 0:
            message = "All trainers must take part when they agr"
            with pytest.raises(JobError, match=message):
                agreement.any(False)


@pytest.mark.multiprocess
def test_an_agreement_without_one_of_the_trainers_is_an_error(tmp_path):
    with Processes(tmp_path) as processes:
        run_trainers(processes, agree, tmp_path)
