"""A training in this process that an exception stops, and that is started again."""

import contextlib
import gc
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch.distributed as dist
from torch.utils.data import DataLoader

from persia_torchrec import EmbeddingClient, EmbeddingCluster, recoverable
from persia_torchrec.errors import ConfigError, PersiaError
from persia_torchrec.sharding.torchrec_api import end_iterator
from tests.resume.loaders import BATCH_SIZE, LOADERS, Given, has_state
from tests.resume.training import LOOPS, Training, to_batch, told
from tests.support.resumed_loops import StoppedError

NUM_SAMPLES, NUM_PASSES = 40, 3
NUM_BATCHES = NUM_SAMPLES // BATCH_SIZE
STOPS = {
    "in a pass": (NUM_BATCHES + 4, False),
    "at its last step": (2 * NUM_BATCHES, False),
    "between passes": (2 * NUM_BATCHES, True),
}
_LEFT_AT_EXIT = contextlib.ExitStack()


@dataclass(frozen=True)
class Line:
    """One line of the table: a training that is stopped at several places."""

    loader: str
    is_shuffled: bool
    in_state: bool
    loop: str
    seed: int

    def __str__(self) -> str:
        order = "shuffled" if self.is_shuffled else "in order"
        where = "in state" if self.in_state else "not"
        return f"| {self.loader} | {order} | {where} | {self.loop} |"


def lines(seed: int) -> list[Line]:
    """Return all lines of the table."""
    return [
        Line(loader, is_shuffled, in_state, loop, seed)
        for loader in LOADERS
        for is_shuffled in (False, True)
        for in_state in (False, True)[: 1 + has_state(loader)]
        for loop in LOOPS
    ]


@cache
def _client() -> EmbeddingClient:
    """Return a client of a server of this process, which stays to its end."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    cluster = _LEFT_AT_EXIT.enter_context(EmbeddingCluster.local(1))
    return EmbeddingClient.connect(cluster.addresses)


def results_of(line: Line) -> list[str]:
    """Stop a training at each place, and resume it; return what became of it."""
    whole = None
    if line.loop == "plain":
        result, whole = _result_of(line, 0, between=False)
        if result != "once":
            return [f"WRONG: {result}, not stopped"] * len(STOPS)
    found = []
    for stop, between in STOPS.values():
        result, weights = _result_of(line, stop, between=between)
        is_same = whole is None or weights is None or (weights == whole).all()
        found.append(result if is_same else f"WRONG: {result}, other weights")
    return found


def _result_of(
    line: Line, stop: int, *, between: bool
) -> tuple[str, np.ndarray | None]:
    _client().clear()
    gc.collect()  # loaders, here and in no thread that others wait for
    with tempfile.TemporaryDirectory() as path:
        given = Given(Path(path), NUM_SAMPLES, line.is_shuffled, NUM_PASSES)
        given.write_rows(row_group_size=7)
        try:
            try:
                training = _train(line, given, stop, between=between)
            except StoppedError:
                training = _train(line, given, 0, between=False)
        except ConfigError as exc:
            is_known = "must get the batches of its pass again" in str(exc)
            return f"error: {'other batches' if is_known else str(exc)[:60]}", None
        except PersiaError as exc:
            return f"WRONG: {type(exc).__name__}", None
        except IndexError:  # of datasets, as it loads a state in a worker
            return "error of datasets", None
        counts = training.counts(NUM_PASSES * NUM_SAMPLES)
        return told(counts), training.weights(NUM_SAMPLES)


@contextlib.contextmanager
def _ending_workers(loader: object) -> Iterator[None]:
    """End a loader's workers at the end, before others hold what tells of that."""
    try:
        yield
    finally:
        if isinstance(loader, DataLoader):
            end_iterator(loader)


def _train(line: Line, given: Given, stop: int, *, between: bool) -> Training:
    """Train up to a step, or what is left."""
    training = Training(_client(), line.loop, line.seed)
    loader = LOADERS[line.loader](given)
    state = {"model": training.model, "optimizer": training.optimizer}
    state |= {"data": loader} if line.in_state else {}
    both = _client(), training.sharders
    num_steps = 0
    with (
        _ending_workers(loader),
        recoverable(given.folder / "run", state, *both, interval_s=0) as run,
    ):
        for number in range(NUM_PASSES):
            first = number * NUM_SAMPLES
            batches = (to_batch(batch, first) for batch in run.skip(loader))
            for _ in training.steps(batches):
                run.step()
                num_steps += 1
                if num_steps == stop and not between:
                    run.save()
                    raise StoppedError
            if num_steps == stop and between:
                run.save()
                raise StoppedError
    training.sharders.flush()
    return training
