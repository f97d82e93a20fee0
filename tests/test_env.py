import os
from pathlib import Path

import pytest

from persia_torchrec import env
from persia_torchrec.errors import ConfigError

NUMBERS = [
    (env.get_rank, "RANK", 0),
    (env.get_local_rank, "LOCAL_RANK", 0),
    (env.get_world_size, "WORLD_SIZE", 1),
    (env.get_replica_index, "REPLICA_INDEX", 0),
    (env.get_replica_size, "REPLICA_SIZE", 1),
]
FDS = [
    (env.supervisor, "PERSIA_SUPERVISOR"),
    (env.supervisor_parent, "PERSIA_SUPERVISOR_PARENT"),
    (env.listen_fd, "PERSIA_LISTEN_FD"),
    (env.memory_fd, "PERSIA_MEMORY_FD"),
]
PATHS = [
    (env.embedding_config_path, "PERSIA_EMBEDDING_CONFIG"),
    (env.global_config_path, "PERSIA_GLOBAL_CONFIG"),
    (env.data_dir, "PERSIA_DATA_DIR"),
]


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch):
    names = [name for _, name, *_ in NUMBERS + PATHS]
    stores = ["PERSIA_STORE_PORT", "PERSIA_STORE_HOST", "PERSIA_STORE_HOST_ENV"]
    for name in [*names, *stores, "LOG_LEVEL", "NODES"]:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("read", "name", "default"), NUMBERS)
def test_a_number_is_read_and_has_a_default(monkeypatch, read, name, default):
    assert read() == default
    monkeypatch.setenv(name, "")
    assert read() == default
    monkeypatch.setenv(name, "3")
    assert read() == 3


@pytest.mark.parametrize(("read", "name", "default"), NUMBERS)
def test_an_invalid_number_is_rejected_by_name(monkeypatch, read, name, default):
    monkeypatch.setenv(name, "two")
    with pytest.raises(ConfigError, match=f"^{name} must be an integer. .*'two'"):
        read()
    monkeypatch.setenv(name, str(default - 1))
    with pytest.raises(ConfigError, match=f"^{name} must be >= {default}. Received"):
        read()


@pytest.mark.parametrize(("read", "name"), FDS)
def test_a_process_or_descriptor_is_read_or_none(monkeypatch, read, name):
    monkeypatch.delenv(name, raising=False)
    assert read() is None
    monkeypatch.setenv(name, "")
    assert read() is None
    monkeypatch.setenv(name, "0")
    assert read() == 0
    monkeypatch.setenv(name, "x")
    with pytest.raises(ConfigError, match=f"^{name} must be an integer"):
        read()


@pytest.mark.parametrize(("read", "name"), PATHS)
def test_a_path_is_read_or_none(monkeypatch, read, name):
    assert read() is None
    monkeypatch.setenv(name, "/data/file.yml")
    assert read() == "/data/file.yml"


@pytest.mark.parametrize("blanks", [" {}", "{} ", "\t{}\r\n"])
def test_blanks_around_a_value_are_not_part_of_it(monkeypatch, blanks):
    values = {"PERSIA_STORE_PORT": "29400", "PERSIA_STORE_HOST": "coordinator"}
    values |= {"PERSIA_JOB_ID": "ads-7", "RANK": "3", "LOG_LEVEL": "debug"}
    for name, value in {**values, "PERSIA_EMBEDDING_CONFIG": "/a b/e.yml"}.items():
        monkeypatch.setenv(name, blanks.format(value))
    assert env.job_store() == ("coordinator", 29400, "ads-7")
    assert env.get_rank() == 3
    assert env.log_level() == "DEBUG"
    assert env.embedding_config_path() == "/a b/e.yml"
    monkeypatch.setenv("RANK", blanks.format(""))
    assert env.get_rank() == 0


def test_persias_way_to_set_all_numbers(monkeypatch):
    for _, name, _ in NUMBERS:
        monkeypatch.setenv(name, "7")
    env.set_env(rank=0, world_size=2)
    assert [os.environ.get(name) for _, name, _ in NUMBERS] == [
        "0",
        None,
        "2",
        None,
        None,
    ]
    env.reload_env()
    assert (env.get_rank(), env.get_world_size()) == (0, 2)


def test_persias_constants_are_what_holds_here():
    assert env.PERSIA_LAUNCHER_VERBOSE is False
    assert env.PERSIA_SKIP_CHECK_DATA is False


def test_a_variable_can_be_set(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    env.set_variable("RANK", 2)
    assert os.environ["RANK"] == "2"
    assert env.get_rank() == 2


def test_without_a_port_the_process_belongs_to_no_job(monkeypatch):
    monkeypatch.setenv("PERSIA_STORE_HOST", "coordinator")
    assert env.job_store() is None


def test_the_store_is_on_this_machine_unless_the_host_is_given(monkeypatch):
    monkeypatch.setenv("PERSIA_STORE_PORT", "29400")
    assert env.job_store() == ("localhost", 29400, "")
    monkeypatch.setenv("PERSIA_STORE_HOST_ENV", "NODES")
    assert env.job_store() == ("localhost", 29400, "")
    monkeypatch.setenv("NODES", "first")
    assert env.job_store() == ("first", 29400, "")
    monkeypatch.setenv("PERSIA_STORE_HOST", "coordinator")
    assert env.job_store() == ("coordinator", 29400, "")


def test_the_store_is_that_of_the_job_of_this_process(monkeypatch):
    monkeypatch.setenv("PERSIA_STORE_PORT", "29400")
    monkeypatch.setenv("PERSIA_JOB_ID", "ads-7")
    assert env.job_id() == "ads-7"
    assert env.job_store() == ("localhost", 29400, "ads-7")
    monkeypatch.setenv("PERSIA_JOB_ID", "")
    assert env.job_id() == ""


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node-1.example.org", "node-1.example.org"),
        ("node1,node2", "node1"),
        ("node[03-07,09],other", "node03"),
        ("node[9,11-12]", "node9"),
        ("node[1-2]-ib", "node1-ib"),
        ("rack[1-2]node[4-8]", "rack1node4"),
        ("10.0.0.1", "10.0.0.1"),
    ],
)
def test_of_several_hosts_the_first_has_the_store(monkeypatch, nodes, first):
    monkeypatch.setenv("PERSIA_STORE_PORT", "29400")
    monkeypatch.setenv("PERSIA_STORE_HOST_ENV", "NODES")
    monkeypatch.setenv("NODES", nodes)
    assert env.job_store() == (first, 29400, "")


@pytest.mark.parametrize(
    ("port", "message"),
    [("http", "must be an integer"), ("0", "must be >= 1"), ("65536", "<= 65535")],
)
def test_an_invalid_port_is_rejected(monkeypatch, port, message):
    monkeypatch.setenv("PERSIA_STORE_PORT", port)
    with pytest.raises(ConfigError, match=f"PERSIA_STORE_PORT .*{message}"):
        env.job_store()


def test_the_log_level_is_info_or_what_is_set_in_capitals_or_not(monkeypatch):
    assert env.log_level() == "INFO"
    monkeypatch.setenv("LOG_LEVEL", "debug")
    assert env.log_level() == "DEBUG"
    for level, ours in (("trace", "DEBUG"), ("Off", "CRITICAL"), ("warn", "WARN")):
        monkeypatch.setenv("LOG_LEVEL", level)  # of PERSIA
        assert env.log_level() == ours
    monkeypatch.setenv("LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="LOG_LEVEL must be one of DEBUG, INFO"):
        env.log_level()


@pytest.mark.parametrize(
    ("job_id", "is_local"),
    [
        ("local_cwd://torchx/persia-x1", True),
        ("slurm://torchx/17", False),
        ("kubernetes://torchx/default:persia-x1", False),
        ("", False),
    ],
)
def test_only_torchx_on_this_machine_makes_a_local_job(monkeypatch, job_id, is_local):
    monkeypatch.setenv("TORCHX_JOB_ID", job_id)
    assert env.is_local_job() is is_local


def test_where_nn_workers_meet_is_what_is_set_each_by_itself(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert env.master() == (None, None)
    monkeypatch.setenv("MASTER_ADDR", "node1")
    assert env.master() == ("node1", None)
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert env.master() == ("node1", 29500)


GATEWAY = "PERSIA_METRICS_GATEWAY_ADDR"


@pytest.mark.parametrize(
    ("text", "gateway"),
    [
        ("", None),
        ("metrics_gateway:9091", ("metrics_gateway", 9091)),
        ("10.0.0.7:1", ("10.0.0.7", 1)),
        ("[fe80::1]:65535", ("fe80::1", 65535)),
    ],
)
def test_the_metrics_gateway_is_a_host_and_a_port(monkeypatch, text, gateway):
    monkeypatch.delenv(GATEWAY, raising=False)
    assert env.metrics_gateway() is None
    monkeypatch.setenv(GATEWAY, text)
    assert env.metrics_gateway() == gateway


@pytest.mark.parametrize(
    "text",
    [
        *("gateway", "gateway:", ":9091", "gateway:0", "gateway:65536", "gateway:x"),
        *("http://gateway:9091", "gateway:9091/metrics", "fe80::1:9091", "a b:9091"),
    ],
)
def test_an_invalid_metrics_gateway_is_rejected_by_name(monkeypatch, text):
    monkeypatch.setenv(GATEWAY, text)
    with pytest.raises(ConfigError, match=f"^{GATEWAY} must be host:port, .*Received"):
        env.metrics_gateway()


def test_a_start_waits_for_ten_minutes_unless_the_setting_says_otherwise(monkeypatch):
    monkeypatch.delenv("PERSIA_JOIN_TIMEOUT_S", raising=False)
    assert env.join_timeout_s() == 600
    monkeypatch.setenv("PERSIA_JOIN_TIMEOUT_S", "0.5")
    assert env.join_timeout_s() == 0.5
    for text in ("0", "-1", "inf", "nan", "soon"):
        monkeypatch.setenv("PERSIA_JOIN_TIMEOUT_S", text)
        with pytest.raises(ConfigError, match=f"seconds > 0. Received: '{text}'"):
            env.join_timeout_s()


def test_on_slurm_the_log_is_where_torchx_has_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REPLICA_INDEX", "1")
    monkeypatch.setenv("TORCHX_JOB_ID", "slurm://torchx/17")
    assert env.slurm_log("server") == ""  # one that torchx does not know
    log = tmp_path / "slurm-17-server-1.err"
    log.touch()
    assert env.slurm_log("server") == str(log)
    monkeypatch.setenv("TORCHX_JOB_ID", "local_cwd://torchx/17")
    assert env.slurm_log("server") == ""


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_token_that_others_can_read_is_rejected(monkeypatch, tmp_path, mode):
    file = tmp_path / "token"
    file.write_text("0123456789abcdef\n")
    monkeypatch.setenv("PERSIA_JOB_TOKEN", "another that counts less")
    monkeypatch.setenv("PERSIA_JOB_TOKEN_FILE", str(file))
    file.chmod(mode)
    message = (
        rf"PERSIA_JOB_TOKEN_FILE must .*chmod 600.*Received: {file}, of mode {mode:o}"
    )
    with pytest.raises(ConfigError, match=message):
        env.job_token()
    file.chmod(0o600)
    assert env.job_token() == "0123456789abcdef"


def test_an_invalid_token_is_rejected_and_not_shown(monkeypatch, tmp_path):
    monkeypatch.delenv("PERSIA_JOB_TOKEN_FILE", raising=False)
    for token in ("too short", "with a blank in it, anywhere", "x" * 256):
        monkeypatch.setenv("PERSIA_JOB_TOKEN", token)
        with pytest.raises(ConfigError, match=r"16 to 255 ASCII") as rejected:
            env.job_token()
        assert token not in str(rejected.value)
    monkeypatch.setenv("PERSIA_JOB_TOKEN_FILE", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="must name a file with a token"):
        env.job_token()


def test_a_user_without_a_home_is_told_to_name_a_file_for_the_token(monkeypatch):
    def unknown(_):
        raise KeyError

    for name in ("HOME", "PERSIA_JOB_TOKEN_FILE", "PERSIA_JOB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(ConfigError, match="PERSIA_JOB_TOKEN_FILE must be set"):
        env.token_file("PERSIA_JOB_TOKEN")


def test_a_launcher_makes_one_token_for_a_user(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("PERSIA_JOB_TOKEN_FILE", "PERSIA_JOB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    path = env.token_file("PERSIA_JOB_TOKEN")
    assert path == str(tmp_path / ".persia_torchrec/job_token")
    token = Path(path).read_text()
    assert env.token_file("PERSIA_JOB_TOKEN") == path
    assert Path(path).read_text() == token
    assert Path(path).stat().st_mode & 0o777 == 0o600
    assert Path(path).parent.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("PERSIA_JOB_TOKEN", "inherited by processes")
    assert env.token_file("PERSIA_JOB_TOKEN") is None
