"""The Adult example learns through kills what it learns without."""

import re
import shutil
from statistics import mean

import pytest

from persia_torchrec import env
from tests.chaos.killing import SUPERVISOR, Killer, recovering_job
from tests.forked_jobs import ROOT

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.skipif(env.data_dir() is None, reason="PERSIA_DATA_DIR is not set"),
]

EXAMPLE = ROOT / "examples/adult_income"
SIZES = {"server": 2, "worker": 2, "loader": 1, "trainer": 1}
TOLERANCE = 0.0015
# The NN worker, whose steps are slow as long as there is a file: kills come in between.
SLOWLY = f"""
import sys
import time
from pathlib import Path

sys.path.insert(0, {str(EXAMPLE)!r})
import train

class Slow(train.DNN):
    def forward(self, *tensors):
        if self.training and Path("slow").exists():
            with Path("steps").open("a") as file:
                file.write(".")
            time.sleep(0.4)
        return super().forward(*tensors)

train.DNN = Slow
train.main()
"""


@pytest.fixture
def learn(tmp_path, draw):
    """Return a function that trains through kills, and returns the AUC."""

    def learn(seed, num_kills):
        folder = tmp_path / f"{seed} {num_kills}"
        folder.mkdir()
        for name in ("embedding_config.yml", "global_config.yml"):
            shutil.copy(EXAMPLE / name, folder)
        (folder / "slowly.py").write_text(SLOWLY)
        slow, steps = folder / "slow", folder / "steps"
        variables = {"PERSIA_DATA_DIR": env.data_dir(), "SEED": str(seed)}
        variables["PERSIA_CHECKPOINT_INTERVAL_S"] = "1"
        scripts = "slowly.py", str(EXAMPLE / "data_loader.py")
        with recovering_job(folder, *scripts, **variables) as (job, book):
            if num_kills:
                slow.touch()
                job.has_printed("step 0: ")
                roles = [*SIZES, "coordinator", SUPERVISOR]
                given = job, book, draw, lambda: steps.stat().st_size, roles
                Killer(folder, *given, **SIZES).kill(num_kills)
                slow.unlink()
            ended = job.wait()
        assert ended.status == 0, ended.output
        return float(re.findall(r"test AUC (\S+)", ended.output)[-1])

    return learn


def test_kills_cost_no_accuracy(learn, kills, request, record_property):
    seeds = range(1, request.config.getoption("seeds") + 1)
    num_kills = kills(20)
    undisturbed = mean([learn(seed, 0) for seed in seeds])
    killed = mean([learn(seed, num_kills) for seed in seeds])
    record_property("kills", num_kills * len(seeds))
    measured = f"AUC {killed:.5f}, undisturbed {undisturbed:.5f}, of {len(seeds)} seeds"
    record_property("measured", measured)
    assert abs(killed - undisturbed) < TOLERANCE, measured
