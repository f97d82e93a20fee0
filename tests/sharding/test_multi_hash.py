import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchrec import EmbeddingBagConfig, PoolingType
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from persia_torchrec import SGD, MultiHashEmbeddingBagCollection, remote_sharders
from persia_torchrec.device.transfer import ToHost
from persia_torchrec.errors import BatchError, ConfigError
from tests.support.remote_job import CPU, META, RemoteJob, kjt_of

N, DIM, M = 90, 4, 10  # of the table "user"; M is the ceiling of the root of N
BAGS = {
    "item": [[0], [6, 3], []],
    "user": [[89, 0, 89], [], [7]],
    "seen": [[5], [], []],
}
KJT_KEYS = list(BAGS)


def tables(combine="add"):
    return [
        EmbeddingBagConfig(
            *(N, DIM), name="user", feature_names=["user"], pooling=PoolingType.MEAN
        ),
        EmbeddingBagConfig(7, DIM + 2, name="item", feature_names=["item", "seen"]),
    ]


class Plain:
    """The definition, id by id, over ``nn.Embedding``."""

    def __init__(self, weights, combine):
        self.tables = {
            name: nn.Embedding.from_pretrained(weight.clone(), freeze=False)
            for name, weight in weights.items()
        }
        self.combine = combine

    def row(self, table, id_, divisor):
        quotient = self.tables[f"{table}_quotient"](torch.tensor(id_ // divisor))
        remainder = self.tables[f"{table}_remainder"](torch.tensor(id_ % divisor))
        if self.combine == "add":
            return quotient + remainder
        if self.combine == "mul":
            return quotient * remainder
        return torch.cat([quotient, remainder])

    def __call__(self, bags):
        columns = []
        for key, table, divisor, dim, is_mean in (
            ("user", "user", 10, DIM, True),
            ("item", "item", 3, DIM + 2, False),
            ("seen", "item", 3, DIM + 2, False),
        ):
            pooled = []
            for bag in bags[key]:
                total = torch.zeros(dim)
                for id_ in bag:
                    total = total + self.row(table, id_, divisor)
                pooled.append(total / max(len(bag), 1) if is_mean else total)
            columns.append(torch.stack(pooled))
        return torch.cat(columns, dim=1)


def weights_of(model):
    return {
        name.split(".")[-2]: value
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
    }


@given(st.integers(1, 2**62), st.data())
def test_pairs_are_exact_and_fit_the_tables(num_ids, data):
    module = MultiHashEmbeddingBagCollection(
        [EmbeddingBagConfig(num_ids, 2, name="t", feature_names=["f"])], device=META
    )
    (bags,) = module.collections
    first, second = [c.num_embeddings for c in bags.embedding_bag_configs()]
    edges = st.sampled_from([0, num_ids - 1, num_ids // 2])
    ids = data.draw(st.lists(st.integers(0, num_ids - 1) | edges, min_size=1))
    halves = module.split_ids(kjt_of({"f": [ids]}))
    quotients = halves["f@t_quotient"].values().tolist()
    remainders = halves["f@t_remainder"].values().tolist()
    assert [q * second + r for q, r in zip(quotients, remainders, strict=True)] == ids
    assert max(quotients) < first <= second
    assert max(remainders) < second
    assert (second - 1) ** 2 < num_ids <= second**2


def test_no_two_ids_share_both_rows():
    for num_ids in range(1, 130):
        module = MultiHashEmbeddingBagCollection(
            [EmbeddingBagConfig(num_ids, 2, name="t", feature_names=["f"])], device=META
        )
        halves = module.split_ids(kjt_of({"f": [list(range(num_ids))]}))
        parts = [half.values().tolist() for half in halves.to_dict().values()]
        assert len(set(zip(*parts, strict=True))) == num_ids


@pytest.mark.parametrize("combine", ["add", "mul", "concat"])
def test_in_process_outputs_and_gradients_equal_those_of_embeddings(combine):
    torch.manual_seed(0)
    module = MultiHashEmbeddingBagCollection(tables(), combine, device=CPU)
    plain = Plain(weights_of(module), combine)
    output, expected = module(kjt_of(BAGS)), plain(BAGS)
    assert output.keys() == ["user", "item", "seen"]
    assert output["item"].shape == (3, DIM + 2)
    torch.testing.assert_close(output.values(), expected)
    factors = torch.rand(expected.shape)
    (output.values() * factors).sum().backward()
    (expected * factors).sum().backward()
    for name, parameter in module.named_parameters():
        of_plain = plain.tables[name.split(".")[-2]].weight.grad
        torch.testing.assert_close(parameter.grad, of_plain)
        assert of_plain.abs().max() > 0


class WithLoss(nn.Module):
    def __init__(self, module, factors):
        super().__init__()
        self.module, self.factors = module, factors

    def forward(self, ids):
        values = self.module(ids).values()
        return (values * self.factors).sum(), values.detach()


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("combine", ["add", "mul", "concat"])
def test_on_the_servers_outputs_and_updates_equal_those_of_embeddings(
    combine, pipelined
):
    torch.manual_seed(0)
    local = MultiHashEmbeddingBagCollection(tables(), combine, device=CPU)
    weights = weights_of(local)
    plain = Plain(weights, combine)
    expected = plain(BAGS)
    factors = torch.rand(expected.shape)
    with RemoteJob() as job:
        module = MultiHashEmbeddingBagCollection(tables(), combine, device=META)
        sharders = remote_sharders(job.client, SGD(1.0))
        model = job.shard(WithLoss(module, factors), sharders)
        sharders.load_weights(weights)
        if pipelined:
            optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
            pipeline = TrainPipelineSparseDist(
                model, optimizer, CPU, execute_all_batches=True, pipeline_postproc=True
            )
            output = pipeline.progress(iter([kjt_of(BAGS)]))
            assert len(pipeline._pipelined_modules) == len(module.collections)
        else:
            loss, output = model(kjt_of(BAGS))
            loss.backward()
        torch.testing.assert_close(output, expected.detach())
        (expected * factors).sum().backward()
        for name, start in weights.items():
            rows = torch.from_numpy(job.read(name, range(len(start))).copy())
            torch.testing.assert_close(rows, start - plain.tables[name].weight.grad)


@pytest.mark.parametrize(("id_", "bags"), [(90, [[3, 90]]), (-1, [[-1], [4]])])
def test_an_id_out_of_range_is_rejected_with_its_feature(id_, bags):
    module = MultiHashEmbeddingBagCollection(tables()[:1], device=CPU)
    with pytest.raises(
        BatchError,
        match=rf"Feature 'user': ids must be in \[0, 90\).*Received: {id_}\.",
    ):
        module(kjt_of({"user": bags}))


def test_ids_of_a_gpu_are_looked_at_later_and_waited_for_by_no_thread(monkeypatch):
    """The error comes with a later batch, when the copy of the bounds is there."""
    are_here = [False]
    monkeypatch.setattr(ToHost, "is_here", lambda _: are_here[0])
    module = MultiHashEmbeddingBagCollection(tables()[:1], device=CPU).split_ids
    module(kjt_of({"user": [[89]]}))
    module(kjt_of({"user": [[-1, 3]]}))
    module(kjt_of({"user": [[4]]}))
    are_here[0] = True
    with pytest.raises(BatchError, match=r"Feature 'user'.*Received: -1\."):
        module(kjt_of({"user": [[5]]}))
    module(kjt_of({"user": [[5]]}))


def test_an_empty_batch_reads_zeros():
    module = MultiHashEmbeddingBagCollection(tables()[:1], "mul", device=CPU)
    output = module(kjt_of({"user": [[], []]}))
    assert torch.equal(output.values(), torch.zeros(2, DIM))


def test_both_halves_start_as_the_config_says():
    config = EmbeddingBagConfig(
        *(N, DIM), name="user", feature_names=["user"], init_fn=nn.init.ones_
    )
    module = MultiHashEmbeddingBagCollection([config], device=CPU)
    shapes = {name: tuple(w.shape) for name, w in weights_of(module).items()}
    assert shapes == {"user_quotient": (9, DIM), "user_remainder": (M, DIM)}
    assert all((weight == 1).all() for weight in weights_of(module).values())


@pytest.mark.parametrize(
    ("change", "combine", "message"),
    [
        ({}, "max", "combine must be one of"),
        ({"embedding_dim": 5}, "concat", "Table 'user': embedding_dim must be even"),
        (
            {"num_embeddings": 0},
            "add",
            "Table 'user': pooling must be SUM or MEAN, and",
        ),
    ],
)
def test_invalid_settings_are_rejected(change, combine, message):
    settings = {
        "num_embeddings": N,
        "embedding_dim": DIM,
        "name": "user",
        "init_fn": nn.init.ones_,
    }
    make = functools.partial(EmbeddingBagConfig, feature_names=["user"])
    with pytest.raises(ConfigError, match=message):
        MultiHashEmbeddingBagCollection([make(**{**settings, **change})], combine)
