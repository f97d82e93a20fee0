"""Which tables lie on the embedding servers, and which under TorchRec's own sharding.

Huge tables belong on the servers: their ids are raw, their rows appear and leave. Small
ones train faster on the trainers themselves, where no byte of theirs travels to a
server. A collection may hold both; here it is decided which is which:

    named in remote, local, or by constraints   -> as named
    else by size                                -> on the servers from a size on
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import DATA_TYPE_NUM_BITS, BaseEmbeddingConfig

from persia_torchrec.errors import ConfigError
from persia_torchrec.table import require_known_tables


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where each table lies; on the servers, unless something here says otherwise.

    A table that is named is where it is named; of the others, those that are as large
    as ``min_rows`` and ``min_bytes`` ask are on the servers.

    Raises:
        ConfigError: a size is negative, or a table is named on both sides.

    Example:
        >>> placement = Placement(min_rows=1_000_000, local={"item"})
        >>> placement.is_remote(BaseEmbeddingConfig(5_000_000, 64, name="user"))
        True
        >>> placement.is_remote(BaseEmbeddingConfig(200, 64, name="country"))
        False
        >>> placement.is_remote(BaseEmbeddingConfig(5_000_000, 64, name="item"))
        False
    """

    min_rows: int = 0
    """Tables of fewer rows (``num_embeddings``) stay under TorchRec."""

    min_bytes: int = 0
    """Tables whose weights take fewer bytes stay under TorchRec."""

    remote: Collection[str] = frozenset()
    """Tables on the servers, whatever their size."""

    local: Collection[str] = frozenset()
    """Tables under TorchRec's own sharding, whatever their size."""

    constraints: Mapping[str, ParameterConstraints] = field(default_factory=dict)
    """The planner's: a table whose constraints have sharding types or compute kernels
    is one that TorchRec shards, and so is local. Tables that no collection has are left
    alone, as the planner leaves them."""

    def __post_init__(self) -> None:
        for name in ("min_rows", "min_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"{name} must be >= 0. Received: {getattr(self, name)}."
                )
        for name in ("remote", "local"):
            if isinstance(getattr(self, name), str):
                raise ConfigError(
                    f"{name} must be a collection of table names. "
                    f"Received: {getattr(self, name)!r}; is "
                    f"{{{getattr(self, name)!r}}} meant?"
                )
        both = set(self.remote) & (set(self.local) | self._constrained())
        if both:
            raise ConfigError(
                "A table must be in remote, or in local or constrained to sharding "
                f"types of TorchRec, not both. Received: {sorted(both)}."
            )

    def is_remote(self, config: BaseEmbeddingConfig) -> bool:
        """Return whether the table lies on the servers."""
        if config.name in self.remote:
            return True
        if config.name in self.local or config.name in self._constrained():
            return False
        return (
            config.num_embeddings >= self.min_rows
            and table_bytes(config) >= self.min_bytes
        )

    def require_known(self, tables: Iterable[str]) -> None:
        """Refuse names that are no tables of the model.

        Raises:
            ConfigError: a name is unknown; the message has the nearest one.
        """
        require_known_tables({*self.remote, *self.local}, tables)

    def _constrained(self) -> set[str]:
        return {
            name
            for name, constraints in self.constraints.items()
            if constraints.sharding_types or constraints.compute_kernels
        }


def table_bytes(config: BaseEmbeddingConfig) -> int:
    """Return the bytes of a table's weights."""
    bits = DATA_TYPE_NUM_BITS[config.data_type]
    return config.num_embeddings * config.embedding_dim * bits // 8
