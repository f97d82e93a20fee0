import json
import os
import subprocess
import sys

import pytest

from persia_torchrec.errors import ConfigError
from persia_torchrec.job import script, torchrun
from persia_torchrec.job.script import run_script, split_module
from tests.support.ports import draw_port
from tests.support.processes import DEADLINE_S
from tests.support.script_jobs import Job

multiprocess = pytest.mark.multiprocess

TELL = """
import json, os, sys
print(json.dumps({name: os.environ.get(name) for name in (
    'RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR',
    'MASTER_PORT')}))
"""


@pytest.fixture(autouse=True)
def _restore_the_interpreter(monkeypatch):
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_a_script_runs_as_python_would_run_it(tmp_path, capsys):
    (tmp_path / "neighbour.py").write_text("name = 'a neighbour'")
    path = tmp_path / "train.py"
    path.write_text(
        "import sys, neighbour\n"
        "print([__name__, __file__, sys.argv, sys.path[0], neighbour.name])\n"
        "assert sys.modules['__main__'].__dict__ is globals()\n"
    )
    run_script(str(path), ["--epochs", "2"])
    seen = ["__main__", str(path), [str(path), "--epochs", "2"], str(tmp_path)]
    assert capsys.readouterr().out == f"{[*seen, 'a neighbour']}\n"


def test_a_module_runs_as_python_would_run_it(tmp_path, capsys, monkeypatch):
    package = tmp_path / "a_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "part.py").write_text("name = 'a part'")
    (package / "train.py").write_text(
        "import sys\n"
        "from . import part\n"
        "print([__name__, __file__, sys.argv, sys.path[0], part.name])\n"
        "assert sys.modules['__main__'].__dict__ is globals()\n"
        "sys.exit(0)\n"
    )
    monkeypatch.chdir(tmp_path)
    run_script("a_package.train", ["--epochs", "2"], is_module=True)
    path = str(package / "train.py")
    seen = ["__main__", path, [path, "--epochs", "2"], str(tmp_path)]
    assert capsys.readouterr().out == f"{[*seen, 'a part']}\n"
    with pytest.raises(
        ConfigError, match=r"module must exist\. Received: 'nowhere\.t'"
    ):
        run_script("nowhere.t", [], is_module=True)
    with pytest.raises(ImportError, match=r"a_package\.nothing"):
        run_script("a_package.nothing", [], is_module=True)


def test_a_script_that_is_missing_is_a_wrong_setting():
    with pytest.raises(
        ConfigError, match=r"must exist\. Received: 'no\.py', looked for"
    ):
        run_script("no.py", [])


@pytest.mark.parametrize("words", [[], ["-m"], ["-m", "-x"], ["--epochs", "2"]])
def test_words_that_name_no_script_are_rejected(words, capsys):
    with pytest.raises(ConfigError, match="must be a file, or -m and the name of"):
        split_module(words)
    with pytest.raises(SystemExit, match="2"):
        script.main(["trainer", *words])
    assert "must be a file, or -m and the name of a module" in capsys.readouterr().err


@multiprocess
def test_nn_workers_and_data_loaders_may_be_modules(processes):
    package = processes.folder / "another_package"
    package.mkdir()
    (package / "__init__.py").write_text("word = 'in a package'")
    (package / "train.py").write_text("from . import word; print(word)")
    job = Job(processes, trainer=1, loader=1)
    variables = {"PERSIA_STORE_PORT": str(job.port)}
    module = ["-m", "another_package.train"]
    started = [
        processes.start(name, main, words, env=variables, cwd=processes.folder)
        for name, main, words in [
            ("loader", script.main, ["loader", *module]),
            ("torchrun", torchrun.main, ["--max-restarts", "0", "--", *module]),
        ]
    ]
    assert [one.status() for one in started] == [0, 0]
    assert all("in a package" in one.output() for one in started)


@pytest.mark.parametrize("ending", ["sys.exit()", "sys.exit(0)", "pass"])
def test_a_script_that_ends_well_returns(tmp_path, ending):
    (tmp_path / "train.py").write_text(f"import sys; {ending}")
    run_script(str(tmp_path / "train.py"), [])


@pytest.mark.parametrize(("ending", "code"), [("3", 3), ("'no data'", "no data")])
def test_a_script_that_ends_badly_raises(tmp_path, ending, code):
    (tmp_path / "train.py").write_text(f"import sys; sys.exit({ending})")
    with pytest.raises(SystemExit) as raised:
        run_script(str(tmp_path / "train.py"), [])
    assert raised.value.code == code


def test_without_a_job_there_is_nothing_to_join(monkeypatch, capfd):
    monkeypatch.delenv("PERSIA_STORE_PORT", raising=False)
    assert script.main(["trainer", "train.py"]) == 1


@multiprocess
def test_trainers_of_one_machine_have_different_local_ranks(processes):
    job = Job(processes, trainer=2)
    trainers = [job.start("trainer", TELL, index=index) for index in range(2)]
    assert [trainer.status() for trainer in trainers] == [0, 0]
    seen = [
        json.loads(next(line for line in t.output().splitlines() if line[0] == "{"))
        for t in trainers
    ]
    assert [one.pop("RANK") for one in seen] == ["0", "1"]
    assert [one.pop("LOCAL_RANK") for one in seen] == ["0", "1"]
    assert seen[0] == seen[1]
    assert seen[0]["MASTER_ADDR"] == "127.0.0.1"
    assert int(seen[0]["MASTER_PORT"]) > 0
    assert seen[0]["WORLD_SIZE"] == seen[0]["LOCAL_WORLD_SIZE"] == "2"


@multiprocess
def test_a_trainer_has_the_rank_that_torchrun_gives_it(processes):
    """Its replica index is that of its machine."""
    # The coordinator waits for torchrun, too: here this process, which does not end.
    job = Job(processes, "--leave-timeout-s", "0.5", trainer=1)
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "1"}
    index_of_machine = {"REPLICA_INDEX": "3", "REPLICA_SIZE": "4"}
    trainer = job.start("trainer", TELL, env={**torchrun, **index_of_machine})
    assert [trainer.status(), job.coordinator.status()] == [0, 0]
    assert '{"RANK": "0", "LOCAL_RANK": null' in trainer.output()  # torchrun's own


@multiprocess
def test_a_trainer_that_finds_no_other_ends_the_job(processes):
    job = Job(processes, "--leave-timeout-s", "0.1", trainer=2)
    trainer = job.start("trainer", TELL, env={"PERSIA_JOIN_TIMEOUT_S": "0.5"})
    for running in (trainer, job.coordinator):
        assert running.status() == 1
        assert "trainer/1/host" in running.output()
    assert "Traceback" not in trainer.output()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "words", "message"),
    [
        ("job.script", ["loader", "no.py"], "The script must exist. Received: 'no.py'"),
        pytest.param(
            *("job.torchrun", ["--", "no.py"], "The script must exist. Received: "),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *("server", ["--global-config", "no.yml"], "no.yml must be a text file"),
            marks=pytest.mark.long,
        ),
        ("server", ["--capacity", "0"], "capacity must be in [1, 4294967294]"),
        ("worker", ["--embedding-config", "no.yml"], "no.yml must be a text file"),
    ],
)
def test_a_mistake_is_told_before_the_job_is_waited_for(
    tmp_path, module, words, message
):
    command = [sys.executable, "-m", f"persia_torchrec.{module}", *words]
    variables = {"PERSIA_STORE_PORT": str(draw_port()), "PERSIA_JOIN_TIMEOUT_S": "1.5"}
    ended = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, **variables},
        stderr=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 1
    told = ended.stderr.splitlines()
    assert message in told[0]
    assert any("waiting for the coordinator" in line for line in told[1:])


@multiprocess
def test_a_missing_script_ends_the_job_at_once(processes):
    job = Job(processes, trainer=1)
    trainer = job.start("trainer", None)
    for running in (trainer, job.coordinator):
        assert running.status() == 1
        assert "The script must exist. Received: " in running.output()


@multiprocess
@pytest.mark.parametrize(
    ("ending", "status", "reason"),
    [
        ("sys.exit(3)", 3, "trainer 0: exit status 3"),
        ("sys.exit('no data')", 1, "trainer 0: no data"),
        (
            "import time; os.kill(os.getpid(), 15); time.sleep(600)",
            *(143, "graceful shutdown (SIGTERM to trainer 0)"),
        ),
        ("os._exit(0)", 0, "was killed"),
    ],
)
def test_every_failure_of_a_script_ends_the_job(processes, ending, status, reason):
    job = Job(processes, trainer=1)
    trainer = job.start("trainer", f"import os, sys; {ending}")
    assert trainer.status() == status
    assert job.coordinator.status() == 1
    assert reason in job.coordinator.output()


@multiprocess
def test_a_script_can_terminate_its_child_process(processes):
    job = Job(processes, trainer=1)
    text = """
import os, signal, time
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    os.write(writing, b"up")
    time.sleep(600)
os.read(reading, 2)
os.kill(child, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
"""
    assert job.start("trainer", text).status() == 0
    assert job.coordinator.status() == 0
