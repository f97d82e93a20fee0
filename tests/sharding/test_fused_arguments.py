"""Arguments of fbgemm's optimizers: which count, and what they compute."""

import logging
from dataclasses import replace
from pathlib import Path

import fbgemm_gpu
import numpy as np
import pytest
import torch
import torchrec.optim
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torch.distributed.optim import _apply_optimizer_in_backward as apply
from torchrec import EmbeddingBagConfig
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

from persia_torchrec import SGD, Adagrad, TableSettings, remote_sharders
from persia_torchrec.embedding.optim import AdamW
from persia_torchrec.errors import ConfigError
from persia_torchrec.sharding import fused_arguments
from persia_torchrec.sharding.fused_arguments import (
    FusedOptimizer,
    read_optimizers,
    translate,
    translate_fused_params,
)
from persia_torchrec.table import TableSpec
from tests.support.models import sequences_of
from tests.support.places import CUDA, ON_GPU
from tests.support.remote_job import META, Bags, kjt_of

DIM, NUM_IDS, LR = 4, 4, 0.1
START = torch.linspace(-1, 1, NUM_IDS * DIM).view(NUM_IDS, DIM)
BAGS = {"f": [[0, 0], [1], [1, 2]]}
GRADS = torch.tensor([[3.0, -5, 0.1, 1], [1, 1, 1, -0.25], [0.5, -0.5, 2, 0]])
L2, DECOUPLE = WeightDecayMode.L2, WeightDecayMode.DECOUPLE
CLIPPED = {"gradient_clipping": True, "max_gradient": 0.75}

KERNELS = {
    torchrec.optim.SGD: EmbOptimType.EXACT_SGD,
    torchrec.optim.Adagrad: EmbOptimType.EXACT_ADAGRAD,
    torchrec.optim.RowWiseAdagrad: EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    torchrec.optim.Adam: EmbOptimType.ADAM,
    torchrec.optim.PartialRowWiseAdam: EmbOptimType.PARTIAL_ROWWISE_ADAM,
    torchrec.optim.LAMB: EmbOptimType.LAMB,
    torchrec.optim.PartialRowWiseLAMB: EmbOptimType.PARTIAL_ROWWISE_LAMB,
    torchrec.optim.LarsSGD: EmbOptimType.LARS_SGD,
}

# Of each kernel, the arguments that it reads; the columns of the matrix.
ARGUMENTS = {
    "eps": 0.5,
    "beta1": 0.5,
    "beta2": 0.5,
    "momentum": 0.5,
    "eta": 0.5,
    "weight_decay": 0.1,
    "max_norm": 0.9,
}
ADAMS = {"eps", "beta1", "beta2", "weight_decay"}
READ = {
    torchrec.optim.SGD: set(),
    torchrec.optim.Adagrad: {"eps"},
    torchrec.optim.RowWiseAdagrad: {"eps", "max_norm"},  # and, by its mode, the decay
    torchrec.optim.Adam: ADAMS,
    torchrec.optim.PartialRowWiseAdam: ADAMS,
    torchrec.optim.LAMB: ADAMS,
    torchrec.optim.PartialRowWiseLAMB: ADAMS,
    torchrec.optim.LarsSGD: {"momentum", "eta", "weight_decay"},
}


@pytest.fixture(autouse=True)
def again():
    """Say each line again, which is said once in a process."""
    fused_arguments._say_once.cache_clear()


def trained_here(cls, arguments, device="cpu", steps=2):
    """Return the rows that fbgemm's kernel makes."""
    on_host = device == "cpu"
    place = EmbeddingLocation.HOST if on_host else EmbeddingLocation.DEVICE
    unit = ComputeDevice.CPU if on_host else ComputeDevice.CUDA
    kernel = SplitTableBatchedEmbeddingBagsCodegen(
        [(NUM_IDS, DIM, place, unit)],
        optimizer=KERNELS[cls],
        learning_rate=LR,
        **arguments,
    )
    [weights] = kernel.split_embedding_weights()
    weights.data.copy_(START)
    ids = kjt_of(BAGS).to(torch.device(device))
    for _ in range(steps):
        pooled = kernel(ids.values(), ids.offsets().long())
        pooled.backward(GRADS.to(device))
    return weights.detach().cpu()


def trained_on_servers(shared_job, name, cls, arguments, steps=2):
    """Return the rows that the servers make of the same."""
    model = Bags([EmbeddingBagConfig(NUM_IDS, DIM, name, feature_names=["f"])])
    apply(cls, model.parameters(), {"lr": LR, **arguments})
    model = shared_job.shard(model, remote_sharders(shared_job.client))
    key = f"bags.embedding_bags.{name}.weight"
    model.load_state_dict({key: START.clone()})
    for _ in range(steps):
        model(kjt_of(BAGS)).values().backward(GRADS)
    return torch.from_numpy(shared_job.read(name, range(NUM_IDS))[:, :DIM].copy())


ON_CPU = [torchrec.optim.SGD, torchrec.optim.Adagrad, torchrec.optim.RowWiseAdagrad]


@pytest.mark.parametrize("cls", ON_CPU)
@pytest.mark.parametrize(
    "arguments",
    [
        {"beta1": 0.95, "beta2": 0.5, "momentum": 0.5, "eta": 0.5, "eps": 0.5},
        {"weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.NONE},
        {"weight_decay": 0.1},
        {"gradient_clipping": False, "max_gradient": 0.01},
        CLIPPED,
    ],
    ids=["of others", "mode NONE", "without a mode", "not clipped", "clipped"],
)
def test_rows_equal_those_of_fbgemms_kernels(shared_job, cls, arguments, request):
    given = shared_job, request.node.name, cls, arguments
    expected = trained_here(cls, arguments)
    torch.testing.assert_close(trained_on_servers(*given), expected)


def clipped_by_hand():
    return GRADS.clamp(-0.75, 0.75)


def test_sequences_clip_the_gradient_of_each_id(shared_job):
    module = sequences_of(["clipped ids"], NUM_IDS, DIM, feature="f")
    apply(torchrec.optim.SGD, module.parameters(), {"lr": 1.0, **CLIPPED})
    model = torch.nn.Sequential(module)
    model = shared_job.shard(model, remote_sharders(shared_job.client))
    model.load_state_dict({"0.embeddings.clipped ids.weight": START.clone()})
    rows = model(kjt_of({"f": [[0, 0], [1]]}))["f"].values()
    rows.backward(GRADS)
    moved = START - torch.from_numpy(shared_job.read("clipped ids", range(NUM_IDS)))
    first, second, third = clipped_by_hand()
    expected = torch.stack([first + second, third, 0 * third, 0 * third])
    torch.testing.assert_close(moved, expected)


def test_gradients_under_a_loss_scale_are_clipped_as_they_are_without(shared_job):
    model = Bags([EmbeddingBagConfig(NUM_IDS, DIM, "scaled", feature_names=["f"])])
    apply(torchrec.optim.SGD, model.parameters(), {"lr": LR, **CLIPPED})
    sharders = remote_sharders(shared_job.client)
    model = shared_job.shard(model, sharders)
    sharders.use_grad_scaler(torch.amp.GradScaler("cpu", init_scale=4096.0))
    model.load_state_dict({"bags.embedding_bags.scaled.weight": START.clone()})
    pooled = model(kjt_of(BAGS)).values()
    pooled.backward(GRADS * 4096)
    rows = torch.from_numpy(shared_job.read("scaled", range(NUM_IDS)))
    given = torchrec.optim.SGD, CLIPPED
    torch.testing.assert_close(rows, trained_here(*given, steps=1))
    pooled = model(kjt_of(BAGS)).values()
    pooled.backward(torch.full_like(GRADS, torch.inf))  # not clipped, and so not pushed
    assert torch.equal(
        rows, torch.from_numpy(shared_job.read("scaled", range(NUM_IDS)))
    )


def stepped(optimizer, num=2):
    """Step rows by the optimizer's kernel as a plain function."""
    rows = START.numpy().copy()
    grads = np.zeros_like(rows)
    for bag, grad in zip(BAGS["f"], GRADS.numpy(), strict=True):
        for id_ in bag:
            grads[id_] += grad
    states = [optimizer.initial_state(DIM) for _ in rows]
    for step in range(1, num + 1):
        numbers = np.array(optimizer.step_numbers(DIM, step), dtype=np.float32)
        for id_ in (0, 1, 2):
            optimizer.kernel(numbers, rows[id_], states[id_], grads[id_], DIM)
    return torch.from_numpy(rows)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [L2, DECOUPLE])
def test_rowwise_adagrad_decays_as_fbgemms_gpu_kernel_does(shared_job, mode):
    decay = {"weight_decay": 0.1, "weight_decay_mode": mode, "max_norm": 0.9}
    cls = torchrec.optim.RowWiseAdagrad
    rows = trained_on_servers(shared_job, f"decay {mode.name}", cls, decay)
    w, g = START.double(), torch.zeros(NUM_IDS, DIM, dtype=torch.float64)
    for bag, grad in zip(BAGS["f"], GRADS.double(), strict=True):
        for id_ in bag:
            g[id_] += grad
    used, sums = [0, 1, 2], torch.zeros(NUM_IDS, 1, dtype=torch.float64)
    for _ in range(2):
        penalised = g + (0.1 * w if mode is L2 else 0)
        sums[used] += penalised[used].square().mean(1, keepdim=True)
        rate = LR / (sums.sqrt() + 1e-8)
        kept = 1 - (rate if mode is L2 else LR) * 0.1
        new = kept * w - rate * g
        length = new.norm(dim=1, keepdim=True)
        new = torch.where(length > 0.9, new * 0.9 / length, new)
        w[used] = new[used]
    torch.testing.assert_close(rows, w.float())


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("cls", READ, ids=[cls.__name__ for cls in READ])
def test_an_argument_counts_where_the_kernel_reads_it(cls, name, caplog):
    plain = translate(cls, {"lr": LR}, table="t")
    given = translate(cls, {"lr": LR, name: ARGUMENTS[name]}, table="t")
    changes = given != plain
    assert changes == (name in READ[cls])
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == (name not in READ[cls])
    if not changes:
        assert name in warnings[0].getMessage()


@pytest.mark.parametrize("cls", READ, ids=[cls.__name__ for cls in READ])
def test_neutral_settings_give_no_warning(cls, caplog):
    neutral = {
        **{name: fused_arguments._DEFAULTS[name] for name in ARGUMENTS},
        "weight_decay_mode": WeightDecayMode.NONE,
        "gradient_clipping": False,
        "max_gradient": 7.0,
        "stochastic_rounding": True,
    }
    given = translate(cls, {"lr": LR, **neutral}, table="t")
    plain = translate(cls, {"lr": LR}, table="t")
    momentum = {"momentum": 0.9} if cls is torchrec.optim.LarsSGD else {}
    assert given == replace(plain, optimizer=replace(plain.optimizer, **momentum))
    assert not caplog.records


def test_one_warning_comes_for_many_tables(caplog):
    for table in "abc":
        translate(torch.optim.SGD, {"lr": LR, "momentum": 0.5}, table=table)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("number", [3, 4, 5])
@pytest.mark.parametrize("cls", [torchrec.optim.RowWiseAdagrad, torch.optim.Adam])
def test_modes_of_weight_decay_that_the_servers_lack_are_errors(cls, number):
    mode = {"weight_decay": 0.1, "weight_decay_mode": WeightDecayMode(number)}
    with pytest.raises(ConfigError, match="'t': weight_decay_mode must be one of"):
        translate(cls, mode, table="t")


def test_rounding_follows_the_argument():
    given = {"stochastic_rounding": False}
    assert not translate(torch.optim.SGD, given, table="t").stochastic_rounding
    assert translate(torch.optim.SGD, {}, table="t").stochastic_rounding


def test_updates_without_stochastic_rounding_round_to_the_nearest(shared_job):
    config = EmbeddingBagConfig(NUM_IDS, DIM, "near", feature_names=["f"])
    config.data_type = torchrec.DataType.FP16
    model = Bags([config])
    of_table = {"lr": 1.0, "stochastic_rounding": False}
    apply(torchrec.optim.SGD, model.parameters(), of_table)
    model = shared_job.shard(model, remote_sharders(shared_job.client))
    key = "bags.embedding_bags.near.weight"
    model.load_state_dict({key: torch.ones(NUM_IDS, DIM)})
    spec = shared_job.client.table("near")
    assert TableSpec.from_json(spec.to_json()) == spec
    for _ in range(50):  # each less than half of the last bit, 2**-11 below 1
        model(kjt_of({"f": [[0]]})).values().backward(torch.full((1, DIM), 1e-4))
    assert (shared_job.read("near", [0])[:, :DIM] == 1.0).all()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, FusedOptimizer(SGD(0.01))),
        ({"learning_rate": 0.5}, FusedOptimizer(SGD(0.5))),
        (
            {
                "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
                "learning_rate": 0.5,
                "eps": 1e-3,
                "beta1": 0.9,
                "output_dtype": SparseType.FP32,
                "cache_load_factor": 0.2,
                "gradient_clipping": True,
            },
            FusedOptimizer(Adagrad(0.5, 0, eps=1e-3, vectorwise_shared=True), 1.0),
        ),
    ],
)
def test_fused_params_are_translated(given, expected):
    assert translate_fused_params(given, None) == expected


def adam(betas):
    return AdamW(0.01, betas=betas, eps=1e-8, weight_decay=0.0)


def test_fused_params_complete_the_optimizers_of_the_model(shared_job):
    model = Bags(
        [
            EmbeddingBagConfig(NUM_IDS, DIM, "own", feature_names=["f"]),
            EmbeddingBagConfig(NUM_IDS, DIM, "none", feature_names=["g"]),
            EmbeddingBagConfig(NUM_IDS, DIM, "set", feature_names=["h"]),
        ]
    )
    weights = model.bags.embedding_bags
    apply(torchrec.optim.Adagrad, weights["own"].parameters(), {"lr": 0.25})
    params = {"optimizer": EmbOptimType.EXACT_SGD, **RATE, "eps": 1e-3, **CLIPPED}
    settings = {"set": TableSettings(optimizer=Adagrad(1.0))}
    model = shared_job.shard(
        model, remote_sharders(shared_job.client, fused_params=params, tables=settings)
    )
    assert [
        shared_job.client.table(name).optimizer for name in ("own", "none", "set")
    ] == [
        Adagrad(0.25, 0.0, eps=1e-3),
        SGD(0.5),
        Adagrad(1.0),
    ]
    [bags] = [m for m in model.modules() if hasattr(m, "spec")]
    assert bags.spec.max_gradients == {"own": 0.75, "none": 0.75}


RATE, BETAS = {"learning_rate": 0.5}, {"beta1": 0.5, "beta2": 0.5}


@pytest.mark.parametrize(
    ("cls", "own", "common", "expected"),
    [
        (torch.optim.SGD, {"lr": 0.25}, RATE, SGD(0.25)),
        (torchrec.optim.SGD, {"learning_rate": 0.25}, {"lr": 0.5}, SGD(0.25)),
        (torch.optim.SGD, {}, RATE, SGD(0.5)),
        (torch.optim.Adam, {"betas": (0.8, 0.9)}, BETAS, adam((0.8, 0.9))),
        (torchrec.optim.Adam, {"beta2": 0.9}, BETAS, adam((0.5, 0.9))),
    ],
)
def test_arguments_of_a_table_win_over_fused_params_by_any_name(
    cls, own, common, expected
):
    table = EmbeddingBagConfig(NUM_IDS, DIM, "table", feature_names=["f"])
    bags = Bags([table]).bags
    apply(cls, bags.parameters(), own)
    assert read_optimizers(bags, common)["table"].optimizer == expected


def test_arguments_of_a_fused_module_win_over_fused_params():
    bags = FusedEmbeddingBagCollection(
        [EmbeddingBagConfig(NUM_IDS, DIM, "table", feature_names=["f"])],
        *(torch.optim.SGD, {"lr": 0.25}),
        device=META,
    )
    assert read_optimizers(bags, RATE)["table"].optimizer == SGD(0.25)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"optimizer": EmbOptimType.MADGRAD}, "must be one of .*MADGRAD|madgrad"),
        ({"optimizer": EmbOptimType.ADAM}, "one optimizer. Received: .*SGD"),
        ({"output_dtype": SparseType.FP16}, "output_dtype must be FP32"),
        ({"extra_optimizer_config": object()}, "extra_optimizer_config"),
    ],
)
def test_fused_params_that_the_servers_lack_are_errors(params, message):
    given = None if "MADGRAD" in str(params) or "madgrad" in str(params) else SGD(1.0)
    with pytest.raises(ConfigError, match=message):
        translate_fused_params(params, given)


RARE = {
    torchrec.optim.PartialRowWiseAdam: "partial_rowwise",
    torchrec.optim.LAMB: "codegen_lamb",
    torchrec.optim.PartialRowWiseLAMB: "partial_rowwise",
    torchrec.optim.LarsSGD: "codegen_lars",
}


@pytest.mark.parametrize("device", [pytest.param(CUDA, marks=ON_GPU)])
@pytest.mark.parametrize("cls", READ, ids=[cls.__name__ for cls in READ])
def test_steps_equal_those_of_fbgemms_kernels_on_a_gpu(cls, device):
    # Written by tests/gpu/prune_fbgemm.py.
    left_out = Path(fbgemm_gpu.__file__).with_name("left_out.txt")
    if left_out.exists() and RARE.get(cls) in left_out.read_text().split():
        pytest.skip("this wheel of fbgemm was cut, and lacks the kernel")
    decays = [{"weight_decay": 0.1, "weight_decay_mode": mode} for mode in (0, 1, 2)]
    for further in ({}, {"max_norm": 0.9}, *decays):
        given = {**further}
        if mode := given.get("weight_decay_mode"):
            given["weight_decay_mode"] = WeightDecayMode(mode)
        given.pop("weight_decay_mode") if not mode and "weight_decay" in given else None
        made = translate(cls, {"lr": LR, **given}, table="t").optimizer
        rows = trained_here(cls, given, str(device))
        torch.testing.assert_close(stepped(made), rows, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("most", [0.0, -1.0, float("nan")])
def test_clipping_needs_a_largest_gradient_above_zero(most):
    given = {"learning_rate": 1.0, "gradient_clipping": True, "max_gradient": most}
    with pytest.raises(ConfigError, match=r"max_gradient must be > 0 with gradient_cl"):
        translate_fused_params(given, None)


def test_the_error_of_sparse_adam_names_its_twin():
    with pytest.raises(
        ConfigError, match=r"nearest is TableSettings\(optimizer=AdamAs"
    ):
        translate(torch.optim.SparseAdam, {}, table="t")
