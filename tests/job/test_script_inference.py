"""Training roles end with an error in an inference job."""

import pytest

from persia_torchrec.job import coordinator, script
from tests.support.script_jobs import INFER


@pytest.fixture(autouse=True)
def _an_inference_job(tmp_path, monkeypatch):
    (tmp_path / "global_config.yml").write_text(INFER)
    monkeypatch.setenv("PERSIA_GLOBAL_CONFIG", str(tmp_path / "global_config.yml"))
    monkeypatch.delenv("PERSIA_STORE_PORT", raising=False)


@pytest.mark.parametrize(
    ("run", "who"),
    [
        (lambda: coordinator.main(["--port", "0", "--num-trainers", "1"]), "coordinat"),
        (lambda: script.main(["trainer", "train.py"]), "A NN worker"),
        (lambda: script.main(["loader", "load.py"]), "A data loader"),
    ],
)
def test_a_training_role_is_rejected_in_an_inference_job(run, who, capfd):
    assert run() == 1
    said = capfd.readouterr()
    assert who in said.out + said.err
    assert "must belong to a job that trains" in said.out + said.err
