import numpy as np
import pytest
import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedTensor,
)

from persia_torchrec import SGD, MultiHashEmbeddingBagCollection, remote_sharders
from persia_torchrec.errors import BatchError
from tests.support.remote_job import META, Bags, ids_of, kjt_of, remote_modules


def batch_of(ids):
    return kjt_of({"ad": [ids]})


@pytest.fixture
def model(job):
    table = EmbeddingBagConfig(10, 4, name="term", feature_names=["ad"])
    return job.put_on_servers(Bags([table]), SGD(0.1))


def test_in_evaluation_the_servers_are_only_looked_at(job, model):
    known = model(batch_of([1])).values().detach()
    counters = job.client.counters()
    model.eval()
    assert torch.equal(model(batch_of([1])).values(), known)
    first = job.client.read("term", ids_of([2]), initial=True)
    assert model(batch_of([2])).values().tolist() == first.tolist()
    assert job.client.num_rows() == [counter["rows"] for counter in counters]
    assert job.total("evictions") == 0
    model(batch_of([1])).values().sum().backward()  # moves no row
    assert torch.equal(model(batch_of([1])).values(), known)


KJT = kjt_of({"ad": [[1], [2]]})


class Called(nn.Module):
    """A collection that is called with whatever the model is."""

    def __init__(self, collection):
        super().__init__()
        self.collection = collection

    def forward(self, *given):
        return self.collection(*given)


@pytest.mark.parametrize(
    ("given", "received"),
    [
        ([KeyedTensor(["ad"], [4], torch.ones(2, 4))], "a KeyedTensor"),
        ([[KJT]], "a list"),
        ([KJT["ad"]], "a JaggedTensor"),
        ([KJT.to_dict()], r"a dict\..*from_jt_dict"),
        ([torch.tensor([1])], "a Tensor"),
        ([None], "a NoneType"),
        ([KJT, KJT], "a KeyedJaggedTensor, a KeyedJaggedTensor"),
        ([], "nothing"),
        ([kjt_of({"user": [[1]]})], r"\['user'\]"),
    ],
)
@pytest.mark.parametrize("kind", ["bags", "sequences", "multi hash"])
def test_what_is_no_batch_of_ids_is_named_and_changes_nothing(
    job, given, received, kind
):
    names = {"name": "term", "feature_names": ["ad"]}
    bag = EmbeddingBagConfig(10, 4, **names)
    collection = {
        "bags": lambda: EmbeddingBagCollection(tables=[bag], device=META),
        "sequences": lambda: EmbeddingCollection(
            tables=[EmbeddingConfig(10, 4, **names)], device=META
        ),
        "multi hash": lambda: MultiHashEmbeddingBagCollection([bag], device=META),
    }[kind]()
    sharders = remote_sharders(job.client, SGD(0.1))
    model = job.shard(Called(collection), sharders)
    for is_training in (True, False):
        model.train(is_training)
        with pytest.raises((BatchError, TypeError), match=f"eceived: {received}|posit"):
            model(*given)
    assert job.total("rows") == 0


def test_without_gradients_training_mode_only_looks_too(job, model):
    with torch.no_grad():
        output = model(batch_of([1])).values()
    first = job.client.read("term", ids_of([1]), initial=True)
    assert output.tolist() == first.tolist()
    assert job.total("rows") == 0


def test_a_batch_may_have_no_samples(job, model):
    output = model(kjt_of({"ad": []})).values()
    assert output.shape == (0, 4)
    output.sum().backward()
    assert job.total("rows") == 0
    assert job.total("open_batches") == 0


def test_training_continues_after_an_evaluation(job, model):
    model.eval()
    model(batch_of([1]))
    model.train()
    model(batch_of([1])).values().sum().backward()
    assert job.total("rows") == 1


def test_an_id_is_64_bits_and_minus_one_is_the_last(job, model):
    for ids in ([-1], [2**63 - 1], [-(2**63)], [0]):
        before = model(batch_of(ids)).values()
        row = job.read("term", ids)
        assert torch.equal(before.detach(), torch.from_numpy(row))
        before.sum().backward()
        assert (job.read("term", ids) != row).all()
    assert job.total("rows") == 4


def test_a_batch_that_is_changed_after_the_forward_pass_does_no_harm(job, model):
    batch = kjt_of({"ad": [[1], [2, 2]]})
    output = model(batch).values()
    before = job.read("term", [1, 2])
    batch.lengths().fill_(1000)
    batch.values().fill_(5)
    output.sum().backward()
    after = job.read("term", [1, 2])
    np.testing.assert_allclose(before - after, [[0.1] * 4, [0.2] * 4], rtol=1e-5)
    assert job.total("rows") == 2


def test_a_batch_may_be_pulled_before_the_model_is_called(job, model):
    (module,) = remote_modules(model)
    started = module.start(batch_of([1]), is_training=True)
    output = module(started).values()
    assert torch.equal(output.detach(), torch.from_numpy(job.read("term", [1])))
    output.sum().backward()
    assert job.total("requests_update") == 2  # one a server


def test_a_backward_pass_of_a_batch_pulled_for_evaluation_reaches_no_row(job, model):
    (module,) = remote_modules(model)
    started = module.start(batch_of([1]), is_training=False)
    module(started).values().sum().backward()  # reaches no row
    with pytest.raises(BatchError, match="looked up for evaluation"):
        started.wait().push((torch.zeros(1, 4).numpy(),))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_can_be_left_out(job, model, bad):
    (module,) = remote_modules(model)
    module.skip_non_finite = True
    output = model(batch_of([1])).values()
    before = job.read("term", [1])
    output.backward(torch.tensor([[1.0, bad, 1.0, 1.0]]))
    assert module.num_skipped == 1
    # The batch makes room for the next at once, although its graph is still there.
    model(batch_of([2])).values().sum().backward()
    assert output.grad_fn is not None
    assert np.array_equal(job.read("term", [1]), before)
    assert job.total("open_batches") == 0


def test_the_steps_of_torchrec_may_be_taken_one_by_one(job, model):
    (module,) = remote_modules(model)
    ctx = module.create_context()
    given = module.input_dist(ctx, batch_of([1])).wait().wait()
    (batch,) = given
    output = module.output_dist(ctx, module.compute(ctx, batch)).wait().values()
    assert torch.equal(output.detach(), torch.from_numpy(job.read("term", [1])))


def test_torchs_default_device_changes_nothing(job):
    table = EmbeddingBagConfig(10, 4, name="term", feature_names=["ad"])
    model = job.put_on_servers(Bags([table]), SGD(0.1), staleness=1)
    before = model(batch_of([1])).values().detach()
    batch = batch_of([1, 1])
    with torch.device("meta"):  # a write to a GPU's memory would end the process, too
        model(batch).values().sum().backward()
        after = model.eval()(batch).values()
    assert after.tolist() == [
        pytest.approx(value) for value in (2 * before - 0.4).tolist()
    ]
