import json

import pytest
from click.testing import CliRunner

from persia_torchrec import timeouts
from persia_torchrec.command import doctor, main

# What `openssl rand -hex 32` gives.
TOKEN = "e973c884b827ae8d54caca07fb4ab3032479b284e168c24ddcd59b0f4b72b60a"


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
    monkeypatch.setattr(doctor, "require_set_that_fits", _lacks_torchrec)
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert f"chmod 600 {token}" in result.output
    assert "pip install --no-deps torchrec" in result.output


@pytest.mark.parametrize(
    ("token", "mode", "state", "found"),
    [
        ("a" * 64, 0o600, "note", "64 characters, 1 of them different: 0 bits at most"),
        ("0123456789abcdef", 0o600, "note", "must be random, of 96 bits or more"),
        (TOKEN, 0o644, "bad", "a file that others cannot read"),
        (TOKEN, 0o600, "ok", "600"),
    ],
)
def test_a_token_in_the_home_of_a_user_must_be_random_and_private(
    monkeypatch, tmp_path, token, mode, state, found
):
    for name in ("PERSIA_JOB_TOKEN_FILE", "PERSIA_JOB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / ".persia_torchrec" / "job_token"
    file.parent.mkdir()
    file.write_text(token)
    file.chmod(mode)
    result = CliRunner().invoke(main, ["doctor", "--json"])
    checks = {one["check"]: one for one in json.loads(result.stdout)}
    assert checks["token"]["state"] == state
    assert found in checks["token"]["found"]
    assert token not in result.output


def _lacks_torchrec():
    raise ImportError("Run: pip install --no-deps torchrec")


def test_a_look_makes_no_token(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PERSIA_JOB_TOKEN_FILE", raising=False)
    monkeypatch.setattr(timeouts, "VERB_JOIN_S", 0.1)
    for verb in (["doctor"], ["status", "localhost:1"]):
        CliRunner().invoke(main, verb)
    assert not [*tmp_path.rglob("job_token")]
