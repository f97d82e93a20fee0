"""A PERSIA user's scripts run as whole jobs, and their mistakes end in words."""

import re

import pytest

from tests.support.faults import kill
from tests.support.persia_scripts import EMBEDDING_CONFIG, Scripts

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
]


@pytest.fixture
def scripts(tmp_path):
    return Scripts(tmp_path)


def test_a_training_may_stop_before_the_end_of_its_data(scripts):
    with scripts.start(
        *("--servers", "2", "--embedding_workers", "2"),
        *("--data_loaders", "2", "--trainers", "1"),
        num_batches=400,
        LAST_BATCH="60",
    ) as job:
        ended = job.wait()
    assert ended.status == 0, ended.output
    result = r"rank 0: trained 60 batches, accuracy (0\.\d+), dense"
    assert float(ended.line(result)) > 0.8
    tests = re.findall(r"test accuracy (\S+), rows \[(\d+), (\d+)\]", ended.output)
    assert len(tests) == 6
    assert float(tests[0][0]) < float(tests[-1][0])
    assert sum(map(int, tests[-1][1:])) == 40 + 60  # every user, every photo
    assert all(log for log in ended.logs.values())
    workers = {f"worker {index}" for index in range(2)}
    loaders = {f"loader {index}" for index in range(2)}
    assert workers | loaders < ended.logs.keys()


@pytest.mark.long
def test_two_trainers_whose_data_differ_end_with_the_same_dense_model(scripts):
    with scripts.start("--trainers", "2", num_batches=41) as job:
        ended = job.wait()
    assert ended.status == 0, ended.output
    results = r"rank (\d): trained (\d+) batches, accuracy 0\.\d+, dense (\w+)"
    trained = {
        rank: (num, dense) for rank, num, dense in re.findall(results, ended.output)
    }
    assert [trained[rank][0] for rank in "01"] == ["21", "20"]
    assert trained["0"][1] == trained["1"][1]


def test_a_killed_server_ends_the_job_and_the_logs_name_it(scripts):
    with scripts.start(*("--servers", "2"), num_batches=100_000) as job:
        job.has_printed("current idx: 5 ")
        victim = job.pid("server 1")
        kill(victim)
        ended = job.wait()
    assert ended.status != 0
    last = ended.logs["coordinator 0"].splitlines()[-1]
    assert f"job failed: server 1 (process {victim}) was killed; its log: " in last
    for member in ("worker 0", "loader 0", "trainer 0"):
        log = ended.logs[member]
        assert f"{member} ends: server 1 has failed" in log, log
        assert "Traceback" not in log


def test_an_unknown_key_of_the_embedding_config_ends_the_job(scripts):
    scripts.write(
        "embedding_config.yml", EMBEDDING_CONFIG.replace("sqrt_scaling", "sqrt_scale")
    )
    with scripts.start(num_batches=10) as job:
        ended = job.wait()
    assert ended.status != 0
    message = r"embedding_config.yml.*photo_id.*sqrt_scale.*sqrt_scaling"
    last = ended.logs.pop("coordinator 0").splitlines()[-1]
    named = re.search(rf"job failed: (\w+ \d): .*{message}", last)
    assert named is not None, last
    assert re.search(message, ended.logs[named[1]]), ended.logs[named[1]]
    # Several members read the file: a second one may fail before it hears of the first.
    for member, log in ended.logs.items():
        ends = f"{member} ends: {named[1]} has failed"
        assert ends in log or re.search(message, log), log


@pytest.mark.long
def test_a_missing_script_ends_all_roles_and_the_last_line_names_it(scripts):
    with scripts.start("--nn_worker", "nowhere.py", num_batches=10) as job:
        ended = job.wait()
    assert ended.status != 0
    last = ended.logs["coordinator 0"].splitlines()[-1]
    assert (
        "trainer 0: ConfigError: The script must exist. Received: 'nowhere.py'" in last
    )
    for member in ("server 0", "worker 0", "loader 0"):
        log = ended.logs[member]
        assert f"{member} ends: trainer 0 has failed" in log, log
