"""The page of counters names every counter, and no other."""

import re

import numpy as np
import pytest

from persia_torchrec import SGD
from persia_torchrec.client.client import BatchNumber
from persia_torchrec.errors import RemoteError
from persia_torchrec.job.status import URGENT
from persia_torchrec.metrics.values import HISTOGRAMS
from persia_torchrec.pipeline.staleness import TrainingSummary
from persia_torchrec.table import TableSpec
from tests.support.processes import wait_until
from tests.support.repository import ROOT
from tests.support.servers import ids_of

PAGE = ROOT / "docs/metrics.md"
OF_SERVERS, _, REST = PAGE.read_text().partition("## Trainer metrics")
OF_TRAINERS, _, OVER_HTTP = REST.partition("## Over HTTP")


def names_in(text):
    """Return the names in the first column of the tables of a text."""
    cells = re.findall(r"^\| (.*?) \|", text, flags=re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


DESCRIBED = names_in(OF_SERVERS)


@pytest.fixture
def counters(servers, tmp_path):
    """Return the counters of servers that have trained a batch, or follow that."""
    logs = str(tmp_path / "increments")
    client = servers.client(servers.start(increments_dir=logs))
    client.add_tables([TableSpec(name="item", dim=2, optimizer=SGD(1.0))])
    batch, split = BatchNumber(1, 1), client.split(ids_of(1, 2))
    client.pull([("item", split)], batch=batch)
    grads = np.ones((2, 2), dtype=np.float32)
    client.outcome(client.push([("item", split)], [grads], batch))
    (counters,) = client.counters()
    return {**counters, **of_a_follower(servers, client, tmp_path)}


def of_a_follower(servers, client, folder):
    """Return the counters of a server of inference that follows a training."""
    client.checkpoints.dump(folder / "run")
    settings = {"checkpoint": folder / "run", "increments_dir": folder / "increments"}
    running = servers.start(1, **{name: str(at) for name, at in settings.items()})
    follower = servers.client(running)

    def counted():
        try:
            return follower.counters()[0]
        except RemoteError:  # it loads
            return {}

    wait_until(lambda: "increment_delay_ms" in counted(), "the follower counts")
    return counted()


@pytest.mark.slow
def test_every_counter_is_described(counters):
    kinds = {n for n in counters if n.startswith("requests_")}
    kinds |= {n for n in counters if n.rpartition("_us_")[0] in HISTOGRAMS}
    assert counters.keys() - kinds - DESCRIBED == set()
    named = names_in(OVER_HTTP)
    assert {f"persia_{name}_seconds" for name in HISTOGRAMS} <= named


def test_every_described_counter_exists(counters):
    only_when_it_happens = {
        *("requests_refused", "following_stopped", "increment_delay_ms_max"),
        *("restored_rows", "restored_increments"),
        *("lost_ms", "lost_updates", "lost_rows"),
    }
    assert DESCRIBED - counters.keys() - only_when_it_happens == set()


def test_every_number_of_a_trainer_is_described():
    public = {name for name in dir(TrainingSummary) if not name.startswith("_")}
    assert names_in(OF_TRAINERS) <= public
    spoken_of = set(re.findall(r"`(\w+)`", OF_TRAINERS))
    assert public - spoken_of == {"total", "num_waited", "num_lacking"}


def test_every_kind_of_problem_that_needs_a_hand_is_described():
    row = r"^\| `persia_problem_seconds` .* by `kind`: (.*?) \|"
    [kinds] = re.findall(row, OVER_HTTP, re.MULTILINE)
    assert re.findall(r"`(\w+)`", kinds) == [*URGENT, "failed"]
