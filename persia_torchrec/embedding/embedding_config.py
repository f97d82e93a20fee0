"""``embedding_config.yml``: which features are embedded, and how ids become rows.

Slots of one feature group share their ids: the same id in two of them is the same
row. Ids of different groups are kept apart by the group's number, which replaces the
top ``feature_index_prefix_bit`` bits of every id. Groups are numbered from 1: first
those of the file, then one for each slot that is in none::

    feature_index_prefix_bit: 8         group     prefix
    slots_config:
      user:   {dim: 16}                 user      2 << 56
      item:   {dim: 8}                  things    1 << 56
      basket: {dim: 8}                  things    1 << 56
    feature_groups:
      things: [item, basket]
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, field, structs

from persia_torchrec.embedding.limits import MAX_DIM
from persia_torchrec.errors import ConfigError
from persia_torchrec.parsing.decoding import KeyPath
from persia_torchrec.parsing.yaml_file import nearest, parse_file, read_text


class HashStack(Struct, frozen=True, kw_only=True):
    """``hash_stack_config`` of a slot: bucket ids instead of each id."""

    hash_stack_rounds: Annotated[int, Meta(ge=0)]  # bucket ids per id; 0: the id stays
    embedding_size: Annotated[int, Meta(ge=0)]  # buckets per round

    def __post_init__(self) -> None:
        if self.hash_stack_rounds and not self.embedding_size:
            raise ConfigError(
                "embedding_size must be >= 1, the buckets per round, where there are "
                f"rounds. Received: 0, and hash_stack_rounds={self.hash_stack_rounds}."
            )


class SlotSettings(Struct, frozen=True, kw_only=True):
    """One entry of ``slots_config``."""

    dim: Annotated[int, Meta(ge=1, le=MAX_DIM)]  # weights per row
    sample_fixed_size: Annotated[int, Meta(ge=1)] = 10  # ids, when they are not summed
    embedding_summation: bool = True  # of the rows of a sample
    sqrt_scaling: bool = False  # divide the sum by the root of the number of ids
    hash_stack: HashStack = field(
        name="hash_stack_config",
        default=HashStack(hash_stack_rounds=0, embedding_size=0),
    )


class SlotConfig(SlotSettings, frozen=True, kw_only=True):
    """One feature: how its ids are looked up, and what becomes of the rows."""

    name: str  # of the id type feature in a batch
    group: str  # name of its feature group
    index_prefix: int  # added to its ids: the group's number, shifted to the top bits


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingSchema:
    """The whole file, its groups numbered."""

    feature_index_prefix_bit: int  # top bits of an id that are its group's number
    slots: Mapping[str, SlotConfig]  # by name, in the file's order
    # Names of the slots of each group, all of one dim, in the order of the groups'
    # numbers. A slot in no group is alone in one with its name.
    groups: Mapping[str, tuple[str, ...]]


class _File(Struct, frozen=True, kw_only=True):
    # With more bits hardly any ids are left: they are taken modulo 2**(64-bits) - 1.
    feature_index_prefix_bit: Annotated[int, Meta(ge=1, le=62)] = 8
    slots_config: dict[str, SlotSettings]
    feature_groups: dict[str, Annotated[tuple[str, ...], Meta(min_length=1)]] = {}


def load_embedding_config(
    path: str | Path, text: str | None = None, *, warns: bool = True
) -> EmbeddingSchema:
    """Read ``embedding_config.yml``, or raise ConfigError with ``path`` and key path.

    ``text`` is the file's content, if it was read before. ``warns``: keys without
    effect are logged, as worker 0 of a job does.
    """
    top = KeyPath(str(path))
    text = read_text(path) if text is None else text
    file = parse_file(_File, text, top, "embedding_config", warns=warns)
    if not file.slots_config:
        raise ConfigError(f"{top.under('slots_config')} must have at least one slot.")
    groups = _complete_groups(file, top.under("feature_groups"))
    bits = file.feature_index_prefix_bit
    if len(groups) >= 2**bits:
        raise ConfigError(
            f"{top} must have at most {2**bits - 1} groups, counting each slot that "
            f"is in none. Received: {len(groups)}. "
            f"Raise feature_index_prefix_bit above {bits}."
        )
    added: dict[str, dict[str, Any]] = {
        slot: {"group": group, "index_prefix": number << (64 - bits)}
        for number, (group, members) in enumerate(groups.items(), start=1)
        for slot in members
    }
    slots = {
        name: SlotConfig(**structs.asdict(slot), name=name, **added[name])
        for name, slot in file.slots_config.items()
    }
    return EmbeddingSchema(feature_index_prefix_bit=bits, slots=slots, groups=groups)


def _complete_groups(file: _File, at: KeyPath) -> dict[str, tuple[str, ...]]:
    """Check the groups of a file, and add one for each slot that is in none."""
    groups = dict(file.feature_groups)
    for name, members in groups.items():
        _check_group(members, file.slots_config, at.under(name))
    times = Counter(slot for members in groups.values() for slot in members)
    for slot in file.slots_config:
        if times[slot] > 1:
            raise ConfigError(
                f"{at} must name each slot at most once. "
                f"Received: {slot!r} {times[slot]} times."
            )
        if times[slot]:
            continue
        if slot in groups:
            raise ConfigError(
                f"{at.under(slot)} must not be named like a slot that is in no group, "
                "whose own group has that name. Rename the group."
            )
        groups[slot] = (slot,)
    return groups


def _check_group(
    members: tuple[str, ...], slots: Mapping[str, SlotSettings], at: KeyPath
) -> None:
    for slot in members:
        if slot not in slots:
            raise ConfigError(
                f"{at} must list slots of slots_config. Received: {slot!r}. "
                f"{nearest(slot, slots)}"
            )
    dims = {slot: slots[slot].dim for slot in members}
    if len(set(dims.values())) > 1:
        raise ConfigError(
            f"{at} must list slots of one dim, since they share rows. Received: {dims}."
        )
