"""Traces and exports of a sharded model, whose lookups they cannot hold."""

import pytest
import torch
import torchrec.fx
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode
from torchrec import KeyedJaggedTensor

from persia_torchrec import (
    SGD,
    MixedSharder,
    Placement,
    RemoteEmbeddingBagCollectionSharder,
    remote_sharders,
)
from persia_torchrec.errors import ConfigError
from tests.support.models import bags_of, sequences_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]

ONES = torch.ones(2, dtype=torch.int64)
FIRST, SECOND = torch.tensor([1, 2]), torch.tensor([3, 4])


class Net(nn.Module):
    """Tensors in and out, as who exports a model has it."""

    def __init__(self):
        super().__init__()
        self.bags = bags_of("ab", feature="f")
        self.rows = sequences_of(["row"], feature="f")
        self.top = nn.Linear(12, 1)

    def forward(self, ids, lengths):
        kjt = KeyedJaggedTensor(["f"], ids, lengths=lengths)
        each = self.bags(kjt).values(), self.rows(kjt)["f"].values()
        return self.top(torch.cat(each, dim=1))


class BagNet(nn.Module):
    """The bags of the same alone."""

    def __init__(self):
        super().__init__()
        self.bags = Net().bags
        self.top = nn.Linear(8, 1)

    def forward(self, ids, lengths):
        kjt = KeyedJaggedTensor(["f"], ids, lengths=lengths)
        return self.top(self.bags(kjt).values())


@pytest.fixture(scope="module")
def model(shared_job):
    return shared_job.shard(
        Net(), remote_sharders(shared_job.client, SGD(1.0))
    ).module.eval()


@pytest.fixture(scope="module")
def mixed(shared_job):
    remote = RemoteEmbeddingBagCollectionSharder(shared_job.client, SGD(1.0))
    sharder = MixedSharder(remote, Placement(local={"a"}))
    return shared_job.shard(BagNet(), [sharder]).module.eval()


def traced_by_jit(model, given):
    return torch.jit.trace(model, given)


def onnx_file(model, given):
    return torch.onnx.export(model, given, "unused.onnx", dynamo=False)


def proxies(mode, before_autograd=False):
    def trace(model, given):
        traced = make_fx(model, tracing_mode=mode, pre_dispatch=before_autograd)
        return traced(*given)

    return trace


def exported(model, given):
    return torch.export.export(model, given, strict=False)


def faked(model, given):
    with FakeTensorMode(allow_non_fake_inputs=True):
        return model(*given)


TRACES = {
    "torch.jit.trace": traced_by_jit,
    "torch.onnx": onnx_file,
    "make_fx real": proxies("real"),
    "make_fx fake": proxies("fake"),
    "make_fx before autograd": proxies("real", True),
    "torch.export": exported,
    "FakeTensorMode": faked,
}


@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)
@pytest.mark.parametrize("is_training", [False, True], ids=["eval", "training"])
def test_a_trace_of_the_model_is_an_error(model, trace, is_training):
    model.train(is_training)
    match = r"outside of a trace.*Received: .*export_for_serving"
    with torch.no_grad(), pytest.raises(ConfigError, match=match):
        trace(model, (FIRST, ONES))
    model.eval()


@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)
def test_a_trace_of_a_mixed_collection_is_an_error_of_either_half(mixed, trace):
    with torch.no_grad(), pytest.raises((ConfigError, RuntimeError)):
        trace(mixed, (FIRST, ONES))


def test_dynamo_that_may_not_break_its_graph_names_the_export_too(model):
    with pytest.raises(torch._dynamo.exc.Unsupported, match="export_for_serving"):
        torch.export.export(model, (FIRST, ONES), strict=True)


def test_after_a_rejected_trace_and_under_profilers_the_model_looks_up(model):
    with pytest.raises(ConfigError):
        proxies("real")(model, (FIRST, ONES))
    with torch.no_grad(), FlopCounterMode(display=False):
        first, second = model(FIRST, ONES), model(SECOND, ONES)
    assert not torch.equal(first, second)


NAMES = [["ShardedEmbeddingBagCollection", "ShardedEmbeddingCollection"], []]


@pytest.mark.parametrize("leaves", NAMES, ids=["TorchRec's names", "none"])
@pytest.mark.parametrize("kind", ["model", "mixed"])
def test_a_graph_of_torch_fx_has_collections_as_leaves_and_trains(
    kind, leaves, shared_job, request
):
    model = request.getfixturevalue(kind).train()
    graph = torchrec.fx.Tracer(leaf_modules=leaves).trace(model)
    traced = torch.fx.GraphModule(model, graph)
    assert [n.op for n in graph.nodes].count("call_module") == len([*model.children()])
    for ids in (FIRST, SECOND):
        torch.testing.assert_close(traced(ids, ONES), model(ids, ONES))
    before = shared_job.read("b", [3])
    traced(SECOND, ONES).sum().backward()
    assert (shared_job.read("b", [3]) != before).any()
