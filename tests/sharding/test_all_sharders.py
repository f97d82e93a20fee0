"""All sharders of a model, and what becomes of a collection that has none."""

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import (
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
)
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    data_parallel,
    get_default_sharders,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

from persia_torchrec import (
    SGD,
    Constant,
    RemoteEmbeddingBagCollectionSharder,
    RemoteEmbeddingCollectionSharder,
    TableSettings,
    remote_sharders,
    save_checkpoint,
)
from persia_torchrec.errors import ConfigError
from tests.support.models import sequences_of, tables_of
from tests.support.remote_job import META, Bags, collided, kjt_of, remote_modules, shard

IDS = {"f": [[1, 2], []], "g": [[3], [3]], "h": [[5], []], "i": [[7], [2**50]]}
ZEROS = TableSettings(initializer=Constant(0.0))


def table(name, feature):
    return tables_of([name], feature=feature)


def sequences():
    return sequences_of(["sequence"], feature="g")


class Processed(nn.Module):
    def __init__(self):
        super().__init__()
        bags = EmbeddingBagCollection(
            tables=table("processed", "h"), is_weighted=True, device=META
        )
        weights = {"h": PositionWeightedModule(max_feature_length=3)}
        self.bags = FeatureProcessedEmbeddingBagCollection(bags, nn.ModuleDict(weights))


class Everything(nn.Module):
    """A collection of each kind; gives the sum of what they give."""

    def __init__(self):
        super().__init__()
        self.bags = Bags(table("bag", "f"))
        self.sequences = sequences()
        self.processed = Processed()
        self.fused = FusedEmbeddingBagCollection(
            *(table("fused", "i"), torch.optim.SGD, {"lr": 0.5}), device=META
        )

    def forward(self, ids):
        pooled = self.bags(ids), self.processed.bags(ids), self.fused(ids)
        total = sum(columns.values().sum() for columns in pooled)
        return total + self.sequences(ids)["g"].values().sum()


class Two(nn.Module):
    """Pooled features and one of sequences."""

    def __init__(self):
        super().__init__()
        self.bags = Bags(table("bag", "f"))
        self.sequences = sequences()


def is_on_servers(model):
    return {t.name for module in remote_modules(model) for t in module.spec.tables}


class TestRemoteSharders:
    def test_it_takes_every_kind_of_collection(self, job):
        model = job.shard(Everything(), remote_sharders(job.client, SGD(1.0)))
        assert is_on_servers(model) == {"bag", "sequence", "processed", "fused"}
        before = {t: job.read(t, [3]) for t in ("bag", "fused")}
        model(kjt_of(IDS)).backward()
        assert before.keys() <= is_on_servers(model)
        assert job.total("rows") == 6

    def test_it_needs_no_planner_and_has_a_sharder_for_all_that_torchrec_has(self, job):
        sharders = remote_sharders(job.client)
        job.adopt(DistributedModelParallel(Everything(), sharders=sharders))
        types = [sharder.module_type for sharder in sharders]
        assert len(types) == len(set(types))
        assert {s.module_type for s in get_default_sharders()} <= set(types)

    def test_the_list_controls_all_tables(self, job, tmp_path):
        sharders = remote_sharders(job.client, SGD(1.0), staleness=8)
        model = job.shard(Everything(), sharders)
        names = {"bag", "sequence", "processed", "fused"}
        assert sharders.optimizer.learning_rates().keys() == names
        sharders.set_learning_rate(0.25)
        sharders.set_learning_rate(0.5, ["sequence"])
        weights = {name: torch.zeros(4, 4) for name in names}
        assert sharders.load_weights(weights) == dict.fromkeys(names, 4)
        model(kjt_of(IDS)).backward()
        sharders.flush()
        assert job.read("bag", [1])[0, 0] == -0.25
        assert job.read("sequence", [3])[0, 0] == -2 * 0.5
        model(kjt_of(IDS)).backward()
        state = {"model": model}
        saved = save_checkpoint(tmp_path, state, job.client, sharders)
        assert saved.num_rows == 4 * 4 + 3  # loaded, and trained
        assert job.read("bag", [1])[0, 0] == -0.5
        sharders.close()

    def test_a_loss_scale_is_undone_for_all_tables(self, job):
        sharders = remote_sharders(job.client, SGD(1.0), tables={"bag": ZEROS})
        model = job.shard(Two(), sharders)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        sharders.use_grad_scaler(scaler)
        ids = kjt_of({"f": [[1]], "g": [[3]]})
        before = job.read("sequence", [3]).copy()
        pooled = model.module.bags(ids).values().sum()
        total = pooled + model.module.sequences(ids)["g"].values().sum()
        before = job.read("sequence", [3]).copy()
        scaler.scale(total).backward()
        assert job.read("bag", [1])[0, 0] == -1
        assert (before - job.read("sequence", [3])).max() == pytest.approx(1, abs=1e-6)

    def test_settings_may_be_of_tables_of_any_kind_and_of_no_other(self, job):
        tables = {"bag": ZEROS, "sequence": ZEROS}
        job.shard(Two(), remote_sharders(job.client, tables=tables))
        wrong = {"bag": ZEROS, "sequenc": ZEROS}
        with pytest.raises(ConfigError, match=r"sequenc.*'sequence'"):
            job.shard(Two(), remote_sharders(job.client, tables=wrong))

    def test_weights_have_to_wait_for_the_model(self, job):
        for sharders in (
            remote_sharders(job.client),
            RemoteEmbeddingBagCollectionSharder(job.client),
        ):
            with pytest.raises(ConfigError, match="when the model is sharded"):
                sharders.load_weights({"bag": torch.zeros(4, 4)})


def plan_by_hand(bags, told):
    """Return a plan as TorchRec's helper makes it when no sharder is named."""
    given = {"local_size": 1, "world_size": 1, "device_type": "cpu"}
    return construct_module_sharding_plan(bags, told, **given)


class TestAPlanOfOthers:
    """A plan that was made without our sharders says what they do not do."""

    @pytest.mark.parametrize("told", [data_parallel(), table_wise(0)])
    def test_it_is_rejected(self, job, told):
        model = Bags(table("bag", "f"))
        plan = plan_by_hand(model.bags, {"bag": told})
        sharder = RemoteEmbeddingBagCollectionSharder(job.client)
        match = r"'bag' as row_wise.*Give a plan by hand row_wise\(.*pass the sharders"
        with pytest.raises(ConfigError, match=match):
            DistributedModelParallel(
                model, sharders=[sharder], plan=ShardingPlan({"bags": plan})
            )

    def test_by_rows_it_is_one_by_hand_and_rows_are_on_servers(self, job):
        model = Bags(table("bag", "f"))
        plan = plan_by_hand(model.bags, {"bag": row_wise()})
        sharders = remote_sharders(job.client, SGD(1.0))
        model = DistributedModelParallel(
            model, sharders=sharders, plan=ShardingPlan({"bags": plan})
        )
        job.adopt(model)
        before = model.state_dict()["bags.embedding_bags.bag.weight"].clone()
        model(kjt_of({"f": [[1]]})).values().sum().backward()
        assert (job.read("bag", [1]) == before[1].numpy() - 1).all()

    def test_it_is_rejected_for_processed_features(self, job):
        sharders = remote_sharders(job.client)
        ours = shard(Bags(table("processed", "h")), *sharders).plan
        (rows,) = ours.plan.values()  # by rows, as for bags without processors
        with pytest.raises(ConfigError, match=r"as table_wise.*Received: row_wise"):
            DistributedModelParallel(
                Processed(), sharders=sharders, plan=ShardingPlan({"bags": rows})
            )


class TestACollectionWithoutASharder:
    def test_it_is_rejected_next_to_one_on_the_servers(self, job):
        bags = RemoteEmbeddingBagCollectionSharder(job.client)
        with pytest.raises(
            ConfigError, match=r"EmbeddingCollection 'sequences'.*remote"
        ):
            DistributedModelParallel(Two(), sharders=[bags])
        sequences = RemoteEmbeddingCollectionSharder(job.client)
        with pytest.raises(ConfigError, match=r"BagCollection 'bags\.bags', which"):
            DistributedModelParallel(Two(), sharders=[sequences])

    def test_torchrecs_own_sharder_leaves_it_to_torchrec(self, job):
        bags = RemoteEmbeddingBagCollectionSharder(job.client)
        model = job.shard(Two(), [bags, EmbeddingCollectionSharder()])
        assert isinstance(model.module.sequences, ShardedEmbeddingCollection)

    def test_it_may_be_left_as_it_is_by_the_plan(self, job):
        sharders = [
            RemoteEmbeddingBagCollectionSharder(job.client),
            EmbeddingCollectionSharder(),
        ]
        whole = job.shard(Two(), sharders).plan
        plan = ShardingPlan({"bags.bags": whole.plan["bags.bags"]})
        model = DistributedModelParallel(Two(), sharders=sharders, plan=plan)
        job.adopt(model)
        assert isinstance(model.module.sequences, EmbeddingCollection)

    def test_without_tables_on_the_servers_nothing_is_rejected(self, job):
        remote_sharders(job.client)
        (default,) = (
            sharder
            for sharder in get_default_sharders()
            if sharder.module_type is EmbeddingBagCollection
        )
        model = DistributedModelParallel(Two(), sharders=[default])
        assert isinstance(model.module.sequences, EmbeddingCollection)

    def test_a_model_that_is_one_collection_needs_one_sharder(self, job):
        bags = RemoteEmbeddingBagCollectionSharder(job.client)
        model = EmbeddingBagCollection(tables=table("bag", "f"), device=META)
        job.adopt(DistributedModelParallel(model, sharders=[bags]))


def test_one_trainer_may_map_its_ids_by_itself(job):
    model = job.put_on_servers(collided(table("bag", "f")))
    assert is_on_servers(model) == {"bag"}
