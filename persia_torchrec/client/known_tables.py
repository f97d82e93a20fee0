"""The tables that a client has made known, and what each server calls them."""

import threading
from collections.abc import Sequence

from persia_torchrec.client.answers import added_tables, told_tables
from persia_torchrec.client.servers import Servers
from persia_torchrec.errors import ConfigError
from persia_torchrec.table import TableSpec
from persia_torchrec.wire.messages import Kind


class KnownTables:
    """Tables by name. Any thread may fill it, and read.

    Args:
        num_servers: how many servers there are.

    Attributes:
        numbers: for each server, its numbers of the tables, by name.
    """

    def __init__(self, num_servers: int) -> None:
        self._filling = threading.Lock()
        self._specs: dict[str, TableSpec] = {}
        self._wants_counts: dict[str, bool] = {}
        self.numbers: list[dict[str, int]] = [{} for _ in range(num_servers)]

    def add(self, specs: Sequence[TableSpec], answers: Sequence[object]) -> None:
        """Note tables that all servers have added.

        Args:
            specs: the tables.
            answers: of each server.

        Raises:
            WireError: an answer tells of other tables.
        """
        wants_counts = dict.fromkeys((spec.name for spec in specs), False)
        with self._filling:
            for numbers, answer in zip(self.numbers, answers, strict=True):
                added = added_tables(answer, len(specs))
                for spec, table in zip(specs, added, strict=True):
                    numbers[spec.name] = int(table["number"])
                    wants_counts[spec.name] |= bool(table["wants_counts"])
            self._wants_counts.update(wants_counts)
            self._specs.update((spec.name, spec) for spec in specs)

    def learn(self, servers: Servers) -> list[TableSpec]:
        """Ask the servers for their tables, and note those that all of them have.

        Returns:
            These tables, as they are on the first server.

        Raises:
            ConfigError: servers differ in what a table is.
            ServerError: a server failed, or did not answer in time.
            WireError: an answer tells of no tables.
        """
        answers = servers.ask(Kind.HELLO, None, "asking for tables")
        told = [told_tables(answer) for answer in answers]
        specs = [
            TableSpec.from_json(table["spec"])
            for name, table in told[0].items()
            if all(name in tables for tables in told)
        ]
        for spec in specs:
            for server, tables in zip(servers.names, told, strict=True):
                other = TableSpec.from_json(tables[spec.name]["spec"])
                if other.dim != spec.dim:
                    raise ConfigError(
                        f"Table {spec.name!r} must have one dim on all servers. "
                        f"Received: {other.dim} of {server}, and {spec.dim} of "
                        f"{servers.names[0]}. Load the same checkpoint into all."
                    )
        self.add(specs, [[tables[spec.name] for spec in specs] for tables in told])
        return specs

    def names(self) -> list[str]:
        """Return the names of all tables."""
        return list(self._specs)

    def spec(self, name: str) -> TableSpec:
        """Return a table.

        Raises:
            ConfigError: it was not added.
        """
        if name not in self._specs:
            raise ConfigError(
                f"Table {name!r} is unknown to this client. Known: "
                f"{sorted(self._specs)}. Call add_tables first."
            )
        return self._specs[name]

    def wants_counts(self, name: str) -> bool:
        """Return whether training pulls of a table should come with counts."""
        return self._wants_counts[self.spec(name).name]

    def numbers_of(self, name: str) -> list[int]:
        """Return the number of a table on each server."""
        return [numbers[self.spec(name).name] for numbers in self.numbers]
