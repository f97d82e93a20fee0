"""Samples per second of a job on three hosts, by the latency of the network between.

    python -m tests.cluster.latency --json latency.json

The adult-income example trains on the loopback interface, and on hosts as of
``tests/support/hosts.py``, in turn: the coordinator, the embedding worker and the data
loader on one, the servers on another, the NN worker on a third. A packet takes half of
a round trip. At 0 ms it shows what the switch costs, a process of its own.
"""

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks import harness
from persia_torchrec import env
from tests.support.forked_jobs import ForkedJob
from tests.support.hosts import Hosts
from tests.support.repository import ROOT

EXAMPLE = ROOT / "examples/adult_income"
NUM_WARM_STEPS = 100
LOADER = f"""
import os, sys
sys.path.insert(0, {str(EXAMPLE)!r})
from obtain import obtain_adult
from data_loader import batches
from persia_torchrec.ctx import DataCtx
from persia_torchrec.env import data_dir

rows = obtain_adult(data_dir()).train
with DataCtx() as ctx:
    for _ in range(int(os.environ["PASSES"])):
        for batch in batches(rows, requires_grad=True):
            ctx.send_data(batch)
"""
TRAIN = f"""
import os, sys, time
sys.path.insert(0, {str(EXAMPLE)!r})
import torch
from model import DNN
from persia_torchrec.ctx import TrainCtx
from persia_torchrec.data import DataLoader, StreamingDataset
from persia_torchrec.embedding.optim import Adagrad
from persia_torchrec.persia.utils import setup_seed

setup_seed(3)
model, loss_fn = DNN(), torch.nn.BCELoss()
with TrainCtx(
    model=model,
    embedding_optimizer=Adagrad(lr=1e-2),
    dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    mixed_precision=False,
) as ctx:
    staleness = int(os.environ["STALENESS"])
    num = 0
    for step, batch in enumerate(
        DataLoader(StreamingDataset(10), embedding_staleness=staleness)
    ):
        if step == {NUM_WARM_STEPS}:
            start = time.perf_counter()
        output, labels = ctx.forward(batch)
        ctx.backward(loss_fn(output, labels[0]))
        num += len(labels[0]) * (step >= {NUM_WARM_STEPS})
    seconds = time.perf_counter() - start
print(f"samples/s {{num / seconds}}", flush=True)
"""


def measure(network: Hosts | None, staleness: int, passes: int) -> float:
    """Return the samples per second of one job, which begins and ends here."""
    hosts = {}
    if network is not None:
        one, two, three = network.all
        hosts = {"coordinator": one, "worker": one, "loader": one}
        hosts |= {"server": two, "trainer": three}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "load.py").write_text(LOADER)
        (folder / "train.py").write_text(TRAIN)
        with ForkedJob(
            folder,
            "train",
            *("--nn_worker", "train.py", "--data_loader", "load.py"),
            *("--embedding_config", f"{EXAMPLE}/embedding_config.yml"),
            *("--global_config", f"{EXAMPLE}/global_config.yml"),
            *("--servers", "2"),
            variables={
                "STALENESS": str(staleness),
                "PASSES": str(passes),
                "OMP_NUM_THREADS": "1",
                "PERSIA_DATA_DIR": env.data_dir() or "",
            },
            hosts=hosts,
        ) as job:
            ended = job.wait()
    if ended.status:
        raise SystemExit(ended.output)
    return float(ended.line(r"samples/s (\S+)"))


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--round-trip-ms", type=float, nargs="+", default=[0, 1, 10])
    parser.add_argument("--staleness", type=int, nargs="+", default=[8])
    parser.add_argument("--passes", type=int, default=4, help="over 32,561 samples")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each network")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    given = parser.parse_args()
    networks = [None, *given.round_trip_ms]
    rates = {(staleness, ms): [] for staleness in given.staleness for ms in networks}
    for _ in range(given.repeats):
        for (staleness, ms), found in rates.items():
            with ExitStack() as stack:
                network = None
                if ms is not None:
                    network = stack.enter_context(Hosts(3))
                    network.set_round_trip(ms / 1000)
                found.append(measure(network, staleness, given.passes))
    rows = []
    for (staleness, ms), found in rates.items():
        base = median(rates[staleness, None])
        name = "loopback" if ms is None else f"three hosts, round trip {ms:g} ms"
        middle = median(found)
        rows.append([name, staleness, middle, min(found), max(found), middle / base])
    header = "network | staleness | samples/s, median | slowest | fastest | of loopback"
    table = harness.Table("latency", "Adult-income, batches of 128.", header, rows)
    sys.stdout.write(table.to_markdown())
    facts = {"machine": harness.describe_machine()}
    facts |= {"versions": harness.describe_versions()}
    sys.stdout.write(json.dumps(facts) + "\n")
    if given.json:
        text = json.dumps({**facts, "rows": table.dicts()}, indent=2)
        given.json.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
