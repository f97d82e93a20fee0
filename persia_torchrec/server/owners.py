"""Owners: trainers that cache rows of tables, each a lease that outlives processes.

While a table has owners, only they change its rows, by writes; another client's request
is an error that names them. An owner is a client's stream of changes, and the rank of
its trainer. A new owner of the same rank ends the previous one: what that still sends
is a FencedError. So a process that was stopped, and continues, writes no older row.

    own(rank 0, stream 7) --> own(rank 0, stream 9): 7 is ended --> disown: 9 may write
"""

from collections.abc import Callable, Collection, Iterable

import msgspec

from persia_torchrec.errors import ConfigError, FencedError

_MAX_ENDED = 1024


class TableOwner(msgspec.Struct, array_like=True):
    """A trainer with a lease: its client's stream, and tables by number."""

    rank: int
    stream: int
    who: str
    tables: set[int]


class TableOwners(msgspec.Struct):
    """All owners of a shard, and streams of those that were ended, the latest last."""

    owners: list[TableOwner] = []
    ended: list[int] = []

    def own(self, new: TableOwner) -> None:
        """Give a trainer a lease of tables; end others of its rank that have one."""
        for old in list(self.owners):
            if old.stream == new.stream:
                self.owners.remove(old)
                new.tables |= old.tables
            elif old.rank == new.rank and old.tables & new.tables:
                self._end(old)
        self.owners.append(new)

    def disown(self, tables: Collection[int], stream: int) -> None:
        """End a stream's leases of tables; or, if it has none, the owners of these."""
        found = [one for one in self.owners if one.tables.intersection(tables)]
        for owner in [one for one in found if one.stream == stream] or found:
            owner.tables.difference_update(tables)
            if owner.stream != stream:
                self._end(owner)
            elif not owner.tables:
                self.owners.remove(owner)

    def drop(self, is_over: Callable[[int], bool]) -> None:
        """Forget owners whose streams are rejected by themselves."""
        self.owners = [one for one in self.owners if not is_over(one.stream)]

    def require(self, tables: Iterable[int] | None, stream: int, what: str) -> None:
        """Reject a change of tables, or of all, by another client than their owners.

        Of a stream that was ended, it is a FencedError.
        """
        if stream in self.ended:
            raise FencedError(
                "A trainer must not write rows of tables that another one of its rank "
                f"has owned since. Received: {what}. End this process."
            )
        found = self.owners
        if tables is not None:
            found = [one for one in found if one.tables.intersection(tables)]
        if found and all(one.stream != stream for one in found):
            whos = ", ".join(f"rank {one.rank} ({one.who})" for one in found)
            raise ConfigError(
                "Tables must not be changed by others while trainers cache their rows. "
                f"Received: {what}; their owners are {whos}. Close these trainers; of "
                "one that has died, start its successor, or call disown of a client."
            )

    def _end(self, owner: TableOwner) -> None:
        self.owners.remove(owner)
        self.ended = [*self.ended, owner.stream][-_MAX_ENDED:]
