"""Which engine ``auto`` chooses, and what it goes by."""

import json
from dataclasses import replace

import pytest

from persia_torchrec.embedding.optim import SGD, Adagrad, Adam
from persia_torchrec.errors import ConfigError
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.fbgemm_engine import (
    MEASUREMENTS,
    EngineChoice,
    FbgemmEngine,
    Measured,
    measurements,
)
from persia_torchrec.table import TableSpec

SGD_16 = TableSpec(name="item", dim=16, optimizer=SGD(0.1))
FASTER = Measured("sgd", "fp32", 16, fused_ns=100, fbgemm_ns=50)
SLOWER = Measured("sgd", "fp32", 64, fused_ns=100, fbgemm_ns=200)


def is_fbgemm(measured, spec, engine="auto"):
    chosen = EngineChoice(engine, measured).choose(spec)
    assert chosen is None or isinstance(chosen, FbgemmEngine)
    return chosen is not None


def test_auto_takes_what_was_measured_to_be_faster():
    assert is_fbgemm((FASTER, SLOWER), SGD_16)
    assert not is_fbgemm((FASTER, SLOWER), replace(SGD_16, dim=64))


def test_auto_goes_by_the_nearest_dim():
    assert is_fbgemm((FASTER, SLOWER), replace(SGD_16, dim=4))
    assert is_fbgemm((FASTER, SLOWER), replace(SGD_16, dim=28))
    assert is_fbgemm((SLOWER, FASTER), replace(SGD_16, dim=32))  # the smaller of two
    assert not is_fbgemm((FASTER, SLOWER), replace(SGD_16, dim=36))
    assert not is_fbgemm((FASTER, SLOWER), replace(SGD_16, dim=256))


def test_auto_does_not_load_torch_for_a_few_percent():
    assert not is_fbgemm((replace(FASTER, fbgemm_ns=91),), SGD_16)
    assert is_fbgemm((replace(FASTER, fbgemm_ns=89),), SGD_16)


@pytest.mark.parametrize(
    "spec",
    [
        replace(SGD_16, weight_dtype="bf16"),
        replace(SGD_16, optimizer=Adagrad()),
        replace(SGD_16, optimizer=Adam()),
        replace(SGD_16, optimizer=SGD(0.1, weight_decay=0.1)),
        replace(SGD_16, dim=18),
    ],
)
def test_auto_takes_the_loop_for_what_was_not_measured_or_fbgemm_lacks(spec):
    assert not is_fbgemm((FASTER,), spec)


def test_a_chosen_engine_is_taken_whatever_was_measured():
    assert not is_fbgemm((FASTER,), SGD_16, "compiled")
    assert is_fbgemm((SLOWER,), SGD_16, "fbgemm")


def test_a_log_reports_which_engine_updates_which_tables_and_why():
    specs = [
        SGD_16,
        replace(SGD_16, name="user"),
        replace(SGD_16, name="ad", dim=64),
        replace(SGD_16, name="day", optimizer=Adam()),
        replace(SGD_16, name="page", dim=18),
        replace(SGD_16, name="shop", weight_dtype="bf16"),
    ]
    assert EngineChoice("auto", (FASTER, SLOWER)).describe(specs) == (
        "fbgemm (fbgemm was measured at 0.5 times the loop's time) for item, user; "
        "compiled (fbgemm was measured at 2 times the loop's time) for ad; "
        "compiled (fbgemm has adam on CUDA devices only) for day; "
        "compiled (dims must be multiples of 4) for page; "
        "compiled (fbgemm was not measured here) for shop"
    )
    for engine in ("compiled", "fbgemm"):
        line = EngineChoice(engine).describe(specs[:1])
        assert line == f"{engine} (as it was set) for item"


def test_tables_of_one_store_share_the_engine():
    choice = EngineChoice("auto", (FASTER,))
    assert choice.choose(SGD_16) is choice.choose(replace(SGD_16, name="other"))


def test_an_unknown_engine_is_rejected():
    with pytest.raises(
        ConfigError, match=r"must be one of auto, compiled, fbgemm\. .*: 'cuda'"
    ):
        EmbeddingStore(2, optimizer_engine="cuda")


def test_nothing_is_nearest_among_other_tables():
    assert not is_fbgemm((FASTER, FASTER), replace(SGD_16, optimizer=Adagrad()))
    assert not is_fbgemm((FASTER, FASTER), replace(SGD_16, weight_dtype="fp16"))
    assert not is_fbgemm((), SGD_16)


def test_adam_with_an_l2_penalty_is_not_fbgemms():
    assert Adam().fbgemm_name == "adam"
    assert Adam(weight_decay=0.1).fbgemm_name == ""


def test_what_is_committed_names_its_machine_and_covers_all_that_fbgemm_has():
    report = json.loads(MEASUREMENTS.read_text())
    assert report["machine"]["cpu"]
    assert report["command"].startswith("python -m benchmarks engines")
    assert any("fbgemm" in name for name in report["versions"])
    for name in ("sgd", "adagrad", "rowwise_adagrad"):
        for dtype in ("fp32", "fp16", "bf16"):
            found = [
                m
                for m in measurements()
                if (m.optimizer, m.weight_dtype) == (name, dtype)
            ]
            assert {16, 64} <= {m.dim for m in found}
            assert all(m.fused_ns > 0 and m.fbgemm_ns > 0 for m in found)
