"""Train TorchRec's DLRM on Criteo's click logs, its tables on embedding servers.

    python examples/dlrm/train.py                        made-up data, servers here
    python examples/dlrm/train.py --train day_0.gz day_1.gz --test day_23.gz
    python examples/dlrm/train.py --plain                plain TorchRec, to compare

Its last line is ``test AUC 0.xxxxxx``. ``--help`` lists the settings.
"""

import argparse
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack

import torch
import torch.distributed as dist
from criteo import CATEGORIES, NUM_COUNTS, batches, generate_lines, read_lines
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchmetrics.functional.classification import binary_auroc
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRMTrain
from torchrec.optim.optimizers import in_backward_optimizer_filter

from persia_torchrec import (
    Adagrad,
    EmbeddingClient,
    EmbeddingCluster,
    HostKeyedJaggedTensor,
    RemoteEmbeddingBagCollectionSharder,
)

NUM_EMBEDDINGS = 100_000
"""Rows per table in plain TorchRec; on servers only a scale of the initial weights."""

TEST_EVERY = 20
"""Without ``--test``, one batch of this many is kept for the test."""

logger = logging.getLogger("dlrm")


def make_model(dim: int, device: torch.device, *, is_dcn: bool) -> DLRMTrain:
    """Return TorchRec's DLRM or DLRM-DCN with a loss, its tables without memory yet."""
    tables = [
        EmbeddingBagConfig(NUM_EMBEDDINGS, dim, name=name, feature_names=[name])
        for name in CATEGORIES
    ]
    embeddings = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    layers = (embeddings, NUM_COUNTS, [512, 256, dim], [512, 512, 256, 1])
    if is_dcn:
        return DLRMTrain(
            DLRM_DCN(
                *layers, dcn_num_layers=3, dcn_low_rank_dim=128, dense_device=device
            )
        )
    return DLRMTrain(DLRM(*layers, dense_device=device))


def in_this_process(
    model: DLRMTrain, lr: float, device: torch.device
) -> DistributedModelParallel:
    """Plain TorchRec: tables of a fixed length, in the memory of the device."""
    adagrad = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": lr}
    sharder = EmbeddingBagCollectionSharder(fused_params=adagrad)
    return DistributedModelParallel(model, device=device, sharders=[sharder])


def on_servers(
    model: DLRMTrain,
    lr: float,
    device: torch.device,
    addresses: list[str],
    staleness: int,
) -> DistributedModelParallel:
    """Put the tables on embedding servers: a row per raw id, created by its lookup."""
    adagrad = Adagrad(lr, initial_accumulator_value=0, vectorwise_shared=True)
    client = EmbeddingClient.connect(addresses)
    sharder = RemoteEmbeddingBagCollectionSharder(client, adagrad, staleness)
    return DistributedModelParallel(model, device=device, sharders=[sharder])


def within_tables(data: Iterator[Batch]) -> Iterator[Batch]:
    """Plain TorchRec: ids that share a remainder share a row."""
    for batch in data:
        batch.sparse_features.values().remainder_(NUM_EMBEDDINGS)
        yield batch


def with_ids_on_host(data: Iterator[Batch]) -> Iterator[Batch]:
    """Leave the ids where the servers want them when a pipeline moves the batch."""
    for batch in data:
        ids = HostKeyedJaggedTensor.of(batch.sparse_features)
        yield Batch(batch.dense_features, ids, batch.labels)


def train(
    model: DistributedModelParallel,
    data: Iterator[Batch],
    lr: float,
    device: torch.device,
) -> None:
    """Take one step per batch; the lookup of the next one overlaps."""
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = torch.optim.Adam(dense.values(), lr)
    pipeline = TrainPipelineSparseDist(model, optimizer, device)
    start, num_samples, step = time.monotonic(), 0, 0
    while True:
        try:
            loss, _, labels = pipeline.progress(data)
        except StopIteration:
            break
        step, num_samples = step + 1, num_samples + len(labels)
        if step % 50 == 0:
            rate = num_samples / (time.monotonic() - start)
            logger.info("step %d: loss %.4f, %.0f samples/s", step, loss, rate)
    pipeline.detach()


def evaluate(
    model: DistributedModelParallel, data: Iterator[Batch], device: torch.device
) -> float:
    """Return the AUC; ids that were never trained read their first weights."""
    model.eval()
    with torch.no_grad():
        outputs = [model(batch.to(device))[1] for batch in data]
    _, logits, labels = zip(*outputs, strict=True)
    return float(binary_auroc(torch.cat(logits), torch.cat(labels).int()))


def open_batches(arguments: argparse.Namespace, *, is_test: bool) -> Iterator[Batch]:
    """Return the batches to train on, or to test with."""
    size = arguments.batch_size
    if not arguments.train:
        num_rows = arguments.rows // 10 if is_test else arguments.rows
        data = batches(generate_lines(num_rows, seed=int(is_test)), size)
    elif arguments.test:
        data = batches(read_lines(arguments.test if is_test else arguments.train), size)
    else:
        data = batches(
            read_lines(arguments.train),
            size,
            lambda number: (number % TEST_EVERY == TEST_EVERY - 1) == is_test,
        )
    return within_tables(data) if arguments.plain else with_ids_on_host(data)


def join_alone(device: torch.device) -> None:
    """Be the only trainer."""
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())


def main() -> None:
    """Train one pass and test."""
    logging.basicConfig(level="INFO", format="%(message)s")
    arguments = parser().parse_args()
    torch.manual_seed(arguments.seed)
    device = torch.device(arguments.device)
    join_alone(device)
    with ExitStack() as stack:
        model = make_model(arguments.dim, device, is_dcn=arguments.dcn)
        if arguments.plain:
            model = in_this_process(model, arguments.lr, device)
        else:
            addresses = arguments.servers
            if not addresses:
                cluster = EmbeddingCluster.local(2, capacity=arguments.capacity)
                addresses = stack.enter_context(cluster).addresses
            model = on_servers(
                model, arguments.lr, device, addresses, arguments.staleness
            )
        data = open_batches(arguments, is_test=False)
        train(model, data, arguments.dense_lr, device)
        auc = evaluate(model, open_batches(arguments, is_test=True), device)
    dist.destroy_process_group()
    print(f"test AUC {auc:.6f}", flush=True)


def parser() -> argparse.ArgumentParser:
    """Return what the command line may say."""
    parser = argparse.ArgumentParser(description="Train DLRM on click logs.")
    add = parser.add_argument
    add("--train", nargs="+", default=[], help="files, plain or .gz [made-up lines]")
    add("--test", nargs="+", default=[], help="files [one batch of 20 of the others]")
    add("--rows", type=int, default=200_000, help="made-up lines [200000]")
    add("--batch-size", type=int, default=1024, help="samples per step [1024]")
    add("--dim", type=int, default=16, help="of the embeddings [16]")
    add("--dcn", action="store_true", help="DLRM-DCN instead of DLRM")
    add("--lr", type=float, default=0.05, help="of the tables' rowwise Adagrad [0.05]")
    add("--dense-lr", type=float, default=1e-3, help="of the dense Adam [0.001]")
    add("--servers", nargs="+", help="tcp://HOST:PORT of each [two, started here]")
    add("--capacity", type=int, default=10_000_000, help="rows per server [10000000]")
    add("--staleness", type=int, default=8, help="batches in flight at most [8]")
    best = "cuda:0" if torch.cuda.is_available() else "cpu"
    add("--device", default=best, help="of the dense layers [a GPU if there is one]")
    add("--seed", type=int, default=0, help="of the dense weights [0]")
    add("--plain", action="store_true", help="plain TorchRec, tables in this process")
    return parser


if __name__ == "__main__":
    main()
