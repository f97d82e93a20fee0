"""The layers of the PLE example: their sizes, their start, and what they compute."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

from examples.ple import model
from persia_torchrec.device.batches import TorchRecBatch

WIDTH = 272
COLUMNS = [("pid", 10), ("tags", 50)]


def num_parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())


def dense_model(kind="ple", width=32, *, corrected=False):
    torch.manual_seed(0)
    return model.DenseModel(kind, width, corrected=corrected)


def multi_task_model(**settings):
    torch.manual_seed(0)
    collections = model.make_collections(
        COLUMNS, make=lambda tables: EmbeddingBagCollection(tables=tables)
    )
    return model.MultiTaskModel(collections, model.Losses(dense_model(), **settings))


def batch_of(size):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([1] * size + [2] * size, dtype=torch.int32)
    values = torch.randint(10, (3 * size,), generator=generator)
    features = KeyedJaggedTensor(["pid", "tags"], values, lengths=lengths)
    labels = torch.randint(2, (2, size), generator=generator).float()
    return TorchRecBatch(id_features=features, labels=tuple(labels))


def test_ple_has_as_many_dense_parameters_as_the_original():
    ple = dense_model(width=WIDTH)
    of_levels = [num_parameters(level) for level in ple.body.levels]
    assert of_levels == [896_198, 470_214, 411_206]
    assert num_parameters(ple.towers) == 117_506
    assert num_parameters(ple) == 1_895_124


def test_kernels_start_as_glorot_says_and_biases_at_0():
    for layer in dense_model("mmoe").modules():
        if isinstance(layer, nn.Linear):
            bound = (6 / (layer.in_features + layer.out_features)) ** 0.5
            assert 0.5 * bound < layer.weight.abs().max() <= bound
            assert layer.bias is None or not layer.bias.any()


@pytest.mark.parametrize("corrected", [False, True])
def test_an_mlp_is_relu_and_then_batch_norm_after_each_layer(corrected):
    mlp, x = model.MLP(32, corrected=corrected), torch.randn(8, 32)
    expected = x
    for linear in (layer for layer in mlp if isinstance(layer, nn.Linear)):
        expected = functional.linear(expected, linear.weight, linear.bias).relu()
        mean, var = expected.mean(dim=0), expected.var(dim=0, unbiased=False)
        expected = (expected - mean) / (var + 1e-3).sqrt()
    torch.testing.assert_close(mlp(x), expected)
    momenta = {m.momentum for m in mlp if isinstance(m, nn.BatchNorm1d)}
    assert momenta == {0.1 if corrected else 0.01}


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("is_last", [False, True])
def test_a_level_mixes_experts_as_its_gates_say(corrected, is_last):
    level = model.Level(32, is_last=is_last, corrected=corrected)
    clk, buy, shared = inputs = [torch.randn(8, 32) for _ in range(3)]
    outputs = level(inputs)
    assert len(outputs) == (2 if is_last else 3)
    (a1, a2), (b1, b2) = level.of_tasks
    of_shared = level.shared(shared)

    def weights(gate, x):
        return functional.linear(gate.mlp(x), gate.weigh.weight, gate.weigh.bias)

    for x, gate, experts, output in (
        (clk, level.gates[0], (a1, a2), outputs[0]),
        (buy, level.gates[1], (b1, b2), outputs[1]),
    ):
        assert gate.weigh.bias is not None
        of_gate = weights(gate, x)
        of_gate = of_gate.softmax(dim=1) if corrected else of_gate
        given = [expert(x) for expert in experts] + [of_shared]
        expected = sum(w[:, None] * e for w, e in zip(of_gate.T, given, strict=True))
        torch.testing.assert_close(output, expected)
    if not is_last:
        gate = level.shared_gate
        assert gate.weigh.bias is None
        given = [a1(clk), a2(clk), b1(buy), b2(buy), of_shared]
        of_gate = weights(gate, shared).softmax(dim=1)
        expected = sum(w[:, None] * e for w, e in zip(of_gate.T, given, strict=True))
        torch.testing.assert_close(outputs[2], expected)


@pytest.mark.parametrize("kind", ["mmoe", "shared"])
def test_the_other_models_have_the_same_towers(kind):
    other = dense_model(kind)
    assert num_parameters(other.towers) == 117_506
    x = torch.randn(8, 32)
    if kind == "shared":
        expected = [other.body.mlp(x)] * 2
    else:
        assert len(other.body.experts) == 5
        experts = torch.stack([expert(x) for expert in other.body.experts])
        expected = [
            torch.einsum("ebh,be->bh", experts, functional.softmax(gate(x), dim=1))
            for gate in other.body.gates
        ]
    for output, of_task in zip(other.body(x), expected, strict=True):
        torch.testing.assert_close(output, of_task)


def test_evaluation_uses_the_statistics_of_its_batch_and_changes_none():
    ple, x = dense_model(), torch.randn(16, 32)
    in_training = ple(x)
    before = {name: value.clone() for name, value in ple.state_dict().items()}
    ple.eval()
    torch.testing.assert_close(ple(x), in_training)
    assert not torch.allclose(ple(x)[:4], ple(x[:4]), atol=1e-3)
    assert all(torch.equal(before[n], v) for n, v in ple.state_dict().items())


def test_the_corrected_model_is_evaluated_by_its_moving_averages():
    ple = dense_model(corrected=True)
    assert ple.dropout.p == 0.2
    for _ in range(3):
        ple(torch.randn(64, 32))
    ple.eval()
    x = torch.randn(16, 32)
    torch.testing.assert_close(ple(x)[:1], ple(x[:1]))


@pytest.mark.parametrize(("corrected", "std"), [(False, 0.25), (True, 0.01)])
def test_tables_start_with_a_truncated_normal(corrected, std):
    [table] = model.make_tables([("pid", 20_000)], corrected=corrected)
    weights = torch.empty(table.num_embeddings, table.embedding_dim)
    table.init_fn(weights)
    assert weights.abs().max() <= 2 * std
    assert weights.std().item() == pytest.approx(0.8796 * std, rel=0.01)


def test_the_loss_is_the_mean_of_both_tasks():
    multi_task, batch = multi_task_model(), batch_of(8)
    loss, (losses, logits, labels) = multi_task(batch)
    assert labels.T.tolist() == [label.tolist() for label in batch.labels]
    for task in range(2):
        p = logits[:, task].double().sigmoid()
        y = labels[:, task]
        expected = -(y * p.log() + (1 - y) * (1 - p).log()).mean()
        assert losses[task].item() == pytest.approx(expected.item(), rel=1e-5)
    assert loss.item() == pytest.approx(losses.mean().item(), rel=1e-6)


def test_the_losses_of_parts_add_up_to_those_of_the_step():
    multi_task, batch = multi_task_model(l2=0.5), batch_of(8)
    (whole, (losses, *_)), total, of_tasks = multi_task(batch), 0.0, torch.zeros(2)
    for fraction in (0.5, 0.375, 0.125):
        loss, (of_part, *_) = multi_task(replace(batch, fraction=fraction))
        total, of_tasks = total + loss.item(), of_tasks + of_part
    assert total == pytest.approx(whole.item(), rel=1e-6)
    torch.testing.assert_close(of_tasks, losses)


def test_l2_adds_its_share_of_each_kernel_to_the_gradient():
    gradients = {}
    for l2 in (0.0, 0.5):
        multi_task = multi_task_model(l2=l2)
        loss, _ = multi_task(batch_of(8))
        loss.backward()
        gradients[l2] = {n: p.grad for n, p in multi_task.named_parameters()}
    is_kernel = {
        f"{name}.weight"
        for name, module in multi_task.named_modules()
        if isinstance(module, nn.Linear)
    }
    for name, parameter in multi_task.named_parameters():
        difference = gradients[0.5][name] - gradients[0.0][name]
        expected = 0.5 * parameter if name in is_kernel else torch.zeros_like(parameter)
        torch.testing.assert_close(difference, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.slow
def test_bf16_is_of_the_dense_layers_alone():
    seen = []
    multi_task = multi_task_model(bf16=True)
    layers = [m for m in multi_task.losses.modules() if isinstance(m, nn.Linear)]
    for layer in layers:
        layer.register_forward_hook(lambda *given: seen.append(given[2].dtype))
    loss, (losses, logits, _) = multi_task(batch_of(256))
    loss.backward()
    assert set(seen) == {torch.bfloat16}
    assert {loss.dtype, losses.dtype, logits.dtype} == {torch.float32}
    assert {p.grad.dtype for p in multi_task.parameters()} == {torch.float32}
    expected, _ = multi_task_model()(batch_of(256))
    assert loss.item() == pytest.approx(expected.item(), abs=0.05)
    assert loss.item() != expected.item()


def test_one_collection_a_column_gives_the_same():
    fused = multi_task_model()
    torch.manual_seed(0)
    single = model.make_collections(
        COLUMNS,
        is_fused=False,
        make=lambda tables: EmbeddingBagCollection(tables=tables),
    )
    assert len(single) == len(COLUMNS)
    for collection, weight in zip(single, fused.collections.parameters(), strict=True):
        collection.load_state_dict({next(iter(collection.state_dict())): weight})
    loss, _ = model.MultiTaskModel(single, fused.losses)(batch_of(256))
    assert torch.equal(loss, fused(batch_of(256))[0])
