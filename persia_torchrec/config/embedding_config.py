"""``embedding_config.yml``: which features are embedded, and how ids become rows.

Slots of one feature group share their ids: the same id in two of them is the same
row. Ids of different groups are kept apart by the group's number, which replaces the
top ``feature_index_prefix_bit`` bits of every id; groups are numbered from 1, first
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
from dataclasses import dataclass, field
from pathlib import Path

from persia_torchrec.config.differences import check_differences, with_present_keys
from persia_torchrec.config.yaml_file import (
    Place,
    hint,
    parse_yaml,
    read_section,
    read_text,
)
from persia_torchrec.errors import ConfigError

ID_BITS = 64
MAX_PREFIX_BITS = 62
"""With more, hardly an id would be left: they are taken modulo ``2**(64-n) - 1``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotConfig:
    """One feature: what its ids are looked up in, and what is made of the rows."""

    name: str
    """Of the id type feature in a batch."""

    dim: int
    """Weights a row."""

    sample_fixed_size: int = 10
    """Ids a sample when they are not summed."""

    embedding_summation: bool = True
    """Whether the rows of a sample are summed up to one."""

    sqrt_scaling: bool = False
    """Whether that sum is divided by the root of the number of ids."""

    hash_stack_rounds: int = 0
    """By how many bucket ids an id is replaced; 0 leaves it as it is."""

    hash_stack_size: int = 0
    """Buckets a round."""

    group: str
    """Name of its feature group."""

    index_prefix: int
    """Of that group; see :class:`FeatureGroup`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureGroup:
    """Slots that share their ids, and hence their rows."""

    name: str
    """From ``feature_groups``, or of the only slot."""

    slots: tuple[str, ...]
    """Names, in the file's order; all of one dim."""

    index_prefix: int
    """Added to the group's ids: its number, from 1, shifted to the top bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingSchema:
    """The whole file."""

    feature_index_prefix_bit: int
    """How many top bits of an id are the number of its feature group."""

    slots: Mapping[str, SlotConfig]
    """By name, in the file's order."""

    groups: tuple[FeatureGroup, ...]
    """In the order of their numbers."""


def load_embedding_config(path: str | Path, *, warns: bool = True) -> EmbeddingSchema:
    """Read ``embedding_config.yml``.

    Args:
        path: of the file.
        warns: whether keys that do not do what they say are logged, see
            ``differences.py``. False for a role beside another that logs them: in a
            job, embedding worker 0 does.

    Raises:
        ConfigError: the file cannot be read, a key is unknown or missing, a value is
            of another type or out of its range, or the groups do not fit the slots.
            The message names the file and the key path.
    """
    return parse_embedding_config(read_text(path), path, warns=warns)


def parse_embedding_config(
    text: str, path: str | Path, *, warns: bool = True
) -> EmbeddingSchema:
    """Read the text of ``embedding_config.yml``.

    Args:
        text: of the file.
        path: of the file, for messages.
        warns: as of :func:`load_embedding_config`.

    Raises:
        ConfigError: as :func:`load_embedding_config`.
    """
    place = Place(Path(path))
    content = with_present_keys(
        place.path, parse_yaml(text, path), is_embedding_config=True, warns=warns
    )
    file = read_section(_File, content, place)
    check_differences(place.path, content, warns=warns)
    groups = _number_groups(file, place)
    group_of = {slot: group for group in groups for slot in group.slots}
    slots = {
        name: SlotConfig(
            name=name,
            dim=entry.dim,
            sample_fixed_size=entry.sample_fixed_size,
            embedding_summation=entry.embedding_summation,
            sqrt_scaling=entry.sqrt_scaling,
            hash_stack_rounds=entry.hash_stack.hash_stack_rounds,
            hash_stack_size=entry.hash_stack.embedding_size,
            group=group_of[name].name,
            index_prefix=group_of[name].index_prefix,
        )
        for name, entry in file.slots.items()
    }
    return EmbeddingSchema(
        feature_index_prefix_bit=file.feature_index_prefix_bit,
        slots=slots,
        groups=groups,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _HashStack:
    """``hash_stack_config`` of a slot, as the file has it."""

    hash_stack_rounds: int
    embedding_size: int

    def __post_init__(self) -> None:
        for name in ("hash_stack_rounds", "embedding_size"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"{name} must be >= 0. Received: {getattr(self, name)}."
                )
        if self.hash_stack_rounds and not self.embedding_size:
            raise ConfigError(
                "embedding_size must be >= 1, the buckets a round, where there are "
                f"rounds. Received: 0, and hash_stack_rounds={self.hash_stack_rounds}."
            )


_NO_HASH_STACK = _HashStack(hash_stack_rounds=0, embedding_size=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Slot:
    """One of ``slots_config``, as the file has it."""

    dim: int
    sample_fixed_size: int = 10
    embedding_summation: bool = True
    sqrt_scaling: bool = False
    hash_stack: _HashStack = _NO_HASH_STACK
    index_prefix: int = 0

    def __post_init__(self) -> None:
        for name in ("dim", "sample_fixed_size"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} must be >= 1. Received: {getattr(self, name)}."
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    """``embedding_config.yml``, as it is."""

    feature_index_prefix_bit: int = 8
    slots: dict[str, _Slot]
    feature_groups: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.feature_index_prefix_bit <= MAX_PREFIX_BITS:
            raise ConfigError(
                f"feature_index_prefix_bit must be in [1, {MAX_PREFIX_BITS}]. "
                f"Received: {self.feature_index_prefix_bit}."
            )
        if not self.slots:
            raise ConfigError("slots_config must have at least one slot.")


def _number_groups(file: _File, place: Place) -> tuple[FeatureGroup, ...]:
    """Give each group its prefix: those of the file first, then the single slots."""
    at = place.under("feature_groups")
    for name, slots in file.feature_groups.items():
        _check_group(name, slots, file, at.under(name))
    times = Counter(slot for slots in file.feature_groups.values() for slot in slots)
    for slot, num_groups in times.items():
        if num_groups > 1:
            raise ConfigError(
                f"{at} must name each slot at most once. "
                f"Received: {slot!r} {num_groups} times."
            )
    members = dict(file.feature_groups)
    for slot in file.slots:
        if slot in times:
            continue
        if slot in members:
            raise ConfigError(
                f"{at.under(slot)} must not be named like a slot that is in no group, "
                "whose own group has that name. Rename the group."
            )
        members[slot] = (slot,)
    prefix_bits = file.feature_index_prefix_bit
    if len(members) >= 2**prefix_bits:
        raise ConfigError(
            f"{place} must have at most {2**prefix_bits - 1} groups, counting each "
            f"slot that is in none. Received: {len(members)}. "
            f"Raise feature_index_prefix_bit above {prefix_bits}."
        )
    return tuple(
        FeatureGroup(
            name=name,
            slots=slots,
            index_prefix=number << (ID_BITS - prefix_bits),
        )
        for number, (name, slots) in enumerate(members.items(), start=1)
    )


def _check_group(name: str, slots: tuple[str, ...], file: _File, at: Place) -> None:
    if not slots:
        raise ConfigError(f"{at} must list at least one slot.")
    for slot in slots:
        if slot not in file.slots:
            raise ConfigError(
                f"{at} must list slots of slots_config. Received: {slot!r}. "
                f"{hint(slot, file.slots)}"
            )
    dims = {slot: file.slots[slot].dim for slot in slots}
    if len(set(dims.values())) > 1:
        raise ConfigError(
            f"{at} must list slots of one dim, since they share rows. Received: {dims}."
        )
