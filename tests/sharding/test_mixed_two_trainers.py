import numpy as np
import pytest

from tests.sharding import mixed_trainers
from tests.sharding.mixed_model import LOCAL, REMOTE
from tests.support.groups import run_trainers
from tests.support.processes import Processes
from tests.support.remote_job import RemoteJob, Servers

pytestmark = pytest.mark.multiprocess

HOLDERS = {"-", "0", "1", "0,1"}


def learn_alone():
    with RemoteJob() as job:
        return mixed_trainers.learn(job.servers.addresses)


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """What two trainers learn on half of each batch each."""
    folder = tmp_path_factory.mktemp("trainers")
    with Servers() as servers, Processes(folder) as processes:
        given = mixed_trainers.run_trainer, 2, servers.addresses, folder
        run_trainers(processes, *given)
    return [np.load(folder / f"{rank}.npz") for rank in range(2)]


def test_two_trainers_learn_what_one_learns_on_the_joined_batches(learnt):
    alone = learn_alone()
    names = alone.keys() - {"placement"}
    assert names > {*REMOTE} | {f"bags.embedding_bags.{name}.weight" for name in LOCAL}
    for name in names:
        np.testing.assert_allclose(learnt[0][name], alone[name], atol=2e-6)


def holders(placement):
    """Return which trainers hold each table."""
    lines = str(placement).splitlines()[1:]
    return {
        line.split()[1]: next(word for word in line.split() if word in HOLDERS)
        for line in lines
    }


def test_each_trainer_reports_which_trainers_hold_a_table(learnt):
    for trainer in learnt:
        found = holders(trainer["placement"])
        assert found.pop("place") in {"0", "1"}  # as the planner likes
        assert found == {"home": "0,1", "term": "0,1", "user": "-", "item": "-"}
