"""Checkpoint code written for TorchRec's tables, with tables on the servers."""

import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_tracker.types import (
    DeltaTrackerConfig,
    ModelTrackerConfigs,
    RawIdTrackerConfig,
)
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardedTensor

from persia_torchrec import SGD, Adagrad, remote_sharders
from persia_torchrec.errors import BatchError, ConfigError
from tests.support.models import bags_of, sequences_of
from tests.support.remote_job import CPU, META, kjt_of, shard

# torch's own gather of a ShardedTensor warns that these will go.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning"),
    pytest.mark.slow,
]

NUM_IDS, DIM = 8, 4
FUSED = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
PLAIN = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]


class Model(nn.Module):
    def __init__(self, device=META):
        super().__init__()
        self.bags = bags_of(["bag"], NUM_IDS, DIM, feature="f", device=device)
        self.rows = sequences_of(["row"], NUM_IDS, DIM, feature="f", device=device)
        self.over = nn.Linear(DIM, 1)

    def forward(self, ids):
        rows = self.rows(ids)["f"].values().sum(0, keepdim=True)
        return self.over(self.bags(ids).values() + rows)


@pytest.fixture
def remote(shared_job):
    shared_job.client.clear()
    return shared_job.shard(Model(), remote_sharders(shared_job.client, SGD(1.0)))


@pytest.fixture
def table(remote):
    return remote.state_dict()["bags.embedding_bags.bag.weight"]


def plain():
    return shard(Model(), *PLAIN, constraints={"bag": FUSED, "row": FUSED})


def sharded(state):
    return {key for key, value in state.items() if isinstance(value, ShardedTensor)}


def save_by_kind(model, folder):
    """Save as dlrm_v3 does: sharded tensors by DCP, the others by torch.save."""
    state = model.state_dict()
    sparse = {k: v for k, v in state.items() if isinstance(v, ShardedTensor)}
    dense = {k: v for k, v in state.items() if not isinstance(v, ShardedTensor)}
    dcp.save({"sparse": sparse}, checkpoint_id=folder / "sparse")
    torch.save(dense, folder / "dense.pt")


def load_by_kind(model, folder):
    state = model.state_dict()
    sparse = {k: v for k, v in state.items() if isinstance(v, ShardedTensor)}
    loaded = {"sparse": sparse}
    dcp.load(loaded, checkpoint_id=folder / "sparse")
    dense = torch.load(folder / "dense.pt")
    model.load_state_dict({**dense, **loaded["sparse"]})


def values_of(model):
    values = {}
    for key, value in model.state_dict().items():
        if isinstance(value, ShardedTensor):
            whole = torch.empty(value.size())
            value.gather(0, whole)
            value = whole
        values[key] = value.clone()
    return values


def assert_same(model, expected):
    for key, value in values_of(model).items():
        torch.testing.assert_close(value, expected[key], msg=key)


def test_tables_are_sharded_tensors_where_plain_has_them(remote):
    state = remote.state_dict()
    assert sharded(state) == sharded(plain().state_dict())
    assert len(sharded(state)) == 2


@pytest.fixture(scope="module")
def with_state(shared_job):
    """Return tensors of weights and of state, ours and plain's, by name."""
    named = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1}
    sharders = [EmbeddingBagCollectionSharder(named), EmbeddingCollectionSharder(named)]
    models = [
        shard(Model(), *sharders, constraints={"bag": FUSED, "row": FUSED}),
        shared_job.shard(
            Model(),
            remote_sharders(shared_job.client, fused_params=named, namespace="s"),
        ),
    ]
    found = []
    for model in models:
        tensors = dict(model.state_dict())
        for state in model.fused_optimizer.state_dict()["state"].values():
            tensors |= state
        found.append({k: tensors[k] for k in sorted(sharded(tensors))})
    return found


def test_state_of_optimizers_is_of_sharded_tensors_too(with_state):
    of_plain, ours = with_state
    assert ours.keys() == of_plain.keys()
    assert {"bag.momentum1", "row.momentum1"} < ours.keys()


def test_they_have_all_that_code_reads_of_sharded_tensors(with_state):
    for plain_one, own in zip(
        *(tensors.values() for tensors in with_state), strict=True
    ):
        assert own.sharding_spec() == plain_one.sharding_spec()
        assert own.metadata().shards_metadata == plain_one.metadata().shards_metadata
        assert type(own) == type(plain_one)  # noqa: E721  # as torchsnapshot asks
        assert own._process_group is plain_one._process_group
        fields = {name for name in vars(plain_one) if name.startswith("_")}
        assert fields
        assert [name for name in fields if not hasattr(own, name)] == []
        for asked in (plain_one, own):
            with pytest.raises(RuntimeError, match="no RRefs to remote shards"):
                asked.remote_shards()
        with pytest.raises(ConfigError, match="cannot be resharded"):
            own.reshard(own.sharding_spec())


def test_shards_are_read_and_written_by_parts_of_their_rows(with_state):
    for own in with_state[1].values():
        (local,) = own.local_shards()
        expected = torch.rand(own.shape)
        for start in range(0, NUM_IDS, 3):
            of_part = dim, begin, num = 0, start, min(3, NUM_IDS - start)
            part = torch.narrow(local.tensor, *of_part)
            assert part.shape[dim] == num
            part.detach().copy_(expected[begin : begin + num])
        assert torch.equal(own.clone(), expected)


def test_torchsnapshot_takes_and_restores_them(remote, shared_job, tmp_path):
    torchsnapshot = pytest.importorskip("torchsnapshot")
    named = shared_job.client, Adagrad(0.1)
    model = shared_job.shard(Model(), remote_sharders(*named, namespace="taken"))
    other = shared_job.shard(Model(), remote_sharders(*named, namespace="restored"))
    model(kjt_of({"f": [[0, 1]]})).sum().backward()
    snapshot = torchsnapshot.Snapshot.take(str(tmp_path / "model"), {"model": model})
    snapshot.restore({"model": other})
    assert_same(other, values_of(model))
    states = [{"state": m.fused_optimizer} for m in (model, other)]
    saving = torchsnapshot.Snapshot.async_take(str(tmp_path / "state"), states[0])
    saving.wait().restore(states[1])
    read = [one["state"].state_dict()["state"].values() for one in states]
    for taken, restored in zip(*read, strict=True):
        for name, tensor in taken.items():
            assert torch.equal(tensor.clone(), restored[name].clone())


def test_a_checkpoint_by_kind_is_loaded_by_the_same_code(remote, tmp_path):
    remote(kjt_of({"f": [[0, 1]]})).sum().backward()
    expected = values_of(remote)
    save_by_kind(remote, tmp_path)
    remote.load_state_dict({k: torch.zeros_like(v) for k, v in expected.items()})
    load_by_kind(remote, tmp_path)
    assert_same(remote, expected)


def test_plains_checkpoint_loads_here_and_ours_there(remote, tmp_path):
    (tmp_path / "ours").mkdir()
    (tmp_path / "plain").mkdir()
    other = plain()
    of_plain, of_ours = values_of(other), values_of(remote)
    save_by_kind(other, tmp_path / "plain")
    save_by_kind(remote, tmp_path / "ours")
    load_by_kind(remote, tmp_path / "plain")
    assert_same(remote, of_plain)
    load_by_kind(other, tmp_path / "ours")
    assert_same(other, of_ours)


class OwnSaver(DefaultSavePlanner):
    """A planner that looks at the kind of each tensor, as programs have their own."""

    def set_up_planner(self, state_dict, *args, **kwargs):
        self.kinds = {k: isinstance(v, ShardedTensor) for k, v in state_dict.items()}
        super().set_up_planner(state_dict, *args, **kwargs)


class OwnLoader(DefaultLoadPlanner):
    def set_up_planner(self, state_dict, *args, **kwargs):
        for value in state_dict.values():
            if isinstance(value, ShardedTensor):
                assert value.metadata().size == value.size()
                assert [s.tensor.shape for s in value.local_shards()] == [value.shape]
        super().set_up_planner(state_dict, *args, **kwargs)


def test_planners_of_others_save_and_load(remote, tmp_path):
    expected, saver = values_of(remote), OwnSaver()
    dcp.save(remote.state_dict(), checkpoint_id=tmp_path / "c", planner=saver)
    assert sum(saver.kinds.values()) == 2
    remote.load_state_dict({k: torch.zeros_like(v) for k, v in expected.items()})
    state = remote.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "c", planner=OwnLoader())
    remote.load_state_dict(state)
    assert_same(remote, expected)


def test_torch_saves_a_table_as_an_ordinary_tensor(table):
    file = io.BytesIO()
    torch.save(table, file)
    file.seek(0)
    loaded = torch.load(file)
    assert type(loaded) is torch.Tensor
    assert torch.equal(loaded, table.whole())


@pytest.mark.parametrize(
    "operation",
    [
        torch.Tensor,
        nn.Parameter,
        torch.as_tensor,
        lambda t: t.cpu(),
        lambda t: t.to(CPU),
        lambda t: t.to(torch.float64),
        lambda t: t.half(),
        lambda t: t.detach(),
        lambda t: t.gather(1, torch.zeros(NUM_IDS, 1, dtype=torch.int64)),
        lambda t: t.local_tensor(),
    ],
)
def test_operations_are_those_of_any_tensor(table, operation):
    result, whole = operation(table), table.whole()
    expected = whole if result.shape == whole.shape else whole[:, :1]
    torch.testing.assert_close(result.clone().float(), expected, rtol=1e-3, atol=1e-3)


def test_a_detached_table_is_sharded_and_a_part_of_it_is_not(table):
    assert isinstance(table.detach(), ShardedTensor)
    assert not isinstance(table[2:4], ShardedTensor)
    assert not isinstance(table.local_shards()[0].tensor, ShardedTensor)


MOVES = [lambda t: t.cpu(), lambda t: t.to("cpu"), lambda t: t.to(CPU, torch.half)]


@pytest.mark.parametrize("move", MOVES)
def test_a_table_of_a_model_on_a_gpu_is_copied_to_the_cpu(table, move):
    table.stored.table.is_on_gpu = True
    (shard,) = table.local_shards()
    for tensor in (table, shard.tensor, table.detach()):
        moved = move(tensor)
        before = moved.clone()
        table.zero_()
        assert torch.equal(moved, before)
        assert moved.abs().sum() > 0
        table.copy_(before)


def test_a_table_of_a_model_on_the_cpu_stays_itself(table):
    moved = table.cpu()
    table.zero_()
    assert not moved.any()


def test_safetensors_get_the_remedy(table):
    safetensors = pytest.importorskip("safetensors.torch")
    with pytest.raises(BatchError, match=r"'bag'.*tensor\.clone\(\)"):
        safetensors.save({"t": table})
    saved = safetensors.load(safetensors.save({"t": table.clone()}))
    assert torch.equal(saved["t"], table.whole())


def test_reading_its_memory_is_an_error_that_reports_how(table):
    with pytest.raises(BatchError, match=r"'bag'.*Give tensor\.clone\(\)"):
        table.data_ptr()


def test_trackers_of_rows_are_errors(remote, shared_job):
    with pytest.raises(ConfigError, match="Servers write increments"):
        remote.init_torchrec_delta_tracker(DeltaTrackerConfig())
    sharders = remote_sharders(shared_job.client, SGD(1.0))
    with pytest.raises(ConfigError, match="Servers write increments"):
        DistributedModelParallel(
            Model(),
            sharders=sharders,
            model_tracker_configs=ModelTrackerConfigs(
                raw_id_tracker_config=RawIdTrackerConfig()
            ),
        )
    sharders.close()
    assert plain().init_torchrec_delta_tracker(DeltaTrackerConfig()) is not None
