"""Two trainers, each option: what PERSIA's names promise about the dense models."""

import numpy as np
import pytest
import torch
from torch import nn

from persia_torchrec.errors import ConfigError, DiscoveryError
from persia_torchrec.persia.distributed import BaguaDistributedOption, DDPOption
from tests.persia import distributed_trainers
from tests.persia.distributed_trainers import LR, Run, loss_of
from tests.support.local_job import LocalJob, run_two_trainers
from tests.support.ports import draw_port
from tests.support.processes import Processes

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

PERIOD = 3
NUM_STEPS = 12
ADAGRAD = torch.optim.Adagrad


def runs_of(folder):
    port = draw_port()
    file = str(folder / "sync file")
    return [
        Run("default", None),
        Run("tcp", DDPOption(backend="gloo", init_method="tcp", master_port=port)),
        Run("file", DDPOption("file", "gloo", sync_file=file)),
        Run("gradient_allreduce", BaguaDistributedOption("gradient_allreduce")),
        Run("bytegrad", BaguaDistributedOption("bytegrad")),
        Run(
            "decentralized",
            BaguaDistributedOption("decentralized"),
            optimizer=ADAGRAD,
        ),
        Run(
            "async",
            BaguaDistributedOption("async", averaging_period=PERIOD),
            optimizer=ADAGRAD,
        ),
        Run("uneven", None, (9, 12)),
        Run("uneven bytegrad", BaguaDistributedOption("bytegrad"), (9, 12)),
        Run("uneven decentralized", BaguaDistributedOption("decentralized"), (9, 12)),
        Run(
            "uneven async",
            BaguaDistributedOption("async", averaging_period=PERIOD),
            (8, 12),
        ),
        Run("scaled", None, overflows=(2,)),
        Run("uneven scaled", None, (5, 12), overflows=(2, 8)),
        Run(
            "async scaled",
            BaguaDistributedOption("async", averaging_period=PERIOD),
            (8, 12),
            overflows=(2,),
        ),
    ]


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """Return the weights, and the loss scales, after each step, by run and rank."""
    folder = tmp_path_factory.mktemp("trainers")
    runs = runs_of(folder)
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        LocalJob(folder, monkeypatch) as job,
        Processes(folder) as processes,
    ):
        run_two_trainers(processes, job, distributed_trainers.run_trainer, runs, folder)
    return {
        (name, rank): np.load(folder / f"{name} {rank}.npy")
        for run in runs
        for name in (run.name, f"scales of {run.name}")
        for rank in range(2)
    }


@pytest.fixture(scope="module")
def by_hand():
    """What plain torch makes of both trainers' batches: weights after each step."""
    model = distributed_trainers.make_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    weights = []
    for number in range(NUM_STEPS):
        losses = []
        for rank in range(2):
            dense, label = parts(rank, number)
            losses.append(loss_of(model([dense], [torch.zeros(1, 1)]), label))
        optimizer.zero_grad()
        (sum(losses) / 2).backward()
        optimizer.step()
        weights.append(distributed_trainers.weights_of(model))
    return np.stack(weights)


def parts(rank, number):
    batch = distributed_trainers.batch(rank, number)
    dense, label = batch.non_id_type_features[0], batch.labels[0]
    return torch.from_numpy(dense.data), torch.from_numpy(label.data)


def each_alone(period):
    """What two trainers learn that step alone and average their weights now and then.

    Adagrad's steps are not linear in the gradient, so that averaging gradients gives
    something else.
    """
    models = [distributed_trainers.make_model(0) for _ in range(2)]
    optimizers = [ADAGRAD(model.parameters(), lr=LR) for model in models]
    weights = []
    for number in range(NUM_STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            dense, label = parts(rank, number)
            optimizer.zero_grad()
            loss_of(model([dense], [torch.zeros(1, 1)]), label).backward()
            optimizer.step()
        if (number + 1) % period == 0:
            mean = np.mean([distributed_trainers.weights_of(m) for m in models], axis=0)
            for model in models:
                nn.utils.vector_to_parameters(
                    torch.from_numpy(mean.copy()), model.parameters()
                )
        weights.append([distributed_trainers.weights_of(model) for model in models])
    return np.array(weights)


@pytest.mark.parametrize("name", ["default", "tcp", "file", "gradient_allreduce"])
def test_averaged_gradients_are_one_training_on_both_trainers_batches(
    learnt, by_hand, name
):
    for rank in range(2):
        np.testing.assert_allclose(learnt[name, rank][:-1], by_hand, atol=1e-6)
    assert np.array_equal(learnt[name, 0], learnt[name, 1])


def test_gradients_of_8_bits_keep_the_models_equal_and_near_the_exact_ones(
    learnt, by_hand
):
    weights = learnt["bytegrad", 0]
    assert np.array_equal(weights, learnt["bytegrad", 1])
    exact = np.concatenate([by_hand, by_hand[-1:]])
    assert 0 < np.abs(weights - exact).max() < 0.02
    assert np.abs(exact[-1] - exact[0]).max() > 0.2  # they went much further


def test_decentralized_steps_alone_and_averages_each_time(learnt):
    both = [learnt["decentralized", rank] for rank in range(2)]
    assert np.array_equal(*both)
    expected = each_alone(period=1)
    for rank in range(2):
        np.testing.assert_allclose(both[rank][:-1], expected[:, rank], atol=1e-5)


def test_async_steps_alone_and_averages_after_its_period(learnt):
    both = [learnt["async", rank] for rank in range(2)]
    expected = each_alone(PERIOD)
    for rank in range(2):
        np.testing.assert_allclose(both[rank][:-1], expected[:, rank], atol=1e-5)
    are_equal = [np.array_equal(*weights) for weights in zip(*both, strict=True)]
    assert are_equal == [False, False, True] * (NUM_STEPS // PERIOD) + [True]


@pytest.mark.parametrize(
    "name", ["uneven", "uneven bytegrad", "uneven decentralized", "uneven async"]
)
def test_trainers_whose_data_differ_end_with_one_model(learnt, name):
    first, second = learnt[name, 0], learnt[name, 1]
    assert len(first) < len(second)
    assert np.array_equal(first[-1], second[-1])
    assert np.abs(first[-1] - first[-2]).max() > 1e-3  # the others' later steps


@pytest.mark.parametrize("name", ["scaled", "uneven scaled"])
def test_loss_scales_stay_equal_when_one_trainers_embeddings_overflow(learnt, name):
    first, second = (learnt[f"scales of {name}", rank] for rank in range(2))
    num_common = len(first) - 1
    assert np.array_equal(first[:num_common], second[:num_common])
    assert first[-1] == second[-1]
    # It falls by PERSIA's factor of 4, and doubles after four good steps in a row.
    assert second[:6].tolist() == [1024, 1024, 256, 256, 256, 256]
    weights = learnt[name, 0], learnt[name, 1]
    assert np.array_equal(*(of_rank[:num_common] for of_rank in weights))
    assert np.array_equal(weights[0][-1], weights[1][-1])
    if name == "uneven scaled":
        assert second[6:].tolist() == [512, 512, 128, 128, 128, 128, 128]


def test_trainers_that_average_weights_have_loss_scales_of_their_own(learnt):
    first, second = (learnt["scales of async scaled", rank] for rank in range(2))
    assert first[:4].tolist() == [1024, 1024, 1024, 2048]
    assert second[:4].tolist() == [1024, 1024, 256, 256]


def test_a_file_of_an_earlier_job_is_rejected(tmp_path, monkeypatch, job):
    file = tmp_path / "sync file"
    file.write_bytes(b"of an earlier job")
    monkeypatch.setenv("WORLD_SIZE", "2")
    option = DDPOption("file", "gloo", sync_file=str(file))
    with pytest.raises(ConfigError, match="sync_file must not exist before the job"):
        job.train_ctx(distributed_option=option)


def test_a_file_that_trainer_0_does_not_make_is_waited_for_in_time(
    tmp_path, monkeypatch, job
):
    monkeypatch.setenv("PERSIA_JOIN_TIMEOUT_S", "0.1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    option = DDPOption("file", "gloo", sync_file=str(tmp_path / "sync file"))
    with pytest.raises(DiscoveryError, match=r"must make sync_file within 0\.1 s"):
        job.train_ctx(distributed_option=option)


def test_trainers_without_a_rendezvous_are_rejected(monkeypatch, job):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match="master_addr must name the host of trainer"):
        job.train_ctx()


def test_nccl_is_rejected_on_the_cpu(job):
    with pytest.raises(ConfigError, match="backend must be 'gloo' on the CPU"):
        job.train_ctx(distributed_option=DDPOption())
