"""Adult, trained and served: the AUC over HTTP is that of the training job."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import binary_auroc

from examples.adult_income import adult
from examples.adult_income.model import DNN
from persia_torchrec.ctx import eval_ctx
from persia_torchrec.data import DataLoader
from persia_torchrec.embedding.optim import Adagrad
from persia_torchrec.persia.batch import (
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia_torchrec.persia.utils import setup_seed
from tests.support.local_job import Batches, LocalJob
from tests.support.processes import Processes, wait_until
from tests.support.serving_process import Serving, predict

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.skipif(
        "PERSIA_DATA_DIR" not in os.environ,
        reason="PERSIA_DATA_DIR names no folder with adult.data and adult.test",
    ),
]

LEAST_AUC = 0.892
CONFIG = Path(adult.__file__).parent / "embedding_config.yml"


def batches(rows, size, **settings):
    """Return the rows as batches, in file order."""
    return [
        PersiaBatch(
            [
                IDTypeFeatureWithSingleID(name, rows.ids[start : start + size, column])
                for column, name in enumerate(adult.ID_COLUMNS)
            ],
            non_id_type_features=[NonIDTypeFeature(rows.dense[start : start + size])],
            labels=[Label(rows.labels[start : start + size])],
            **settings,
        )
        for start in range(0, len(rows.labels), size)
    ]


def train(ctx, rows):
    loader = DataLoader(
        Batches(batches(rows, 128)), reproducible=True, embedding_staleness=1
    )
    for batch in loader:
        output, labels = ctx.forward(batch)
        ctx.backward(torch.nn.functional.binary_cross_entropy(output, labels[0]))


@pytest.fixture
def deterministic():
    """Restore what ``setup_seed`` changes in this process."""
    state = torch.get_rng_state()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.set_rng_state(state)


@pytest.mark.long
def test_the_auc_over_http_is_that_of_the_job(tmp_path, monkeypatch, deterministic):
    """Of a server that follows the training, and of one that starts after it."""
    trained, tested = adult.load_adult(Path(os.environ["PERSIA_DATA_DIR"]))
    test = batches(tested, 1024, requires_grad=False)
    setup_seed(3)
    model = DNN()
    run, logs = str(tmp_path / "run"), str(tmp_path / "increments")
    writing = {"increments_dir": logs, "increments_interval_s": 0.5}
    settings = {"capacity_rows": 10_000, **writing}
    job = LocalJob(tmp_path, monkeypatch, CONFIG.read_text(), **settings)
    serve = ["--checkpoint", run, "--embedding-config", str(CONFIG)]
    with (
        job,
        job.train_ctx(model, Adagrad(lr=1e-2)) as ctx,
        Processes(tmp_path) as processes,
    ):
        ctx.dump_checkpoint(run, with_jit_model=True)  # nothing is trained yet
        following = Serving(processes, *serve, "--increments-dir", logs)
        before = predict(following.address, test[0].to_bytes())
        train(ctx, trained)
        ctx.dump_checkpoint(run, with_jit_model=True)
        expected = evaluate(model, test)
        assert not np.allclose(before, expected[0].reshape(-1), atol=1e-3)

        def is_followed():
            served = predict(following.address, test[0].to_bytes())
            return np.allclose(served, expected[0].reshape(-1), atol=1e-6)

        wait_until(is_followed, "the server has what was trained")
        of_following = [predict(following.address, batch.to_bytes()) for batch in test]
    with Processes(tmp_path / "run") as processes:
        later = Serving(processes, *serve)
        of_later = [predict(later.address, batch.to_bytes()) for batch in test]
    check_auc(tested, expected, of_following)
    check_auc(tested, expected, of_later)


def evaluate(model, test):
    model.eval()
    with eval_ctx() as evaluation, torch.no_grad():
        looked_up = DataLoader(Batches(test))
        return [evaluation.forward(batch)[0].numpy() for batch in looked_up]


def check_auc(tested, expected, answers):
    of_job, served = np.concatenate(expected).reshape(-1), np.concatenate(answers)
    np.testing.assert_allclose(served, of_job, atol=1e-6)
    labels = torch.from_numpy(tested.labels[:, 0]).int()
    auc, auc_of_job = (
        binary_auroc(torch.from_numpy(scores), labels).item()
        for scores in (served, of_job)
    )
    assert auc == pytest.approx(auc_of_job, abs=1e-6)
    assert auc >= LEAST_AUC
