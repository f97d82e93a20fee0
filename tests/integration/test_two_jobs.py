"""A job that trains, and processes of other jobs that come to its port."""

import contextlib

import pytest

from persia_torchrec.errors import TokenError
from persia_torchrec.job import coordinator, script
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.persia.utils import dump_yaml
from persia_torchrec.rpc.connections import Connections
from persia_torchrec.rpc.greeting import Greeting
from persia_torchrec.rpc.messages import Header, Kind, encode_json
from tests.support import helped
from tests.support.forked_jobs import ForkedJob
from tests.support.inference_job import run_server, run_worker
from tests.support.processes import DEADLINE_S, Processes, wait_until

TRAIN = "from tests.support import helped_training as t; t.train_while_others_come()"
LOAD = "from tests.support import helped; helped.send()"
SCRIPTS = ("trainer", "loader")
ROLES = (*SCRIPTS, "server", "worker")


class Comers:
    """Processes that come to the port of a job that trains already."""

    def __init__(self, processes: Processes, port: str, config: str) -> None:
        self._processes = processes
        self._config = config
        self._port = port
        self.started = {}

    def come(self, name, role, *, job_id="", index=0, size=1):
        env = {
            "PERSIA_STORE_PORT": self._port,
            "PERSIA_JOB_ID": job_id,
            "PERSIA_EMBEDDING_CONFIG": self._config,
            "REPLICA_INDEX": str(index),
            "REPLICA_SIZE": str(size),
        }
        call = {
            "coordinator": (
                coordinator.main,
                ["--port", self._port, "--trainers", "1"],
            ),
            "trainer": (script.main, ["trainer", __file__]),
            "loader": (script.main, ["loader", __file__]),
            "server": (run_server,),
            "worker": (run_worker,),
        }[role]
        self.started[name] = self._processes.start(name, *call, env=env)

    def rejections(self):
        """Wait until all have ended badly; return the one error of each."""
        errors = {}
        for name, running in self.started.items():
            assert running.status() == 1, name
            output = running.output()
            assert "Traceback" not in output
            (errors[name],) = (x for x in output.splitlines() if "ERROR" in x)
            assert self._port in errors[name]
        return errors


def is_rejected_by(role, address):
    """Ask a process of the job in the name of another; it must not answer."""
    connections = Connections(role, [address], greeting=Greeting("theirs"))
    with contextlib.closing(connections):
        question = (Header(Kind.HELLO), [encode_json(None)])
        reply = connections[0].send(*question, timeout_s=DEADLINE_S, what="asking")
        with pytest.raises(TokenError, match=f"{role} 0 of job 'theirs'. Received"):
            reply.result(DEADLINE_S)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_process_of_another_job_at_the_port_ends_and_the_job_continues(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "load.py").write_text(LOAD)
    (tmp_path / "global.yml").write_text("{}")
    config = tmp_path / "embedding.yml"
    dump_yaml(helped.SLOTS, config)
    with (
        Processes(tmp_path) as processes,
        ForkedJob(
            *(tmp_path, "train"),
            *("--nn_worker", "train.py", "--data_loader", "load.py"),
            *("--embedding_config", str(config), "--global_config", "global.yml"),
        ) as job,
    ):
        ours, port = job.job_id, str(job.port)
        wait_until((tmp_path / "training").exists, "the job trains")
        comers = Comers(processes, port, str(config))
        comers.come("their coordinator", "coordinator", job_id="theirs")
        for role in ROLES:
            comers.come(f"their {role}", role, job_id="theirs")
            comers.come(f"second {role}", role)  # by one file of the environment
        for role in SCRIPTS:
            comers.come(f"further {role}", role, index=1, size=2)
        errors = comers.rejections()
        with contextlib.closing(AddressBook.join("localhost", int(port))) as book:
            for role in ("server", "worker"):
                (address,) = book.addresses(role, timeout_s=DEADLINE_S)
                is_rejected_by(f"embedding {role}", address)
        (tmp_path / "go").touch()
        ended = job.wait()
    assert ended.status == 0, ended.output
    trained = (tmp_path / "trained.txt").read_text()
    assert trained == f"{helped.NUM_BATCHES} {helped.NUM_BATCHES} 1"
    lines = ended.output.splitlines()
    told = "\n".join(line for line in lines if "rejected a client" not in line)
    assert ended.output.count("is for embedding") == 2  # of the server, of the worker
    for word in ("theirs", "JobMismatch", "with the same number"):
        assert word not in told
    assert "address already in use" in errors["their coordinator"].lower()
    for role in ROLES:
        theirs = f"belong to job '{ours}'. Received: job 'theirs'. Two jobs use"
        assert theirs in errors[f"their {role}"]
        taken = f"process must be {role} 0 in job '{ours}', at port {port}."
        assert taken in errors[f"second {role}"]
    for role in SCRIPTS:
        alike = f"Received: 2 from {role} 1, 1 from another"
        assert alike in errors[f"further {role}"]
