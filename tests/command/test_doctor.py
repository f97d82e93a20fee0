import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from persia_torchrec import env
from persia_torchrec.command import main


def test_a_machine_that_runs_the_tests_will_do():
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    checks = {one["check"]: one for one in json.loads(result.stdout)}
    assert {"python", "versions", "ports", "token", "shared memory", "clock"} <= {
        *checks
    }
    assert all(one["mend"] for one in checks.values() if one["state"] != "ok")
    assert "torchrec" in checks["versions"]["found"]


def test_what_is_wrong_has_the_command_that_mends_it(monkeypatch, tmp_path):
    token = tmp_path / "token"
    token.write_text("a" * 64)
    token.chmod(0o644)
    monkeypatch.setenv("PERSIA_JOB_TOKEN_FILE", str(token))
    monkeypatch.setattr(
        "persia_torchrec.command.doctor.require_set_that_fits", _lacks_torchrec
    )
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert f"chmod 600 {token}" in result.output
    assert "pip install --no-deps torchrec" in result.output


def _lacks_torchrec():
    raise ImportError("Run: pip install --no-deps torchrec")


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_the_token_of_the_users_jobs_is_judged_as_a_job_would(
    monkeypatch, tmp_path, mode
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PERSIA_JOB_TOKEN_FILE", raising=False)
    path = Path(env.token_file("PERSIA_JOB_TOKEN"))
    path.chmod(mode)
    result = CliRunner().invoke(main, ["doctor"])
    is_good = mode == 0o600
    assert result.exit_code == 1 - is_good
    assert (f"chmod 600 {path}" not in result.output) is is_good


def test_a_look_makes_no_token(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PERSIA_JOB_TOKEN_FILE", raising=False)
    monkeypatch.setattr("persia_torchrec.timeouts.VERB_JOIN_S", 0.1)
    for verb in (["doctor"], ["status", "localhost:1"]):
        CliRunner().invoke(main, verb)
    assert not [*tmp_path.rglob("job_token")]
