import pytest
import torch
import torchrec.optim
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed.optim import _apply_optimizer_in_backward as apply
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

from persia_torchrec import LAMB, LARS, SGD, Adagrad, Adam, AdamW, TableSettings
from persia_torchrec.embedding.optim import RowwiseAdam, RowwiseLAMB
from persia_torchrec.errors import ConfigError
from persia_torchrec.sharding.collection import describe_collection
from persia_torchrec.sharding.fused_arguments import (
    FusedOptimizer,
    read_optimizers,
    translate,
)
from tests.support.models import bags_of, sequences_of
from tests.support.remote_job import META


def bags():
    return bags_of(["term", "user", "place"])


def weight(collection, table):
    return collection.embedding_bags[table].weight


@pytest.mark.parametrize(
    ("cls", "arguments", "expected"),
    [
        (torch.optim.SGD, {"lr": 0.5}, SGD(0.5)),
        (torchrec.optim.SGD, {"learning_rate": 0.5}, SGD(0.5)),
        (
            *(torch.optim.SGD, {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.1}),
            SGD(0.5),  # fbgemm's has neither
        ),
        (torch.optim.Adagrad, {}, Adagrad(0.01, 0.0, eps=1e-8)),
        (
            *(torchrec.optim.Adagrad, {"lr": 1.0, "initial_accumulator_value": 0.5}),
            Adagrad(1.0, 0.5, eps=1e-8),
        ),
        (
            *(torchrec.optim.RowWiseAdagrad, {"lr": 0.1, "eps": 1e-3}),
            Adagrad(0.1, 0.0, eps=1e-3, vectorwise_shared=True),
        ),
        (
            *(torch.optim.Adam, {"lr": 0.1, "betas": [0.5, 0.6], "weight_decay": 0.2}),
            AdamW(0.1, betas=(0.5, 0.6), weight_decay=0.2),
        ),
        (
            torchrec.optim.Adam,
            {"beta1": 0.5},
            AdamW(0.01, betas=(0.5, 0.999), weight_decay=0),
        ),
        (torchrec.optim.PartialRowWiseAdam, {"lr": 0.1}, RowwiseAdam(0.1)),
        (torchrec.optim.LAMB, {"lr": 0.1, "eps": 0.5}, LAMB(0.1, eps=0.5)),
        (torchrec.optim.PartialRowWiseLAMB, {"lr": 0.1}, RowwiseLAMB(0.1)),
        (torchrec.optim.LarsSGD, {"lr": 0.1, "eta": 0.5}, LARS(0.1, eta=0.5)),
    ],
)
def test_an_optimizer_of_the_model_becomes_that_of_the_servers(
    cls, arguments, expected
):
    assert translate(cls, arguments, table="term").optimizer == expected


def test_arguments_that_switch_something_off_are_accepted():
    arguments = {"lr": 0.1, "amsgrad": False, "maximize": False, "foreach": None}
    assert translate(torch.optim.Adam, arguments, table="term").optimizer.lr == 0.1


@pytest.mark.parametrize(
    ("cls", "arguments", "name"),
    [
        (torch.optim.SGD, {"nesterov": True}, "nesterov=True"),
        (torch.optim.Adam, {"amsgrad": True}, "amsgrad=True"),
        (torch.optim.Adagrad, {"lr_decay": 0.1}, "lr_decay=0.1"),
        (torchrec.optim.Adam, {"cowclip_regularization": {1}}, "cowclip_regular.*"),
    ],
)
def test_an_argument_that_the_servers_lack_is_named(cls, arguments, name):
    message = f"Table 'term': {cls.__name__} .*Received: {name}. Leave it out"
    with pytest.raises(ConfigError, match=message):
        translate(cls, arguments, table="term")


@pytest.mark.parametrize(
    ("cls", "nearest"),
    [
        (torch.optim.AdamW, "torch.optim.Adam, whose weight_decay"),
        (torch.optim.RMSprop, "AdamAsync"),
        (torch.optim.ASGD, "torch.optim.SGD"),
        (torch.optim.Adamax, "torch.optim.Adam"),
    ],
)
def test_an_optimizer_that_cannot_move_is_named_and_the_nearest_that_can(cls, nearest):
    collection = bags()
    apply(cls, [weight(collection, "user")], {"lr": 0.1})
    message = rf"Table 'user': .*Received: torch\..*{cls.__name__}\. .*{nearest}"
    with pytest.raises(ConfigError, match=message):
        describe_collection(collection, SGD(1.0))


def test_two_optimizers_of_one_table_are_rejected():
    collection = bags()
    for cls in (torch.optim.SGD, torch.optim.Adam):
        apply(cls, [weight(collection, "term")], {"lr": 0.1})
    with pytest.raises(ConfigError, match=r"'term' must have one .*'SGD', 'Adam'"):
        describe_collection(collection, SGD(1.0))


def test_settings_win_over_the_model_and_the_model_over_the_sharder():
    collection = bags()
    apply(torch.optim.SGD, [weight(collection, "term")], {"lr": 0.25})
    apply(torch.optim.SGD, [weight(collection, "user")], {"lr": 0.5})
    settings = {"user": TableSettings(optimizer=Adam(0.1))}
    spec = describe_collection(collection, Adagrad(1.0), settings)
    assert {table.name: table.optimizer for table in spec.tables} == {
        "term": SGD(0.25),
        "user": Adam(0.1),
        "place": Adagrad(1.0),
    }


def test_arguments_that_torchrec_changes_are_copied():
    # Sharding a table of the same call changes the dict that all of them share.
    collection, arguments = bags(), {"lr": 0.5}
    apply(torch.optim.SGD, list(collection.parameters()), arguments)
    arguments["optimizer"] = EmbOptimType.EXACT_SGD
    arguments["learning_rate"] = arguments.pop("lr")
    assert set(read_optimizers(collection).values()) == {FusedOptimizer(SGD(0.5))}


def test_tables_of_sequences_may_have_their_own_too():
    collection = sequences_of(["term"])
    apply(torchrec.optim.LAMB, collection.parameters(), {"lr": 0.1})
    (table,) = describe_collection(collection, SGD(1.0)).tables
    assert table.optimizer == LAMB(0.1)


def test_the_optimizer_of_a_fused_collection_is_that_of_all_its_tables():
    collection = FusedEmbeddingBagCollection(
        tables=bags().embedding_bag_configs(),
        optimizer_type=torch.optim.SGD,
        optimizer_kwargs={"lr": 0.125},
        device=META,
    )
    spec = describe_collection(collection, Adagrad())
    assert [table.optimizer for table in spec.tables] == [SGD(0.125)] * 3
