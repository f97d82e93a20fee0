import json

from click.testing import CliRunner

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
