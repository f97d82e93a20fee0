"""What each of two trainers does in its own process, and what it should come to."""

import contextlib
import logging
import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper
from torchrec.distributed.planner.types import ParameterConstraints

from persia_torchrec import (
    SGD,
    Adagrad,
    Adam,
    Constant,
    EmbeddingClient,
    RemoteEmbeddingBagCollectionSharder,
    TableSettings,
    accumulate,
)
from persia_torchrec.client.client import BatchNumber
from persia_torchrec.embedding.optim import Optimizer
from persia_torchrec.errors import PersiaError
from persia_torchrec.sharding.planned import dense_parameters
from persia_torchrec.sharding.training_blocks import join
from tests.support.groups import trainer_of_group
from tests.support.remote_job import (
    CPU,
    META,
    Bags,
    collided,
    ids_of,
    kjt_of,
    remote_modules,
    shard,
)

NUM_IDS = 30
NUM_STEPS = 100
NUM_SAMPLES = 16
NUM_PARTS = 41

TABLES = [
    EmbeddingBagConfig(NUM_IDS, 8, name="term", feature_names=["ad", "query"]),
    EmbeddingBagConfig(NUM_IDS, 4, name="user", feature_names=["user"]),
]


@dataclass(frozen=True)
class Case:
    """An optimizer on the servers, and what fbgemm calls the same one."""

    optimizer: Optimizer
    kind: EmbOptimType
    arguments: dict[str, float] = field(default_factory=dict)


_ADAGRAD = {"learning_rate": 0.1, "eps": 1e-8}

CASES = {
    "SGD": Case(SGD(2.0), EmbOptimType.EXACT_SGD, {"learning_rate": 2.0}),
    "Adagrad": Case(
        Adagrad(lr=0.1, initial_accumulator_value=0, eps=1e-8),
        EmbOptimType.EXACT_ADAGRAD,
        _ADAGRAD,
    ),
    "rowwise Adagrad": Case(
        Adagrad(lr=0.1, initial_accumulator_value=0, eps=1e-8, vectorwise_shared=True),
        EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        _ADAGRAD,
    ),
}

PLACE: torch.device | None = None
"""Where ids are, if not with the model."""

EPOCHS = [(0, 4), (12, 7), (3, 3)]
"""Batches that each of two trainers has."""

ADAM = Adam(lr=0.01)
"""fbgemm has none on the CPU: it is compared with a single trainer."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = EmbeddingBagCollection(tables=TABLES, device=META)
        self.over = nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, ids):
        return self.over(self.embeddings(ids).values()).squeeze(1)


class TwoCollections(nn.Module):
    """The same as two collections, of which trainer 1 leaves one out now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.terms = EmbeddingBagCollection(tables=TABLES[:1], device=META)
        self.users = EmbeddingBagCollection(tables=TABLES[1:], device=META)
        self.over = nn.Linear(20, 1)
        self.step = 0

    def forward(self, ids):
        terms = self.terms(ids).values()
        users = torch.zeros(len(terms), 4)
        if dist.get_rank() == 0 or self.step % 2:
            users = self.users(ids).values()
        self.step += 1
        return self.over(torch.cat([terms, users], dim=1)).squeeze(1)


class Trainer:
    """A model on servers of its own, and this process as one of its trainers."""

    def __init__(
        self, addresses, model, optimizer, *, device=CPU, static_graph=False, **settings
    ):
        self.client = EmbeddingClient.connect(addresses)
        self.sharder = RemoteEmbeddingBagCollectionSharder(
            self.client, optimizer, **settings
        )
        torch.manual_seed(0)
        self.model = shard(
            model(),
            self.sharder,
            device=device,
            data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=static_graph),
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.sharder.close()
        self.client.close()

    def learnt(self):
        """Return dense weights and rows, once all trainers are here."""
        self.sharder.flush()
        dist.barrier()
        weights = [weight.flatten().cpu() for weight in dense_parameters(self.model)]
        dense = torch.cat([*weights, torch.zeros(0)])
        rows = [self.client.read(t.name, ids_of(range(NUM_IDS))) for t in TABLES]
        return {
            "dense": dense.detach().numpy(),
            "rows": np.concatenate([table.ravel() for table in rows]),
        }


def run_trainer(
    rank, world_size, addresses, folder: Path, backend="gloo", place=None
) -> None:
    """Be one of the trainers; leave what was learnt in the folder.

    Args:
        addresses: of the servers of each training, by its name.
        backend: of the process group; if it names CUDA, the models are there, on one
            GPU unless it is NCCL's, which wants one for each rank.
        place: where the ids of batches are; by default with the model.
    """
    global PLACE  # of this process
    device, PLACE = CPU, place
    if "cuda" in backend:
        device = torch.device("cuda", rank if "nccl" in backend else 0)
        torch.cuda.set_device(device)
    with trainer_of_group(rank, world_size, folder / "process group", backend):
        for name, of_trainer in addresses.items():
            learnt = TRAININGS[name](of_trainer, device)
            np.savez(folder / f"{name} {rank}.npz", **learnt)
            dist.barrier()


def batches(rank, num, seed=1):
    """Yield this trainer's batches, whose lengths no other trainer's have."""
    generator = torch.Generator().manual_seed(seed + 100 * rank)
    for _ in range(num):
        num_samples = int(torch.randint(1, NUM_SAMPLES, (), generator=generator))
        lengths = torch.randint(4, (3, num_samples), generator=generator).tolist()
        bags = {
            key: [
                torch.randint(NUM_IDS, (n,), generator=generator).tolist()
                for n in lengths[f]
            ]
            for f, key in enumerate(["ad", "query", "user"])
        }
        scores = [
            sum(id_ % 3 - 1 for of_feature in bags.values() for id_ in of_feature[b])
            for b in range(num_samples)
        ]
        yield bags, (torch.tensor(scores) > 0).float()


def train(model, data):
    """Return the loss of each batch; the dense half is trained by plain SGD."""
    dense = [weight for name, weight in model.named_parameters() if "bags" not in name]
    optimizer = torch.optim.SGD(dense, lr=0.1)
    losses = []
    for batch in data:
        loss = loss_of(model, [batch], dense[0].device)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses)


def loss_of(model, batches, device=CPU):
    """Return the sum of the losses of batches that go through the model together."""
    bags = {
        key: [bag for of_batch, _ in batches for bag in of_batch[key]]
        for key in batches[0][0]
    }
    logits = model(kjt_of(bags).to(PLACE or device)).split(
        [len(labels) for _, labels in batches]
    )
    return sum(
        nn.functional.binary_cross_entropy_with_logits(of_batch, labels.to(device))
        for of_batch, (_, labels) in zip(logits, batches, strict=True)
    )


def same_as_torchrec(case):
    """Return what trains a model on the servers, and one in plain TorchRec."""

    def both(addresses, device):
        rank = dist.get_rank()
        with Trainer(addresses, Model, case.optimizer, device=device) as trainer:
            twin = plain_twin(trainer, case)
            remote = train(trainer.model, batches(rank, NUM_STEPS))
            plain = train(twin, batches(rank, NUM_STEPS))
            learnt = trainer.learnt()["rows"]
        return {"remote": remote, "plain": plain, "rows": learnt}

    return both


def plain_twin(trainer, case):
    """Return a model in plain TorchRec that starts where the trainer's does."""
    torch.manual_seed(0)
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": case.kind, **case.arguments}
    )
    fused = ParameterConstraints(
        sharding_types=["table_wise"], compute_kernels=["fused"]
    )
    twin = shard(Model(), sharder, constraints={t.name: fused for t in TABLES})
    for table in TABLES:
        split = trainer.client.split(ids_of(range(NUM_IDS)))
        number = BatchNumber(BatchNumber.new_stream(), 1)
        (rows,) = trainer.client.pull([(table.name, split)], batch=number)
        weights = torch.from_numpy(rows[split.inverse])
        name = f"embeddings.embedding_bags.{table.name}.weight"
        for piece in twin.state_dict()[name].local_shards():
            start, length = piece.metadata.shard_offsets[0], len(piece.tensor)
            piece.tensor.copy_(weights[start : start + length])
    return twin


def each_by_itself(addresses, _):
    """Train as PERSIA does, but in step: each trainer's gradient is applied alone."""
    settings = {"update": "each", "gradient_division": False}
    with Trainer(addresses, Model, SGD(0.5), **settings) as trainer:
        optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
        for batch in batches(dist.get_rank(), 20, seed=0):
            loss = loss_of(trainer.model, [batch])
            optimizer.zero_grad()
            dist.barrier()  # all have pulled
            loss.backward()
            optimizer.step()
            dist.barrier()  # all have pushed
        return trainer.learnt()


def with_uneven_data(addresses, device):
    """Train some epochs in which trainers have different numbers of batches."""
    optimizer = CASES["Adagrad"].optimizer
    with Trainer(addresses, Model, optimizer, device=device) as trainer:
        for epoch, nums in enumerate(EPOCHS):
            data = batches(dist.get_rank(), nums[dist.get_rank()], seed=epoch)
            with join(trainer.model):
                train(trainer.model, data)
        evaluate_alone(trainer.model)
        return trainer.learnt()


def evaluate_alone(model):
    """Evaluate on the first trainer; a collective would meet the others' barrier."""
    model.eval()
    if dist.get_rank() == 0:
        with torch.no_grad():
            loss_of(model, list(batches(0, 1)), next(model.parameters()).device)
    dist.barrier()


def with_adam(addresses, device):
    """Train with an optimizer for which it matters how often it is applied."""
    with Trainer(addresses, Model, ADAM, device=device) as trainer:
        train(trainer.model, batches(dist.get_rank(), 50, seed=0))
        return trainer.learnt()


def in_parts(addresses, device):
    """Train with batches that are the halves of a step; the last step has one."""
    with Trainer(addresses, Model, ADAM, device=device) as trainer:
        optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
        data = list(batches(dist.get_rank(), NUM_PARTS, seed=0))
        with accumulate(trainer.sharder, 2):
            for step in range(0, len(data), 2):
                optimizer.zero_grad()
                for part in data[step : step + 2]:
                    loss_of(trainer.model, [part]).backward()
                optimizer.step()
        return trainer.learnt()


def parts_together(addresses):
    """Train on what :func:`in_parts` does, as a single trainer, a batch a step."""
    with Trainer(addresses, Model, ADAM) as trainer:
        optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
        data = [list(batches(rank, NUM_PARTS, seed=0)) for rank in range(2)]
        for step in range(0, NUM_PARTS, 2):
            parts = [part for of_rank in data for part in of_rank[step : step + 2]]
            optimizer.zero_grad()
            (loss_of(trainer.model, parts) / 2).backward()
            optimizer.step()
        return trainer.learnt()


def under_a_loss_scale(*epochs, overflows, model=Model, num_passes=1, **settings):
    """Return what trains under a scaler; trainer 1's embeddings overflow at steps.

    Args:
        epochs: steps of each trainer.
        overflows: steps of trainer 1, counted over all epochs.
        model: made for each trainer.
        num_passes: backward passes a step, of which the first overflows.
    """

    def scaled(addresses, device):
        rank = dist.get_rank()
        seen = []
        with Trainer(addresses, model, SGD(0.1), device=device, **settings) as trainer:
            optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler(
                device.type, init_scale=1024.0, growth_interval=3
            )
            trainer.sharder.use_grad_scaler(scaler)
            is_even = all(len(set(nums)) == 1 for nums in epochs)
            for epoch, nums in enumerate(epochs):
                data = batches(rank, nums[rank] * num_passes, seed=epoch)
                with contextlib.nullcontext() if is_even else join(trainer.model):
                    for _ in range(nums[rank]):
                        overflow = rank == 1 and len(seen) in overflows
                        for number in range(num_passes):
                            loss = loss_of(trainer.model, [next(data)], device)
                            with overflowing(trainer, overflow and number == 0):
                                scaler.scale(loss).backward()
                        for each in (optimizer, trainer.sharder.optimizer):
                            scaler.step(each)
                            each.zero_grad()
                        scaler.update()
                        seen.append(state_of(trainer, scaler))
                seen.append(state_of(trainer, scaler))
            num_skipped = sum(m.num_skipped for m in remote_modules(trainer.model))
        scales, weights, rows = zip(*seen, strict=True)
        return {
            "scales": np.array(scales),
            "weights": np.stack(weights),
            "rows": np.stack(rows),
            "num_skipped": num_skipped,
        }

    return scaled


@contextlib.contextmanager
def overflowing(trainer, is_on):
    """Make gradients of the trainer's embeddings infinite, as a large scale does."""
    modules = remote_modules(trainer.model) if is_on else []
    scales = [module.gradient_scale for module in modules]
    for module in modules:
        module.gradient_scale = math.inf
    yield
    for module, scale in zip(modules, scales, strict=True):
        module.gradient_scale = scale


def state_of(trainer, scaler):
    """Return the loss scale, and copies of dense weights and of a table's rows."""
    weights = nn.utils.parameters_to_vector(dense_parameters(trainer.model))
    rows = trainer.client.read("term", ids_of(range(NUM_IDS)))
    return scaler.get_scale(), weights.detach().cpu().numpy().copy(), rows.copy()


def both_alone(addresses, optimizer, epochs):
    """Train on the batches of two trainers as a single one, with the mean loss.

    Args:
        epochs: batches of each.
    """
    with Trainer(addresses, Model, optimizer) as trainer:
        optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
        for epoch, nums in enumerate(epochs):
            data = [list(batches(rank, num, epoch)) for rank, num in enumerate(nums)]
            for step in range(max(nums)):
                loss = loss_of(trainer.model, [m[step] for m in data if step < len(m)])
                optimizer.zero_grad()
                (loss / 2).backward()
                optimizer.step()
        return trainer.learnt()


class Counting(Trainer):
    """A trainer whose every step moves the rows of its ids by the mean of 1 a trainer.

    All rows start at zero.
    """

    def __init__(self, addresses, **settings):
        zeros = {t.name: TableSettings(initializer=Constant(0.0)) for t in TABLES}
        super().__init__(
            addresses, lambda: Bags(TABLES), SGD(1.0), tables=zeros, **settings
        )

    def step(self):
        ids = kjt_of({"ad": [[7]], "query": [[8]], "user": [[9]]})
        self.model(ids).values().sum().backward()

    def num_steps(self):
        return -self.client.read("term", ids_of([7]))[0, 0]


def with_staleness(addresses, _):
    """Train ahead of the updates."""
    with Counting(addresses, staleness=4) as trainer:
        for _ in range(50):
            trainer.step()
        return trainer.learnt()


def with_one_that_ends(addresses, _):
    """Continue while the other trainer has closed its tables."""
    with Counting(addresses) as trainer:
        for _ in range(2 + 3 * dist.get_rank()):
            trainer.step()
        return {"num_steps": trainer.num_steps()}


def without_dense_half(addresses, _):
    """Train tables alone, scaled; rank 0 has no data, and answers rank 1."""
    with Counting(addresses) as trainer:
        (module,) = remote_modules(trainer.model)
        trainer.sharder.use_grad_scaler(torch.amp.GradScaler("cpu", init_scale=1.0))
        agreement = module.remote_tables.agreement
        answered, answer = [], agreement.main_hook
        agreement.main_hook = lambda: answered.append(answer())
        with join(trainer.model):
            for _ in range(3 * dist.get_rank()):
                trainer.step()
        trainer.learnt()
        return {"num_steps": trainer.num_steps(), "num_answered": len(answered)}


def with_a_look(addresses, _):
    """Look rows up once without a backward pass, on one trainer alone."""
    with Counting(addresses) as trainer:
        for step in range(4):
            if step == 2 and dist.get_rank() == 1:
                ids = kjt_of({"ad": [[7]], "query": [[8]], "user": [[9]]})
                trainer.model(ids).values()
            trainer.step()
        return trainer.learnt()


def with_one_that_vanishes(addresses, _):
    """Wait without success for the other trainer, which neither trains nor closes."""
    with Counting(addresses, joint_timeout_s=0.5) as trainer:
        error = _error_of(trainer.step) if dist.get_rank() == 0 else ""
        dist.barrier()
    return {"error": error}


def with_other_settings(addresses, _):
    """Make a model with another ``update``, then one with another rate, per trainer."""
    rank, told = dist.get_rank(), []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())
    log = logging.getLogger("persia_torchrec.sharding.checks")
    log.addHandler(handler)

    def make(lr, update):
        with Trainer(addresses, Model, SGD(lr), update=update):
            pass

    error = _error_of(lambda: make(0.1, ["joint", "each"][rank]))
    make(0.1, "joint")
    num_before = len(told)
    make([0.1, 0.2][rank], "joint")
    log.removeHandler(handler)
    return {"error": error, "num_before": num_before, "told": told}


def with_saved_state(addresses, _):
    """Save and load the rows together; map ids on each trainer by itself."""
    optimizer, rank = CASES["Adagrad"].optimizer, dist.get_rank()
    with (
        Trainer(addresses, Model, optimizer) as trainer,
        tempfile.TemporaryDirectory() as own,
    ):
        train(trainer.model, batches(rank, 5))
        state = {"model": trainer.model, "optimizer": trainer.model.fused_optimizer}
        whole = trainer.model.state_dict()[f"{_BAGS}.term.weight"].clone()
        saved, folder = trainer.learnt(), [own]
        dist.broadcast_object_list(folder)  # the first trainer's is that of both
        dcp.save(state, checkpoint_id=folder[0])
        train(trainer.model, batches(rank, 5, seed=2))
        moved = trainer.learnt()
        dist.barrier()
        dcp.load(state, checkpoint_id=folder[0])
        loaded = trainer.learnt()
        dist.barrier()
        trainer.model.load_state_dict({f"{_BAGS}.term.weight": whole + 1}, strict=False)
        term = trainer.client.read("term", ids_of(range(NUM_IDS)))[:, :8]
        dist.barrier()
        error = _error_of(lambda: shard(collided(TABLES), trainer.sharder))
        files = dcp.FileSystemReader(folder[0]).read_metadata().storage_data
        dist.barrier()
    return {
        "saved": saved["rows"],
        "moved": moved["rows"],
        "loaded": loaded["rows"],
        "added": term - whole.numpy(),
        "writers": [of.relative_path for key, of in files.items() if "term" in key.fqn],
        "error": error,
    }


_BAGS = "embeddings.embedding_bags"


def with_two_passes(addresses, device):
    """Run backward twice through each forward pass, as plain TorchRec does beside."""
    case, rank, losses = CASES["Adagrad"], dist.get_rank(), []
    with Trainer(addresses, Model, case.optimizer, staleness=1) as trainer:
        for model in (trainer.model, plain_twin(trainer, case)):
            of_model = []
            for batch in batches(rank, 20):
                loss = loss_of(model, [batch])
                of_model.append(loss.item())
                loss.backward(retain_graph=True)
                (2 * loss).backward()
            losses.append(np.array(of_model))
            trainer.sharder.flush()
            dist.barrier()
    return {"remote": losses[0], "plain": losses[1]}


def _error_of(call):
    try:
        call()
    except PersiaError as exc:
        return str(exc)
    return "none"


TRAININGS = {
    **{name: same_as_torchrec(case) for name, case in CASES.items()},
    "Adam": with_adam,
    "parts": in_parts,
    "each": each_by_itself,
    "uneven": with_uneven_data,
    "ahead": with_staleness,
    "saved": with_saved_state,
    "two passes": with_two_passes,
    "ended": with_one_that_ends,
    "looks": with_a_look,
    "tables alone": without_dense_half,
    "vanished": with_one_that_vanishes,
    "other settings": with_other_settings,
    "scaled": under_a_loss_scale((10, 10), overflows=[2], static_graph=True),
    "scaled, accumulated": under_a_loss_scale((5, 5), overflows=[2], num_passes=2),
    "scaled, uneven": under_a_loss_scale((4, 9), (0, 3), (4, 4), overflows=[2, 7]),
    "scaled, each": under_a_loss_scale(
        *((4, 9), (4, 4)), overflows=[2, 7], model=TwoCollections, update="each"
    ),
}
