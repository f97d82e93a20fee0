"""What a state dict holds in place of a table whose rows are on the servers.

    model.state_dict()["...embedding_bags.user.weight"]
        plain TorchRec    a tensor
        here              a str: where the rows are, and what saves and reads them

A str goes through ``torch.save``, ``torch.load(weights_only=True)`` and
``torch.distributed.checkpoint`` as it is, and whoever takes it for a tensor fails. Rows
that come the other way, in a plain model's state, are refused: they would be lost.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from persia_torchrec.errors import ConfigError

_BEGINNING = "on the embedding servers, not in this state: "


def state_entry(table: str) -> str:
    """Return what stands in a state dict for the weights of a table."""
    return (
        f"{_BEGINNING}the rows of table {table!r}. save_checkpoint and load_checkpoint "
        "of persia_torchrec keep them with the dense half; plain_state_dict and "
        "read_table return them as tensors, load_weights of the sharder takes tensors."
    )


def is_state_entry(value: object) -> bool:
    """Return whether a value of a state dict stands for a table on the servers."""
    return isinstance(value, str) and value.startswith(_BEGINNING)


class HoldsEntries(Protocol):
    """A module whose tables are on the servers."""

    def tables_by_key(self) -> Mapping[str, str]:
        """Return the tables' names, by the keys that TorchRec gives their weights."""


def add_entries(
    module: HoldsEntries, state_dict: dict[str, Any], prefix: str, *_: object
) -> None:
    """Put an entry for each table into the state of a model; a hook for torch."""
    for key, table in module.tables_by_key().items():
        state_dict[prefix + key] = state_entry(table)


def take_entries(
    module: HoldsEntries,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: object,
    strict: bool,
    missing_keys: list[str],
    *_: object,
) -> None:
    """Take the entries out of a state before the rest is loaded; a hook for torch.

    Raises:
        ConfigError: there are weights of a table, which would be lost.
    """
    for key, table in module.tables_by_key().items():
        entry = state_dict.pop(prefix + key, None)
        if entry is None and strict:
            missing_keys.append(prefix + key)
        elif not isinstance(entry, str | None):
            raise ConfigError(
                f"{prefix + key!r} must not hold weights: the rows of this table are "
                f"on the embedding servers. Received: {type(entry).__name__}. Call "
                "load_weights(state_dict) of the sharder, or load_tables(client, "
                f"state_dict, [{table!r}]), to write them there; then load the dense "
                "half with strict=False, from a state without the keys of tables on "
                "the servers."
            )
