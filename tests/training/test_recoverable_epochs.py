"""A resumed loop over epochs begins at the right one, and each end of one runs once."""

import re
from contextlib import suppress
from functools import partial

import pytest
import torch

from persia_torchrec.data import CsvDataset, IdColumn, WorkQueue
from persia_torchrec.errors import ConfigError
from persia_torchrec.sharding.trainer_metrics import TrainerMetrics
from persia_torchrec.training.recoverable import recoverable
from tests.support.repository import ROOT
from tests.support.resumed_loops import StoppedError
from tests.support.servers import Servers

pytestmark = pytest.mark.slow

NUM_EPOCHS, NUM_BATCHES, PATIENCE = 4, 2, 2
AUCS = 0.5, 0.7, 0.6, 0.65, 0.69
LOSSES = 0.5, 0.3, 0.4, 0.45  # by epoch, of the evaluation


@pytest.fixture(scope="module")
def client():
    with Servers() as servers:
        yield servers.client(servers.start(1))


def make_optimizer():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


class Training:
    """A loop as in the pages: evaluation, best epoch, schedule."""

    def __init__(self, client, folder, stops_early=False):
        self._given = client, folder
        self._stops_early = stops_early
        self.trained, self.evaluated, self.rates = [], [], []

    def run(self, stop=0, num_epochs=NUM_EPOCHS, save=False):
        client, folder = self._given
        optimizer, schedule = make_optimizer()
        batches = [torch.tensor([n]) for n in range(NUM_BATCHES)]
        state = {"optimizer": optimizer, "schedule": schedule, "best": [1.0, -1]}
        with recoverable(folder, state, client, (), interval_s=0) as run:
            for epoch in run.epochs(num_epochs):
                for batch in run.skip(batches):
                    self.trained.append((epoch, int(batch)))
                    run.step()
                    if run.num_steps == stop:
                        run.save()
                        raise StoppedError
                loss = LOSSES[epoch % len(LOSSES)]
                self.evaluated.append(epoch)
                self.rates.append(schedule.get_last_lr()[0])
                schedule.step()
                if loss < state["best"][0]:
                    state["best"] = [loss, epoch]
                elif self._stops_early and epoch - state["best"][1] >= PATIENCE:
                    break
            if save:
                run.save()
        return state["best"]


# Of a schedule whose pass was trained before the resume.
@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("stops_early", [False, True])
def test_a_loop_that_is_resumed_at_any_step_ends_as_one_that_was_not(
    client, tmp_path, stops_early
):
    whole = Training(client, tmp_path / "whole", stops_early)
    best = whole.run()
    num_steps = len(whole.trained)
    for stop in range(1, num_steps + 1):
        parts = Training(client, tmp_path / f"{stop}", stops_early)
        with pytest.raises(StoppedError):
            parts.run(stop)
        assert parts.run() == best == [0.3, 1]
        assert parts.trained == whole.trained
        assert parts.evaluated == whole.evaluated == [*range(num_steps // NUM_BATCHES)]
        assert parts.rates == whole.rates


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_training_that_had_ended_continues_with_more_epochs(client, tmp_path):
    training = Training(client, tmp_path)
    training.run(num_epochs=2, save=True)
    training.run(num_epochs=2)
    assert training.evaluated == [0, 1]
    training.run(num_epochs=3)
    assert training.evaluated == [0, 1, 2]
    assert training.trained[-2:] == [(2, 0), (2, 1)]
    assert training.rates == [1.0, 0.5, 0.25]


def test_the_last_step_is_that_of_all_epochs(client, tmp_path):
    def last_steps(num_steps):
        found = []
        given = tmp_path, {}, client, ()
        with recoverable(*given, interval_s=0) as run:
            for _ in run.epochs(NUM_EPOCHS):
                for _ in run.skip([torch.tensor([n]) for n in range(NUM_BATCHES)]):
                    found.append(TrainerMetrics.last_step)
                    run.step()
                    if run.num_steps == num_steps:
                        run.save()
                        return found
        return found

    assert set(last_steps(5)) == set(last_steps(0)) == {NUM_EPOCHS * NUM_BATCHES}


def test_a_loop_that_counts_epochs_by_itself_is_told_of_the_one_that_does(
    client, tmp_path, caplog
):
    def run(num_passes, stop):
        given = tmp_path, {}, client, ()
        with recoverable(*given, interval_s=0) as run:
            for _ in range(num_passes):
                for _ in run.skip([torch.tensor([n]) for n in range(NUM_BATCHES)]):
                    run.step()
            if stop:
                run.save()

    caplog.set_level("INFO")
    run(2, stop=True)
    assert "run.epochs" not in caplog.text
    run(3, stop=False)
    assert caplog.text.count("was trained before the resume: it has no batches") == 1
    assert "pass 1 of the data was trained" in caplog.text
    assert caplog.text.count("for epoch in run.epochs(n)") == 1


def test_a_work_queue_has_all_epochs_in_one_pass(client, tmp_path):
    (tmp_path / "rows.csv").write_text("1\n2\n")
    queue = WorkQueue([tmp_path / "rows.csv"], 2)
    state = {"data": CsvDataset(queue, 1, [IdColumn("one")])}
    with (
        recoverable(tmp_path / "run", state, client, (), interval_s=0) as run,
        pytest.raises(ConfigError, match="Received: a dataset with a WorkQueue"),
    ):
        next(run.epochs(2))


def test_epochs_are_counted_by_one_loop(client, tmp_path):
    with recoverable(tmp_path, {}, client, (), interval_s=0) as run:
        with pytest.raises(ConfigError, match="Received: 0 epochs"):
            next(run.epochs(0))
        assert list(run.epochs(2)) == [0, 1]
        with pytest.raises(ConfigError, match="Received: a second call"):
            next(run.epochs(2))


class Stopping:
    """A loader that ends its script when it is asked for more than some batches."""

    def __init__(self, num):
        self._left = num

    def __iter__(self):
        for number in range(NUM_BATCHES):
            self._require_more()
            yield torch.tensor([[float(number)]]), torch.tensor([[1.0]])
            self._left -= 1
        self._require_more()

    def __len__(self):
        return NUM_BATCHES

    def _require_more(self):
        if not self._left:
            raise StoppedError


def run_block(client, folder, num_steps):
    """Run the loop of the page up to a step; return its variables if it ended."""
    page = (ROOT / "docs/torchrec.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    torch.manual_seed(3)
    optimizer, schedule = make_optimizer()
    model = torch.nn.Linear(1, 1)
    names = {
        "recoverable": partial(recoverable, save_steps=num_steps, interval_s=0),
        "loader": Stopping(num_steps),
        "loss_of": torch.nn.BCEWithLogitsLoss(),
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "runs": folder,
        "client": client,
        "sharders": (),
    }
    names["evaluate"] = lambda _: AUCS[names["epoch"]]
    with suppress(StoppedError):
        exec(compile(block, "docs/torchrec.md", "exec"), names)
        return names
    return None


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_the_loop_of_the_page_may_stop_behind_any_step(client, tmp_path, capsys):
    whole = run_block(client, tmp_path / "whole", 100)
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == "epoch 4: AUC 0.6900, best 0.7000"
    for stop in range(1, len(AUCS) * NUM_BATCHES + 1):
        folder = tmp_path / f"{stop}"
        assert run_block(client, folder, stop) is None
        ended = run_block(client, folder, 100)
        assert capsys.readouterr().out == printed
        assert ended["state"]["best"] == {"auc": 0.7, "epoch": 1}
        assert ended["schedule"].get_last_lr() == whole["schedule"].get_last_lr()
        assert torch.equal(ended["model"].weight, whole["model"].weight)
