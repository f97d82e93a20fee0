"""The Adult example learns through kills what it learns without."""

import re
import shutil
from statistics import mean

import pytest

from persia_torchrec import env
from tests.chaos.killing import KILLS, SUPERVISOR, Killer, recovering_job
from tests.support.repository import ROOT

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.skipif(env.data_dir() is None, reason="PERSIA_DATA_DIR is not set"),
]

EXAMPLE = ROOT / "examples/adult_income"
SIZES = {"server": 2, "worker": 2, "loader": 1, "trainer": 1}
TOLERANCE = 0.0015
# The NN worker, which takes one step after each kill as long as there is a file.
SLOWLY = f"""
import sys
import time
from pathlib import Path

sys.path.insert(0, {str(EXAMPLE)!r})
import train

SLOW, STEPS, KILLS = Path("slow"), Path("steps"), Path({KILLS!r})

class Slow(train.DNN):
    num_kills = -1

    def forward(self, *tensors):
        if self.training:
            while SLOW.exists() and KILLS.stat().st_size == self.num_kills:
                time.sleep(0.01)
            self.num_kills = KILLS.stat().st_size
            with STEPS.open("a") as file:
                file.write(".")
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
        steps.touch()
        (folder / KILLS).touch()
        variables = {"PERSIA_DATA_DIR": env.data_dir(), "SEED": str(seed)}
        variables["PERSIA_CHECKPOINT_INTERVAL_S"] = "1"
        scripts = "slowly.py", str(EXAMPLE / "data_loader.py")
        if num_kills:
            slow.touch()
        with recovering_job(folder, *scripts, **variables) as (job, book):
            if num_kills:
                job.has_printed("step 0: ")
                roles = [*SIZES, "coordinator", SUPERVISOR]
                given = job, book, draw, lambda: steps.stat().st_size, roles
                killer = Killer(folder, *given, **SIZES)
                killer.kill(num_kills, most_pause_s=0.3, most_steps=1)
                slow.unlink()
            ended = job.wait()
        assert ended.status == 0, ended.output
        return float(re.findall(r"test AUC (\S+)", ended.output)[-1])

    return learn


def test_kills_cost_no_accuracy(learn, kills, request, record_property):
    seeds = range(1, request.config.getoption("seeds") + 1)
    num_kills = kills(100)
    undisturbed = [learn(seed, 0) for seed in seeds]
    killed = [learn(seed, num_kills) for seed in seeds]
    record_property("kills", num_kills * len(seeds))
    pairs = zip(killed, undisturbed, strict=True)
    measured = (
        f"AUC {mean(killed):.5f}, undisturbed {mean(undisturbed):.5f}, of {len(seeds)} "
        f"seeds; differences {[round(a - b, 5) for a, b in pairs]}"
    )
    record_property("measured", measured)
    assert abs(mean(killed) - mean(undisturbed)) < TOLERANCE, measured
