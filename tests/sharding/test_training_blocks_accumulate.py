import gc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchrec import EmbeddingBagConfig
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from persia_torchrec import (
    SGD,
    Adam,
    MixedSharder,
    Placement,
    RemoteEmbeddingBagCollectionSharder,
    TableSettings,
    accumulate,
    remote_sharders,
)
from persia_torchrec.data import CsvDataset, IdColumn, LabelColumn
from persia_torchrec.errors import ConfigError, RemoteError
from persia_torchrec.lookup.sharded_lookup import RowGradients, add_up
from persia_torchrec.routing.route import IdGroup, unique_ids
from tests.support.models import WithLoss, bags_of, sequences_of, tables_of
from tests.support.optimizers import EVERY_OPTIMIZER
from tests.support.remote_job import CPU, Bags, RemoteJob, kjt_of

pytestmark = pytest.mark.slow

NUM_IDS, DIM = 12, 4


@st.composite
def gradients(draw):
    """Draw gradients of whole numbers, whose sums are exact, of parts of a batch."""
    num_servers = draw(st.integers(1, 3))
    pieces = st.dictionaries(
        st.sampled_from("ab"), st.lists(st.integers(0, 9), max_size=12), max_size=2
    )
    parts = []
    for tables in draw(st.lists(pieces, max_size=4)):
        split = [
            IdGroup.of(name, unique_ids(np.array(ids, dtype=np.uint64), num_servers))
            for name, ids in tables.items()
        ]
        rng = np.random.default_rng(draw(st.integers(0, 99)))
        grads = [
            rng.integers(-9, 9, (len(ids.ids), 3)).astype(np.float32) for ids in split
        ]
        parts.append(RowGradients(split, grads))
    return num_servers, parts


@given(gradients())
def test_each_id_of_a_sum_has_all_its_gradients_and_its_server(given):
    num_servers, parts = given
    expected = {}
    for part in parts:
        for group, grads in zip(part.groups, part.grads, strict=True):
            for id_, grad in zip(group.ids.tolist(), grads, strict=True):
                key = group.tables, id_
                expected[key] = expected.get(key, 0) + grad
    total = add_up(parts)
    found = {}
    for split, grads in zip(total.groups, total.grads, strict=True):
        again = unique_ids(split.ids, num_servers)
        np.testing.assert_array_equal(split.offsets, again.offsets)
        for server in range(num_servers):
            own = slice(*split.offsets[server : server + 2])
            assert set(split.ids[own]) == set(again.ids[own])
        assert len(set(split.ids)) == len(split.ids) == len(grads)
        found |= {
            (split.tables, id_): grad
            for id_, grad in zip(split.ids.tolist(), grads, strict=True)
        }
    assert found.keys() == expected.keys()
    for key, grad in expected.items():
        np.testing.assert_array_equal(found[key], grad)


class Squares(nn.Module):
    """Bags of all tables, and a loss that is a sum over the samples."""

    def __init__(self, names):
        super().__init__()
        self.bags = bags_of(names, NUM_IDS, DIM, feature="f")

    def forward(self, ids):
        pooled = self.bags(ids).values()
        return (pooled - torch.linspace(-1, 1, pooled.shape[1])).square().sum()


def batch(step, num_samples=8):
    rng = np.random.default_rng(step)
    return [
        rng.integers(0, NUM_IDS, rng.integers(0, 4)).tolist()
        for _ in range(num_samples)
    ]


def every_optimizer(num_parts, staleness):
    """Return the rows and steps of a table for each optimizer after six updates."""
    with RemoteJob() as job:
        settings = {
            name: TableSettings(optimizer=optimizer)
            for name, optimizer in EVERY_OPTIMIZER.items()
        }
        sharders = remote_sharders(
            job.client, SGD(1.0), staleness=staleness, tables=settings
        )
        model = job.shard(Squares(EVERY_OPTIMIZER), sharders)
        with accumulate(sharders, num_parts):
            for step in range(6):
                bags = batch(step)
                size = len(bags) // num_parts
                for part in range(num_parts):
                    of_part = bags[part * size : (part + 1) * size]
                    model(kjt_of({"f": of_part})).backward()
                sharders.flush()  # or else the next rows may lack the update
        rows = {name: job.read(name, range(NUM_IDS)) for name in EVERY_OPTIMIZER}
        return rows, {name: job.client.step(name) for name in EVERY_OPTIMIZER}


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_parts_are_one_batch_for_every_optimizer(staleness):
    rows, steps = every_optimizer(4, staleness)
    expected, _ = every_optimizer(1, 0)
    assert set(steps.values()) == {6}
    for name, of_table in expected.items():
        np.testing.assert_allclose(
            rows[name], of_table, rtol=1e-4, atol=1e-5, err_msg=name
        )


COUNTS = tables_of("t", NUM_IDS, 1, feature="f", init_fn=nn.init.zeros_)


class Counting:
    """Rows that begin at zero, and move by -1 for each sample of an update."""

    def __init__(self, job, staleness=0, **settings):
        self.job = job
        self.sharders = remote_sharders(
            job.client, SGD(1.0), staleness=staleness, **settings
        )
        self.model = job.shard(Bags(COUNTS), self.sharders)

    def part(self, *ids):
        self.model(kjt_of({"f": [list(ids)]})).values().sum().backward()

    def rows(self, *ids):
        return self.job.read("t", ids)[:, 0].tolist()

    @property
    def num_updates(self):
        return self.job.client.step("t")


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_last_part_sends_the_update(job, staleness):
    trainer = Counting(job, staleness)
    with accumulate(trainer.sharders, 3):
        for step in range(1, 4):
            trainer.part(1, 2)
            trainer.part(2)
            trainer.sharders.flush()
            assert trainer.num_updates == step - 1
            trainer.part(2, 3)
            trainer.sharders.flush()
            assert trainer.num_updates == step
            assert trainer.rows(1, 2, 3) == [-step, -3 * step, -step]
    assert trainer.num_updates == 3
    trainer.part(1)  # as before, each by itself
    trainer.sharders.flush()
    assert (trainer.num_updates, trainer.rows(1)) == (4, [-4])
    assert job.total("open_batches") == 0


def test_the_parts_of_an_uneven_end_are_one_update(job):
    trainer = Counting(job)
    with accumulate(trainer.sharders, 4):
        for _ in range(6):
            trainer.part(5)
    assert (trainer.num_updates, trainer.rows(5)) == (2, [-6])


@pytest.mark.parametrize("staleness", [0, 2])
def test_an_exception_drops_the_parts_of_a_begun_update(job, staleness):
    trainer = Counting(job, staleness)

    def fail(num_parts):
        with accumulate(trainer.sharders, num_parts):
            for _ in range(3):
                trainer.part(5)
            trainer.model(kjt_of({"f": [[5]]})).values()
            raise ZeroDivisionError

    for num_parts, expected in ((2, -2), (3, -5)):  # it raises in the last, or first
        with pytest.raises(ZeroDivisionError):
            fail(num_parts)
        gc.collect()  # the part that was under way
        trainer.sharders.flush()
        assert trainer.rows(5) == [expected]
    trainer.part(5)
    trainer.sharders.flush()
    assert trainer.rows(5) == [-6]
    assert job.total("open_batches") == 0


def test_batches_of_evaluation_do_not_count(job):
    trainer = Counting(job)
    with accumulate(trainer.sharders, 2):
        for _ in range(4):
            trainer.part(5)
            trainer.model.eval()
            trainer.model(kjt_of({"f": [[5]]})).values()
            trainer.model.train()
            with torch.no_grad():
                trainer.model(kjt_of({"f": [[6]]})).values()
    assert (trainer.num_updates, trainer.rows(5)) == (2, [-4])


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_lookup_without_a_backward_pass_is_no_part(job, staleness):
    trainer = Counting(job, staleness)
    with accumulate(trainer.sharders, 2):
        for num_looks in (1, 3, 0):
            for _ in range(num_looks):
                trainer.model(kjt_of({"f": [[5]]})).values()
                gc.collect()
            for _ in range(2):
                trainer.part(5)
                trainer.model(kjt_of({"f": [[5]]})).values()
                gc.collect()
            trainer.sharders.flush()
    assert (trainer.num_updates, trainer.rows(5)) == (3, [-6])


def test_a_part_that_is_not_finite_drops_its_update(job):
    trainer = Counting(job)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=10**6)
    trainer.sharders.use_grad_scaler(scaler)
    with accumulate(trainer.sharders, 2):
        for factor in (1.0, torch.inf, 1.0, 1.0):
            values = trainer.model(kjt_of({"f": [[5]]})).values()
            scaler.scale(factor * values.sum()).backward()
    assert trainer.rows(5) == [-2]


def test_learning_rates_change_between_updates(job):
    trainer = Counting(job, staleness=2)
    schedule = torch.optim.lr_scheduler.StepLR(trainer.sharders.optimizer, 1, 10.0)
    with accumulate(trainer.sharders, 2):
        for _ in range(2):
            trainer.part(5)
            trainer.part(5)
            trainer.sharders.optimizer.step()
            schedule.step()
    trainer.sharders.flush()
    assert trainer.rows(5) == [-2 - 20]


def test_a_pull_that_fails_takes_no_other_part_with_it(job):
    trainer = Counting(job)
    pipeline = trainer.sharders.remote_tables.pipelines[0][0]
    pull = pipeline.lookup.pull

    def failing(bags, number):
        raise RemoteError("no rows", server="s", kind="StoreError")

    with accumulate(trainer.sharders, 2):
        trainer.part(5)
        pipeline.lookup.pull = failing
        with pytest.raises(RemoteError, match="no rows"):
            trainer.part(5)
        pipeline.lookup.pull = pull
    assert (trainer.num_updates, trainer.rows(5)) == (1, [-1])


@pytest.mark.parametrize("staleness", [0, 1, 2, 8])
def test_batches_that_a_pipeline_pulls_ahead_are_parts_in_their_order(job, staleness):
    sharders = remote_sharders(job.client, SGD(1.0), staleness=staleness)
    model = job.shard(WithLoss(Bags(COUNTS)), sharders)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    pipeline = TrainPipelineSparseDist(model, optimizer, CPU, execute_all_batches=True)
    data = iter([kjt_of({"f": [[5]]}) for _ in range(14)])
    with accumulate(sharders, 4):
        read = [-float(pipeline.progress(data)) for _ in range(14)]
    sharders.flush()
    assert job.client.step("t") == 4  # 4 + 4 + 4 + 2
    assert job.read("t", [5])[0, 0] == -14
    assert all(seen % 4 == 0 for seen in read)
    behind = [4 * (number // 4) - seen for number, seen in enumerate(read)]
    assert max(behind) <= 4 * max(staleness - 1, 0)


class Regression(nn.Module):
    """Predicts a label from a bag, by two layers on top of a table on the servers."""

    def __init__(self):
        super().__init__()
        self.bags = bags_of("t", NUM_IDS, DIM, feature="f")
        self.top = nn.Sequential(nn.Linear(DIM, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, batch):
        found = self.top(self.bags(batch.id_features).values())[:, 0]
        loss = (found - batch.labels[0]).square().mean()
        return loss * batch.fraction, len(found)


def two_epochs(path, num_parts):
    """Train batches of 16 of 45 rows; return layers, rows, steps and sizes of parts."""
    columns = (IdColumn("f", is_text=False), LabelColumn("label"))
    of_parts = {"micro_batches": num_parts, "min_batch_size": 2}
    dataset = CsvDataset(path, 16, columns, shuffle=True, **of_parts)
    with RemoteJob() as job:
        sharders = remote_sharders(job.client, Adam(0.1))
        torch.manual_seed(0)
        model = job.shard(Regression(), sharders)
        dense = torch.optim.Adam(model.module.top.parameters(), lr=0.1)
        sizes = []
        for _ in range(2):
            with accumulate(sharders, num_parts):
                for batch in dataset:
                    loss, size = model(batch)
                    loss.backward()
                    sizes.append(size)
                    if len(sizes) % num_parts == 0:
                        dense.step()
                        dense.zero_grad()
        layers = [layer.detach() for layer in model.module.top.parameters()]
        return layers, job.read("t", range(NUM_IDS)), job.client.step("t"), sizes


def test_epochs_in_parts_train_as_in_whole_batches_also_the_last(tmp_path):
    path, rng = tmp_path / "rows.csv", np.random.default_rng(0)
    numbers = zip(rng.integers(0, NUM_IDS, 45), rng.normal(0, 1, 45), strict=True)
    path.write_text("".join(f"{id_},{label:.3f}\n" for id_, label in numbers))
    *expected, num_steps, sizes = two_epochs(path, 1)
    assert (num_steps, sizes) == (6, [16, 16, 13] * 2)
    *found, num_steps, sizes = two_epochs(path, 3)
    assert (num_steps, sizes) == (6, [6, 5, 5, 6, 5, 5, 5, 4, 4] * 2)
    for one, other in zip(
        (*found[0], found[1]), (*expected[0], expected[1]), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def test_sequences_and_rows_on_a_device_are_summed_too(job):
    rows = sequences_of("s", NUM_IDS, 1, feature="f", init_fn=nn.init.zeros_)
    sharders = remote_sharders(job.client, Adam(1.0))
    model = job.shard(nn.Sequential(rows), sharders)
    with accumulate(sharders, 2):
        for ids in ([[5, 5]], [[5, 6]]):
            model(kjt_of({"f": ids}))["f"].values().sum().backward()
    assert job.client.step("s") == 1
    np.testing.assert_allclose(job.read("s", [5, 6])[:, 0], -1, rtol=1e-5)


def test_unsupported_accumulation_is_rejected(job):
    sharders = remote_sharders(job.client)
    with (
        pytest.raises(ConfigError, match="the model must be sharded"),
        accumulate(sharders, 2),
    ):
        pass
    trainer = Counting(job)
    with (
        pytest.raises(ConfigError, match="num_parts must be an integer >= 1"),
        accumulate(trainer.sharders, 0),
    ):
        pass
    with accumulate(trainer.sharders, 2):  # noqa: SIM117
        with (
            pytest.raises(ConfigError, match="must not be nested"),
            accumulate(trainer.sharders, 2),
        ):
            pass
    trainer.part(5)
    assert trainer.rows(5) == [-1]


def test_tables_that_torchrec_updates_by_itself_are_rejected(job):
    remote = RemoteEmbeddingBagCollectionSharder(job.client, SGD(1.0))
    configs = [
        EmbeddingBagConfig(NUM_IDS, 4, name=name, feature_names=[name])
        for name in ("here", "there")
    ]
    sharder = MixedSharder(remote, Placement(local={"here"}))
    job.shard(Bags(configs), [sharder])
    with (
        pytest.raises(ConfigError, match="all tables must be on servers"),
        accumulate(remote, 2),
    ):
        pass
