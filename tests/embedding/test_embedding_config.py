"""The embedding config: slots and groups that are read, and those that are rejected."""

import pytest

from persia_torchrec.embedding.embedding_config import SlotConfig
from persia_torchrec.errors import ConfigError

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
        ("slots_config: {a: {dim: 4097}}", "a.dim must be <= 4096. Received: 4097"),
        ("slots_config: {a: {dim: 010}}", "must be YAML. Received: 010: a number must"),
        ("slots_config: {a: {dim: 1:30}}", "must be YAML. Received: 1:30: a number mu"),
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
def test_slots_that_cannot_work_are_rejected(embedding_config, text, message):
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
def test_groups_that_do_not_fit_the_slots_are_rejected(
    embedding_config, groups, message
):
    slots = "slots_config: {a: {dim: 8}, b: {dim: 8}, c: {dim: 16}}"
    with pytest.raises(ConfigError, match=message):
        embedding_config(f"{slots}\nfeature_groups: {groups}")


def test_a_group_may_be_named_like_a_slot_that_is_in_a_group(embedding_config):
    schema = embedding_config("slots_config: {a: {dim: 8}}\nfeature_groups: {a: [a]}")
    assert list(schema.groups) == ["a"]


@pytest.mark.parametrize(
    ("slot", "message"),
    [
        ("index_prefix: 3", "index_prefix must be 0. Received: 3. Leave it out"),
    ],
)
def test_slot_settings_without_a_meaning_here_are_rejected(
    embedding_config, slot, message
):
    with pytest.raises(ConfigError, match=message):
        embedding_config(f"slots_config: {{a: {{dim: 8, {slot}}}}}")
