"""The training of the PLE example, on rows that look like Taobao's."""

import contextlib
import importlib
import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.ple import model
from persia_torchrec import Adam
from tests.processes import Processes

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

FOLDER = Path(model.__file__).parent
NUM_ROWS, NUM_STEPS, EPS = 400, 6, 1e-2
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


def make_smooth(train):
    """Give Adam an eps at which noise in a gradient near 0 is no step of its own.

    With 1e-8, rows that differ by 1e-7 give losses that differ by 1e-2 at step 3: the
    sign of such a gradient decides, and batch norm of 32 rows does the rest.
    """
    train.dense_optimizer = lambda _, parameters: torch.optim.Adam(parameters, eps=EPS)
    train.RowAdam = partial(train.RowAdam, eps=EPS)
    train.row_optimizer = lambda _: Adam(eps=EPS)


def compare(folder):
    """Print the losses in this process, and on servers at staleness 0."""
    folder = Path(folder)
    make_smooth(of_example("train"))
    # PLE's three levels amplify a difference tenfold a step.
    words = ["--model", "shared", "--batch_size", "128"]
    plain = parse(folder, "--tf", *words)
    with contextlib.ExitStack() as stack:
        of_example("train").start_torch(plain, stack)
        local, tables = start(plain, stack)
        state = {name: value.clone() for name, value in tables.state_dict().items()}
        print(json.dumps(losses_of(local)))
        remote, _ = start(parse(folder, "--smartstaged", "false", *words), stack)
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


def test_on_servers_at_staleness_0_it_trains_as_in_plain_torchrec(tmp_path):
    lines = in_a_process(tmp_path, compare).splitlines()
    local, remote = (json.loads(line) for line in lines if line.startswith("[["))
    assert len(local) == NUM_STEPS
    np.testing.assert_allclose(remote, local, rtol=1e-5)


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
