"""What planners are told of tables on the servers."""

import pytest
import torch.distributed as dist
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints

from persia_torchrec import (
    MixedSharder,
    Placement,
    RemoteEmbeddingBagCollectionSharder,
    remote_sharders,
)
from tests.support.remote_job import META, RemoteJob


@pytest.fixture(scope="module")
def job():
    with RemoteJob() as job:
        yield job


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        settings = {"feature_names": ["f"]}
        self.bags = EmbeddingBagCollection(
            tables=[EmbeddingBagConfig(8, 4, name, **settings) for name in "ab"],
            device=META,
        )
        self.rows = EmbeddingCollection(
            tables=[EmbeddingConfig(8, 4, "row", **settings)], device=META
        )


def plan(sharders, constraints, model=None):
    topology = Topology(world_size=1, local_world_size=1, compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    model = Model() if model is None else model
    return planner.collective_plan(model, list(sharders), dist.GroupMember.WORLD)


OTHERS = [
    ParameterConstraints(sharding_types=["table_wise"]),
    ParameterConstraints(sharding_types=["data_parallel"], compute_kernels=["dense"]),
    ParameterConstraints(compute_kernels=["dense"]),
]


@pytest.mark.parametrize("name", ["b", "row"])
@pytest.mark.parametrize("constraints", OTHERS)
def test_a_planner_rejects_constraints_that_servers_cannot_keep(job, name, constraints):
    model = Model()
    with pytest.raises(RuntimeError, match=f"user provided constraints for {name}"):
        plan(remote_sharders(job.client), {name: constraints}, model)


def test_constraints_that_they_keep_are_accepted(job):
    model = Model()
    kept = ParameterConstraints(
        sharding_types=["row_wise", "table_wise"], compute_kernels=["fused"]
    )
    made = plan(remote_sharders(job.client), dict.fromkeys(["a", "row"], kept), model)
    assert made.plan["bags"]["a"].sharding_type == "row_wise"


def test_a_mixed_sharder_leaves_such_tables_to_torchrec(job):
    model = Model()
    del model.rows
    constraints = {"b": OTHERS[0]}
    sharder = RemoteEmbeddingBagCollectionSharder(job.client)
    mixed = MixedSharder(sharder, Placement(constraints=constraints))
    made = plan([mixed], constraints, model)
    assert made.plan["bags"]["b"].sharding_type == "table_wise"
    assert made.plan["bags"]["a"].sharding_type == "row_wise"
