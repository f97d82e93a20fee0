"""The training of the PLE example, on rows that look like Taobao's."""

import contextlib
import importlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.ple import model
from persia_torchrec import Adam
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.table import TableSpec
from tests.processes import Processes

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

FOLDER = Path(model.__file__).parent
NUM_ROWS, NUM_STEPS = 400, 6
NUM_COMPARED = 20
COMMON = ["--op_fusion", "false", "--batch_size", "32", "--steps", str(NUM_STEPS)]


def write_rows(folder):
    """Write lines of 20 fields, two of them lists, some empty."""
    rng = np.random.default_rng(5)
    lines = []
    for _ in range(NUM_ROWS):
        ids = [str(number) for number in rng.integers(0, 40, 18)]
        ids[8 + rng.integers(3)] = ""
        for column in (15, 16):
            ids[column] = "|".join(str(n) for n in rng.integers(0, 9, rng.integers(4)))
        lines.append(",".join([*(str(n) for n in rng.integers(0, 2, 2)), *ids]))
    (folder / "taobao_test_data").write_text("\n".join(lines) + "\n")


def of_example(name):
    """Import a module of the example, as its scripts do."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)


def parse(folder, *words):
    location = ["--data_location", str(folder), "--output_dir", str(folder / "result")]
    return of_example("options").Options.parse([*location, *COMMON, *words])


def start(options, stack):
    """Return a training, before its first step."""
    train = of_example("train")
    spec = train.SPECS[options.dataset]
    torch.manual_seed(0)
    own = train.make_model(options, spec), train.read_data(options, spec)
    return train.Training(options, spec, own[1], own[0], stack), own[0]


def losses_of(training):
    return [losses.tolist() for losses in training.steps()]


class RowsInProcess:
    """Adam for tables of this process, as the servers compute it: to the bit.

    Gradients of an id are added in the order of the batch. torch's sparse gradients
    are added in another one, and its Adam rounds otherwise: within 5 steps PLE makes
    1e-7 of a row 1e-2 of the loss.
    """

    def __init__(self, parameters, lr):
        self.parameters, self.param_groups = list(parameters), [{}]
        self.store = EmbeddingStore(sum(map(len, self.parameters)))
        for number, rows in enumerate(self.parameters):
            spec = TableSpec(name=str(number), dim=model.DIM, optimizer=Adam(lr))
            self.store.add_table(spec)
            ids = np.arange(len(rows), dtype=np.uint64)
            self.store.write(number, ids, rows.detach().numpy())

    def zero_grad(self):
        for rows in self.parameters:
            rows.grad = None

    def step(self):
        for number, rows in enumerate(self.parameters):
            ids, inverse = np.unique(rows.grad._indices()[0], return_inverse=True)
            grads = np.zeros((len(ids), model.DIM), dtype=np.float32)
            np.add.at(grads, inverse, rows.grad._values().numpy())
            self.store.update(number, ids.astype(np.uint64), grads)
            found = self.store.read(number, ids.astype(np.uint64))
            rows.data[ids] = torch.from_numpy(found[:, : model.DIM])


def compare(folder):
    """Print the losses in this process, and on servers at staleness 0."""
    folder = Path(folder)
    file = folder / "taobao_test_data"
    file.write_text(re.sub(r"\|[^,]*", "", file.read_text()))  # means round otherwise
    of_example("train").RowAdam = RowsInProcess
    plain = parse(folder, "--tf", "--steps", str(NUM_COMPARED))
    with contextlib.ExitStack() as stack:
        of_example("train").start_torch(plain, stack)
        local, tables = start(plain, stack)
        state = {name: value.clone() for name, value in tables.state_dict().items()}
        print(json.dumps(losses_of(local)))
        words = ["--smartstaged", "false", "--steps", str(NUM_COMPARED)]
        remote, _ = start(parse(folder, *words), stack)
        remote.half.sharders.load_weights(state)
        print(json.dumps(losses_of(remote)))


def run(folder, *words):
    of_example("train").run(parse(Path(folder), *words))


def in_a_process(folder, target, *words):
    write_rows(folder)
    with Processes(folder) as processes:
        process = processes.start("training", target, str(folder), *words)
        assert process.status() == 0, process.output()
    return process.output()


def test_on_servers_at_staleness_0_the_losses_are_those_in_this_process(tmp_path):
    lines = in_a_process(tmp_path, compare).splitlines()
    local, remote = (json.loads(line) for line in lines if line.startswith("[["))
    assert len(local) == NUM_COMPARED
    assert remote == local


def test_a_run_leaves_its_results(tmp_path):
    words = ["--ev", "--ev_filter", "counter", "--timeline", "4", "--save_steps", "3"]
    in_a_process(tmp_path, run, *words)
    folder = tmp_path / "result"
    results = json.loads((folder / "results.json").read_text())
    assert results["steps"] == NUM_STEPS
    assert 0 <= results["auc_clk"] <= 1
    assert results["acc_buy"] == pytest.approx(0.5, abs=0.5)
    assert results["options"]["ev"] is True
    assert "| clk | 0." in (folder / "results.md").read_text()
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(folder.glob("events.out*"))) == 1
    trace = json.loads((folder / "timeline-4.json").read_text())
    assert trace["traceEvents"]
    (checkpoints,) = folder.glob("model_PLE_*")
    assert [path.name for path in checkpoints.glob("checkpoint-*")] == [
        "checkpoint-00000003"
    ]
