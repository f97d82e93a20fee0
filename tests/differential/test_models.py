"""Few of the random models of ``make differential``; those of one trainer."""

import pytest

from tests.differential.drawing import PLANTS, draw
from tests.differential.run import run_alone

pytestmark = pytest.mark.usefixtures("group")

IN_PLAIN, BY_FORMULAS, PLANTED = 57, 179, 57


@pytest.mark.parametrize("seed", [IN_PLAIN, BY_FORMULAS])
def test_a_random_model_trains_on_servers_as_it_must(seed):
    result = run_alone(draw(seed, most_trainers=1))
    assert result.is_equal, result


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_fault_is_found(plant):
    result = run_alone(draw(PLANTED, most_trainers=1, plant=plant))
    assert not result.is_equal, result


def test_the_models_are_of_both_sorts():
    models = [draw(seed, most_trainers=1) for seed in (IN_PLAIN, BY_FORMULAS)]
    assert [model.runs_in_plain for model in models] == [True, False]


def test_a_seed_repeats_its_model():
    assert draw(IN_PLAIN) == draw(IN_PLAIN) != draw(BY_FORMULAS)
