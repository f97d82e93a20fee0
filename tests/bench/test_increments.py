"""The benchmark of increments measures what it says, and checks every row."""

import json

import numpy as np
import pytest

from persia_torchrec.bench.__main__ import main
from persia_torchrec.bench.increments import IncrementSettings, measure
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.errors import ConfigError, StoreError

SMALL = IncrementSettings(
    rows=500, batches=2, paced_batches=1, repeats=1, interval_s=0.02, draws=200
)


@pytest.mark.multiprocess
def test_costs_and_freshness_are_in_the_report(tmp_path):
    path = tmp_path / "increments.json"
    assert main(["increments", "--tiny", "--json", str(path)]) == 0
    tables = json.loads(path.read_text())["results"]["increments"]["tables"]
    plain, writing = tables["cost"]["rows"]
    assert plain["relative"] == 1
    assert writing["rate"] > 0
    assert 0 < tables["freshness"]["rows"][0]["delay_median"] < 60


@pytest.mark.multiprocess
def test_a_follower_with_other_rows_ends_it(monkeypatch):
    read = EmbeddingClient.read

    def wrong(client, table, ids):
        rows = read(client, table, ids)
        is_follower = "increments_put_in" in client.counters()[0]
        return rows + np.float32(is_follower and len(ids) > 100)

    monkeypatch.setattr(EmbeddingClient, "read", wrong)
    with pytest.raises(StoreError, match="must have the rows of the training"):
        measure(SMALL)


def test_numbers_out_of_range_are_refused():
    with pytest.raises(ConfigError, match=r"batches must be > 0\. Received: 0"):
        IncrementSettings(batches=0)
