"""What planners are told of tables on the servers."""

import pytest
import torch.distributed as dist
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints

from persia_torchrec import (
    MixedSharder,
    Placement,
    RemoteEmbeddingBagCollectionSharder,
    remote_sharders,
)
from tests.support.models import BothKinds, bags_of, sequences_of


def make_model():
    return BothKinds(bags_of("ab", feature="f"), sequences_of(["row"], feature="f"))


def plan(sharders, constraints, model=None):
    topology = Topology(world_size=1, local_world_size=1, compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    model = model or make_model()
    return planner.collective_plan(model, list(sharders), dist.GroupMember.WORLD)


OTHERS = [
    ParameterConstraints(sharding_types=["table_wise"]),
    ParameterConstraints(sharding_types=["data_parallel"], compute_kernels=["dense"]),
    ParameterConstraints(compute_kernels=["dense"]),
]


@pytest.mark.parametrize("name", ["b", "row"])
@pytest.mark.parametrize("constraints", OTHERS)
def test_a_planner_rejects_constraints_that_servers_cannot_keep(
    shared_job, name, constraints
):
    with pytest.raises(RuntimeError, match=f"user provided constraints for {name}"):
        plan(remote_sharders(shared_job.client), {name: constraints})


def test_constraints_that_they_keep_are_accepted(shared_job):
    kept = ParameterConstraints(
        sharding_types=["row_wise", "table_wise"], compute_kernels=["fused"]
    )
    made = plan(remote_sharders(shared_job.client), dict.fromkeys(["a", "row"], kept))
    assert made.plan["bags"]["a"].sharding_type == "row_wise"


def test_a_mixed_sharder_leaves_such_tables_to_torchrec(shared_job):
    model = make_model()
    del model.rows
    constraints = {"b": OTHERS[0]}
    sharder = RemoteEmbeddingBagCollectionSharder(shared_job.client)
    mixed = MixedSharder(sharder, Placement(constraints=constraints))
    made = plan([mixed], constraints, model)
    assert made.plan["bags"]["b"].sharding_type == "table_wise"
    assert made.plan["bags"]["a"].sharding_type == "row_wise"
