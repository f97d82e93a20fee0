"""The training of the PLE example, on rows that look like Taobao's."""

import contextlib
import copy
import importlib
import json
import os
import re
import sys
from dataclasses import replace
from itertools import chain, count
from pathlib import Path

import numpy as np
import pytest
import torch
from pyarrow import parquet
from torch import nn

from examples.ple import data, model
from persia_torchrec import Adam
from persia_torchrec.data import IdColumn
from persia_torchrec.errors import ConfigError
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.table import TableSpec
from tests.support.forked_jobs import ForkedJob
from tests.support.pipelined import Counted
from tests.support.processes import Processes

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

FOLDER = Path(model.__file__).parent
NUM_ROWS, NUM_TRAINED, NUM_STEPS = 400, 280, 6
NUM_COMPARED = 40
NUM_BUCKETS = 1000  # of tables that are copied as a whole
NUM_PARTS = 4
STOPS_AT, LONG = 2, 5  # steps; an epoch has 3
SMALL = ["--model", "shared", "--batch_size", "128"]
EXACT = ["--smartstaged", "false"]
LOOKUPS = "requests_lookup"
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


def train_both(folder, words, on_servers, watch=lambda *_: None):
    """Print the losses in this process, and on servers from the same rows."""
    specs = of_example("train").SPECS
    columns = [
        replace(column, num_buckets=NUM_BUCKETS)
        if isinstance(column, IdColumn)
        else column
        for column in specs["taobao"].columns
    ]
    specs["taobao"] = replace(specs["taobao"], columns=tuple(columns))
    plain = parse(folder, *words, "--tf")
    with contextlib.ExitStack() as stack:
        of_example("train").start_torch(plain, stack)
        local, tables = start(plain, stack)
        state = {name: value.clone() for name, value in tables.state_dict().items()}
        print(json.dumps(losses_of(local)))
        remote, own = start(parse(folder, *words, *on_servers), stack)
        remote.half.sharders.load_weights(state)
        watch(remote, own)
        print(json.dumps(losses_of(remote)))


def compare(folder):
    """Print the losses of faithful PLE in this process, and on servers."""
    file = Path(folder) / "taobao_test_data"
    file.write_text(re.sub(r"\|[^,]*", "", file.read_text()))  # means round otherwise
    of_example("train").RowAdam = RowsInProcess
    words = ["--steps", str(NUM_COMPARED), "--batch_size", "8"]
    train_both(Path(folder), words, EXACT)


def wait_for_next_part(training, own):
    """Let each part of a step compute until the rows of the next one are pulled."""
    ((pipeline, _),) = training.half.sharders.remote_tables.pipelines
    pipeline.lookup = counted = Counted(pipeline.lookup)
    numbers = count(1)

    def wait(*_):
        if (number := next(numbers)) % NUM_PARTS:  # staleness 0: others wait for a step
            counted.wait_for(number + 1)

    own.losses.register_forward_hook(wait)


def train_parts(folder):
    """Print the losses of whole batches in this process, of parts on servers."""
    # Batch norm has other statistics in each part.
    of_example("model").BatchNorm = lambda width, corrected: nn.Identity()
    words = [*SMALL, "--learning_rate", "0.01", "--l2_regularization", "0.01"]
    on_servers = ["--micro_batch", str(NUM_PARTS), "--staleness", "0"]
    train_both(Path(folder), words, on_servers, wait_for_next_part)


def resume(folder):
    """Print the losses of a run that continues, of one that stops, and of its rest.

    And of one as the first with a collection for each table, and the lookups of both.
    """
    folder = Path(folder)
    with contextlib.ExitStack() as stack:
        of_example("train").start_torch(parse(folder), stack)
        for name, steps, *words in (
            ("whole", LONG, "--save_steps", "2", "--keep_checkpoint_max", "2"),
            ("part", STOPS_AT),
            ("part", LONG),
            ("single", LONG, "--emb_fusion", "false"),
        ):
            words += ["--steps", str(steps), "--checkpoint", str(folder / name)]
            with contextlib.ExitStack() as servers:
                options = parse(folder, *EXACT, *SMALL, *words)
                training, _ = start(options, servers)
                losses = losses_of(training)
                (counters,) = training.half.client.counters()
            print(json.dumps({"losses": losses, "lookups": counters[LOOKUPS]}))


def reject(folder):
    """Print why runs are rejected, and what starts the rows of two seeds."""
    train, folder = of_example("train"), Path(folder)
    for variables, *words in (
        ({"PATH": "", "CXX": ""}, "--op_fusion", "true"),
        ({"PATH": "", "CXX": "nowhere"}, "--op_fusion", "true"),
        ({"WORLD_SIZE": "2"}, "--tf"),
        ({"WORLD_SIZE": "2"}, "--schedule", "cosine"),
    ):
        os.environ.update(variables)
        try:
            train.run(parse(folder, *words))
        except ConfigError as exc:
            print(exc)
    for words in (["--seed", "1"], ["--seed", "2"], ["--multihash", "add"]):
        options, spec = parse(folder, *words), data.TAOBAO
        settings = train.settings_of_tables(options, spec)
        print(json.dumps([one.seed for one in settings.values()]))


def compile_layers(folder):
    """Print by how much the loss and its gradients differ if layers are compiled."""
    torch._inductor.config.compile_threads = 1
    options = parse(Path(folder), "--op_fusion", "true")
    layers = model.DenseModel("shared", 32, corrected=True)
    losses, keys = model.Losses(layers), list(layers.state_dict())
    before = copy.deepcopy(losses)
    assert of_example("train").compile_dense(losses, options) > 0
    assert list(layers.state_dict()) == keys
    assert losses.compiled_batch == options.batch_size
    steps = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (before, losses)]
    differences = []
    for batch in range(4):
        torch.manual_seed(batch)
        x, y = torch.randn(options.batch_size, 32), torch.rand(2, options.batch_size)
        found = []
        for one, step in zip((before, losses), steps, strict=True):
            torch.manual_seed(batch)
            given = x.clone().requires_grad_()
            step.zero_grad()
            loss, (of_tasks, *_) = one(given, y)
            loss.backward()
            step.step()
            found.append(torch.cat([of_tasks, given.grad.flatten()]))
        differences.append((found[0] - found[1]).abs().max().item())
    print(json.dumps(differences))


def in_a_process(folder, target, *words):
    write_rows(folder)
    with Processes(folder) as processes:
        process = processes.start("training", target, str(folder), *words)
        assert process.status() == 0, process.output()
    return process.output()


@pytest.mark.long
def test_on_servers_at_staleness_0_the_losses_are_those_in_this_process(tmp_path):
    lines = in_a_process(tmp_path, compare).splitlines()
    local, remote = (json.loads(line) for line in lines if line.startswith("[["))
    assert len(local) == NUM_COMPARED
    assert remote == local


@pytest.mark.long
def test_epochs_in_micro_batches_pulled_ahead_have_the_losses_of_whole_batches(
    tmp_path,
):
    lines = in_a_process(tmp_path, train_parts).splitlines()
    whole, parts = (json.loads(line) for line in lines if line.startswith("[["))
    assert len(whole) == NUM_STEPS  # two epochs, whose last batches have 24 rows
    np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-6)


@pytest.mark.long
def test_a_resumed_run_and_one_of_single_collections_have_the_losses_of_one(tmp_path):
    lines = in_a_process(tmp_path, resume).splitlines()
    runs = [json.loads(line) for line in lines if line.startswith("{")]
    whole, part, rest, single = (run["losses"] for run in runs)
    assert [len(part), len(rest), len(whole)] == [STOPS_AT, LONG - STOPS_AT, LONG]
    assert part + rest == whole == single
    assert runs[0]["lookups"] == LONG
    assert runs[3]["lookups"] == LONG * len(data.TAOBAO.features)
    newest = sorted(path.name for path in (tmp_path / "whole").glob("checkpoint-*"))
    # Of those of steps 2 and 4, and of the end.
    assert newest == ["checkpoint-00000002", "checkpoint-00000003"]


@pytest.mark.long  # from nothing, torch compiles for a minute
def test_compiled_layers_have_the_losses_and_keys_of_those_as_written(tmp_path):
    *_, line = in_a_process(tmp_path, compile_layers).splitlines()
    assert max(json.loads(line)) < 1e-5


def test_invalid_arguments_are_rejected_before_anything_starts(
    tmp_path,
):
    output = in_a_process(tmp_path, reject)
    for reason in (
        r"--op_fusion needs a C\+\+ compiler.* no g\+\+, c\+\+, clang\+\+ in PATH",
        r"no nowhere in PATH. .* or give --op_fusion false",
        r"--tf trains in one process.*2 trainers",
        r"--schedule needs one trainer.*2 trainers",
    ):
        assert re.search(reason, output), output
    assert not (tmp_path / "result").exists()
    lines = (line for line in output.splitlines() if line.startswith("["))
    one, two, halves = (set(json.loads(line)) for line in lines)
    num_tables = len(data.TAOBAO.features)
    assert (len(one), len(two), len(halves)) == (num_tables, num_tables, 2 * num_tables)
    assert not one & two


@pytest.mark.long
def test_a_job_of_two_trainers_leaves_one_set_of_results(tmp_path):
    write_rows(tmp_path)
    data.main(["--to_parquet", "--data_location", str(tmp_path)])
    path = tmp_path / "taobao_test_data.parquet"
    parquet.write_table(parquet.read_table(path), path, row_group_size=50)
    folder, checkpoints = tmp_path / "result", tmp_path / "checkpoints"
    words = ["--data_location", str(tmp_path), "--output_dir", str(folder)]
    words += ["--op_fusion", "false", "--batch_size", "32", "--epochs", "1", "--ev"]
    words += ["--timeline", "2", "--save_steps", "2", "--keep_checkpoint_max", "2"]
    script = " ".join([str(FOLDER / "train.py"), *words])
    command = ["train_torchrec", "--servers", "2", "--trainers", "2"]
    variables = {"PERSIA_CHECKPOINT_DIR": str(checkpoints)}
    with ForkedJob(tmp_path, *command, "--script", script, variables=variables) as job:
        ended = job.wait()
    assert ended.status == 0, ended.output
    results = json.loads((folder / "results.json").read_text())
    assert 0 <= results["auc_clk"] <= 1
    num_right = results["acc_buy"] * (NUM_ROWS - NUM_TRAINED)
    assert num_right == pytest.approx(round(num_right))
    assert results["rows"] == num_ids(tmp_path)  # of the data of both
    assert "| clk | 0." in (folder / "results.md").read_text()
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(folder.glob("events.out*"))) == 1
    trace = json.loads((folder / "timeline-2.json").read_text())
    spans = {event.get("name") for event in trace["traceEvents"]}
    assert {"persia: wait for rows", "persia: wait for push"} <= spans
    (of_job,) = checkpoints.iterdir()
    assert len(list(of_job.glob("checkpoints/checkpoint-*"))) == 2


def num_ids(folder):
    """Return how many different ids the rows to train on have, over all features."""
    batches = data.open_data(data.TAOBAO, folder, 32, parquet=True).train
    assert batches.num_rows == NUM_TRAINED
    bags = chain.from_iterable(b.id_features.to_dict().items() for b in batches)
    return len({(name, one) for name, ids in bags for one in ids.values().tolist()})


def test_trainers_of_a_machine_take_its_gpus_in_turn(tmp_path, monkeypatch):
    train = of_example("train")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "3")
    for words in ([], ["--device", "cuda"]):
        assert train.device_of(parse(tmp_path, *words)) == torch.device("cuda", 1)
    cpu = torch.device("cpu")
    assert train.device_of(parse(tmp_path, "--device", "cpu")) == cpu
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert train.device_of(parse(tmp_path)) == cpu
    with pytest.raises(ConfigError, match="--device cuda needs a GPU"):
        train.device_of(parse(tmp_path, "--device", "cuda"))
