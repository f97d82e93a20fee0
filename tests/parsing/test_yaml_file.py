"""Keys of PERSIA's YAML files that differ here, and each key that a file may have."""

import logging
from typing import get_args

import msgspec
import pytest
import yaml

from persia_torchrec.embedding.embedding_config import (
    SlotConfig,
    load_embedding_config,
)
from persia_torchrec.errors import ConfigError
from persia_torchrec.parsing.yaml_file import DIFFERENCES
from persia_torchrec.persia.global_config import (
    GlobalSettings,
    load_global_config,
    reject_inference,
)
from tests.support.yaml_configs import GLOBAL, infer


@pytest.mark.parametrize("load", [load_embedding_config, load_global_config])
def test_a_file_that_cannot_be_read_is_rejected(tmp_path, load):
    with pytest.raises(ConfigError, match=r"missing\.yml must be a text file"):
        load(tmp_path / "missing.yml")
    with pytest.raises(ConfigError, match="must be a text file that can be read"):
        load(tmp_path)
    binary = tmp_path / "binary.yml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.yml must be a text file"):
        load(binary)


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
        with pytest.raises(ConfigError) as rejected:
            load(key_path, "{misfit: }")
        message = str(rejected.value)
        assert "is unknown" not in message or "misfit is unknown" in message


@pytest.mark.parametrize("row", [row for row in OTHER_KEYS.values() if row.right_key])
def test_a_right_key_is_one_that_files_may_have(row):
    assert row.right_key in {*SETTINGS, *SECTIONS}


@pytest.mark.parametrize("row", RENAMED, ids=lambda row: row.key_path)
def test_a_key_beside_its_other_name_is_rejected(embedding_config, global_config, row):
    name, right = (key.rpartition(".")[2] for key in (row.key_path, row.right_key))
    text = f"{{{name}: 3, {right}: 3}}"
    for key in reversed(row.key_path.replace("*", "a").split(".")[:-1]):
        text = f"{{{key}: {text}}}"
    is_embedding = is_of_embedding_config(row.key_path)
    read = embedding_config if is_embedding else global_config
    with pytest.raises(
        ConfigError, match=f"{name} must not be set together with {right}"
    ):
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
def test_an_unknown_table_is_rejected(
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
    reject_inference("data loader", path)
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
    + "  incremental_interval_seconds: 3\n  optimizer_engine: fbgemm\n"
    + "  incremental_base_ratio: 4.0\n",
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
def test_effective_settings_give_no_warning(
    embedding_config, global_config, warned, name
):
    (embedding_config if name == "slots" else global_config)(EVERY_KEY[name])
    expected = [row.key_path for row in NO_EFFECT] if name == "train" else []
    assert [args[0] for args in warned()] == expected
