"""Updates by fbgemm's kernels: as by the fused loop, and as by fbgemm itself."""

import subprocess
import sys

import numpy as np
import pytest
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec.embedding.optim import (
    FTRL,
    LAMB,
    LARS,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    RowwiseAdam,
)
from persia_torchrec.errors import ConfigError
from persia_torchrec.store.embedding_store import EmbeddingStore, UpdateResult
from persia_torchrec.store.fbgemm_engine import BLOCK, FbgemmEngine
from persia_torchrec.store.memory import MISSING
from persia_torchrec.table import TableSpec
from tests.support.consistency import check_store
from tests.support.servers import ids_of
from tests.support.trained_elsewhere import NUM_ROWS, batches, train_with_fbgemm

pytestmark = pytest.mark.slow

OPTIMIZERS = {
    "sgd": SGD(0.1),
    "adagrad": Adagrad(0.1, eps=1e-3),
    "rowwise": Adagrad(0.1, eps=1e-3, vectorwise_shared=True),
}
DIMS = [4, 8, 16, 64]
NUM_IDS = 40
STEP_OF = {"fp16": 2.0**-10, "bf16": 2.0**-7}


class Both:
    """Two stores, one an engine, that get the same requests."""

    def __init__(self, spec, capacity_rows=NUM_IDS):
        self.now_s = 7
        self.stores = [
            EmbeddingStore(
                capacity_rows, optimizer_engine=engine, clock=lambda: self.now_s
            )
            for engine in ("compiled", "fbgemm")
        ]
        self.dim = spec.dim
        for store in self.stores:
            store.add_table(spec)

    def look_up(self, ids):
        """Make rows; return the hints, which are the same in both."""
        out = np.empty((len(ids), self.dim), dtype=np.float32)
        fused, fbgemm = (s.lookup(0, ids, out, training=True) for s in self.stores)
        assert fused.tolist() == fbgemm.tolist()
        return fused

    def update(self, ids, grads, hints=None):
        fused, fbgemm = (s.update(0, ids, grads, hints) for s in self.stores)
        assert fused == fbgemm
        return fbgemm

    def rows(self, ids):
        return [store.read(0, ids) for store in self.stores]


def make_spec(optimizer, dim, **settings):
    return TableSpec(name="item", dim=dim, optimizer=optimizer, **settings)


def normal(rng, num, dim):
    return rng.standard_normal((num, dim), dtype=np.float32)


def assert_same_rows(both, ids, dtype="fp32"):
    fused, fbgemm = both.rows(ids)
    assert np.isfinite(fbgemm).all()
    if dtype == "fp32":
        np.testing.assert_allclose(fbgemm, fused, rtol=1e-5, atol=1e-6)
        return
    # Sums in another order may end on the other side of a random threshold, seldom.
    step = STEP_OF[dtype]
    np.testing.assert_allclose(fbgemm, fused, rtol=4 * step, atol=4 * step)
    weights = np.s_[:, : both.dim]
    assert (fbgemm[weights] != fused[weights]).mean() < 0.05


@pytest.mark.parametrize("weight_dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_both_engines_leave_the_same_rows(name, dim, weight_dtype):
    settings = {"weight_dtype": weight_dtype, "weight_bound": 0.125}
    both = Both(make_spec(OPTIMIZERS[name], dim, keeps_metadata=True, **settings))
    rng = np.random.default_rng(dim)
    ids = np.arange(NUM_IDS, dtype=np.uint64)
    both.look_up(ids)
    for _ in range(5):
        both.now_s += 1
        some = rng.integers(0, NUM_IDS + 20, 30).astype(np.uint64)
        grads = normal(rng, 30, dim)
        grads[3, -1], grads[17, 0] = np.nan, -np.inf
        result = both.update(some, grads, rng.permutation(both.stores[0].find(0, some)))
        assert result.num_missed == (some >= NUM_IDS).sum()
    assert_same_rows(both, ids, weight_dtype)
    fused, fbgemm = (store.metadata(0, ids) for store in both.stores)
    assert fbgemm.last_step.tolist() == fused.last_step.tolist()
    assert fbgemm.last_s.tolist() == fused.last_s.tolist()
    weights = both.rows(ids)[1][:, :dim]
    assert np.abs(weights).max() == 0.125
    counters = [store.counters() for store in both.stores]
    assert counters[0] == counters[1]
    check_store(both.stores[1])


@given(
    st.sampled_from(sorted(OPTIMIZERS)),
    st.sampled_from(DIMS[:3]),
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 12), max_size=24),
            st.sampled_from(["right", "wrong", "missing", "none"]),
            st.integers(0, 2**32 - 1),
        ),
        max_size=4,
    ),
)
def test_any_requests_leave_the_same_rows(name, dim, requests):
    both = Both(make_spec(OPTIMIZERS[name], dim))
    present = np.arange(10, dtype=np.uint64)
    both.look_up(present)
    for numbers, hint, seed in requests:
        rng = np.random.default_rng(seed)
        ids = ids_of(*numbers)
        grads = normal(rng, len(ids), dim)
        grads[rng.random(len(ids)) < 0.1, rng.integers(dim)] = np.nan
        hints = {
            "right": both.stores[0].find(0, ids),
            "wrong": rng.integers(0, 2**32 - 1, len(ids)).astype(np.uint32),
            "missing": np.full(len(ids), MISSING, dtype=np.uint32),
            "none": None,
        }[hint]
        both.update(ids, grads, hints)
    assert_same_rows(both, present)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(
    ("optimizer", "fbgemms"),
    [
        (SGD(0.1), EmbOptimType.EXACT_SGD),
        (Adagrad(0.1, 0, eps=1e-3), EmbOptimType.EXACT_ADAGRAD),
        (
            Adagrad(0.1, 0, eps=1e-3, vectorwise_shared=True),
            EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        ),
    ],
)
def test_rows_are_bit_for_bit_those_of_fbgemms_own_tables(optimizer, fbgemms, dim):
    weights, steps = batches(dim, some_rows=True)
    expected, state = train_with_fbgemm(
        weights, steps, fbgemms, learning_rate=0.1, eps=1e-3
    )
    store = EmbeddingStore(NUM_ROWS, optimizer_engine="fbgemm")
    store.add_table(make_spec(optimizer, dim))
    store.write(0, np.arange(NUM_ROWS, dtype=np.uint64), weights)
    for rows, grads in steps:
        store.update(0, rows.astype(np.uint64), grads)
    floats = store.read(0, np.arange(NUM_ROWS, dtype=np.uint64))
    assert floats[:, :dim].tobytes() == expected.tobytes()
    if state is not None:
        assert floats[:, dim:].tobytes() == state.tobytes()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_request_of_many_parts_is_updated_in_order(name):
    both = Both(make_spec(OPTIMIZERS[name], 64), 5000)
    rng = np.random.default_rng(0)
    ids = rng.permutation(5000).astype(np.uint64)
    hints = both.look_up(ids)
    again = np.concatenate([ids, ids[:50], ids[:50], ids[4000:]])
    hints = np.concatenate([hints, hints[:50], hints[:50], hints[4000:]])
    assert both.update(again, normal(rng, len(again), 64), hints) == UpdateResult(0, 0)
    assert_same_rows(both, ids)


def test_an_id_that_comes_twice_is_updated_twice():
    store = EmbeddingStore(2, optimizer_engine="fbgemm")
    store.add_table(make_spec(Adagrad(1.0, 0, eps=0), 4))
    store.write(0, ids_of(7), np.zeros((1, 4), dtype=np.float32))
    grads = np.repeat(np.array([[3], [4]], dtype=np.float32), 4, axis=1)
    store.update(0, ids_of(7, 7), grads)
    floats = store.read(0, ids_of(7))[0]
    assert floats[4:].tolist() == [3 * 3 + 4 * 4] * 4
    np.testing.assert_allclose(floats[:4], -3 / 3 - 4 / 5, rtol=1e-6)


def test_a_rejected_gradient_does_not_hide_the_next_one_of_its_id():
    store = EmbeddingStore(2, optimizer_engine="fbgemm")
    store.add_table(make_spec(SGD(1.0), 4))
    store.write(0, ids_of(7), np.zeros((1, 4), dtype=np.float32))
    grads = np.ones((3, 4), dtype=np.float32)
    grads[0, 2] = np.nan
    assert store.update(0, ids_of(7, 7, 8), grads) == UpdateResult(1, 1)
    assert store.read(0, ids_of(7)).tolist() == [[-1] * 4]
    counters = store.counters()
    assert (counters["gradients_missed"], counters["gradients_refused"]) == (1, 1)


def test_an_empty_request_changes_nothing():
    store = EmbeddingStore(2, optimizer_engine="fbgemm")
    store.add_table(make_spec(SGD(1.0), 4))
    none = np.empty((0, 4), dtype=np.float32)
    assert store.update(0, ids_of(), none) == UpdateResult(0, 0)
    assert store.num_rows == 0


def test_slots_of_earlier_blocks_are_forgotten_when_their_numbers_run_out():
    both = Both(make_spec(SGD(1.0), 4))
    ids = np.arange(5, dtype=np.uint64)
    both.look_up(ids)
    engine = both.stores[1].states[0].rows.engine
    grads = np.ones((5, 4), dtype=np.float32)
    for num_blocks in (0, 2**31 - 1):
        both.update(ids, grads)
        progress = engine.dense[4, 0].progress
        progress[BLOCK] = num_blocks
        for _ in range(3):
            both.update(ids, grads)
    assert progress[BLOCK] == 2
    assert_same_rows(both, ids)


def test_tables_of_one_store_do_not_meet():
    store = EmbeddingStore(9, optimizer_engine="fbgemm")
    for name, lr in (("a", 1.0), ("b", 2.0)):
        store.add_table(TableSpec(name=name, dim=4, optimizer=SGD(lr)))
    zeros, ones = (np.full((2, 4), x, dtype=np.float32) for x in (0, 1))
    for table in (0, 1):
        store.write(table, ids_of(1, 2), zeros)
    for table in (0, 1, 0):
        store.update(table, ids_of(1, 2), ones)
    assert store.read(0, ids_of(1, 2)).tolist() == [[-2] * 4] * 2
    assert store.read(1, ids_of(1, 2)).tolist() == [[-2] * 4] * 2


def test_a_known_table_steps_by_its_new_learning_rate():
    store = EmbeddingStore(2, optimizer_engine="fbgemm")
    store.add_table(make_spec(SGD(1.0), 4))
    store.write(0, ids_of(1), np.zeros((1, 4), dtype=np.float32))
    store.add_table(make_spec(SGD(2.0), 4))
    store.update(0, ids_of(1), np.ones((1, 4), dtype=np.float32))
    assert store.read(0, ids_of(1)).tolist() == [[-2] * 4]


@pytest.mark.parametrize(
    ("optimizer", "dim", "reason"),
    [
        (SGD(0.1), 6, "dims must be multiples of 4"),
        (Adagrad(), 1, "dims must be multiples of 4"),
        (SGD(0.1, momentum=0.9), 4, "its sgd has no momentum"),
        (SGD(0.1, weight_decay=0.1), 4, "its sgd has no weight decay on CPU"),
        (Adagrad(weight_decay=0.1), 4, "its adagrad has no weight decay on CPU"),
        (
            Adagrad(weight_decay=0.1, vectorwise_shared=True),
            *(4, "its rowwise_adagrad has no weight decay on CPU"),
        ),
        (Adagrad(g_square_momentum=0.9), 4, "its adagrad has no g_square_momentum"),
        (Adam(), 4, "fbgemm has adam on CUDA devices only"),
        (Adam(weight_decay=0.1), 4, "fbgemm has no such optimizer"),
        (AdamW(), 4, "fbgemm has adam on CUDA devices only"),
        (RowwiseAdam(), 4, "fbgemm has partial_rowwise_adam on CUDA devices only"),
        (LAMB(), 4, "fbgemm has lamb on CUDA devices only"),
        (LARS(), 4, "fbgemm has lars_sgd on CUDA devices only"),
        (FTRL(), 4, "fbgemm has no such optimizer"),
    ],
)
def test_an_optimizer_without_fbgemm_kernel_is_rejected(optimizer, dim, reason):
    store = EmbeddingStore(2, optimizer_engine="fbgemm")
    with pytest.raises(ConfigError, match=rf"'item', dim {dim}, .*: {reason}\. Choose"):
        store.add_table(make_spec(optimizer, dim))
    assert store.tables == []
    EmbeddingStore(2, optimizer_engine="compiled").add_table(make_spec(optimizer, dim))


def test_a_known_table_keeps_its_settings_if_the_new_ones_are_rejected():
    store = EmbeddingStore(2, optimizer_engine="fbgemm")
    store.add_table(make_spec(Adagrad(), 4))
    with pytest.raises(ConfigError, match="no weight decay"):
        store.add_table(make_spec(Adagrad(weight_decay=0.1), 4))
    assert store.tables == [make_spec(Adagrad(), 4)]


def test_fbgemm_is_rejected_where_it_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "fbgemm_gpu", None)
    with pytest.raises(ConfigError, match=r"needs torch and fbgemm_gpu\. Received: .*"):
        EmbeddingStore(2, optimizer_engine="fbgemm")
    EmbeddingStore(2).add_table(make_spec(SGD(0.1), 4))


@pytest.mark.slow
def test_a_store_loads_no_torch_unless_fbgemm_is_chosen():
    code = (
        "import sys\n"
        "import numpy as np\n"
        "from persia_torchrec.embedding.optim import SGD\n"
        "from persia_torchrec.store.embedding_store import EmbeddingStore\n"
        "from persia_torchrec.table import TableSpec\n"
        "for engine, is_loaded in (('compiled', False), ('fbgemm', True)):\n"
        "    store = EmbeddingStore(2, optimizer_engine=engine)\n"
        "    store.add_table(TableSpec(name='item', dim=4, optimizer=SGD(0.1)))\n"
        "    ids = np.array([1], dtype=np.uint64)\n"
        "    store.update(0, ids, np.ones((1, 4), dtype=np.float32))\n"
        "    assert ('torch' in sys.modules) == is_loaded, engine\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_compiled_loops_update_rows_unless_fbgemm_is_named():
    assert EmbeddingStore(2).rows.engine is None
    assert EmbeddingStore(2, optimizer_engine="compiled").rows.engine is None
    assert isinstance(
        EmbeddingStore(2, optimizer_engine="fbgemm").rows.engine, FbgemmEngine
    )


def test_auto_of_earlier_versions_is_compiled_and_a_warning_says_so(caplog):
    assert EmbeddingStore(2, optimizer_engine="auto").rows.engine is None
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "must be compiled or fbgemm. Received: 'auto', which means compiled" in (
        record.getMessage()
    )


def test_an_unknown_engine_is_rejected():
    with pytest.raises(
        ConfigError, match=r"must be one of compiled, fbgemm\. .*: 'cuda'"
    ):
        EmbeddingStore(2, optimizer_engine="cuda")


def test_adam_with_an_l2_penalty_is_not_fbgemms():
    assert Adam().fbgemm_name == "adam"
    assert Adam(weight_decay=0.1).fbgemm_name == ""
