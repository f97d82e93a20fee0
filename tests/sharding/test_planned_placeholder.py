"""Parameters of tables on the servers: what they say, and what needs their rows."""

import copy
import operator

import pytest
import torch
import torchrec.optim
from torch import nn
from torchrec import EmbeddingBagConfig
from torchrec.optim.keyed import KeyedOptimizerWrapper

from persia_torchrec import SGD, remote_sharders
from persia_torchrec.errors import ConfigError
from tests.support.remote_job import Bags, kjt_of

TABLES = [EmbeddingBagConfig(10, 4, name="term", feature_names=["ad"])]


@pytest.fixture
def model(shared_job):
    return shared_job.shard(Bags(TABLES), remote_sharders(shared_job.client, SGD(1.0)))


@pytest.fixture(scope="module")
def weight(shared_job):
    (weight,) = shared_job.shard(
        Bags(TABLES), remote_sharders(shared_job.client, SGD(1.0))
    ).parameters()
    return weight


def loss_of(model):
    return model(kjt_of({"ad": [[1]]})).values().sum()


INITS = {
    "uniform_": (),
    "normal_": (),
    "constant_": (0.5,),
    "ones_": (),
    "zeros_": (),
    "eye_": (),
    "dirac_": (),
    "trunc_normal_": (),
    "sparse_": (0.5,),
    "orthogonal_": (),
    "xavier_uniform_": (),
    "xavier_normal_": (),
    "kaiming_uniform_": (),
    "kaiming_normal_": (),
}


@pytest.mark.parametrize("name", INITS)
def test_nn_init_of_a_table_names_init_fn(weight, name):
    with pytest.raises(ConfigError, match="init_fn"):
        getattr(nn.init, name)(weight, *INITS[name])


ROWS = torch.ones(10, 4)  # as many as TABLES declare


def set_slice(weight):
    weight[:] = ROWS


def set_rows(weight):
    weight[torch.tensor([1])] = ROWS[:1]


def set_data(weight):
    weight.data = ROWS


def add_to(weight):
    weight += 1


def add_into(weight):
    return torch.add(ROWS, ROWS, out=weight)


NEED_ROWS = {
    **{name: operator.methodcaller(name) for name in ("zero_", "normal_", "uniform_")},
    **{name: operator.methodcaller(name, 1) for name in ("fill_", "add_", "mul_")},
    "clamp_": lambda w: w.clamp_(5, 6),
    "lerp_": lambda w: w.lerp_(ROWS, 0.5),
    "masked_fill_": lambda w: w.masked_fill_(ROWS > 0, 0),
    "copy_": lambda w: w.copy_(ROWS),
    "index_copy_": lambda w: w.index_copy_(0, torch.tensor([1]), ROWS[:1]),
    "resize_": lambda w: w.resize_(3, 4),
    "w[:] =": set_slice,
    "w[ids] =": set_rows,
    "w.data =": set_data,
    "w +=": add_to,
    "out=": add_into,
    "foreach": lambda w: torch._foreach_mul_([torch.ones(1), w], 2),
    "view": lambda w: w.view(-1).zero_(),
    "vector": lambda w: nn.utils.vector_to_parameters(ROWS.flatten(), [w]),
    **{name: operator.methodcaller(name) for name in ("norm", "mean", "std", "sum")},
    "any nan": lambda w: w.isnan().any(),
    "half": lambda w: w.half().norm(),
    "clone": lambda w: w.clone().norm(),
    "numpy": lambda w: w.detach().numpy(),
    "tolist": operator.methodcaller("tolist"),
    "embedding": lambda w: nn.functional.embedding(torch.tensor([1]), w),
    "tied layer": lambda w: torch.ones(2, 4) @ w.T,
    "w[0]": lambda w: w[0],
}


@pytest.mark.parametrize("given", ["itself", "data", "detached"])
@pytest.mark.parametrize("use", NEED_ROWS.values(), ids=NEED_ROWS)
def test_what_needs_the_rows_of_a_parameter_says_where_they_are(weight, use, given):
    given = {"itself": weight, "data": weight.data, "detached": weight.detach()}[given]
    match = "table 'term', which holds no rows.*init_fn.*state_dict"
    with torch.no_grad(), pytest.raises(ConfigError, match=match):
        use(given)


def test_a_loop_that_draws_every_matrix_is_an_error(model):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    with pytest.raises(ConfigError, match="init_fn"):
        [nn.init.xavier_uniform_(p) for p in matrices]


def test_parameters_have_the_shape_of_their_tables(weight):
    assert (weight.numel(), torch.numel(weight), weight.nelement()) == (40, 40, 40)
    assert (weight.shape, weight.size(1), weight.dim()) == ((10, 4), 4, 2)
    assert (len(weight), weight.ndim, weight.nbytes) == (10, 2, 160)


def test_what_torch_does_with_all_parameters_works(model):
    (weight,) = model.parameters()
    model.load_state_dict(model.state_dict())
    model.module.load_state_dict(model.state_dict(), assign=True)
    model.double().float().to("cpu").zero_grad()
    assert dict(model.named_parameters())["bags.embedding_bags.term.weight"] is weight
    for copied in (copy.deepcopy(weight), nn.Parameter(weight)):
        assert (copied.shape, copied.requires_grad) == ((10, 4), True)
    assert (repr(weight), weight.detach().requires_grad) == (
        "Placeholder of table 'term', whose rows are on the servers",
        False,
    )
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert weight.grad is None


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    "Adagrad": torch.optim.Adagrad,
    "AdamW": torch.optim.AdamW,
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "RowWiseAdagrad": lambda p: torchrec.optim.RowWiseAdagrad(p, lr=0.1),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers_over_all_parameters_leave_tables_to_the_servers(model, make):
    keyed = KeyedOptimizerWrapper(dict(model.named_parameters()), make)
    keyed.init_state()
    before = loss_of(model)
    before.backward()
    keyed.step()
    keyed.zero_grad()
    assert loss_of(model).item() == pytest.approx(before.item() - 4)


def test_parameters_of_the_fused_optimizer_are_no_rows_either(model):
    for group in model.fused_optimizer.param_groups:
        for parameter in group["params"]:
            with torch.no_grad(), pytest.raises(ConfigError, match="'term'"):
                parameter.mul_(0.9)
