"""A model whose hot rows are cached trains as plain TorchRec does.

The cache has a tenth of the rows that batches touch, so that most leave and come back.
"""

import contextlib
import gc
import math
import threading
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    JaggedTensor,
    KeyedJaggedTensor,
)
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

from persia_torchrec import (
    FTRL,
    SGD,
    AdmitFrequency,
    Cache,
    EmbeddingClient,
    TableSettings,
    load_checkpoint,
    remote_sharders,
    save_checkpoint,
)
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.client.checkpoint_client import CheckpointClient
from persia_torchrec.errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    RequestTimeoutError,
    StoreError,
)
from persia_torchrec.sharding import cache_snapshot
from persia_torchrec.sharding.training_blocks import accumulate
from persia_torchrec.table import TableSpec
from tests.integration.cached import (
    CASES,
    DIMS,
    NUM_IDS,
    ROWWISE,
    Twins,
    make_batches,
    make_model,
    one_table,
    step,
    touched,
    write_zeros,
)
from tests.integration.twins import plain_rows, shard_plain, train
from tests.support.groups import alone
from tests.support.processes import DEADLINE_S
from tests.support.remote_job import (
    CPU,
    META,
    RemoteJob,
    Servers,
    kjt_of,
    shard,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", CASES)
def test_every_step_has_the_loss_of_plain_torchrec(job, case):
    batches = make_batches(100)
    twins = Twins(job, case)
    losses = twins.losses(twins.remote, batches)
    twins.require_equal(batches, losses, twins.losses(twins.plain, batches))
    of_pools = [pool.map.counters for pool in twins.cache.pools]
    assert sum(c.evicted for c in of_pools) > sum(c.misses for c in of_pools) / 2
    assert sum(c.hits for c in of_pools) > 0
    assert job.total("gradients_missed") == 0


@pytest.mark.parametrize(
    "staleness",
    [
        pytest.param(1, marks=pytest.mark.long),
        2,
        pytest.param(4, marks=pytest.mark.long),
    ],
)
def test_a_pipeline_that_looks_ahead_has_no_stale_row(job, staleness):
    batches = make_batches(60)
    twins = Twins(job, staleness=staleness, rows=900)
    losses = twins.piped(batches)
    twins.require_equal(batches, losses, twins.losses(twins.plain, batches))


def test_rows_of_single_ids_are_cached_too(job):
    batches = make_batches(40, features=("ad", "query", "user"))
    twins = Twins(job, each_id=True)
    losses = twins.losses(twins.remote, batches)
    twins.require_equal(batches, losses, twins.losses(twins.plain, batches))


def test_weights_of_ids_and_their_gradients_are_those_of_plain_torchrec(job):
    """Bags of weighted ids; the weights come from a parameter, which trains too."""
    config = EmbeddingBagConfig(NUM_IDS, 16, name="user", feature_names=["user"])
    found, rng = [], np.random.default_rng(0)
    rows_ND = rng.standard_normal((NUM_IDS, 16)).astype(np.float32)
    ids_of = [rng.zipf(1.3, 60) % NUM_IDS for _ in range(30)]
    for is_cached in (True, False):
        bags = EmbeddingBagCollection(
            tables=[config], is_weighted=True, device=META if is_cached else CPU
        )
        if is_cached:
            job.client.tables.users.clear()
            sharders = remote_sharders(job.client, SGD(0.5), cache=Cache(rows=130))
            model = job.shard(bags, sharders)
            job.client.write("user", np.arange(NUM_IDS, dtype=np.uint64), rows_ND)
        else:
            arguments = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5}
            model = shard_plain(
                bags, EmbeddingBagCollectionSharder(arguments), ["user"]
            )
            plain_rows(model, "user").copy_(torch.from_numpy(rows_ND))
        factors = nn.Parameter(torch.linspace(0.5, 1.5, 60))
        dense = torch.optim.SGD([factors], lr=0.1)
        for ids in ids_of:
            kjt = KeyedJaggedTensor(
                ["user"],
                torch.from_numpy(ids),
                weights=factors * 1,
                lengths=torch.full((20,), 3),
            )
            loss = model(kjt).values().tanh().pow(2).mean()
            dense.zero_grad()
            loss.backward()
            dense.step()
            found.append(loss.item())
        found += factors.tolist()
    half = len(found) // 2
    np.testing.assert_allclose(found[:half], found[half:], rtol=0, atol=1e-5)


def loss_of(model, batch):
    return model(batch)[0]


def test_backward_passes_may_come_in_any_order_or_not_at_all(job):
    batches = make_batches(12)
    twins = Twins(job, staleness=2, rows=900)
    both = twins.remote, twins.plain
    for model in both:
        for a, b, c in zip(batches[::3], batches[1::3], batches[2::3], strict=True):
            of_a, of_b = loss_of(model, a), loss_of(model, b)
            of_b.backward()
            of_a.backward(retain_graph=True)
            of_a.backward()
            with contextlib.suppress(ZeroDivisionError):
                loss_of(model, c)
                raise ZeroDivisionError
    twins.require_equal([], [], [])
    for table, ids in touched(batches).items():
        rows = twins.job.client.read(table, ids.astype(np.uint64))
        plain = plain_rows(twins.plain, table)[ids]
        np.testing.assert_allclose(rows[:, : DIMS[table]], plain, rtol=0, atol=1e-5)


def checkpointed(model, batch):
    return checkpoint(model, batch, use_reentrant=False)


def saved_elsewhere(model, batch):
    with torch.autograd.graph.save_on_cpu():
        return model(batch)


@pytest.mark.parametrize("call", [checkpointed, saved_elsewhere])
def test_what_autograd_saves_may_be_freed_or_copied(job, call):
    batches = make_batches(8)
    twins = Twins(job)
    dense = twins.dense_optimizer(twins.remote)
    losses = train(partial(call, twins.remote), batches, dense)
    twins.require_equal(batches, losses, twins.losses(twins.plain, batches))
    assert twins.cache.counts.read()["cache_written"] > 0


def test_lookups_without_a_backward_pass_keep_no_slot(job):
    twins = Twins(job)
    (batch,) = make_batches(1)
    for _ in range(100):
        loss_of(twins.remote, batch)
    assert [pool.map.counters.num_pinned for pool in twins.cache.pools] == [0, 0]


def test_an_evaluation_reads_what_was_trained_and_changes_nothing(job):
    batches = make_batches(30)
    twins = Twins(job)
    twins.losses(twins.remote, batches)
    twins.losses(twins.plain, batches)
    before = [pool.map.counters for pool in twins.cache.pools]
    assert all(counters.num_dirty for counters in before)
    for model in (twins.remote, twins.plain):
        model.eval()
    with torch.no_grad():
        for batch in make_batches(5, seed=1) + batches[-3:]:
            found, expected = (loss_of(m, batch) for m in (twins.remote, twins.plain))
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert [pool.map.counters for pool in twins.cache.pools] == before


@pytest.mark.parametrize("flush_s", [0, 60])
def test_with_flush_s_0_others_read_the_rows_of_each_step_at_once(job, flush_s):
    twins = Twins(job, rows=Cache(rows=6000, flush_s=flush_s), staleness=0)
    with closing(EmbeddingClient.connect(job.servers.addresses)) as other:
        other.learn_tables()
        for batch in make_batches(3):
            twins.losses(twins.remote, [batch])
            for table, ids in touched([batch]).items():
                rows = other.read(table, ids.astype(np.uint64))
                newest = twins.cache.pool_of(table)
                slots_N = newest.map.slots_of(table, ids.astype(np.uint64))
                are_equal = np.array_equal(rows, newest.gather(slots_N))
                assert are_equal == (flush_s == 0)


def test_state_dicts_and_checkpoints_have_all_rows(job, tmp_path):
    batches = make_batches(40)
    twins = Twins(job)
    losses = list(twins.losses(twins.remote, batches[:20]))
    state = twins.remote.state_dict()
    expected = twins.losses(twins.plain, batches[:20])
    for table in DIMS:
        (found,) = (v for k, v in state.items() if k.endswith(f"{table}.weight"))
        (shard,) = found.local_shards()
        plain = plain_rows(twins.plain, table)
        torch.testing.assert_close(shard.tensor, plain, rtol=0, atol=1e-5)
    both = {"model": twins.remote}
    save_checkpoint(tmp_path, both, job.client, twins.sharders)
    twins.losses(twins.remote, batches[:7])  # what the checkpoint does not have
    load_checkpoint(tmp_path, both, job.client)
    losses += list(twins.losses(twins.remote, batches[20:]))
    expected = [*expected, *twins.losses(twins.plain, batches[20:])]
    twins.require_equal(batches, losses, expected)


def test_a_run_that_is_resumed_has_the_same_rows_leave_next(job, tmp_path):
    batches = make_batches(60)
    first = Twins(job)
    first.losses(first.remote, batches[:30])
    save_checkpoint(tmp_path, {"model": first.remote}, job.client, first.sharders)
    losses = first.losses(first.remote, batches[30:])
    with (
        Servers(2) as servers,
        closing(EmbeddingClient.connect(servers.addresses)) as client,
    ):
        second = Twins(SimpleNamespace(client=client, shard=lambda m, s: shard(m, *s)))
        load_checkpoint(tmp_path, {"model": second.remote}, client)
        assert np.array_equal(second.losses(second.remote, batches[30:]), losses)
        for table, ids in touched(batches).items():
            ids = ids.astype("u8")
            expected, found = (
                t.cache.pool_of(table).map.slots_of(table, ids) for t in (first, second)
            )
            assert np.array_equal(found, expected)
            assert (found < 0).any()
            assert (found >= 0).any()


def test_a_run_that_is_resumed_moves_no_row_of_full_servers(tmp_path):
    with alone(), Servers(1, 8) as servers, ExitStack() as stack:
        client, other = (
            stack.enter_context(closing(EmbeddingClient.connect(servers.addresses)))
            for _ in range(2)
        )
        model, sharders = one_table(client, cache=Cache(rows=4))
        step(model, 1, 2, 3)
        for each in (client, other):
            each.add_tables([TableSpec(name="other", dim=16, optimizer=SGD(1.0))])
        ids, rows = np.arange(8, dtype="u8"), np.ones((8, 16), dtype=np.float32)
        other.write("other", ids[:5], rows[:5])
        sharders.flush()  # 1, 2 and 3 are used last
        other.write("other", ids[:7], rows[:7])  # 1 and 2 leave
        save_checkpoint(tmp_path, {"model": model}, client, sharders)
        model, sharders = one_table(client, cache=Cache(rows=4))
        load_checkpoint(tmp_path, {"model": model}, client)
        step(model, 4)
        assert client.count_ids("user")[1].tolist() == [4]  # 3 left for it
        assert sorted(other.count_ids("other")[1].tolist()) == [0, 1, 2, 3, 4, 5, 6]


def test_rows_of_a_frozen_table_that_are_used_stay_on_full_servers():
    with alone(), Servers(1, 8) as servers, ExitStack() as stack:
        client, other = (
            stack.enter_context(closing(EmbeddingClient.connect(servers.addresses)))
            for _ in range(2)
        )
        model, sharders = one_table(client, cache=Cache(rows=4))
        step(model, 1)
        learnt = client.read("user", np.array([1], dtype="u8"))
        sharders.freeze()
        other.add_tables([TableSpec(name="other", dim=16, optimizer=SGD(1.0))])
        for id_ in range(12):
            step(model, 1)
            sharders.flush()
            ids, rows = np.array([id_], dtype="u8"), np.ones((1, 16), np.float32)
            other.write("other", ids, rows)
        rows = client.read("user", np.array([1], dtype="u8"), initial=False)
        assert np.array_equal(rows, learnt)


def test_rows_of_a_checkpoint_that_have_not_come_are_not_trained(
    job, tmp_path, monkeypatch
):
    model, sharders = one_table(job.client, cache=Cache(rows=30))
    write_zeros(job.client)
    step(model, 1)
    save_checkpoint(tmp_path, {"model": model}, job.client, sharders)
    model, _ = one_table(job.client, cache=Cache(rows=30))
    load_checkpoint(tmp_path, {"model": model}, job.client)

    def late(*_, **__):
        raise RequestTimeoutError("no reply", server="0")

    with monkeypatch.context() as patch:
        patch.setattr(job.client, "begin_pull", late)
        with pytest.raises(RequestTimeoutError):
            step(model, 1)
    assert (step(model, 1) == -0.5).all()


def test_blocks_of_an_export_have_what_was_trained_before_they_are_read(job):
    model, _ = one_table(job.client, cache=Cache(rows=30))
    write_zeros(job.client)
    blocks = job.client.export("user")
    for weight in (-0.5, -1.0):
        step(model, 1)
        trained = np.concatenate([block.weights[block.ids == 1] for block in blocks])
        assert trained.tolist() == [[weight] * 16]


def test_a_batch_before_the_end_of_a_load_is_an_error(job, tmp_path, monkeypatch):
    model, sharders = one_table(job.client, cache=Cache(rows=30))
    write_zeros(job.client)
    step(model, 1)
    save_checkpoint(tmp_path, {"model": model}, job.client, sharders)
    step(model, 1)
    may_load, run_steps = threading.Event(), CheckpointClient._run_steps

    def run_later(self, *args):
        assert may_load.wait(DEADLINE_S)
        return run_steps(self, *args)

    monkeypatch.setattr(CheckpointClient, "_run_steps", run_later)
    task = job.client.checkpoints.start_load(tmp_path)
    with pytest.raises(StoreError, match="before the end of a load"):
        step(model, 1)
    may_load.set()
    task.wait(DEADLINE_S)
    assert (step(model, 1) == -0.5).all()


def test_a_batch_that_is_larger_than_its_part_gets_a_larger_one(job):
    batches = []
    for batch in make_batches(20):
        features = batch.ids.to_dict()
        num = len(batch.labels)
        features["place"] = JaggedTensor(  # a quarter of the features
            torch.arange(3 * num) * 7, lengths=torch.full([num], 3)
        )
        batches.append(replace(batch, ids=KeyedJaggedTensor.from_jt_dict(features)))
    twins = Twins(job, rows=300)
    losses = twins.losses(twins.remote, batches)
    pools = twins.cache.pools
    assert sum(pool.num_slots for pool in pools) in (299, 300)
    assert all(pool.most_rows <= pool.num_slots for pool in pools)
    assert max(pool.most_rows for pool in pools) == 144 > 300 / 4
    twins.require_equal(batches, losses, twins.losses(twins.plain, batches))


def test_slots_of_a_checkpoint_that_are_damaged_are_an_error(job, tmp_path):
    batches = make_batches(3)
    first = Twins(job)
    first.losses(first.remote, batches)
    save_checkpoint(tmp_path, {"model": first.remote}, job.client, first.sharders)
    file = next(tmp_path.glob("*/slots_*"))
    whole = file.read_bytes()
    head, _, words = whole.partition(b"\n")
    for other in (Cache(rows=300), Cache(rows=6000)):  # which begin empty
        folder = Folder(file.parent)
        assert cache_snapshot.read(folder, first.cache.pools, other) == []
    alone = tmp_path / "without checksums"
    alone.mkdir()
    file.write_bytes(whole.replace(b'"batches":3', b'"batches":4'))
    folder, pools = Folder(file.parent), first.cache.pools
    with pytest.raises(CheckpointError, match="checksum"):
        cache_snapshot.read(folder, pools, first.cache.settings)
    for damaged in (
        whole[:-1],
        head + b"\n" + words[-16:],
        whole.replace(b'"num_slots":', b'"num_slots":9'),
        whole.replace(b'"num_slots":', b'"num_slots":-'),
        b"[]\n" + words,
        head + b"\n" + b"\xff" * len(words),
    ):
        (alone / file.name).write_bytes(damaged)
        for other in file.parent.glob("slots_*"):
            if other != file:
                (alone / other.name).write_bytes(other.read_bytes())
        with Servers(1) as servers, ExitStack() as stack:
            client = EmbeddingClient.connect(servers.addresses)
            stack.enter_context(closing(client))
            job_there = SimpleNamespace(client=client, shard=lambda m, s: shard(m, *s))
            twins = Twins(job_there)
            twins.cache.restore(Folder(alone))
            with pytest.raises(CheckpointError):
                twins.losses(twins.remote, batches)


@pytest.mark.parametrize("staleness", [0, pytest.param(2, marks=pytest.mark.long)])
def test_pools_share_the_slots_by_what_they_missed(job, staleness):
    batches = make_batches(120)
    twins = Twins(job, rows=Cache(gib=80_000 / 2**30), staleness=max(staleness, 1))
    given = twins.piped if staleness else partial(twins.losses, twins.remote)
    losses = given(batches)
    pools = twins.cache.pools
    sizes = {pool.dim: (pool.num_slots, 4 * pool.width + 35) for pool in pools}
    assert sizes[16][0] != int(80_000 * 3 / 4 / sizes[16][1])  # 3 of the 4 features
    assert 79_800 < sum(num * num_bytes for num, num_bytes in sizes.values()) <= 80_000
    twins.require_equal(batches, losses, twins.losses(twins.plain, batches))


def test_rows_that_others_write_take_the_place_of_cached_ones(job):
    batches = make_batches(5)
    twins = Twins(job, rows=6000)
    twins.losses(twins.remote, batches)
    ids = touched(batches)["user"].astype(np.uint64)
    ones = np.ones((len(ids), 16), dtype=np.float32)
    job.client.write("user", ids, ones)
    assert np.array_equal(job.client.read("user", ids)[:, :16], ones)
    twins.losses(twins.remote, batches[:1])
    twins.sharders.flush()
    moved = job.client.read("user", ids)[:, :16]
    assert 0 < (moved != ones).any(axis=1).sum() < len(ids)
    assert abs(moved - ones).max() <= 0.2  # one step of Adagrad: lr * sqrt(D)


def test_a_learning_rate_holds_from_the_next_backward_pass_on(job):
    batches = make_batches(20)
    twins = Twins(job)
    losses = list(twins.losses(twins.remote, batches[:10]))
    expected = list(twins.losses(twins.plain, batches[:10]))
    twins.sharders.set_learning_rate(0.2)
    for group in twins.plain.fused_optimizer.param_groups:
        group["lr"] = 0.2
    twins.plain.fused_optimizer.step()
    losses += list(twins.losses(twins.remote, batches[10:]))
    expected += list(twins.losses(twins.plain, batches[10:]))
    twins.require_equal(batches, losses, expected)
    twins.sharders.freeze()
    before = {
        t: job.client.read(t, i.astype("u8")) for t, i in touched(batches).items()
    }
    twins.losses(twins.remote, batches[:3])
    twins.sharders.flush()
    for table, ids in touched(batches).items():
        assert np.array_equal(job.client.read(table, ids.astype("u8")), before[table])


def test_gradients_that_are_not_finite_reach_no_row(job):
    twins = Twins(job)
    batch, *_ = make_batches(1)
    twins.losses(twins.remote, [batch])
    output = twins.remote.module.model.embeddings(batch.ids).values()
    grad = torch.zeros_like(output)
    grad[3] = torch.nan
    output.backward(grad)
    twins.sharders.flush()
    for table, ids in touched([batch]).items():
        assert np.isfinite(job.client.read(table, ids.astype("u8"))).all()


def test_a_row_that_leaves_and_is_not_finite_takes_no_other_with_it(job):
    model, sharders = one_table(job.client, cache=Cache(rows=3))
    write_zeros(job.client)
    for _ in range(3):
        step(model, 1, 2, 3, grad=3e38)
    step(model, 4, 5, 6)  # in the slots of these
    sharders.flush()
    found = job.read("user", range(1, 7))
    assert (found[:3] == 0).all()
    assert (found[3:] == -0.5).all()


def test_a_second_model_with_the_same_rows_is_the_only_one_that_trains_on(job):
    client = job.client
    first, of_first = one_table(client, cache=Cache(rows=30))
    write_zeros(client)
    step(first, 1)
    second, of_second = one_table(client, cache=Cache(rows=30))
    assert (step(second, 1) == -0.5).all()
    with pytest.raises(ConfigError, match="by one model at a time"):
        step(first, 1)
    of_first.close()
    _, of_third = one_table(client, cache=Cache(rows=30))
    client.write("user", np.array([2], dtype="u8"), np.ones((1, 16), dtype="f"))
    of_third.close()  # it has trained nothing
    assert (step(second, 1) == -1).all()
    of_second.flush()
    assert (job.read("user", [1]) == -1.5).all()


def test_checkpoints_have_the_slots_of_the_model_that_trains(job):
    both = [one_table(job.client, cache=Cache(rows=30)) for _ in range(2)]
    with torch.no_grad():
        for model, _ in both:
            model(kjt_of({"user": [[1]]}))
    for trained in range(2):
        step(both[trained][0], 1)
        caches = [sharders.remote_tables.cache for _, sharders in both]
        are_there = [bool(cache.snapshot()) for cache in caches]
        assert are_there == [trained == 0, trained == 1]


def test_rows_of_a_model_that_is_dropped_are_written_back(job):
    model, sharders = one_table(job.client, cache=Cache(rows=30))
    write_zeros(job.client)
    step(model, 1)
    del model, sharders
    gc.collect()
    assert (job.read("user", [1]) == -0.5).all()


def test_an_interrupt_within_a_step_leaves_its_rows_to_be_written(job, monkeypatch):
    model, _ = one_table(job.client, cache=Cache(rows=30))
    write_zeros(job.client)
    backward = torch.autograd.backward

    def interrupted(*args, **settings):
        backward(*args, **settings)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.autograd, "backward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(model, 1)
    assert (job.read("user", [1]) == -0.5).all()


def test_a_close_that_is_interrupted_is_done_at_the_end(job, monkeypatch):
    model, sharders = one_table(job.client, cache=Cache(rows=30))
    write_zeros(job.client)
    step(model, 1)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    cache = sharders.remote_tables.cache
    with monkeypatch.context() as patch:
        patch.setattr(job.client, "write_rows", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.close()
    cache.close()
    assert (job.read("user", [1]) == -0.5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_evaluation_in_any_mode_may_come_first(job, dtype):
    model, _ = one_table(job.client, cache=Cache(rows=30, flush_s=math.inf))
    write_zeros(job.client)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.inference_mode():
            model.eval()(kjt_of({"user": [[1]]}))
        step(model.train(), 1)
    finally:
        torch.set_default_dtype(before)
    assert (job.read("user", [1]) == -0.5).all()
    assert "cache flush" in {thread.name for thread in threading.enumerate()}


def test_rows_may_travel_as_halves_where_they_are_not_cached(job):
    batches = make_batches(10)
    twins = Twins(job, wire_dtype=torch.float16)
    losses = twins.losses(twins.remote, batches)
    expected = twins.losses(twins.plain, batches)
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5)
    for model in (twins.remote, twins.plain):
        model.eval()
    with torch.no_grad():
        found, expected = (loss_of(m, batches[0]) for m in (twins.remote, twins.plain))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)


def test_a_loss_scale_is_undone_before_rows_step(job):
    batches = make_batches(12)
    twins = Twins(job)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    twins.sharders.use_grad_scaler(scaler)
    dense = twins.dense_optimizer(twins.remote)
    losses = []
    for number, batch in enumerate([batches[0], *batches]):
        loss = loss_of(twins.remote, batch)
        dense.zero_grad()
        twins.sharders.optimizer.zero_grad()
        # The first one is skipped as a whole, and halves the scale.
        scaler.scale(loss * (1 if number else torch.inf)).backward()
        scaler.step(dense)
        scaler.step(twins.sharders.optimizer)
        scaler.update()
        losses.append(loss.item())
    assert scaler.get_scale() == 512.0
    assert twins.sharders.remote_tables.counts.num_skipped == 1
    expected = twins.losses(twins.plain, batches)
    assert losses[0] == losses[1]
    twins.require_equal(batches, losses[1:], expected)


def test_ids_are_admitted_as_without_a_cache():
    batches, found = make_batches(30), []
    settings = TableSettings(admission=AdmitFrequency(3), keeps_metadata=True)
    for cache in (Cache(rows=600), None):
        with RemoteJob() as job:
            tables = dict.fromkeys(DIMS, settings)
            sharders = remote_sharders(job.client, ROWWISE, tables=tables, cache=cache)
            torch.manual_seed(0)
            model = job.shard(make_model(), sharders)
            dense = torch.optim.SGD(model.module.model.over.parameters(), lr=0.1)
            losses = train(model, batches, dense)
            sharders.flush()
            rows, frequencies = {}, {}
            for table, ids in touched(batches).items():
                rows[table] = job.client.read(table, ids.astype("u8"), initial=False)
                metadata = job.client.metadata(table, ids.astype("u8"))
                frequencies[table] = metadata.frequency
            found.append((losses, rows, frequencies))
    (losses, rows, frequencies), (expected, rows_there, frequencies_there) = found
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-6)
    for table in rows:
        there = rows_there[table]
        np.testing.assert_allclose(rows[table], there, rtol=0, atol=1e-5)
        has_row = there.any(axis=1)
        assert 0 < has_row.sum() < len(has_row)
        assert np.array_equal(frequencies[table], frequencies_there[table]), table


def test_what_a_cache_cannot_do_is_an_error(job):
    batches = make_batches(2)
    with pytest.raises(ConfigError, match="one of gib and rows"):
        Cache(gib=1, rows=2)
    with pytest.raises(ConfigError, match="finite and > 0"):
        Cache(gib=math.inf)
    twins = Twins(job, rows=60)
    with pytest.raises(BatchError, match=r"Received: \d+ rows, \d+ slots"):
        twins.losses(twins.remote, batches)
    with pytest.raises(ConfigError, match="sharded before the first batch"):
        job.shard(make_model(), twins.sharders)
    block = accumulate(twins.sharders, 2)
    with pytest.raises(ConfigError, match="rows must not be cached"), block:
        pass


def test_a_cache_by_dim_has_each_dim(job):
    twins = Twins(job, rows=Cache(rows={16: 600}))
    with pytest.raises(ConfigError, match="0 rows for dim 8"):
        twins.losses(twins.remote, make_batches(1))


@pytest.mark.parametrize(
    "settings",
    [TableSettings(optimizer=FTRL(lr=0.1)), TableSettings(weight_dtype="fp16")],
)
def test_tables_that_fbgemm_cannot_train_here_are_not_cached(job, caplog, settings):
    batches = make_batches(3)
    caplog.set_level("INFO", "persia_torchrec")
    twins = Twins(job, tables={"user": settings}, rows=6000)
    assert "tables that are not cached: 'user': " in caplog.text
    twins.losses(twins.remote, batches)
    assert {t for pool in twins.cache.pools for t in pool.tables} == {"term", "place"}
    twins.sharders.flush()
    ids = touched(batches)
    assert job.client.num_rows()
    before = {t: job.client.read(t, i.astype("u8")) for t, i in ids.items()}
    twins.losses(twins.remote, batches)
    twins.sharders.flush()
    for table, rows in before.items():
        assert (job.client.read(table, ids[table].astype("u8")) != rows).any(), table
