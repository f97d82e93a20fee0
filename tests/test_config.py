import logging
from dataclasses import FrozenInstanceError

import pytest

from persia_torchrec.config import (
    FeatureGroup,
    GlobalSettings,
    SlotConfig,
    differences,
    inference_settings,
    load_embedding_config,
    load_global_config,
    refuse_inference,
)
from persia_torchrec.config.differences import MISTAKEN, NO_EFFECT, ONE_VALUE
from persia_torchrec.errors import ConfigError
from persia_torchrec.server.config import ServerConfig, config_of_job

SLOTS = """
feature_index_prefix_bit: 12
slots_config:
  user: {dim: 16}
  item:
    dim: 8
    embedding_summation: true
    sqrt_scaling: true
  basket: {dim: 8}
feature_groups:
  things: [item, basket]
"""

# As PERSIA's own example has them, and every other key that it knows.
GLOBAL = """
common_config:
  metrics_config:
    enable_metrics: false
    job_name: adult
    push_interval_seconds: 5
  job_type: Train
  checkpointing_config:
    num_workers: 8
embedding_worker_config:
  forward_buffer_size: 100
  buffered_data_expired_sec: 60
embedding_parameter_server_config:
  capacity: 1000000
  num_hashmap_internal_shards: 1
  enable_incremental_update: false
  incremental_buffer_size: 5
  incremental_dir: /tmp/increments
  incremental_channel_capacity: 7
"""


def infer(settings):
    """Return the text of a file for inference."""
    return f"common_config: {{job_type: Infer, infer_config: {{{settings}}}}}"


@pytest.fixture
def embedding_config(tmp_path):
    def load(text):
        path = tmp_path / "embedding_config.yml"
        path.write_text(text, encoding="utf-8")
        return load_embedding_config(path)

    return load


@pytest.fixture
def global_config(tmp_path):
    def load(text):
        path = tmp_path / "global_config.yml"
        path.write_text(text, encoding="utf-8")
        return load_global_config(str(path))

    return load


def test_slots_are_read_in_order_with_persias_defaults(embedding_config):
    schema = embedding_config(SLOTS)
    assert schema.feature_index_prefix_bit == 12
    assert list(schema.slots) == ["user", "item", "basket"]
    assert schema.slots["user"] == SlotConfig(
        name="user",
        dim=16,
        sample_fixed_size=10,
        embedding_summation=True,
        sqrt_scaling=False,
        hash_stack_rounds=0,
        hash_stack_size=0,
        group="user",
        index_prefix=2 << 52,
    )
    assert schema.slots["item"].sqrt_scaling
    with pytest.raises(FrozenInstanceError):
        schema.slots["user"].dim = 3


def test_groups_of_the_file_come_first_then_one_for_each_other_slot(embedding_config):
    schema = embedding_config(SLOTS)
    assert schema.groups == (
        FeatureGroup(name="things", slots=("item", "basket"), index_prefix=1 << 52),
        FeatureGroup(name="user", slots=("user",), index_prefix=2 << 52),
    )
    for name in ("item", "basket"):
        assert schema.slots[name].group == "things"
        assert schema.slots[name].index_prefix == 1 << 52


def test_eight_bits_are_the_prefix_unless_the_file_says_otherwise(embedding_config):
    schema = embedding_config("slots_config: {a: {dim: 4}, b: {dim: 4}}")
    assert schema.feature_index_prefix_bit == 8
    assert [group.index_prefix for group in schema.groups] == [1 << 56, 2 << 56]


def test_as_many_groups_as_fit_the_prefix_are_accepted(embedding_config):
    schema = embedding_config(
        "{feature_index_prefix_bit: 2, "
        "slots_config: {a: {dim: 4}, b: {dim: 4}, c: {dim: 4}}}"
    )
    assert schema.groups[-1].index_prefix == 3 << 62


def test_a_hash_stack_of_no_rounds_changes_nothing(embedding_config):
    stack = "{hash_stack_rounds: 0, embedding_size: 5}"
    schema = embedding_config(
        f"slots_config: {{a: {{dim: 4, hash_stack_config: {stack}}}}}"
    )
    assert schema.slots["a"].hash_stack_rounds == 0
    assert schema.slots["a"].hash_stack_size == 5


def test_a_merged_yaml_key_is_read(embedding_config):
    schema = embedding_config(
        "slots_config:\n  a: &base {dim: 4, sqrt_scaling: true}\n"
        "  b: {<<: *base, dim: 8}\n"
    )
    assert schema.slots["b"].dim == 8
    assert schema.slots["b"].sqrt_scaling


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "embedding_config.yml must have the key 'slots_config'"),
        ("slots_config:", "slots_config must have at least one slot"),
        ("[a, b]", r"yml must be a mapping. Received: \['a', 'b'\]"),
        ("slots_config: [a]", "yml: slots_config must be a mapping"),
        ("slots_config: {a: 8}", r"yml: slots_config.a must be a mapping. Received: 8"),
        ("slots_config: {a: {}}", "slots_config.a must have the key 'dim'"),
        ("slots_config: {a: {dim: 0}}", "slots_config.a: dim must be >= 1"),
        ("slots_config: {a: {dim: 8.0}}", r"a.dim must be an integer. Received: 8\.0"),
        ("slots_config: {a: {dim: '8'}}", "a.dim must be an integer. Received: '8'"),
        ("slots_config: {a: {dim: true}}", "must be an integer. Received: True"),
        ("slots_config: {1: {dim: 8}}", "names as keys. Received: 1. Put it into quo"),
        ("slots_config: {no: {dim: 8}}", "names as keys. Received: False"),
        ("slots_config: {'': {dim: 8}}", "names as keys. Received: ''"),
        ("{slots_confg: {}}", r"slots_confg is unknown. Did you mean 'slots_config'\?"),
        (
            "slots_config: {a: {dims: 8}}",
            r"slots_config\.a\.dims is unknown. Did you mean 'dim'\?",
        ),
        (
            "slots_config: {a: {dim: 8, zzz: 8}}",
            "zzz is unknown. Known: dim, sample_fixed_size, embedding_summation",
        ),
        (
            "slots_config: {a: {dim: 8, sqrt_scaling: 1}}",
            "sqrt_scaling must be true or false. Received: 1",
        ),
        (
            "slots_config: {a: {dim: 8, sample_fixed_size: 0}}",
            "slots_config.a: sample_fixed_size must be >= 1",
        ),
        (
            "slots_config: {a: {dim: 8, hash_stack_config: {hash_stack_rounds: 0}}}",
            "hash_stack_config must have the key 'embedding_size'",
        ),
        (
            "slots_config: {a: {dim: 8, hash_stack_config: "
            "{hash_stack_rounds: 2, embedding_size: 0}}}",
            "slots_config.a.hash_stack_config: embedding_size must be >= 1, the",
        ),
        (
            "slots_config: {a: {dim: 8, hash_stack_config: "
            "{hash_stack_rounds: 0, embedding_size: -1}}}",
            "slots_config.a.hash_stack_config: embedding_size must be >= 0",
        ),
        (
            "{slots_config: {a: {dim: 8}}, feature_index_prefix_bit: 0}",
            r"feature_index_prefix_bit must be in \[1, 62\]. Received: 0",
        ),
        (
            "{slots_config: {a: {dim: 8}}, feature_index_prefix_bit: 63}",
            r"must be in \[1, 62\]. Received: 63",
        ),
        (
            "{slots_config: {a: {dim: 8}, b: {dim: 8}}, feature_index_prefix_bit: 1}",
            "at most 1 groups, .*Received: 2. Raise feature_index_prefix_bit above 1",
        ),
        (
            "slots_config:\n  a: {dim: 8}\n  a: {dim: 16}",
            "must be YAML. Received: the key 'a' for the second time",
        ),
        ("slots_config: {a: {dim: 8", "embedding_config.yml must be YAML"),
        ("slots_config: 2020-99-99", "embedding_config.yml must be YAML"),
        ("? [a]\n: b", r"(?s)must be YAML.*unhashable key"),
    ],
)
def test_slots_that_cannot_work_are_refused(embedding_config, text, message):
    with pytest.raises(ConfigError, match=message):
        embedding_config(text)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("{g: [a, c]}", r"feature_groups.g must list slots of one dim.*'c': 16"),
        ("{g: [aa]}", "must list slots of slots_config. Received: 'aa'. Did you mean"),
        ("{g: []}", "feature_groups.g must list at least one slot"),
        ("{g: [a], h: [b, a]}", "name each slot at most once. Received: 'a' 2 times"),
        ("{g: [a, a]}", "Received: 'a' 2 times"),
        ("{c: [a, b]}", "feature_groups.c must not be named like a slot that is in no"),
        ("{g: a}", "feature_groups.g must be a list of strings. Received: 'a'"),
        ("{g: [1]}", r"feature_groups.g must be a list of strings. Received: \[1\]"),
        ("[a, b]", "feature_groups must be a mapping"),
    ],
)
def test_groups_that_do_not_fit_the_slots_are_refused(
    embedding_config, groups, message
):
    slots = "slots_config: {a: {dim: 8}, b: {dim: 8}, c: {dim: 16}}"
    with pytest.raises(ConfigError, match=message):
        embedding_config(f"{slots}\nfeature_groups: {groups}")


def test_a_group_may_be_named_like_a_slot_that_is_in_a_group(embedding_config):
    schema = embedding_config("slots_config: {a: {dim: 8}}\nfeature_groups: {a: [a]}")
    assert [group.name for group in schema.groups] == ["a"]


def test_an_empty_global_config_gives_persias_defaults(global_config):
    settings = global_config("")
    assert settings == GlobalSettings()
    assert settings.common.job_type == "Train"
    assert settings.common.infer is None
    assert settings.common.metrics.enable_metrics
    assert settings.common.metrics.job_name == "persia_default_jobname"
    assert settings.common.metrics.push_interval_seconds == 10
    assert settings.common.checkpointing.num_workers == 4
    assert settings.embedding_worker.forward_buffer_size == 1000
    assert settings.embedding_worker.buffered_data_expired_sec == 1000
    assert settings.embedding_parameter_server.capacity == 1_000_000_000
    assert global_config("common_config:\n") == settings


def test_a_whole_global_config_is_read(global_config):
    settings = global_config(GLOBAL)
    assert not settings.common.metrics.enable_metrics
    assert settings.common.metrics.job_name == "adult"
    assert settings.common.metrics.push_interval_seconds == 5
    assert settings.common.checkpointing.num_workers == 8
    assert settings.embedding_worker.forward_buffer_size == 100
    assert settings.embedding_worker.buffered_data_expired_sec == 60
    server = settings.embedding_parameter_server
    assert server.capacity == 1_000_000
    assert server.num_hashmap_internal_shards == 1
    assert server.incremental_buffer_size == 5
    assert server.incremental_dir == "/tmp/increments"
    assert server.incremental_channel_capacity == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "embedding_parameter_server_config: {capacity: 0}",
            "global_config.yml: embedding_parameter_server_config: "
            "capacity must be >= 1. Received: 0",
        ),
        (
            "embedding_parameter_server_config: {capacity: 1e9}",
            "capacity must be an integer. Received: '1e9'",
        ),
        (
            "embedding_worker_config: {forward_buffer_size: 0}",
            "forward_buffer_size must be >= 1",
        ),
        (
            "embedding_worker_config: {buffered_data_expired_sec: -1}",
            "buffered_data_expired_sec must be >= 1",
        ),
        (
            "common_config: {metrics_config: {push_interval: 10}}",
            "common_config.metrics_config.push_interval is unknown. "
            r"Did you mean 'push_interval_seconds'\?",
        ),
        (
            "common_config: {metrics_config: {push_interval_seconds: 0}}",
            "push_interval_seconds must be >= 1",
        ),
        (
            "common_config: {metrics_config: {job_name: 3}}",
            "job_name must be a string. Received: 3",
        ),
        (
            "common_config: {metrics_config: {job_name: ''}}",
            "job_name must not be empty",
        ),
        (
            "common_config: {checkpointing_config: {num_workers: 0}}",
            "num_workers must be >= 1",
        ),
        (
            "common_config: {zzz: 1}",
            "common_config.zzz is unknown. Known: metrics_config, job_type",
        ),
        ("common_config: {job_type: train}", "job_type must be one of Train, Eval"),
        ("common_config: {infer_config: {}}", "must have the key 'servers'"),
        (
            "common_config: {infer_config: {servers: a, embedding_checkpoint: b}}",
            "infer_config.servers must be a list of strings",
        ),
        (
            "common_config: {job_type: Infer}",
            "job_type: Infer must come with an infer_config",
        ),
        (
            infer("servers: ['a:1'], embedding_checkpoint: b").replace(
                "Infer", "Train"
            ),
            "infer_config must come with job_type: Infer. Received: job_type: Train",
        ),
        (
            infer("servers: [], embedding_checkpoint: b"),
            "infer_config: servers must list the address of every embedding server",
        ),
        (
            infer("servers: ['a:1', 'a'], embedding_checkpoint: b"),
            "servers must list addresses as host:port, .*Received: 'a'",
        ),
        (
            infer("servers: ['a:65536'], embedding_checkpoint: b"),
            r"a port in \[1, 65535\]. Received: 'a:65536'",
        ),
        (
            infer("servers: ['a:1', 'a:1'], embedding_checkpoint: b"),
            "servers must list each embedding server once",
        ),
        (
            infer("servers: ['a:1'], embedding_checkpoint: ''"),
            "embedding_checkpoint must name a folder",
        ),
    ],
)
def test_global_settings_that_cannot_work_are_refused(global_config, text, message):
    with pytest.raises(ConfigError, match=message):
        global_config(text)


def test_an_inference_job_knows_its_servers_and_its_checkpoint(global_config):
    servers = "servers: ['10.0.0.1:8888', 'tcp://ps-1.svc:81'], embedding_checkpoint: r"
    settings = global_config(infer(servers)).common.infer
    assert settings.embedding_checkpoint == "r"
    assert [settings.port_of(shard) for shard in range(2)] == [8888, 81]
    assert settings.listen_host == "0.0.0.0"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "tcp://127.0.1.1"])
def test_an_inference_job_of_this_machine_listens_for_it_only(global_config, host):
    text = infer(f"servers: ['{host}:1', 'localhost:2'], embedding_checkpoint: r")
    assert global_config(text).common.infer.listen_host == "127.0.0.1"


def test_an_evaluation_job_is_accepted(global_config):
    settings = global_config("common_config: {job_type: Eval}")
    assert settings.common.job_type == "Eval"
    assert settings.common.infer is None


INFER = infer("servers: ['a:1'], embedding_checkpoint: b")


@pytest.mark.parametrize("in_job", [False, True])
def test_only_a_file_for_inference_has_its_settings(tmp_path, in_job):
    path = tmp_path / "global_config.yml"
    assert inference_settings(None, in_job=in_job) is None
    for text in ("", "common_config: {job_type: Eval}"):
        path.write_text(text)
        assert inference_settings(path, in_job=in_job) is None
    path.write_text(INFER)
    settings = inference_settings(path, in_job=in_job)
    assert settings.common.infer.servers == ("a:1",)


def test_a_member_of_a_job_reads_a_bad_file_when_it_has_joined(tmp_path):
    path = tmp_path / "global_config.yml"
    path.write_text("zzz: 1")
    assert inference_settings(path, in_job=True) is None
    with pytest.raises(ConfigError, match="zzz is unknown"):
        inference_settings(path, in_job=False)


def test_a_role_that_only_trains_is_refused_for_inference(tmp_path):
    path = tmp_path / "global_config.yml"
    refuse_inference("data loader", None)
    refuse_inference("data loader", path)  # it reads nothing else from the file
    path.write_text("")
    refuse_inference("data loader", path)
    path.write_text(INFER)
    with pytest.raises(ConfigError, match=r"data loader must .* job_type: Infer"):
        refuse_inference("data loader", path)


@pytest.mark.parametrize("load", [load_embedding_config, load_global_config])
def test_a_file_that_cannot_be_read_is_refused(tmp_path, load):
    with pytest.raises(ConfigError, match=r"missing\.yml must be a text file"):
        load(tmp_path / "missing.yml")
    with pytest.raises(ConfigError, match="must be a text file that can be read"):
        load(tmp_path)
    binary = tmp_path / "binary.yml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.yml must be a text file"):
        load(binary)


@pytest.mark.parametrize(
    ("slot", "message"),
    [
        ("index_prefix: 3", "index_prefix must be 0. Received: 3. Leave it out"),
    ],
)
def test_slot_settings_without_a_meaning_here_are_refused(
    embedding_config, slot, message
):
    with pytest.raises(ConfigError, match=message):
        embedding_config(f"slots_config: {{a: {{dim: 8, {slot}}}}}")


@pytest.mark.parametrize(
    ("job_type", "is_on", "expected"),
    [
        ("Train", "true", "/tmp/increments"),
        ("Train", "false", None),
        ("Eval", "true", None),
    ],
)
def test_servers_write_increments_where_the_file_says_so(
    global_config, job_type, is_on, expected
):
    text = GLOBAL.replace("job_type: Train", f"job_type: {job_type}")
    text = text.replace("update: false", f"update: {is_on}")
    text += "  incremental_interval_seconds: 3\n"
    config = config_of_job(ServerConfig(), global_config(text))
    assert config.incremental_dir == expected
    assert config.capacity_rows == 1_000_000
    assert config.incremental_buffer_rows == 5
    assert config.incremental_queue == 7
    assert config.incremental_interval_s == 3.0


def test_settings_without_an_effect_are_accepted_and_logged(global_config, caplog):
    with caplog.at_level(logging.INFO, "persia_torchrec.config"):
        global_config(GLOBAL)
    logged = {record.args[1] for record in caplog.records}
    assert logged == {path for path in NO_EFFECT if not path.startswith("slots")}


def with_only(key_path, value="3"):
    """Return a file that has nothing but a key."""
    text = value
    for key in reversed(key_path.replace("*", "a").split(".")):
        text = f"{{{key}: {text}}}"
    return text


@pytest.fixture
def load(embedding_config, global_config):
    """Read a file that has nothing but a key, by the reader of its kind."""

    def load(key_path, value="3"):
        read = embedding_config if key_path.startswith("slot") else global_config
        return read(with_only(key_path, value))

    return load


@pytest.mark.parametrize("row", MISTAKEN, ids=lambda row: row.key_path)
def test_a_mistaken_key_of_persias_own_pages_is_refused_with_what_was_meant(load, row):
    with pytest.raises(ConfigError) as refused:
        load(row.key_path)
    assert f"{row.key_path} is unknown. {row.instead}" in str(refused.value)


@pytest.mark.parametrize("row", MISTAKEN, ids=lambda row: row.key_path)
def test_a_mistaken_key_is_one_that_no_file_may_have(monkeypatch, load, row):
    monkeypatch.setattr(differences, "MISTAKEN", ())
    with pytest.raises(ConfigError, match="is unknown"):
        load(row.key_path)


def test_every_key_path_of_the_tables_is_one_that_files_may_have(load):
    """A row that no file can reach would refuse nothing, and nobody would notice."""
    for key_path in (*NO_EFFECT, *(row.key_path for row in ONE_VALUE)):
        with pytest.raises(ConfigError) as refused:
            load(key_path, "{misfit: }")
        message = str(refused.value)
        assert "is unknown" not in message or "misfit is unknown" in message
