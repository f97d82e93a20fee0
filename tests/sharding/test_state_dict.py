"""State and optimizers of a model on the servers, beside those of plain TorchRec."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torchrec import EmbeddingBagConfig
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import get_module, get_unwrapped_module
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from persia_torchrec import SGD, Constant, RemoteEmbeddingBagCollectionSharder, join
from persia_torchrec.errors import ConfigError
from persia_torchrec.table import TableSettings
from tests.support.remote_job import (
    CPU,
    META,
    Bags,
    kjt_of,
    remote_modules,
    shard,
    tensors_of,
)

pytestmark = pytest.mark.slow

TABLES = [
    EmbeddingBagConfig(10, 4, name="term", feature_names=["ad", "query"]),
    EmbeddingBagConfig(10, 4, name="user", feature_names=["user"]),
]
IDS = {"ad": [[1, 2], []], "query": [[2], [3]], "user": [[5], [7, 7]]}
LR = 0.5


class Tower(nn.Module):
    def __init__(self, device=META):
        super().__init__()
        self.bags = Bags(TABLES)
        self.over = nn.Linear(12, 1, device=device)
        self.register_buffer("steps", torch.zeros(1, device=device))

    def forward(self, ids):
        return self.over(self.bags(ids).values()).squeeze(1)


class Twins:
    """A model on the servers, and the same one in plain TorchRec."""

    def __init__(self, job, **settings_of_sharder):
        zeros = TableSettings(initializer=Constant(0.0))
        settings = {table.name: zeros for table in TABLES}
        self.remote = job.put_on_servers(
            Tower(), SGD(LR), tables=settings, **settings_of_sharder
        )
        sharder = EmbeddingBagCollectionSharder(
            fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LR}
        )
        fused = ParameterConstraints(
            sharding_types=["table_wise"], compute_kernels=["fused"]
        )
        constraints = {table.name: fused for table in TABLES}
        self.plain = shard(Tower(), sharder, constraints=constraints)
        for name, value in self.plain.state_dict().items():
            if "embedding_bags" in name:
                value.local_shards()[0].tensor.zero_()
        with torch.no_grad():
            for model in (self.remote, self.plain):
                get_unwrapped_module(model).over.weight.fill_(0.1)
                get_unwrapped_module(model).over.bias.fill_(0.0)

    def __iter__(self):
        return iter((self.remote, self.plain))


@pytest.fixture
def twins(job):
    return Twins(job)


@pytest.fixture
def left_out(job):
    """Twins whose state dict has no rows."""
    return Twins(job, state_dict_rows="none")


def is_rows(name):
    return "embedding_bags" in name


def optimizers_of(model):
    """Return the optimizers of both halves together, as TorchRec's examples do."""
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.SGD(params, lr=0.1),
    )
    return CombinedOptimizer([model.fused_optimizer, dense])


def train(model, optimizer, num_steps=6):
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = (model(kjt_of(IDS)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_parameters_buffers_and_state_have_torchrecs_names(twins):
    for names in (
        lambda model: [name for name, _ in model.named_parameters()],
        lambda model: [name for name, _ in model.named_buffers()],
        lambda model: list(model.state_dict()),
    ):
        assert names(twins.remote) == names(twins.plain)
    assert all(p.device.type == "cpu" for p in twins.remote.parameters())


def test_data_parallel_ignores_just_the_sharded_parameters(twins):
    sharded = DistributedModelParallel._sharded_parameter_names
    for model in twins:
        assert {is_rows(name) for name in sharded(model)} == {True}
        replica = get_module(model)
        assert isinstance(replica, nn.parallel.DistributedDataParallel)
        assert set(replica.parameters_to_ignore) == set(sharded(model))


def test_the_modules_are_where_torchrec_has_them(twins):
    for model in twins:
        assert isinstance(model.module, Tower)
        assert model.module is get_unwrapped_module(model)
        assert set(model.plan.get_plan_for_module("bags.bags")) == {"term", "user"}
    (module,) = remote_modules(twins.remote)
    assert twins.remote.module.bags.bags is module


def test_the_data_parallel_half_may_be_made_later(job):
    sharder = RemoteEmbeddingBagCollectionSharder(job.client, SGD(LR))
    model = DistributedModelParallel(
        Tower(), sharders=[sharder], init_data_parallel=False, init_parameters=False
    )
    dense = {p.device.type for n, p in model.named_parameters() if not is_rows(n)}
    assert dense == {"meta"}
    model.init_parameters = True
    model.init_data_parallel()
    assert isinstance(get_module(model), nn.parallel.DistributedDataParallel)
    losses = train(model, optimizers_of(model))
    assert losses[-1] < losses[0]
    sharder.close()


def test_trainers_whose_data_end_unevenly_need_a_graph_that_is_not_static(twins):
    with pytest.raises(ConfigError, match="without static_graph"), join(twins.remote):
        pytest.fail("the block was entered")


def test_state_without_rows_loads_strictly(twins):
    train(twins.remote, optimizers_of(twins.remote))
    state = copy.deepcopy(twins.remote.state_dict())
    train(twins.remote, optimizers_of(twins.remote))
    for strict in (True, False):
        result = twins.remote.load_state_dict(dict(state), strict=strict)
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        for name, value in tensors_of(twins.remote).items():
            assert torch.equal(value, state[name])


@pytest.mark.parametrize("strict", [True, False])
def test_missing_and_unknown_keys_are_reported_as_by_torchrec(twins, strict):
    reports = []
    for model in twins:
        state = model.state_dict()
        state["over.scale"] = state.pop("over.bias")
        reports.append(model.load_state_dict(state, strict=strict))
    assert reports[0] == reports[1]
    assert bool(reports[0].missing_keys) == strict


def test_a_state_that_knows_nothing_of_the_rows_is_incomplete(twins):
    state = tensors_of(twins.remote)
    with pytest.raises(RuntimeError, match=r"Missing key.*term\.weight.*user\.weight"):
        twins.remote.load_state_dict(dict(state), strict=True)


def plain_tower():
    tower = Tower(CPU)
    tower.bags = Bags(TABLES, CPU)
    return tower


class TestWhatStandsForRows:
    def test_it_reports_where_they_are_and_what_saves_and_reads_them(self, left_out):
        entry = left_out.remote.state_dict()["bags.bags.embedding_bags.term.weight"]
        assert type(entry) is str
        for word in ("servers", "'term'", "save_checkpoint", "read_table"):
            assert word in entry

    def test_it_goes_through_torchs_files(self, left_out, tmp_path):
        state = left_out.remote.state_dict()
        torch.save(state, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=True)
        assert_same(loaded, state)
        with torch.no_grad():
            get_unwrapped_module(left_out.remote).over.weight.zero_()
        left_out.remote.load_state_dict(loaded)
        assert left_out.remote.state_dict()["over.weight"].any()

    def test_it_goes_through_distributed_checkpoints(self, left_out, tmp_path):
        dcp.save({"model": left_out.remote}, checkpoint_id=tmp_path)
        expected = copy.deepcopy(left_out.remote.state_dict())
        with torch.no_grad():
            get_unwrapped_module(left_out.remote).over.weight.zero_()
        dcp.load({"model": left_out.remote}, checkpoint_id=tmp_path)
        assert_same(left_out.remote.state_dict(), expected)

    def test_a_plain_model_rejects_it(self, left_out, tmp_path):
        state = left_out.remote.state_dict()
        with pytest.raises(RuntimeError, match=r"expected torch\.Tensor.*class 'str'"):
            plain_tower().load_state_dict(dict(state))
        with pytest.raises(RuntimeError, match=r"key type <class 'str'> found"):
            left_out.plain.load_state_dict(dict(state))
        dcp.save(state, checkpoint_id=tmp_path)
        plain = plain_tower().state_dict()
        dcp.load(plain, checkpoint_id=tmp_path)
        with pytest.raises(RuntimeError, match=r"expected torch\.Tensor.*class 'str'"):
            plain_tower().load_state_dict(plain)

    def test_rows_of_a_plain_model_do_not_replace_an_entry(self, left_out, tmp_path):
        dcp.save(plain_tower().state_dict(), checkpoint_id=tmp_path)
        with pytest.raises(CheckpointException, match=r"term\.weight, expected Bytes"):
            dcp.load(left_out.remote.state_dict(), checkpoint_id=tmp_path)

    def test_an_entry_taken_for_a_sharded_tensor_fails(self, left_out):
        rows = [v for k, v in left_out.remote.state_dict().items() if is_rows(k)]
        with pytest.raises(AttributeError, match="local_shards"):
            rows[0].local_shards()

    def test_a_module_by_itself_has_it_too(self, left_out):
        (module,) = remote_modules(left_out.remote)
        state = module.state_dict()
        assert list(state) == [
            f"embedding_bags.{table.name}.weight" for table in TABLES
        ]
        module.load_state_dict(state)
        with pytest.raises(RuntimeError, match=r"Unexpected key.*more\.weight"):
            module.load_state_dict({**state, "more.weight": torch.zeros(1)})


def assert_same(state, expected):
    assert state.keys() == expected.keys()
    for key, value in state.items():
        if isinstance(value, str):
            assert value == expected[key]
        else:
            assert torch.equal(value, expected[key])


class TestTheFusedOptimizer:
    def test_it_has_torchrecs_names_and_rates(self, twins):
        remote, plain = (model.fused_optimizer for model in twins)
        assert list(remote.params) == list(plain.params)
        assert {group["lr"] for group in remote.param_groups} == {LR}
        assert {group["lr"] for group in plain.param_groups} == {LR}
        assert remote.state_dict() == plain.state_dict()

    def test_a_loop_with_both_halves_in_one_optimizer_trains_the_same(self, twins):
        remote, plain = (train(model, optimizers_of(model)) for model in twins)
        np.testing.assert_allclose(remote, plain, rtol=1e-6)
        assert remote[-1] < remote[0]

    def test_the_state_of_both_halves_is_saved_and_loaded(self, twins):
        for model in twins:
            optimizer = optimizers_of(model)
            optimizer.init_state()
            train(model, optimizer)
            state = copy.deepcopy(optimizer.state_dict())
            assert set(state) == {"state"}
            optimizer.load_state_dict(state)

    def test_groups_are_saved_when_that_is_asked_for(self, twins):
        optimizer = twins.remote.fused_optimizer
        optimizer.save_param_groups(True)
        state = copy.deepcopy(optimizer.state_dict())
        for group in optimizer.param_groups:
            group["lr"] = 9.0
        optimizer.load_state_dict(state)
        assert {group["lr"] for group in optimizer.param_groups} == {LR}

    def test_torchrecs_warm_up_reaches_the_servers(self, twins):
        stages = [
            WarmupStage(WarmupPolicy.LINEAR, max_iters=3, value=0.1),
            WarmupStage(WarmupPolicy.CONSTANT, max_iters=9, value=2.0),
        ]
        losses = [
            train(model, WarmupOptimizer(optimizers_of(model), list(stages), lr=0.3))
            for model in twins
        ]
        np.testing.assert_allclose(*losses, rtol=1e-5)
        assert {g["lr"] for g in twins.remote.fused_optimizer.param_groups} == {0.6}

    def test_torchs_schedules_reach_the_servers(self, twins):
        losses = []
        for model in twins:
            optimizer = optimizers_of(model)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            for _ in range(4):
                losses.append(train(model, optimizer, 1))
                schedule.step()
        np.testing.assert_allclose(losses[:4], losses[4:], rtol=1e-5)

    def test_it_and_the_sharders_optimizer_show_the_same_rates(self, job):
        sharder = RemoteEmbeddingBagCollectionSharder(job.client, SGD(LR))
        model = DistributedModelParallel(Tower(), sharders=[sharder])
        for group in model.fused_optimizer.param_groups:
            group["lr"] = 0.25
        assert sharder.optimizer.learning_rates() == {"term": 0.25, "user": 0.25}
        sharder.set_learning_rate(0.125, ["user"])
        rates = [group["lr"] for group in model.fused_optimizer.param_groups]
        assert rates == [0.25]  # one group, as in TorchRec
        assert sharder.rates() == {"term": 0.25, "user": 0.125}
        sharder.close()
