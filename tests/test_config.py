import logging
from typing import get_args

import msgspec
import pytest
import yaml

from persia_torchrec.config.embedding_config import SlotConfig, load_embedding_config
from persia_torchrec.config.global_config import (
    GlobalSettings,
    inference_settings,
    load_global_config,
    refuse_inference,
)
from persia_torchrec.config.yaml_file import DIFFERENCES
from persia_torchrec.errors import ConfigError
from persia_torchrec.server.config import ServerConfig, apply_global_config

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
        group="user",
        index_prefix=2 << 52,
    )
    assert schema.slots["item"].sqrt_scaling
    with pytest.raises(AttributeError, match="immutable"):
        schema.slots["user"].dim = 3


def test_groups_of_the_file_come_first_then_one_for_each_other_slot(embedding_config):
    schema = embedding_config(SLOTS)
    assert list(schema.groups.items()) == [
        ("things", ("item", "basket")),
        ("user", ("user",)),
    ]
    assert schema.slots["user"].group == "user"
    assert schema.slots["user"].index_prefix == 2 << 52
    for name in ("item", "basket"):
        assert schema.slots[name].group == "things"
        assert schema.slots[name].index_prefix == 1 << 52


def test_eight_bits_are_the_prefix_unless_the_file_says_otherwise(embedding_config):
    schema = embedding_config("slots_config: {a: {dim: 4}, b: {dim: 4}}")
    assert schema.feature_index_prefix_bit == 8
    assert [slot.index_prefix for slot in schema.slots.values()] == [1 << 56, 2 << 56]


def test_as_many_groups_as_fit_the_prefix_are_accepted(embedding_config):
    schema = embedding_config(
        "{feature_index_prefix_bit: 2, "
        "slots_config: {a: {dim: 4}, b: {dim: 4}, c: {dim: 4}}}"
    )
    assert schema.slots["c"].index_prefix == 3 << 62


def test_a_hash_stack_of_no_rounds_changes_nothing(embedding_config):
    stack = "{hash_stack_rounds: 0, embedding_size: 5}"
    schema = embedding_config(
        f"slots_config: {{a: {{dim: 4, hash_stack_config: {stack}}}}}"
    )
    stack = schema.slots["a"].hash_stack
    assert (stack.hash_stack_rounds, stack.embedding_size) == (0, 5)


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
        ("slots_config: {a: {dim: 0}}", "slots_config.a.dim must be >= 1. Received: 0"),
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
            "slots_config.a.sample_fixed_size must be >= 1. Received: 0",
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
            "slots_config.a.hash_stack_config.embedding_size must be >= 0. Rec.*: -1",
        ),
        (
            "{slots_config: {a: {dim: 8}}, feature_index_prefix_bit: 0}",
            "feature_index_prefix_bit must be >= 1. Received: 0",
        ),
        (
            "{slots_config: {a: {dim: 8}}, feature_index_prefix_bit: 63}",
            "feature_index_prefix_bit must be <= 62. Received: 63",
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
        ("{g: []}", r"feature_groups.g must be of length >= 1. Received: \[\]"),
        ("{g: [a], h: [b, a]}", "name each slot at most once. Received: 'a' 2 times"),
        ("{g: [a, a]}", "Received: 'a' 2 times"),
        ("{c: [a, b]}", "feature_groups.c must not be named like a slot that is in no"),
        ("{g: a}", "feature_groups.g must be a list. Received: 'a'"),
        ("{g: [1]}", r"feature_groups.g\[0\] must be a string. Received: 1"),
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
    assert list(schema.groups) == ["a"]


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
            "global_config.yml: embedding_parameter_server_config.capacity "
            "must be >= 1. Received: 0",
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
            "job_name must be of length >= 1. Received: ''",
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
            "infer_config.servers must be a list. Received: 'a'",
        ),
        (
            "common_config: {job_type: Infer}",
            "job_type: Infer must come with an infer_config",
        ),
        (
            infer("servers: ['a:1'], embedding_checkpoint: b").replace(
                "Infer", "Train"
            ),
            "infer_config must come with job_type: Infer. Rec.*: job_type: Train, and",
        ),
        (
            infer("servers: [], embedding_checkpoint: b"),
            r"infer_config.servers must be of length >= 1. Received: \[\]",
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
            "embedding_checkpoint must be of length >= 1. Received: ''",
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
def test_only_a_file_for_inference_has_its_settings(monkeypatch, tmp_path, in_job):
    monkeypatch.setenv("PERSIA_STORE_PORT", "29400" if in_job else "")
    path = tmp_path / "global_config.yml"
    assert inference_settings(None) is None
    for text in ("", "common_config: {job_type: Eval}"):
        path.write_text(text)
        assert inference_settings(path) is None
    path.write_text(INFER)
    assert inference_settings(path).servers == ("a:1",)


def test_a_member_of_a_job_reads_a_bad_file_when_it_has_joined(monkeypatch, tmp_path):
    path = tmp_path / "global_config.yml"
    path.write_text("zzz: 1")
    monkeypatch.setenv("PERSIA_STORE_PORT", "29400")
    assert inference_settings(path) is None
    monkeypatch.delenv("PERSIA_STORE_PORT")
    with pytest.raises(ConfigError, match="zzz is unknown"):
        inference_settings(path)


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
    config = apply_global_config(ServerConfig(), global_config(text))
    assert config.incremental_dir == expected
    assert config.capacity_rows == 1_000_000
    assert config.incremental_buffer_rows == 5
    assert config.incremental_queue == 7
    assert config.incremental_interval_s == 3.0


# What a file may have for each key of the tables, and each has one.
OTHER_VALUES = {
    "middleware_config": "{forward_buffer_size: 3}",
    "embedding_server_config": "{capacity: 3}",
    "shard_server_config": "{capacity: 3, num_signs_per_file: 4, storage: Ceph}",
    "common_config.intent": "Eval",
    "slot_config": "{a: {dim: 3, is_pid: true}}",
    "slot_configs": "{a: {dim: 3}}",
    "feature_configs": "{a: {dim: 3, variable_max_length: 4}}",
    "slots_config.*.variable_max_length": "3",
    "slots_config.*.sum_attention": "false",
    "common_config.metrics_config.push_interval_sec": "3",
    "common_config.initial_sparse_checkpoint": "/a/folder",
    "common_config.embedding_checkpoint": "/a/folder",
    "common_config.servers": "[a:8000, b:8000]",
    "PersiaMetricsConfig": "{enable_metrics: true, job_name: adult}",
    "PersiaInferConfig": "{servers: [a:8000], initial_sparse_checkpoint: /a/folder}",
    "PersiaEmbeddingServerConfig": "{capacity: 3, intent: Train}",
    "PersiaShardedServerConfig": "{capacity: 3, intent: Train}",
    "common_config.num_embedding_io_workers": "8",
    "embedding_parameter_server_config.num_embedding_io_workers": "8",
    "embedding_parameter_server_config.num_persistence_workers": "4",
    "embedding_parameter_server_config.num_signs_per_file": "5000000",
    "embedding_parameter_server_config.storage": "Ceph",
    "embedding_parameter_server_config.local_buffer_dir": "/a/folder",
    "embedding_parameter_server_config.full_amount_manager_buffer_size": "1000",
    "embedding_parameter_server_config.embedding_recycle_pool_capacity": "1000",
    "forward_buffer_size": "1000",
    "target_config": "[]",
    "slots_config.*.capacity": "1000000",
    "slots_config.*.is_uid": "true",
    "slots_config.*.is_pid": "true",
    "common_config.checkpointing_config.num_workers": "8",
    "embedding_parameter_server_config.num_hashmap_internal_shards": "1",
}
ROWS = [row for rows in DIFFERENCES.values() for row in rows]
RENAMED = [row for row in ROWS if row.kind == "renamed"]
IGNORED = [row for row in ROWS if row.kind == "ignored"]
NO_EFFECT = [row for row in ROWS if row.kind == "no_effect"]
OTHER_KEYS = {row.key_path: row for row in (*RENAMED, *IGNORED, *NO_EFFECT)}
CHANGED_KEYS = [row.key_path for row in (*RENAMED, *IGNORED)]
OF_EMBEDDING_CONFIG = {row.key_path for row in DIFFERENCES["embedding_config"]}


def is_of_embedding_config(key_path):
    """Return whether a key is of ``embedding_config.yml``, not of the other file."""
    top = key_path.partition(".")[0]
    return key_path in OF_EMBEDDING_CONFIG or top in ("slots_config", "feature_groups")


def with_key(key_path, value):
    """Return a file with a key, and nothing else that it can do without."""
    text = value
    *above, name = key_path.replace("*", "a").split(".")
    # A slot needs a dim, unless the slots are the value.
    text = f"{{{name}: {text}, dim: 8}}" if "*" in key_path else f"{{{name}: {text}}}"
    for key in reversed(above):
        text = f"{{{key}: {text}}}"
    needs_slots = is_of_embedding_config(key_path) and not name.endswith(
        ("slot_config", "slot_configs", "feature_configs", "slots_config")
    )
    if needs_slots and not above:
        text = f"{{slots_config: {{a: {{dim: 8}}}}, {text[1:]}"
    return text


@pytest.fixture
def load(embedding_config, global_config):
    """Read a file with a key, by the reader of its kind."""

    def load(key_path, value):
        is_embedding = is_of_embedding_config(key_path)
        read = embedding_config if is_embedding else global_config
        return read(with_key(key_path, value))

    return load


@pytest.fixture
def warned(caplog):
    """Return the arguments of each warning so far, without the path."""
    caplog.set_level(logging.WARNING, "persia_torchrec.config")
    return lambda: [record.args[1:] for record in caplog.records]


def test_every_key_of_the_tables_is_tried_here():
    assert list(OTHER_VALUES) == list(OTHER_KEYS)


@pytest.mark.parametrize("key_path", OTHER_VALUES)
def test_a_key_of_the_tables_is_one_warning_of_a_process(load, warned, key_path):
    row = OTHER_KEYS[key_path]
    for _ in range(2):
        load(key_path, OTHER_VALUES[key_path])
    assert warned()[0] == (key_path, row.right_key, row.reason)
    within = [args[0] for args in warned()[1:]]  # other keys of the same value
    assert all(path.rpartition(".")[2] in OTHER_VALUES[key_path] for path in within)
    assert len(within) == len(set(within))


@pytest.mark.parametrize("row", RENAMED, ids=lambda row: row.key_path)
def test_a_renamed_key_does_what_its_present_name_does(load, row):
    value = OTHER_VALUES[row.key_path]
    if row.key_path == "feature_configs":  # has renamed keys itself
        value = value.replace("variable_max_length", "sample_fixed_size")
    settings = load(row.key_path, value)
    assert settings == load(row.right_key, value)
    assert settings not in (GlobalSettings(), load("slots_config", "{a: {dim: 8}}"))


@pytest.mark.parametrize("value", ["as in PERSIA", "[{a: [3]}]"])
@pytest.mark.parametrize("row", IGNORED, ids=lambda row: row.key_path)
def test_an_ignored_key_changes_nothing_whatever_its_value(load, row, value):
    if value == "as in PERSIA":
        value = OTHER_VALUES[row.key_path]
    expected = (
        load("slots_config", "{a: {dim: 8}}")
        if is_of_embedding_config(row.key_path)
        else GlobalSettings()
    )
    assert load(row.key_path, value) == expected


@pytest.mark.parametrize("key_path", CHANGED_KEYS)
def test_a_key_of_the_tables_is_one_that_no_file_has_by_itself(
    monkeypatch, load, key_path
):
    for file in DIFFERENCES:
        monkeypatch.setitem(DIFFERENCES, file, NO_EFFECT)
    with pytest.raises(ConfigError, match="is unknown"):
        load(key_path, "3")


def test_every_key_path_without_effect_is_one_that_files_may_have(load):
    """A row that no file can reach would do nothing, unnoticed."""
    for key_path in (row.key_path for row in ROWS if row.kind in ("no_effect", "zero")):
        with pytest.raises(ConfigError) as refused:
            load(key_path, "{misfit: }")
        message = str(refused.value)
        assert "is unknown" not in message or "misfit is unknown" in message


@pytest.mark.parametrize("row", [row for row in OTHER_KEYS.values() if row.right_key])
def test_a_right_key_is_one_that_files_may_have(row):
    assert row.right_key in {*SETTINGS, *SECTIONS}


@pytest.mark.parametrize("row", RENAMED, ids=lambda row: row.key_path)
def test_a_key_beside_its_other_name_is_refused(embedding_config, global_config, row):
    name, right = (key.rpartition(".")[2] for key in (row.key_path, row.right_key))
    text = f"{{{name}: 3, {right}: 3}}"
    for key in reversed(row.key_path.replace("*", "a").split(".")[:-1]):
        text = f"{{{key}: {text}}}"
    is_embedding = is_of_embedding_config(row.key_path)
    read = embedding_config if is_embedding else global_config
    with pytest.raises(ConfigError, match=f"{name} must not stand beside {right}"):
        read(text)


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        ("global", "slot_config: {}", "slot_config is unknown"),
        ("global", "{target_config: []}", "target_config is unknown"),
        ("embedding", "{middleware_config: {}}", "middleware_config is unknown"),
        ("global", "middleware_config: {buffer: 1}", "config.buffer is unknown"),
        (
            "global",
            "shard_server_config: {capacty: 3}",
            r"capacty is unknown. Did you mean 'capacity'\?",
        ),
        (
            "global",
            "common_config: {metrics_config: {push_interval_secs: 3}}",
            r"push_interval_secs is unknown. Did you mean 'push_interval_seconds'\?",
        ),
        (
            "global",
            "common_config: {job_type: Infer, servers: ['a:1'], "
            "initial_sparse_checkpoint: b}",
            "job_type: Infer must come with an infer_config, with servers and embeddin",
        ),
        ("embedding", "{slot_config: {a: {}}}", "must have the key 'dim'"),
        (
            "embedding",
            "{slot_config: {a: {dims: 8}}}",
            r"a.dims is unknown. Did you mean 'dim'\?",
        ),
    ],
)
def test_what_is_in_no_table_is_refused(
    embedding_config, global_config, read, text, message
):
    with pytest.raises(ConfigError, match=message):
        (embedding_config if read == "embedding" else global_config)(text)


def test_a_role_beside_another_that_warns_does_not(tmp_path, warned):
    path = tmp_path / "config.yml"
    path.write_text(with_key("shard_server_config", "{capacity: 3, storage: Ceph}"))
    assert (
        load_global_config(path, warns=False).embedding_parameter_server.capacity == 3
    )
    refuse_inference("data loader", path)
    path.write_text("slot_config: {a: {dim: 8}, b: {dim: 8, capacity: 3}}")
    assert len(load_embedding_config(path, warns=False).slots) == 2
    assert warned() == []


def test_a_key_of_several_slots_is_one_warning(embedding_config, warned):
    schema = embedding_config("slots_config: {a: {dim: 8, capacity: 1}, b: {dim: 8}}")
    embedding_config(
        "slots_config: {a: {dim: 8, capacity: 1}, b: &b {dim: 8, capacity: 2}, c: *b}"
    )
    assert list(schema.slots) == ["a", "b"]
    assert [args[0] for args in warned()] == ["slots_config.*.capacity"]


# Every key of PERSIA that does what it says, and ours, each with another value than
# the default, in the fewest files that can have them all.
EVERY_KEY = {
    "train": GLOBAL.replace("Train", "Eval").replace("update: false", "update: true")
    + "  incremental_interval_seconds: 3\n",
    "infer": infer("servers: ['a:1', 'b:2'], embedding_checkpoint: run"),
    "slots": """
feature_index_prefix_bit: 12
slots_config:
  user:
    dim: 16
    sample_fixed_size: 3
    embedding_summation: false
    sqrt_scaling: true
    hash_stack_config: {hash_stack_rounds: 2, embedding_size: 5}
    index_prefix: 0
  item: {dim: 8}
  basket: {dim: 8}
feature_groups:
  things: [item, basket]
""",
}


def keys_of(cls, at=""):
    """Yield each key path that a file of a struct may have, its struct and default."""
    for field in msgspec.structs.fields(cls):
        kinds = (field.type, *get_args(field.type))
        inner = next((k for k in kinds if hasattr(k, "__struct_fields__")), None)
        yield f"{at}{field.encode_name}", inner, field.default
        if inner is not None:
            yield from keys_of(inner, f"{at}{field.encode_name}.")


ALL_KEYS = [
    *keys_of(GlobalSettings),
    ("feature_index_prefix_bit", None, 8),
    ("slots_config", SlotConfig, None),
    *keys_of(SlotConfig.__base__, "slots_config.*."),
    ("feature_groups", None, None),
]
SETTINGS = {key: default for key, inner, default in ALL_KEYS if inner is None}
SECTIONS = [key for key, inner, _ in ALL_KEYS if inner is not None]


def value_of(content, key_path):
    """Return what a file says at a key path, of its first slot; None: nothing."""
    for key in key_path.split("."):
        if not content or (key != "*" and key not in content):
            return None
        content = next(iter(content.values())) if key == "*" else content[key]
    return content


@pytest.mark.parametrize("key_path", SETTINGS)
def test_every_key_is_in_a_file_of_ours_and_does_what_it_says(
    embedding_config, global_config, key_path
):
    if is_of_embedding_config(key_path) or key_path.startswith("feature_"):
        files, read = ["slots"], embedding_config
    else:
        files, read = ["train", "infer"], global_config
    told = {name: value_of(yaml.safe_load(EVERY_KEY[name]), key_path) for name in files}
    name, value = next(item for item in told.items() if item[1] is not None)
    settings = read(EVERY_KEY[name])
    if key_path == "feature_groups":
        assert list(settings.groups["things"]) == value["things"]
        return
    assert value != SETTINGS[key_path]
    for key in key_path.split("."):
        if key == "*":
            settings = next(iter(settings.values()))
            continue
        name = next(
            (n for n in (key, key.removesuffix("_config")) if hasattr(settings, n)),
            None,
        )
        settings = settings if name is None else getattr(settings, name)
    assert (list(settings) if isinstance(value, list) else settings) == value


@pytest.mark.parametrize("name", EVERY_KEY)
def test_what_does_what_it_says_is_no_warning(
    embedding_config, global_config, warned, name
):
    (embedding_config if name == "slots" else global_config)(EVERY_KEY[name])
    expected = [row.key_path for row in NO_EFFECT] if name == "train" else []
    assert [args[0] for args in warned()] == expected
