"""The same training by fbgemm's CPU kernels and by torch's optimizers."""

import numpy as np
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

NUM_ROWS = 6
NUM_STEPS = 8


def batches(dim, *, some_rows):
    """Return weights to begin with, and rows and gradients of every step."""
    rng = np.random.default_rng(dim)
    weights = rng.uniform(-1, 1, (NUM_ROWS, dim)).astype(np.float32)
    steps = []
    for _ in range(NUM_STEPS):
        num = 3 if some_rows else NUM_ROWS
        rows = rng.choice(NUM_ROWS, num, replace=False)
        steps.append((rows, rng.standard_normal((num, dim)).astype(np.float32)))
    return weights, steps


def train_with_fbgemm(weights, steps, optimizer, **settings):
    collection = SplitTableBatchedEmbeddingBagsCodegen(
        [(*weights.shape, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=optimizer,
        **settings,
    )
    collection.split_embedding_weights()[0].copy_(torch.from_numpy(weights))
    for rows, grads in steps:
        one_id_a_bag = torch.arange(len(rows) + 1)
        pooled = collection(torch.from_numpy(rows), one_id_a_bag)
        pooled.backward(torch.from_numpy(grads))
    states = [state[0] for state in collection.split_optimizer_states()]
    state = states[0].reshape(NUM_ROWS, -1).numpy() if states else None
    return collection.split_embedding_weights()[0].numpy(), state


def train_with_torch(weights, steps, make_optimizer, *, sparse=False):
    parameter = torch.nn.Parameter(torch.from_numpy(weights.copy()))
    optimizer = make_optimizer([parameter])
    for rows, grads in steps:
        grad = torch.zeros_like(parameter)
        grad[rows] = torch.from_numpy(grads)
        parameter.grad = grad.to_sparse(1) if sparse else grad
        optimizer.step()
    return parameter.detach().numpy()
