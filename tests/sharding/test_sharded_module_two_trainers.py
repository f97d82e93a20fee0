import contextlib

import numpy as np
import pytest
import torch

from tests.support import two_trainers
from tests.support.groups import run_trainers
from tests.support.places import GPU_PLACES
from tests.support.processes import Processes
from tests.support.remote_job import RemoteJob, Servers
from tests.support.two_trainers import ADAM, CASES, EPOCHS, SGD, TRAININGS

pytestmark = pytest.mark.multiprocess


def train(names, folder, backend="gloo", place=None):
    """Let two trainers train; return what each has learnt, by training and rank."""
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(Servers()) for name in names}
        addresses = {name: started.addresses for name, started in servers.items()}
        processes = stack.enter_context(Processes(folder))
        given = two_trainers.run_trainer, 2, addresses, folder, backend, place
        run_trainers(processes, *given, is_spawned="cuda" in backend)
    return {
        (name, rank): np.load(folder / f"{name} {rank}.npz")
        for name in names
        for rank in range(2)
    }


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    return train(TRAININGS, tmp_path_factory.mktemp("trainers"))


def alone(optimizer, epochs):
    """Train on the batches of both as a single trainer."""
    with RemoteJob() as job:
        return two_trainers.both_alone(job.servers.addresses, optimizer, epochs)


@pytest.mark.parametrize("name", CASES)
def test_every_step_of_every_trainer_has_the_loss_of_plain_torchrec(learnt, name):
    for rank in range(2):
        losses = learnt[name, rank]
        np.testing.assert_allclose(losses["remote"], losses["plain"], rtol=1e-5)
        # It would not mean much if nothing were learnt.
        assert losses["plain"][-20:].mean() < 0.9 * losses["plain"][:20].mean()
    first, second = (learnt[name, rank] for rank in range(2))
    np.testing.assert_array_equal(first["rows"], second["rows"])
    assert not np.array_equal(first["remote"], second["remote"])


def test_adam_steps_once_for_all_trainers(learnt):
    expected = alone(ADAM, [(50, 50)])
    for rank in range(2):
        for half in ("dense", "rows"):
            weights = learnt["Adam", rank][half]
            np.testing.assert_allclose(weights, expected[half], atol=1e-4)


def test_parts_of_all_trainers_are_one_step(learnt):
    with RemoteJob() as job:
        expected = two_trainers.parts_together(job.servers.addresses)
    for rank in range(2):
        for half in ("dense", "rows"):
            weights = learnt["parts", rank][half]
            np.testing.assert_allclose(weights, expected[half], atol=1e-4)


def test_trainers_whose_data_end_unevenly_learn_from_all_of_it(learnt):
    expected = alone(CASES["Adagrad"].optimizer, EPOCHS)
    for rank in range(2):
        for half in ("dense", "rows"):
            weights = learnt["uneven", rank][half]
            np.testing.assert_allclose(weights, expected[half], atol=1e-5)


def test_update_each_adds_gradients_up_as_persia_does(learnt):
    # The dense gradients are averaged all the same: the learning rate makes up for it.
    expected = alone(SGD(2 * 0.5), [(20, 20)])
    for rank in range(2):
        for half in ("dense", "rows"):
            weights = learnt["each", rank][half]
            np.testing.assert_allclose(weights, expected[half], atol=1e-5)


def test_no_gradient_is_lost_or_counted_twice_under_staleness(learnt):
    for rank in range(2):
        rows = learnt["ahead", rank]["rows"]
        assert sorted(set(rows)) == [-50, 0]
        assert np.count_nonzero(rows) == 8 + 8 + 4


def test_a_trainer_that_closes_its_tables_does_not_hold_up_the_others(learnt):
    assert learnt["ended", 0]["num_steps"] == 2
    assert learnt["ended", 1]["num_steps"] == 2 + 3 / 2  # of one trainer of two


def test_without_a_dense_half_a_trainer_without_data_answers_each_pass(learnt):
    for rank in range(2):
        of_trainer = learnt["tables alone", rank]
        assert of_trainer["num_steps"] == 3 / 2  # of one trainer of two
        assert of_trainer["num_answered"] == (3 if rank == 0 else 0)


def test_a_lookup_without_a_backward_pass_is_no_step(learnt):
    for rank in range(2):
        rows = learnt["looks", rank]["rows"]
        assert sorted(set(rows)) == [-4, 0]


def test_trainers_with_other_settings_get_a_warning(learnt):
    for rank in range(2):
        of_rank = learnt["other settings", rank]
        assert "same update. Received: ['joint', 'each'], by rank" in str(
            of_rank["error"]
        )
        assert of_rank["num_before"] == 0
        assert len(of_rank["told"]) == 2  # tables
        for text in of_rank["told"]:
            assert "['SGD(lr=0.1)', 'SGD(lr=0.2)'], by rank" in text


def test_a_trainer_that_vanishes_is_named(learnt):
    assert "none of rank 1 within 0.5 s" in str(learnt["vanished", 0]["error"])


def test_distributed_checkpoints_have_each_row_once_and_load_it(learnt):
    for rank in range(2):
        of_trainer = learnt["saved", rank]
        saved, loaded = of_trainer["saved"], of_trainer["loaded"]
        assert not np.array_equal(of_trainer["moved"], saved)
        were_there = saved != 0  # rows that were not have their initial weights now
        np.testing.assert_array_equal(loaded[were_there], saved[were_there])
    # Each trainer has a block of the weights, and one of Adagrad's state.
    writers = learnt["saved", 0]["writers"].tolist()
    assert sorted(writers) == [f"__{rank}_0.distcp" for rank in (0, 0, 1, 1)]


def test_ordinary_tensors_are_there_when_any_trainer_has_loaded_them(learnt):
    for rank in range(2):
        added = learnt["saved", rank]["added"]
        np.testing.assert_allclose(added, np.ones((30, 8)), rtol=1e-6)


def test_trainers_that_map_ids_each_by_itself_are_rejected(learnt):
    for rank in range(2):
        error = str(learnt["saved", rank]["error"])
        assert "maps ids on each trainer by itself, and 2 trainers" in error


def test_each_backward_pass_of_a_batch_is_a_step_of_all_trainers(learnt):
    for rank in range(2):
        losses = learnt["two passes", rank]
        np.testing.assert_allclose(losses["remote"], losses["plain"], rtol=1e-5)
    assert losses["plain"][-5:].mean() < 0.95 * losses["plain"][:5].mean()


@pytest.mark.parametrize("name", ["scaled", "scaled, accumulated"])
def test_loss_scales_and_dense_weights_stay_equal_when_one_trainer_overflows(
    learnt, name
):
    first, second = (learnt[name, rank] for rank in range(2))
    for what in ("scales", "weights"):
        np.testing.assert_array_equal(first[what], second[what])
    # It falls at once, and doubles after three good steps.
    expected = [1024.0] * 2 + [512.0] * 3 + [1024.0] * 3 + [2048.0] * 2
    num_steps = len(first["scales"]) - 1
    assert first["scales"].tolist()[:-1] == expected[:num_steps]
    assert (first["num_skipped"], second["num_skipped"]) == (0, 1)
    steps = np.abs(np.diff(first["weights"], axis=0)).max(axis=1)
    assert (steps[:-1] > 0).all()  # dense gradients were finite


def test_finite_gradients_of_a_step_that_overflowed_elsewhere_are_applied(learnt):
    rows = learnt["scaled", 0]["rows"]
    moved = np.abs(np.diff(rows, axis=0)).max(axis=(1, 2))
    assert (moved[:-1] > 0).all()


@pytest.mark.parametrize("name", ["scaled, uneven", "scaled, each"])
def test_a_trainer_at_the_end_of_its_data_keeps_the_others_loss_scale(learnt, name):
    first, second = (learnt[name, rank] for rank in range(2))
    # After the fourth step trainer 0 waits, and sees the second overflow at the end.
    expected = [1024.0, 1024.0, 512.0, 512.0, 512.0, 1024.0, 1024.0, 512.0, 512.0]
    assert second["scales"].tolist()[:10] == [*expected, 512.0]
    assert first["scales"].tolist()[:5] == [*expected[:4], 512.0]
    for what in ("scales", "weights"):
        np.testing.assert_array_equal(first[what][:4], second[what][:4])
        np.testing.assert_array_equal(first[what][-5:], second[what][-5:])
    assert second["scales"][-1] > 512  # they went on


BACKENDS = [
    pytest.param("gloo", id="one GPU"),
    pytest.param(
        "nccl",
        marks=pytest.mark.skipif(
            torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each trainer"
        ),
        id="a GPU each",
    ),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("device", "place"), GPU_PLACES)
def test_trainers_on_gpus_train_as_those_on_cpus_do(tmp_path, device, place, backend):
    learnt = train(
        ["Adagrad", "uneven"],
        tmp_path,
        f"cpu:gloo,cuda:{backend}",
        place=None if place == device else place,
    )
    expected = alone(CASES["Adagrad"].optimizer, EPOCHS)
    for rank in range(2):
        losses = learnt["Adagrad", rank]  # of plain TorchRec: on the CPU
        np.testing.assert_allclose(losses["remote"], losses["plain"], rtol=1e-3)
        weights = learnt["uneven", rank]
        np.testing.assert_allclose(weights["rows"], expected["rows"], atol=1e-3)
