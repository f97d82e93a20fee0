"""A job that strangers connect to again and again trains on, and hardly works more."""

import os
import statistics
import threading
from pathlib import Path

import pytest

from persia_torchrec.client.client import EmbeddingClient
from tests.soak import job, strangers
from tests.soak.conftest import LEAST_OF_A_TABLE
from tests.support.processes import children_of, wait_until

TABLE = Path(__file__).with_name("strangers.md")
LEAST_PAIRS = 5
TURN_S = 10  # short: the speed of the machine changes within minutes
MOST = 1.05

pytestmark = pytest.mark.multiprocess


def processor_s(pid):
    """Return the processor time that a process and its children have used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(map(processor_s, children_of(pid)))


class Job:
    """A job, and what a batch costs it."""

    def __init__(self, processes, folder):
        self.running, addresses = job.start(processes, str(folder), fills=False)
        self.latencies = folder / "latencies"
        book = self.running["address book"].output().split()[1]
        self.mechanisms = {int(book): strangers.CURVE}
        for address in addresses:
            self.mechanisms[int(address.rpartition(":")[2])] = strangers.PLAIN
        self.addresses = addresses

    def cost_ms(self, seconds):
        """Return the milliseconds of processor time of a batch, for so long."""
        begun = self._used()
        threading.Event().wait(seconds)
        wait_until(lambda: self._used()[0] > begun[0], "a batch is trained")
        batches, used_s = (b - a for a, b in zip(begun, self._used(), strict=True))
        return 1000 * used_s / batches

    def _used(self):
        lines = self.latencies.read_text().count("\n")
        return lines, sum(processor_s(one.pid) for one in self.running.values())


@pytest.mark.parametrize("kind", strangers.KINDS)
def test_strangers_cost_hardly_a_thing(processes, tmp_path, minutes, kind, monkeypatch):
    if minutes < LEAST_OF_A_TABLE:
        pytest.skip("in seconds, nothing can be compared: make soak")
    monkeypatch.setenv("PERSIA_JOB_TOKEN", os.urandom(32).hex())
    measured = Job(processes, tmp_path)
    of_kind_s = 60 * minutes / len(strangers.KINDS)
    num_pairs = max(LEAST_PAIRS, round(of_kind_s / (2 * TURN_S)))
    seconds = of_kind_s / (2 * num_pairs)
    alone, beside = [], []
    for turn in range(num_pairs):
        alone.append(measured.cost_ms(seconds))
        name = f"strangers {turn}"
        come = processes.start(name, strangers.come_again, kind, measured.mechanisms)
        come.has_printed("closed")
        beside.append(measured.cost_ms(seconds))
        assert come.process.is_alive(), come.output()
        come.kill()
    for name, process in measured.running.items():
        assert process.process.is_alive(), f"{name}: {process.output()[-3000:]}"
        assert "Traceback" not in process.output(), process.output()[-3000:]
    client = EmbeddingClient.connect(measured.addresses)
    assert all(client.counters())
    client.close()
    ratio = statistics.median(b / a for a, b in zip(alone, beside, strict=True))
    line = (
        f"| {kind} | {statistics.median(alone):.2f} | "
        f"{statistics.median(beside):.2f} | {ratio:.3f} |\n"
    )
    print(line)
    head, _, rows = TABLE.read_text().partition("|---|---|---|---|\n")
    kept = [row for row in rows.splitlines(True) if not row.startswith(f"| {kind} |")]
    TABLE.write_text(f"{head}|---|---|---|---|\n{''.join([*kept, line])}")
    assert ratio <= MOST, line
