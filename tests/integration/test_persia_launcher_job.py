"""The adult-income example as PERSIA's users start it on one machine, by honcho."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ports import draw_port
from tests.support.processes import DEADLINE_S
from tests.support.repository import ROOT

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@pytest.mark.long
def test_honcho_runs_the_procfile_without_a_traceback_on_made_up_rows(tmp_path):
    (tmp_path / "env").write_text(f"PERSIA_STORE_PORT={draw_port()}\n")
    nowhere = "http://127.0.0.1:9"  # so that the rows of the example are made up
    with subprocess.Popen(
        [sys.executable, "-m", "honcho", "-e", f".env,{tmp_path / 'env'}", "start"],
        cwd=ROOT / "examples/adult_income",
        env={
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(tmp_path),
            "HTTP_PROXY": nowhere,
            "HTTPS_PROXY": nowhere,
            "OMP_NUM_THREADS": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as honcho:
        try:
            output, _ = honcho.communicate(timeout=DEADLINE_S)
        finally:
            honcho.terminate()  # it ends the processes then, if it has not ended
    assert honcho.returncode == 0, output
    assert "Traceback" not in output
    assert output.count("ready tcp://127.0.0.1:") == 5  # servers and embedding workers
    made_up = [line for line in output.splitlines() if "data: made-up rows" in line]
    assert all("WARNING" in x and "no network" in x for x in made_up), made_up
    of_roles = [re.search("loader|trainer", line)[0] for line in made_up]
    assert sorted(of_roles) == ["loader", "loader", "trainer", "trainer"]
    found = re.search(r"trainer.* test AUC (0\.\d+)", output)
    assert found is not None, output
    assert float(found[1]) > 0.85
