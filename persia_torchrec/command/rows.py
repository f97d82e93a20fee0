"""Verbs of the rows of a running job, and of files of data."""

import contextlib
from collections.abc import Iterator
from typing import Any

import click
import numpy as np

from persia_torchrec import timeouts
from persia_torchrec.arrays import Ids
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.command import console
from persia_torchrec.command.console import as_json
from persia_torchrec.command.job_view import opened
from persia_torchrec.job.requests import FindRole, Found

of_job = click.option("--job", default="", help="Id of the job [the one that runs].")
_MAX_ID = 2**64


class Id(click.ParamType):  # type: ignore[type-arg]  # of older click it has none
    """An id of 64 bits: not negative, or torch's view of it as int64."""

    name = "id"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Return the id as uint64 has it."""
        try:
            number = int(value, 0)
        except ValueError:
            number = _MAX_ID
        if not -_MAX_ID // 2 <= number < _MAX_ID:
            self.fail(f"must be an integer of 64 bits. Received: {value}.", param, ctx)
        return number % _MAX_ID


def shown(ids: Ids, weights: Any, state: Any) -> list[dict[str, Any]]:
    """Return a line for each row: id, weights and optimizer state."""
    return [
        {"id": int(i), "weights": w.tolist(), "state": s.tolist()}
        for i, w, s in zip(ids, weights, state, strict=True)
    ]


def print_rows(lines: list[dict[str, Any]], *, is_json: bool) -> None:
    """Print rows: as JSON, or a line each."""
    if is_json:
        console.show_json(lines)
        return
    for line in lines:
        weights = " ".join(f"{value:.6g}" for value in line["weights"])
        state = " ".join(f"{value:.6g}" for value in line["state"])
        console.echo(
            f"{line['id']}: {weights}" + (f"  state: {state}" if state else "")
        )


@click.command()
@click.argument("table")
@click.argument("ids", nargs=-1, type=Id(), required=True)
@of_job
@as_json
def get(table: str, ids: tuple[int, ...], job: str, is_json: bool) -> None:
    """Show the rows of IDS of a TABLE, as the servers have them now.

    An id without a row has zeros, or what the table has for it.

    persia-torchrec get item 17 18
    """
    with _servers_of(job, table) as client:
        ids_U, order = np.unique(np.array(ids, np.uint64), return_inverse=True)
        rows = client.read(table, ids_U)[order]
        dim = client.table(table).dim
        lines = shown(ids_U[order], rows[:, :dim], rows[:, dim:])
    print_rows(lines, is_json=is_json)


@click.command()
@click.argument("table")
@click.option("-k", default=20, show_default=True, help="How many ids.")
@click.option("--sample", default=100_000, show_default=True, help="Rows looked at.")
@of_job
@as_json
def hot(table: str, k: int, sample: int, job: str, is_json: bool) -> None:
    """Show the ids of a TABLE that were seen most often, of a sample of its rows.

    The table must keep metadata (TableSettings(keeps_metadata=True), or eviction lfu).
    Nothing is counted for this: it reads what such a table has.

    persia-torchrec hot item -k 10
    """
    with _servers_of(job, table) as client:
        found = [np.empty(0, np.uint64)]
        for block in client.export(table):
            found.append(block.ids)
            if sum(map(len, found)) >= sample:
                break
        ids = np.sort(np.concatenate(found)[:sample])
        seen = client.metadata(table, ids)
    order = np.argsort(seen.frequency, kind="stable")[::-1][:k]
    lines = [
        {
            "id": str(ids[at]),
            "frequency": int(seen.frequency[at]),
            "last_step": int(seen.last_step[at]),
        }
        for at in order
    ]
    if is_json:
        console.show_json(lines)
    else:
        console.show(lines, title=f"{table}: {len(ids)} rows looked at")


@contextlib.contextmanager
def _servers_of(job: str, table: str) -> Iterator[EmbeddingClient]:
    """Connect to the servers of a job, which have a table."""
    with opened(job) as there:
        servers = there.book.call(FindRole("server"), Found).values or []
        known = [address for address in servers if address]
        if not servers or known != servers:
            raise click.ClickException(
                f"All servers of the job must have registered. Received: {servers}."
            )
        client = EmbeddingClient.connect(
            known, timeout_s=timeouts.VERB_ANSWER_S, greeting=there.book.greeting
        )
        with contextlib.closing(client):
            names = [spec.name for spec in client.learn_tables()]
            if table not in names:
                raise click.ClickException(
                    f"TABLE must be one of the job: {', '.join(names)}. Received: "
                    f"{table}."
                )
            yield client


@click.command()
@click.argument("files", nargs=-1, required=True)
@click.option("--rows", default=1_000_000, show_default=True, help="Rows looked at.")
def data(files: tuple[str, ...], rows: int) -> None:
    """Show what is in FILES, and the lines of Python that read them.

    persia-torchrec data day_*.parquet
    """
    from persia_torchrec.datasets.look import look  # needs the extra data

    console.echo(look(files, rows))
