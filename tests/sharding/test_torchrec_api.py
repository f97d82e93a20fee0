"""What the package takes from torch and TorchRec that is not theirs to promise."""

import ast
from pathlib import Path

import pytest
import torch
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import (
    EmbeddingCollectionContext,
    EmbeddingCollectionSharder,
)
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    EmbeddingBagCollectionSharder,
)
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import LazyAwaitable
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from persia_torchrec.sharding import torchrec_api
from tests.support.remote_job import META, Bags, shard

CHECKED_WITH = {"torch": "2.11 to 2.14", "torchrec": "1.6 to 1.9"}


def bags(is_weighted=False):
    config = EmbeddingBagConfig(10, 4, name="term", feature_names=["ad"])
    return EmbeddingBagCollection(tables=[config], is_weighted=is_weighted, device=META)


def weight_with_optimizer():
    (parameter,) = bags().parameters()
    _apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 1.0})
    return parameter


def feature_processed():
    processors = PositionWeightedModuleCollection({"ad": 3})
    return FeatureProcessedEmbeddingBagCollection(bags(is_weighted=True), processors)


OWNERS = {
    "torch": lambda: torch,
    "torch._C": lambda: torch._C,
    "torch._ops": lambda: torch._ops,
    "torch.Tensor": lambda: torch.Tensor,
    "the operators of torch": lambda: torch.ops.aten,
    "an operator of torch": lambda: torch.ops.aten.copy_.default,
    "torch.autograd.Variable": lambda: torch.autograd.Variable,
    "a DistributedModelParallel": lambda: DistributedModelParallel,
    "a DataLoader": lambda: torch.utils.data.DataLoader([]),
    "torch.distributed": lambda: torch.distributed,
    "a parameter of apply_optimizer_in_backward": weight_with_optimizer,
    "an EmbeddingBagCollection": bags,
    "a FeatureProcessedEmbeddingBagCollection": feature_processed,
    "an EmbeddingBagCollectionSharder": EmbeddingBagCollectionSharder,
    "an EmbeddingCollectionSharder": EmbeddingCollectionSharder,
}

TAKEN = {
    "_iterator": "a DataLoader",
    "_init_delta_tracker": "a DistributedModelParallel",
    "_init_raw_id_tracker": "a DistributedModelParallel",
    "_embedding_bag_per_sample_weights_backward": "the operators of torch",
    "_current_graph_task_id": "torch._C",
    "_execution_engine": "torch.autograd.Variable",
    "_make_wrapper_subclass": "torch.Tensor",
    "_TensorMeta": "torch._C",
    "_is_tracing": "torch._C",
    "_len_torch_dispatch_stack": "torch._C",
    "_len_torch_dispatch_stack_pre_dispatch": "torch._ops",
    "_ops": "torch",
    "_guards": "torch",
    "_schema": "an operator of torch",
    "_in_backward_optimizers": "a parameter of apply_optimizer_in_backward",
    "_shard": "torch.distributed",
    "_optimizer_classes": "a parameter of apply_optimizer_in_backward",
    "_optimizer_kwargs": "a parameter of apply_optimizer_in_backward",
    "_device": "an EmbeddingBagCollection",
    "_feature_processors": "a FeatureProcessedEmbeddingBagCollection",
    "_sharded_module_order_overwrite": "an EmbeddingBagCollectionSharder",
    "_use_index_dedup": "an EmbeddingCollectionSharder",
}
"""Each private attribute, and what has it; more below: those of sharded modules."""

OF_SHARDED = ("_table_name_to_config", "_lookups")
OF_SHARDED_TENSORS = {
    *("_metadata", "_sharding_spec", "_local_shards"),
    *("_process_group", "_remote_shards"),
}

FILE = Path(torchrec_api.__file__)
OWN = {"_begin_turn", "_C"}


def missing(name, owner):
    return (
        f"{owner} has no attribute {name!r} any more. sharding/torchrec_api.py was "
        f"checked with {CHECKED_WITH}, and these are other versions. "
        "Find what took its place, and change that file."
    )


@pytest.mark.parametrize("name", TAKEN)
def test_private_attributes_are_there(name):
    owner = TAKEN[name]
    assert hasattr(OWNERS[owner](), name), missing(name, owner)


def test_the_growth_tracker_is_in_the_state_of_a_scaler():
    key = torchrec_api.GROWTH_TRACKER
    state = torch.amp.GradScaler("cpu").state_dict()
    assert key in state, missing(key, "the state of a GradScaler")


def test_sharded_modules_have_their_configs_and_lookups(job):
    module = shard(
        Bags(bags().embedding_bag_configs()), EmbeddingBagCollectionSharder()
    )
    for name in OF_SHARDED:
        assert hasattr(module.module.bags, name), missing(name, "a sharded collection")
    kept = ParameterConstraints(sharding_types=["table_wise"])
    plain = shard(
        Bags(bags().embedding_bag_configs()),
        EmbeddingBagCollectionSharder(),
        constraints={"term": kept},
    )
    for name in (*OF_SHARDED_TENSORS, "_init_rrefs", "_sharded_tensor_id"):
        [table] = plain.state_dict().values()
        assert name in vars(table), missing(name, "a ShardedTensor")
    assert list(torchrec_api.table_configs(module.module.bags)) == ["term"]
    (kernel,) = torchrec_api.embedding_kernels(module.module.bags)
    assert [table.name for table in kernel.config.embedding_tables] == ["term"]


def test_contexts_of_batches_take_further_attributes():
    for context in (EmbeddingBagCollectionContext(), EmbeddingCollectionContext()):
        context.remote_input = None


def test_an_output_that_waits_overrides_what_lazy_awaitables_call():
    assert hasattr(LazyAwaitable, "_wait_impl"), missing("_wait_impl", "LazyAwaitable")


def test_the_planner_asks_a_sharder_while_it_iterates_over_its_parameters(job):
    asked = []
    topology = Topology(world_size=1, compute_device="cpu")

    class Asked(EmbeddingBagCollectionSharder):
        def shardable_parameters(self, module):
            parameters = super().shardable_parameters(module)
            return torchrec_api.ParametersInTurn(parameters, asked.append)

        def sharding_types(self, compute_device_type):
            asked.append("sharding_types")
            return super().sharding_types(compute_device_type)

    enumerator = EmbeddingEnumerator(topology, batch_size=1)
    enumerator.enumerate(Bags(bags().embedding_bag_configs()), [Asked()])
    assert asked == ["term", "sharding_types", None]


def test_this_list_names_every_private_attribute_of_the_file():
    tree = ast.parse(FILE.read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    used |= {
        part
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for part in node.module.split(".")
    }
    private = {
        name
        for name in used
        if isinstance(name, str) and name.startswith("_") and name.isidentifier()
    }
    private = {name for name in private if not name.startswith("__")}
    named = {*TAKEN, *OF_SHARDED, *OF_SHARDED_TENSORS, torchrec_api.GROWTH_TRACKER}
    assert private - OWN == named
