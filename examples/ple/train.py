"""Train PLE on two tasks: its tables on embedding servers, or in plain TorchRec.

    python examples/ple/train.py --data_location DIR          servers started here
    python examples/ple/train.py --data_location DIR --tf     plain TorchRec, to compare
    torchx run -s local_cwd persia.train_torchrec --script "examples/ple/train.py ..."

At the end it prints the exact AUC and the accuracy of both tasks over all rows of the
test. ``--help`` lists the options, README.md says what each does.
"""

import contextlib
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from math import ceil, sqrt
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from data import SPECS, Data, DatasetSpec, find_files, open_data
from model import (
    DIM,
    DenseModel,
    Losses,
    MultiTaskModel,
    make_collections,
)
from optimizers import RowAdam, Steps, dense_optimizer, make_schedules, row_optimizer
from options import EPOCHS, Options
from results import Progress, measure, write
from torch import nn
from torchrec import EmbeddingBagCollection
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper

import persia_torchrec as persia
from persia_torchrec import EmbeddingClient, EmbeddingCluster, TableSettings, env
from persia_torchrec.errors import ConfigError, PersiaError
from persia_torchrec.training.recovery import folder_of_job

SIGHTINGS, EXPECTED_IDS = 3, 1_000_000
"""After which an id gets a row; ids a table for which a Bloom filter has room."""

STEPS_TO_LIVE, LEAST_HALF_SQUARE = 4000, 1.0
"""Rows leave so many steps after their last update, or when half of the sum of their
squares is less; such rows are spared when they are younger."""

LEAST_INTERVAL_S = 60.0  # of increments, where deltas end them
DYNAMIC = persia.DynamicDim(blocks=2, period=5000)
"""Rows of one or two blocks of 8 weights."""

COMPILERS = ("g++", "c++", "clang++")

logger = logging.getLogger("ple")


def make_model(options: Options, spec: DatasetSpec) -> MultiTaskModel:
    """Return the model, its tables with rows if they are to be in this process."""
    columns = [(name, spec.num_buckets[name]) for name in spec.features]
    make: Callable[..., nn.Module] | None = None
    if options.tf:
        make = in_this_process
    elif options.multihash:
        make = partial(
            persia.MultiHashEmbeddingBagCollection, combine=options.multihash
        )
    # First, so that a seed gives the same dense layers wherever the tables are.
    width = DIM * len(columns)
    dense = DenseModel(options.model, width, corrected=options.corrected)
    collections = make_collections(
        columns,
        corrected=options.corrected,
        is_fused=options.emb_fusion,
        make=make,
    )
    losses = Losses(dense, bf16=options.bf16, l2=options.l2_regularization)
    return MultiTaskModel(collections, losses)


def in_this_process(tables: list[Any]) -> EmbeddingBagCollection:
    """Return TorchRec's own collection; gradients are of the rows of the batch only."""
    collection = EmbeddingBagCollection(tables=tables)
    for bag in collection.embedding_bags.values():
        bag.sparse = True
    return collection


def settings_of_tables(options: Options, spec: DatasetSpec) -> dict[str, TableSettings]:
    """Return what the options ask of each table on the servers."""
    admission = expiry = None
    if options.ev_filter == "cbf":
        admission = persia.AdmitBloom(SIGHTINGS, EXPECTED_IDS, 0.01)
    elif options.ev_filter == "counter" or options.adaptive_emb:
        admission = persia.AdmitFrequency(SIGHTINGS)
    if options.ev_elimination == "gstep":
        expiry = persia.Expiry(steps_to_live=STEPS_TO_LIVE)
    elif options.ev_elimination == "l2":
        bound = sqrt(2 * LEAST_HALF_SQUARE)
        expiry = persia.Expiry(min_l2_norm=bound, spared_steps=STEPS_TO_LIVE)
    parts = ("_quotient", "_remainder") if options.multihash else ("",)
    return {
        f"{name}{part}": TableSettings(
            admission=admission,
            expiry=expiry,
            shared_rows=spec.num_buckets[name] if options.adaptive_emb else None,
            dynamic=DYNAMIC if options.dynamic_ev else None,
            seed=seed_of_table(f"{name}{part}", options.seed),
        )
        for name in spec.features
        for part in parts
    }


def seed_of_table(name: str, seed: int) -> int:
    """Return the seed of a table's rows: a table's own, as ids are the same in all."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class OnServers:
    """The model inside DMP, its tables on embedding servers.

    Attributes:
        model: to be trained.
        client: of the servers.
        sharders: that have put the tables there.
    """

    def __init__(
        self,
        options: Options,
        spec: DatasetSpec,
        model: MultiTaskModel,
        stack: contextlib.ExitStack,
    ) -> None:
        self._options, self._folder = options, checkpoint_folder(options)
        self.client = self._connect(stack)
        stack.callback(self.client.close)
        self.sharders = persia.remote_sharders(
            self.client,
            row_optimizer(options),
            options.staleness_of_rows,
            tables=settings_of_tables(options, spec),
        )
        self.model = DistributedModelParallel(
            model,
            sharders=self.sharders,
            device=device_of(options),
            # Without a static graph, data may end unevenly.
            data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=False),
        )

    def _connect(self, stack: contextlib.ExitStack) -> EmbeddingClient:
        options = self._options
        if env.job_store() is not None:
            if own := sorted({"embedding_servers", "capacity"} & options.given):
                raise ConfigError(
                    "The servers of a job are said by its component. Received: "
                    f"--{own[0]} of the script."
                )
            return EmbeddingClient.of_job()
        logs: dict[str, Any] = {}
        if seconds := options.incremental_ckpt:
            logs["increments_dir"] = str(self._folder / "increments")
            # Each delta ends an increment: between two, rows are written once.
            logs["increments_interval_s"] = max(2 * seconds, LEAST_INTERVAL_S)
        servers = EmbeddingCluster.local(
            options.embedding_servers, options.capacity, restarts=True, **logs
        )
        cluster = stack.enter_context(servers)
        recovery_s = cluster.recovery_s
        return EmbeddingClient.connect(cluster.addresses, recovery_s=recovery_s)

    def optimizer(self, options: Options) -> Any:
        """Return what holds the rates of the rows; the servers step."""
        return self.sharders.optimizer

    def saved(self, state: dict[str, Any], stack: contextlib.ExitStack) -> Any:
        """Resume the run, if there is a checkpoint; return what counts and saves."""
        options = self._options
        if env.get_rank() == 0:
            options.require_same_as(self._folder)
        run = persia.recoverable(
            self._folder,
            {**state, "model": self.model},
            self.client,
            self.sharders,
            interval_s=0,
            save_steps=options.save_steps,
            keep=options.keep_checkpoint_max,
            delta_interval_s=options.incremental_ckpt,
        )
        return stack.enter_context(run)

    def together(self) -> contextlib.AbstractContextManager[Any]:
        """Keep several trainers in step whose data end at different batches."""
        return persia.join(self.model)

    def accumulating(self, num: int) -> contextlib.AbstractContextManager[Any]:
        """Make so many batches one update of the rows."""
        alone = contextlib.nullcontext()
        return persia.accumulate(self.sharders, num) if num > 1 else alone

    def flush(self) -> None:
        """Wait until every update is applied."""
        self.sharders.flush()

    def placed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Leave ids on the host, where the servers want them, when batches move."""
        # Those of several tables an id are computed where the others are.
        if device_of(self._options).type == "cpu" or self._options.multihash:
            return batches
        of = persia.HostKeyedJaggedTensor.of
        return (replace(each, id_features=of(each.id_features)) for each in batches)

    def num_rows(self) -> int:
        """Return how many rows the servers hold."""
        return sum(self.client.num_rows())


class InProcess:
    """The model with its tables, as plain TorchRec; see ``OnServers``."""

    def __init__(self, model: MultiTaskModel, device: torch.device) -> None:
        self.model = model.to(device)

    def optimizer(self, options: Options) -> Any:
        """Return what steps the rows."""
        return RowAdam(self.model.collections.parameters(), lr=options.learning_rate)

    def saved(self, state: dict[str, Any], stack: contextlib.ExitStack) -> Any:
        """Return what counts the steps."""
        return NotSaved()

    def together(self) -> contextlib.AbstractContextManager[Any]:
        """There is one trainer."""
        return contextlib.nullcontext()

    def accumulating(self, num: int) -> contextlib.AbstractContextManager[Any]:
        """Gradients of rows add up in the tables, as torch has it."""
        return contextlib.nullcontext()

    def flush(self) -> None:
        """Nothing is under way."""

    def placed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return batches, all of which goes to the device."""
        return batches

    def num_rows(self) -> int:
        """Return the length of all tables."""
        return sum(len(table) for table in self.model.collections.parameters())


class Loop:
    """A train pipeline with nothing ahead: one batch after the other."""

    def __init__(
        self, model: nn.Module, optimizer: Steps, device: torch.device
    ) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device

    def progress(self, batches: Iterator[Any]) -> Any:
        """Train the next batch; StopIteration after the last one."""
        batch = next(batches).to(self._device)
        self._optimizer.zero_grad()
        loss, output = self._model(batch)
        loss.backward()
        self._optimizer.step()
        return output

    def detach(self) -> None:
        """Leave the model as it is."""


class NotSaved:
    """Counts steps as ``recoverable`` does, where nothing is saved."""

    def __init__(self) -> None:
        self.num_steps = 0

    def skip(self, batches: Any) -> Iterator[Any]:
        """Return a pass over the data."""
        return iter(batches)

    def step(self, num_batches: int) -> None:
        """Count a step."""
        self.num_steps += 1

    def save(self) -> None:
        """There is nowhere to save."""


class Training:
    """One training: the model, its optimizers, and the run that counts and saves.

    Attributes:
        half: the model, with its tables.
        progress: of the steps.
        num_steps: of the whole training.
    """

    def __init__(
        self,
        options: Options,
        spec: DatasetSpec,
        data: Data,
        model: MultiTaskModel,
        stack: contextlib.ExitStack,
    ) -> None:
        self._options, self.num_steps = options, num_steps(options, data)
        self._data = data.train
        self.half: OnServers | InProcess
        if options.tf:
            self.half = InProcess(model, device_of(options))
        else:
            self.half = OnServers(options, spec, model, stack)
        dense = dense_optimizer(options, model.losses.parameters())
        rows = self.half.optimizer(options)
        schedules = make_schedules(options, [dense, rows], self.num_steps)
        self._steps = Steps([dense, rows], options.num_parts, schedules.values())
        state = {"optimizer": dense, "data": self._data, **schedules}
        self._run = self.half.saved(state, stack)
        self.progress = Progress(
            Path(options.output_dir),
            spec.labels,
            self.num_steps,
            self._run.num_steps,
            is_shown=env.get_rank() == 0,
        )

    def steps(self) -> Iterator[torch.Tensor]:
        """Train until the steps, or the epochs, are over; yield the losses of each."""
        options, run = self._options, self._run
        make = partial(
            TrainPipelineSparseDist,
            pipeline_postproc=bool(options.multihash),  # which splits ids
        )
        model = self.half.model
        model.train()
        kind = make if options.pulls_ahead else Loop
        pipeline = kind(model, self._steps, device=device_of(options))
        with self.half.together():
            # A queue gives the rows of all epochs in one pass.
            num_passes = 1 if options.workqueue else options.epochs or EPOCHS
            for _ in range(num_passes):
                left = (self.num_steps - run.num_steps) * options.num_parts
                batches = self.half.placed(islice(run.skip(self._data), left))
                yield from self._pass(pipeline, batches)
                if run.num_steps >= self.num_steps:
                    break
        self.half.flush()
        self.progress.close()
        pipeline.detach()
        run.save()

    def _pass(self, pipeline: Any, batches: Iterator[Any]) -> Iterator[torch.Tensor]:
        with self.half.accumulating(self._options.num_parts):
            while parts := self._step(pipeline, batches):
                losses = torch.stack([losses for losses, _, _ in parts]).sum(dim=0)
                self.progress.step(losses, sum(len(labels) for _, _, labels in parts))
                self._run.step(len(parts))
                yield losses

    def _step(self, pipeline: Any, batches: Iterator[Any]) -> list[Any]:
        """Train the parts of a step; return what the model gave for each of them.

        The data have as many of every step; none at their end.
        """
        num_parts = self._options.num_parts
        with (
            traced(self._options, self._run.num_steps + 1),
            contextlib.suppress(StopIteration),
        ):
            return [pipeline.progress(batches) for _ in range(num_parts)]
        return []


def checkpoint_folder(options: Options) -> Path:
    """Return the folder of the checkpoints: as said, of the job, or a new one."""
    if options.checkpoint is not None:
        return Path(options.checkpoint)
    if (job := env.job_store()) is not None:
        return Path(folder_of_job(job.job_id))
    name = f"model_{options.model.upper()}_{time.strftime('%Y%m%d-%H%M%S')}"
    return Path(options.output_dir, name).absolute()


@contextlib.contextmanager
def traced(options: Options, step: int) -> Iterator[None]:
    """Write what happens in each n-th step of rank 0 as a trace for Chrome."""
    if env.get_rank() or not options.timeline or step % options.timeline:
        yield
        return
    activities = torch.profiler.supported_activities()
    with torch.profiler.profile(activities=activities) as p:
        yield
    p.export_chrome_trace(str(Path(options.output_dir, f"timeline-{step}.json")))


def num_steps(options: Options, data: Data) -> int:
    """Return how many steps to train: as said, or for all epochs."""
    if options.steps:
        return options.steps
    if options.epochs:
        return options.epochs * len(data.train) // options.num_parts
    return ceil(EPOCHS * data.train.num_rows / options.batch_size)


def evaluate(
    model: nn.Module, batches: Iterator[Any], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and labels, ``(N, T)`` each, of all rows of the test."""
    model.eval()
    with torch.no_grad():
        outputs = [model(batch.to(device))[1] for batch in batches]
    return tuple(torch.cat([out[k] for out in outputs]) for k in (1, 2))


def compile_dense(losses: Losses, options: Options) -> float:
    """Compile the dense layers for the batches of training; return the seconds."""
    cxx = os.environ.get("CXX")
    if not any(shutil.which(one) for one in ([cxx] if cxx else COMPILERS)):
        raise ConfigError(
            "--op_fusion needs a C++ compiler, with which torch compiles. Received: no "
            f"{cxx or ', '.join(COMPILERS)} in PATH. Install one, name it by CXX, or "
            "give --op_fusion false."
        )
    began_s = time.monotonic()
    dense = losses.dense_model
    losses.compiled_batch = options.part_size
    dense.compile(options={"fallback_random": True})  # dropout is that of torch
    before = {name: buffer.clone() for name, buffer in dense.named_buffers()}
    size = options.part_size, dense.width
    x = torch.zeros(size, device=device_of(options), requires_grad=True)
    try:
        with torch.random.fork_rng():
            losses.logits(x).sum().backward()
    except RuntimeError as exc:  # torch's own, of whatever went wrong
        raise ConfigError(
            f"--op_fusion: torch could not compile the dense layers ({exc!s:.500}). "
            "Give --op_fusion false."
        ) from exc
    dense.zero_grad()
    for name, buffer in dense.named_buffers():
        buffer.copy_(before[name])
    return time.monotonic() - began_s


def has_parquet(options: Options, spec: DatasetSpec) -> bool:
    """Return whether Parquet files are read: as said, or where there are any."""
    if options.parquet_dataset is not None:
        return options.parquet_dataset
    try:
        find_files(spec, options.data_location, parquet=True)
    except PersiaError:
        return False
    return True


def read_data(options: Options, spec: DatasetSpec) -> Data:
    """Open the data for this trainer."""
    is_parquet = has_parquet(options, spec)
    own: dict[str, Any] = {
        "partition_count": env.get_world_size(),
        "partition_index": env.get_rank(),
    }
    if options.workqueue:
        own = {"queue_epochs": options.epochs or EPOCHS}
    return open_data(
        spec,
        options.data_location,
        options.batch_size,
        ev=options.has_raw_ids,
        parquet=is_parquet,
        shuffle=options.parquet_dataset_shuffle if is_parquet else True,
        seed=options.seed,
        micro_batches=options.num_parts,
        **own,
    )


def device_of(options: Options) -> torch.device:
    """Return where the dense layers of this trainer are."""
    num = torch.cuda.device_count()
    if options.device == "cuda" and not num:
        raise ConfigError(
            "--device cuda needs a GPU that torch can use. Received: a machine, or a "
            "torch, without one. Give --device cpu."
        )
    if options.device == "cpu" or not num:
        return torch.device("cpu")
    return torch.device("cuda", env.get_local_rank() % num)


def start_torch(options: Options, stack: contextlib.ExitStack) -> None:
    """Set threads and seed, and join the other trainers."""
    if options.intra:
        torch.set_num_threads(options.intra)
    if options.inter:
        torch.set_num_interop_threads(options.inter)
    torch.manual_seed(options.seed)
    device, backend = device_of(options), "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # NCCL wants a GPU for each trainer.
        has_each = torch.cuda.device_count() >= env.get_world_size()
        backend = f"cpu:gloo,cuda:{'nccl' if has_each else 'gloo'}"
    if env.master()[0] is not None:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    stack.callback(dist.destroy_process_group)


def run(options: Options) -> dict[str, Any]:
    """Train, evaluate and write the results; return them."""
    for line in options.warnings():
        logger.warning(line)
    if options.tf and env.get_world_size() > 1:
        raise ConfigError(
            "--tf trains in one process, which has all tables. Received: "
            f"{env.get_world_size()} trainers. Start one."
        )
    if options.schedule and env.get_world_size() > 1:
        raise ConfigError(
            "--schedule needs one trainer: several may have other numbers of steps, "
            f"and share the rates of rows. Received: {env.get_world_size()} trainers. "
            "Start one."
        )
    folder, spec = Path(options.output_dir), SPECS[options.dataset]
    with contextlib.ExitStack() as stack:
        start_torch(options, stack)
        data = read_data(options, spec)
        model = make_model(options, spec)
        model.losses.to(device_of(options))
        results: dict[str, Any] = {}
        if options.compiles:
            results["compile_s"] = compile_dense(model.losses, options)
            logger.info("compiled the dense layers in %.0f s", results["compile_s"])
        folder.mkdir(parents=True, exist_ok=True)
        training = Training(options, spec, data, model, stack)
        for _ in training.steps():
            pass
        if env.get_rank() == 0:
            results |= finish(training, options, spec, data)
        dist.barrier()
    return results


def finish(
    training: Training, options: Options, spec: DatasetSpec, data: Data
) -> dict[str, Any]:
    """Evaluate, and write the results; return them."""
    progress, half = training.progress, training.half
    results: dict[str, Any] = {}
    if not options.no_eval:
        results |= measure(
            spec.labels,
            *evaluate(half.model, half.placed(iter(data.test)), device_of(options)),
        )
    results |= {
        "steps": progress.num_steps,
        "train_s": progress.seconds,
        "steps_per_s": progress.num_timed / progress.seconds,
        "samples_per_s": progress.num_samples / progress.seconds,
        "rows": half.num_rows(),
    }
    for column, number in data.train.num_beyond_buckets.items():
        results[f"beyond_buckets_{column}"] = number
        logger.warning("%d values of %s beyond its buckets", number, column)
    write(Path(options.output_dir), progress, results, options.as_dict())
    return results


def main() -> None:
    """Train as the command line says."""
    logging.basicConfig(level="INFO", format="%(message)s")
    results = run(Options.parse())
    for name, value in results.items():
        if name.startswith(("auc_", "acc_")):
            print(f"test {name} {value if value is None else format(value, '.6f')}")


if __name__ == "__main__":
    main()
