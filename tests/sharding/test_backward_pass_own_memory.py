"""Gradients that the caller of ``backward`` may write are copied, and no others."""

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from persia_torchrec import SGD, remote_sharders
from persia_torchrec.sharding.backward_pass import own_memory
from tests.support.remote_job import META, HeldPushes, RemoteJob, kjt_of


class Rows(torch.autograd.Function):
    """Notes which of its gradients are copied."""

    are_copied: list[bool]

    @staticmethod
    def forward(ctx, anchor):
        return torch.zeros(2, 3)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        pairs = zip(own_memory(grads), grads, strict=True)
        Rows.are_copied = [own is not grad for own, grad in pairs]


def rows():
    return Rows.apply(torch.zeros(0, requires_grad=True))


def with_hook(keeps):
    def run(kept):
        out = rows()
        out.register_hook(lambda grad: keeps(kept, grad))
        out.square().sum().backward()

    return run


def given(kept, through=lambda out: out, shape=(2, 3)):
    kept.append(torch.ones(shape))
    through(rows()).backward(kept[-1])


OTHERS_HAVE_IT = {
    "given": given,
    "given, through a sum": lambda kept: given(kept, lambda out: out + 1),
    "given, reshaped": lambda kept: given(kept, lambda out: out.reshape(6), (6,)),
    "given as a view": lambda kept: rows().backward(
        kept.append(torch.ones(4, 3)) or kept[-1][:2]
    ),
    "kept by a hook": with_hook(lambda kept, grad: kept.append(grad)),
    "kept detached": with_hook(lambda kept, grad: kept.append(grad.detach())),
}


def linear(kept):
    nn.Linear(3, 1)(rows()).mean().backward()


def retained(kept):
    kept.append(rows())
    kept[-1].retain_grad()
    kept[-1].square().sum().backward()


def parameter(kept):
    kept.append(nn.Parameter(torch.zeros(2, 3)))
    (rows() + kept[-1]).square().sum().backward()


AUTOGRADS_ALONE = {
    "linear": linear,
    "square": lambda _: rows().square().sum().backward(),
    "reshaped": lambda _: rows().reshape(6).square().sum().backward(),
    "reshaped twice": lambda _: rows().view(6).view(3, 2).square().sum().backward(),
    "concatenated": lambda _: (
        torch.cat([rows(), torch.zeros(2, 1)], 1).sum().backward()
    ),
    "used twice": lambda _: (lambda out: (out + 1) * out)(rows()).sum().backward(),
    "with a hook": with_hook(lambda *_: None),
    "retained": retained,
    "added to a parameter": parameter,
}


@pytest.mark.parametrize("name", OTHERS_HAVE_IT)
def test_a_gradient_that_others_have_is_copied(name):
    OTHERS_HAVE_IT[name]([])
    assert Rows.are_copied == [True]


@pytest.mark.parametrize("name", AUTOGRADS_ALONE)
def test_a_gradient_of_autograd_alone_is_not_copied(name):
    AUTOGRADS_ALONE[name]([])
    assert Rows.are_copied == [False]


@pytest.mark.parametrize("staleness", [1, 4])
def test_a_gradient_may_be_written_right_after_the_backward_pass(staleness):
    config = EmbeddingBagConfig(10, 4, "t", feature_names=["f"], init_fn=nn.init.zeros_)
    bags = EmbeddingBagCollection(tables=[config], device=META)
    with RemoteJob() as job:
        model = job.shard(bags, remote_sharders(job.client, SGD(1.0), staleness))
        held, grad = HeldPushes(model), torch.ones(1, 4)
        model(kjt_of({"f": [[3]]})).values().backward(grad)
        grad.zero_()
        held.may_push.set()
        model.eval()
        assert model(kjt_of({"f": [[3]]})).values().tolist() == [[-1.0] * 4]
