"""Every embedding module of TorchRec trains on the servers as it does in TorchRec.

Both models start from the same rows and dense weights, and see the same batches.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torchrec.optim
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tensordict import TensorDict
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import (
    FeatureProcessedEmbeddingBagCollectionSharder,
)
from torchrec.distributed.fused_embeddingbag import FusedEmbeddingBagCollectionSharder
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.feature_processor_ import (
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from torchrec.modules.fp_embedding_modules import (
    FeatureProcessedEmbeddingBagCollection,
)
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

from persia_torchrec import (
    Adagrad,
    RemoteEmbeddingBagCollectionSharder,
    RemoteEmbeddingCollectionSharder,
    RemoteFeatureProcessedEmbeddingBagCollectionSharder,
    RemoteFusedEmbeddingBagCollectionSharder,
)
from tests.integration.twins import Twins, WithLoss
from tests.support.models import OnHost
from tests.support.places import GPU_PLACES, require_kernels
from tests.support.remote_job import CPU, META

pytestmark = pytest.mark.slow

NUM_IDS = 40
NUM_SAMPLES = 16
NUM_STEPS_OF_VARIANTS = 24
MAX_IDS = 4
SEQUENCE_NAMES = ["ad@term", "query", "user", "ad@user"]
KEYS = ["ad", "query", "user", "place"]
LR = 0.05
FUSED = {
    "optimizer": EmbOptimType.EXACT_ADAGRAD,
    "learning_rate": LR,
    "eps": 1e-8,
}
OPTIMIZER = Adagrad(lr=LR, initial_accumulator_value=0, eps=1e-8)


def tables(last=PoolingType.MEAN):
    """Two features a table, an id shared by two tables, mixed dims, both poolings."""
    return [
        EmbeddingBagConfig(NUM_IDS, 8, name="term", feature_names=["ad", "query"]),
        EmbeddingBagConfig(NUM_IDS, 4, name="user", feature_names=["user", "ad"]),
        EmbeddingBagConfig(
            *(NUM_IDS, 4), name="place", feature_names=["place"], pooling=last
        ),
    ]


def bags():
    return EmbeddingBagCollection(tables=tables(), device=META)


def weighted_bags():
    # fbgemm's CPU kernel pools a weighted mean, but leaves the division out of its
    # gradient; so the mean of weighted bags has tests of its own.
    return EmbeddingBagCollection(
        tables=tables(PoolingType.SUM), device=META, is_weighted=True
    )


def bags_with_optimizers():
    collection = bags()
    weights = {
        name: module.weight for name, module in collection.embedding_bags.items()
    }
    apply(torch.optim.SGD, [weights["term"]], {"lr": 1.0})
    rowwise = {"lr": 0.1, "eps": 1e-6}
    apply(torchrec.optim.RowWiseAdagrad, [weights["user"]], rowwise)
    return collection


def bags_of_a_feature_twice():
    first, *rest = tables()
    twice = replace(first, feature_names=["ad", "query", "ad"])
    return EmbeddingBagCollection(tables=[twice, *rest], device=META)


def fused_bags():
    return FusedEmbeddingBagCollection(
        tables=tables(),
        optimizer_type=torch.optim.Adagrad,
        optimizer_kwargs={"lr": 2 * LR, "eps": 1e-6},
        device=META,
    )


def processed_together():
    lengths = dict.fromkeys(KEYS, MAX_IDS)
    return FeatureProcessedEmbeddingBagCollection(
        weighted_bags(), PositionWeightedModuleCollection(lengths, device=CPU)
    )


def processed_one_by_one():
    return FeatureProcessedEmbeddingBagCollection(
        weighted_bags(),
        {key: PositionWeightedModule(MAX_IDS, device=CPU) for key in KEYS},
    )


def sequences(*, need_indices=False, of_term=("ad", "query")):
    return EmbeddingCollection(
        tables=[
            EmbeddingConfig(NUM_IDS, 8, name="term", feature_names=[*of_term]),
            EmbeddingConfig(NUM_IDS, 8, name="user", feature_names=["user", "ad"]),
        ],
        need_indices=need_indices,
        device=META,
    )


class Pooled(nn.Module):
    """Embeddings and dense features, and one layer over them."""

    def __init__(self, embeddings, dim=2 * 8 + 2 * 4 + 4) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.over = nn.Linear(dim + 3, 1)

    def forward(self, dense, ids):
        values = self.embeddings(ids).values()
        return self.over(torch.cat([torch.tanh(values), dense], dim=1)).squeeze(1)


class Sequential(nn.Module):
    """The embedding of each id counts by itself, so that pooling cannot replace it."""

    def __init__(self, embeddings, dim=4 * 8) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.over = nn.Linear(dim + 3, 1)

    def forward(self, dense, ids):
        output = self.embeddings(ids)
        sums = [sum_by_sample(dense, output[name]) for name in SEQUENCE_NAMES]
        return self.over(torch.cat([dense, *sums], dim=1)).squeeze(1)


@torch.fx.wrap
def sum_by_sample(dense, feature):
    values = torch.tanh(feature.values())
    if feature.weights_or_none() is not None:
        values = values * (feature.weights() % 5).unsqueeze(1)
    samples = torch.arange(len(dense), device=dense.device)
    sample = samples.repeat_interleave(feature.lengths())
    zeros = torch.zeros(len(dense), values.shape[1], device=dense.device)
    return zeros.index_add(0, sample, values)


def as_int32(kjt):
    return KeyedJaggedTensor(kjt.keys(), kjt.values().int(), lengths=kjt.lengths())


def as_tensor_dict(kjt):
    """Return the same ids, and those of a feature that no table has, before them."""
    features = {"other": kjt[KEYS[0]], **{key: kjt[key] for key in KEYS}}
    return TensorDict(
        {
            key: torch.nested.nested_tensor_from_jagged(
                jagged.values(), lengths=jagged.lengths()
            )
            for key, jagged in features.items()
        }
    )


@dataclass(frozen=True)
class Case:
    """A module, and the sharders that put it on the servers and into TorchRec."""

    model: Callable[[], nn.Module]
    remote: Callable[..., list]
    local: Callable[[], object]
    is_weighted: bool = False
    is_variable: bool = False
    given: Callable[[KeyedJaggedTensor], object] = lambda kjt: kjt
    num_steps: int = 80


def remote_bags(client):
    return [RemoteEmbeddingBagCollectionSharder(client, OPTIMIZER)]


def remote_fused(client):
    return [RemoteFusedEmbeddingBagCollectionSharder(*remote_bags(client))]


def remote_processed(client):
    return [RemoteFeatureProcessedEmbeddingBagCollectionSharder(*remote_bags(client))]


def remote_sequences(client):
    return [RemoteEmbeddingCollectionSharder(client, OPTIMIZER)]


def local_bags():
    return EmbeddingBagCollectionSharder(fused_params=dict(FUSED))


def local_processed():
    return FeatureProcessedEmbeddingBagCollectionSharder(local_bags())


def local_sequences():
    return EmbeddingCollectionSharder(fused_params=dict(FUSED))


POOLED = Case(lambda: Pooled(bags()), remote_bags, local_bags)
WEIGHTED = Case(
    lambda: Pooled(weighted_bags()), remote_bags, local_bags, is_weighted=True
)
SEQUENCES = Case(lambda: Sequential(sequences()), remote_sequences, local_sequences)
VARIANT = {"num_steps": NUM_STEPS_OF_VARIANTS}
CASES = {
    "bags": POOLED,
    "bags, samples kept once": replace(POOLED, is_variable=True, **VARIANT),
    "weighted bags": WEIGHTED,
    "weighted bags, samples kept once": replace(WEIGHTED, is_variable=True, **VARIANT),
    "bags with optimizers of their own": replace(
        POOLED, model=lambda: Pooled(bags_with_optimizers())
    ),
    "fused bags": Case(
        lambda: Pooled(fused_bags()), remote_fused, FusedEmbeddingBagCollectionSharder
    ),
    "processed bags": Case(
        lambda: Pooled(processed_together()),
        *(remote_processed, local_processed),
    ),
    "bags processed one by one": Case(
        lambda: Pooled(processed_one_by_one()),
        *(remote_processed, local_processed),
    ),
    "sequences": SEQUENCES,
    "sequences with indices": replace(
        SEQUENCES, model=lambda: Sequential(sequences(need_indices=True))
    ),
    "sequences, samples kept once": replace(SEQUENCES, is_variable=True, **VARIANT),
    "bags of int32 ids": replace(POOLED, given=as_int32, **VARIANT),
    "bags of a TensorDict": replace(POOLED, given=as_tensor_dict, **VARIANT),
    "bags of a feature twice": replace(
        POOLED,
        model=lambda: Pooled(bags_of_a_feature_twice(), 3 * 8 + 2 * 4 + 4),
        **VARIANT,
    ),
    "sequences of int32 ids": replace(
        SEQUENCES,
        model=lambda: Sequential(sequences(need_indices=True)),
        given=as_int32,
        **VARIANT,
    ),
    "sequences of a TensorDict": replace(SEQUENCES, given=as_tensor_dict, **VARIANT),
    "sequences of a feature twice": replace(
        SEQUENCES,
        model=lambda: Sequential(
            sequences(of_term=["ad", "query", "ad"], need_indices=True), 5 * 8
        ),
        **VARIANT,
    ),
}


@dataclass
class Batch(OnHost):
    dense: torch.Tensor
    ids: KeyedJaggedTensor
    labels: torch.Tensor

    def repeated(self):
        """Return the batch with every sample where it was kept once.

        On a CPU, fbgemm pools no batch of a variable number of samples.
        """
        keys, samples = self.ids.inverse_indices()
        bags = [
            (feature[sample], weights[sample] if weights else None)
            for key, of_key in zip(keys, samples.tolist(), strict=True)
            for feature, weights in [self._bags(key)]
            for sample in of_key
        ]
        weights = [of_bag for _, of_bag in bags]
        ids = KeyedJaggedTensor(
            keys,
            torch.cat([ids for ids, _ in bags]),
            torch.cat(weights) if weights[0] is not None else None,
            lengths=torch.tensor([len(ids) for ids, _ in bags], dtype=torch.int32),
        )
        return replace(self, ids=ids)

    def _bags(self, key):
        feature = self.ids[key]
        lengths = feature.lengths().tolist()
        weights = feature.weights_or_none()
        return feature.values().split(
            lengths
        ), None if weights is None else weights.split(lengths)


def make_batch(generator, case):
    """Bags of 0 to 4 ids; now and then a feature has none in the whole batch."""

    def integers(high, *shape):
        return torch.randint(high, shape, generator=generator)

    kept = [NUM_SAMPLES] * len(KEYS)
    if case.is_variable:
        kept = (1 + integers(NUM_SAMPLES, len(KEYS))).tolist()
    lengths = [integers(MAX_IDS + 1, num) for num in kept]
    if integers(4, 1) == 0:
        lengths[integers(len(KEYS), 1)].zero_()
    lengths = torch.cat(lengths)
    ids = integers(NUM_IDS, int(lengths.sum()))
    weights = torch.rand(len(ids), generator=generator) * 2 - 0.5
    more = {}
    if case.is_variable:
        samples = [integers(num, NUM_SAMPLES) for num in kept]
        more["stride_per_key_per_rank"] = [[num] for num in kept]
        more["inverse_indices"] = (KEYS, torch.stack(samples))
    kjt = KeyedJaggedTensor(
        KEYS, ids, weights if case.is_weighted else None, lengths=lengths.int(), **more
    )
    dense = torch.randn(NUM_SAMPLES, 3, generator=generator)
    return Batch(dense, case.given(kjt), (dense.sum(1) > 0).float())


def make_batches(case):
    generator = torch.Generator().manual_seed(0)
    return [make_batch(generator, case) for _ in range(case.num_steps)]


def make_twins(job, case, device=CPU):
    configs = configs_of(case.model().embeddings)
    return Twins(
        *(job, lambda: WithLoss(case.model())),
        *(case.remote(job.client), case.local()),
        dims={config.name: config.embedding_dim for config in configs},
        num_ids=NUM_IDS,
        device=device,
    )


def configs_of(module):
    if isinstance(module, EmbeddingCollection):
        return module.embedding_configs()
    if isinstance(module, FeatureProcessedEmbeddingBagCollection):
        module = module._embedding_bag_collection
    return module.embedding_bag_configs()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_step_has_the_loss_of_plain_torchrec(job, case):
    twins = make_twins(job, case)
    losses = twins.train(twins.remote, make_batches(case))
    batches = make_batches(case)
    if case.is_variable:
        batches = [batch.repeated() for batch in batches]
    expected = twins.train(twins.plain, batches)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    twins.require_equal_rows()
    assert job.total("gradients_missed") == 0


@pytest.mark.parametrize(
    "case",
    [
        "weighted bags",
        "fused bags",
        "processed bags",
        "bags processed one by one",
        "sequences with indices",
    ],
)
def test_a_pipeline_of_torchrec_trains_every_module_as_a_plain_loop_does(job, case):
    case = replace(CASES[case], **VARIANT)
    twins = make_twins(job, case)
    optimizer = twins.dense_optimizer(twins.remote)
    pipeline = TrainPipelineSparseDist(twins.remote, optimizer, CPU)
    batches = iter(make_batches(case))
    losses = [pipeline.progress(batches).item() for _ in range(case.num_steps)]
    expected = twins.train(twins.plain, make_batches(case))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def few_bags():
    config = EmbeddingBagConfig(NUM_IDS, 4, name="term", feature_names=["ad"])
    return Pooled(EmbeddingBagCollection(tables=[config], device=META), 4)


class FewSequences(Sequential):
    """One sequence, whose embeddings are added up by sample without index_add."""

    def __init__(self):
        config = EmbeddingConfig(NUM_IDS, 4, name="term", feature_names=["ad"])
        super().__init__(EmbeddingCollection(tables=[config], device=META), 4)

    def forward(self, dense, ids):
        values = torch.tanh(self.embeddings(ids)["ad"].values())
        sums = values.reshape(len(dense), -1, 4).sum(1)
        return self.over(torch.cat([dense, sums], dim=1)).squeeze(1)


def full_batches(num, max_ids=2):
    """Yield batches of as many ids in every bag."""
    generator = torch.Generator().manual_seed(0)
    for step in range(num):
        num_ids = 1 + step % max_ids if max_ids > 2 else max_ids
        lengths = torch.full((len(KEYS) * NUM_SAMPLES,), num_ids, dtype=torch.int32)
        ids = torch.randint(NUM_IDS, (int(lengths.sum()),), generator=generator)
        dense = torch.randn(NUM_SAMPLES, 3, generator=generator)
        labels = (dense.sum(1) > 0).float()
        yield Batch(dense, KeyedJaggedTensor(KEYS, ids, lengths=lengths), labels)


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(replace(POOLED, model=few_bags), id="bags"),
        pytest.param(replace(SEQUENCES, model=FewSequences), id="sequences"),
    ],
)
def test_a_compiled_model_trains_as_plain_torchrec_does(job, case):
    torch.compiler.reset()
    graphs = []

    def recorded(graph, inputs):
        graphs.append(
            [getattr(n.target, "__name__", n.target) for n in graph.graph.nodes]
        )
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    twins = make_twins(job, case)
    open_batches = job.total("open_batches")  # it has made rows
    remote = torch.compile(twins.remote, backend=recorded)
    losses = twins.train(remote, full_batches(4))
    compiled = {name for graph in graphs for name in graph}
    assert {"tanh", "linear", "binary_cross_entropy_with_logits"} <= compiled
    expected = twins.train(twins.plain, full_batches(4))
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    twins.require_equal_rows(rtol=0, atol=1e-6, moved=0)
    # A second number of ids compiles graphs for any number, the last ones.
    twins.train(remote, full_batches(4, max_ids=3))
    num_graphs = len(graphs)
    twins.train(remote, full_batches(12, max_ids=6))
    assert len(graphs) == num_graphs
    assert job.total("open_batches") == open_batches


@pytest.mark.parametrize(("device", "place"), GPU_PLACES)
@pytest.mark.parametrize(
    "case",
    [
        "bags",
        "weighted bags",
        "weighted bags, samples kept once",
        "processed bags",
        "bags processed one by one",
        "sequences with indices",
        "sequences, samples kept once",
    ],
)
def test_a_module_on_a_gpu_trains_as_plain_torchrec_does(job, case, device, place):
    if "processed" in case:
        require_kernels(device)
    case = CASES[case]
    twins = make_twins(job, case, device)
    batches = make_batches(case)
    placed = [replace(batch.to(device), ids=batch.ids.to(place)) for batch in batches]
    losses = twins.train(twins.remote, placed)
    if case.is_variable:
        batches = [batch.repeated() for batch in batches]
    expected = twins.train(twins.plain, batches)
    # Sums there are in another order.
    np.testing.assert_allclose(losses, expected, rtol=1e-3)
