"""Checkpoints of trainers whose data end at different steps, within ``join``."""

from contextlib import closing

import numpy as np
import pytest

from persia_torchrec import EmbeddingClient
from persia_torchrec.checkpoint import catalog
from tests.support import uneven_trainers
from tests.support.groups import run, run_group_to_a_kill
from tests.support.processes import Processes
from tests.support.remote_job import Servers
from tests.support.uneven_trainers import IDS_OF_A_TRAINER, expected_trainings

pytestmark = pytest.mark.multiprocess


def steps_saved(folder):
    """Return the steps of the checkpoints of a run, in their order."""
    found = [*catalog.saved_states(folder / "run")]
    return [catalog.Saved.read(one).step for one in reversed(found)]


def trainings_of(servers, size):
    """Return how often each trainer's ids were trained, by trainer."""
    with closing(EmbeddingClient.connect(servers.addresses)) as client:
        client.learn_tables()
        ids = np.arange(size * IDS_OF_A_TRAINER, dtype=np.uint64)
        counts = -client.read("id", ids)[:, 0].astype(int)
    return counts.reshape(size, -1)


def results(outputs):
    """Return what is printed of the dense half, which all trainers must agree on."""
    told = {output.rpartition("; dense ")[2].splitlines()[0] for output in outputs}
    assert len(told) == 1, told
    return told.pop()


def train(folder, passes, *lives, sizes=(2, 2, 2), **settings):
    """Train, each life up to the step of its kill, and then to the end.

    Returns:
        What the trainers of the last life printed, and how often ids were trained.
    """
    folder.mkdir(exist_ok=True)
    with Servers(2) as servers, Processes(folder) as processes:
        for life, dies_at in enumerate([*lives, 0]):
            size = sizes[life]
            act = run_group_to_a_kill if dies_at else run
            given = (lambda rank: rank), size, servers.addresses, folder, passes
            names = processes, "uneven", uneven_trainers.train
            outputs = act(*names, *given, dies_at, settings, life=life, size=size)
        return outputs, trainings_of(servers, len(passes[0]))


@pytest.mark.parametrize(
    "nums",
    [
        (0, 32),
        pytest.param((12, 32), marks=pytest.mark.long),
        pytest.param((32, 10), marks=pytest.mark.long),
    ],
)
def test_the_end_of_a_training_is_saved_for_any_last_trainer(tmp_path, nums):
    outputs, counts = train(tmp_path, [nums])
    assert steps_saved(tmp_path) == [5, 10, 15, 20, 25, 30, 32]
    assert (counts == expected_trainings([nums])).all()
    results(outputs)


@pytest.mark.parametrize(
    "dies_at", [(22,), pytest.param((13, 4), marks=pytest.mark.long)]
)
def test_a_training_of_which_one_has_ended_continues_at_its_last_checkpoint(
    tmp_path, dies_at
):
    passes = [(10, 30), (4, 6)]
    undisturbed, _ = train(tmp_path / "undisturbed", passes)
    outputs, counts = train(tmp_path / "killed", passes, *dies_at)
    assert (counts == expected_trainings(passes)).all()
    assert results(outputs) == results(undisturbed)
    assert "checkpoint-" in outputs[0]
    assert [int(o.partition("trained ")[2].split(";")[0]) for o in outputs] == [14, 36]


def test_what_fewer_trainers_leave_out_is_named(tmp_path):
    outputs, counts = train(tmp_path, [(10, 30)], 22, sizes=(2, 1))
    assert (counts[0] == expected_trainings([(10, 30)])[0]).all()
    assert (
        "trainers that continue: 1, of 2 that have saved. Left out: of trainer 1 "
        "'num_seen', the position after 20 batches of pass 1"
    ) in outputs[0]


def test_more_trainers_than_have_saved_a_position_are_an_error(tmp_path):
    with pytest.raises(AssertionError) as raised:
        train(tmp_path, [(10, 30, 30)], 22, sizes=(2, 3))
    assert (
        "ConfigError: A training that 2 trainers have saved must continue with as "
        "many, or fewer: the position in the data cannot be divided among more. "
        "Received: 3 trainers. Start 2"
    ) in str(raised.value)
