"""Batches of several requests, predicted together.

A group takes requests until its window is over or it is full, and no longer than the
group before it is predicted. A group that fails is predicted again, one batch at a
time, so that each request gets an answer of its own.
"""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from persia_torchrec import timeouts
from persia_torchrec.errors import RequestTimeoutError
from persia_torchrec.persia.batch import (
    MAX_BATCH_SIZE,
    IDFeature,
    IDTypeFeature,
    NonIDTypeFeature,
    PersiaBatch,
)

Floats = npt.NDArray[np.float32]
Run = Callable[[PersiaBatch], Floats]


class Batching(NamedTuple):
    """Settings of batching.

    Attributes:
        window_s: seconds that the first request of a group waits for others.
        max_samples: of a group; a larger batch is predicted alone.
    """

    window_s: float
    max_samples: int


class _Group:
    """Batches that are predicted together, by the thread of the first one."""

    def __init__(self) -> None:
        self.batches: list[PersiaBatch] = []
        self.num_samples = 0
        self.is_full = threading.Event()
        self.is_done = threading.Event()
        self.answers: list[Floats | Exception] = []


class Batcher:
    """Predicts batches of the same features together. Any thread may call it."""

    def __init__(self, batching: Batching) -> None:
        self._batching = batching
        self._max_samples = min(batching.max_samples, MAX_BATCH_SIZE)
        self._lock = threading.Lock()  # guards what is open, and its batches
        self._open: dict[int, _Group] = {}  # by the model, of whose signature they are
        self._running = threading.Lock()  # of the group that is predicted

    def predict(self, model: object, run: Run, batch: PersiaBatch) -> Floats:
        """Return the predictions of a batch, float32 ``(B, ...)``.

        Args:
            model: those of one model are predicted together.
            run: predicts a batch of one or more requests.
            batch: in the order of the model's signature, and checked.

        Raises:
            RequestTimeoutError: the group's thread gives no answer.
            PersiaError: what ``run`` raises for this batch.
        """
        if batch.batch_size >= self._max_samples:
            return run(batch)
        group, place = self._enter(id(model), batch)
        if place == 0:
            group.is_full.wait(self._batching.window_s)
            with self._running:
                with self._lock:
                    self._leave(id(model), group)
                try:
                    group.answers = _run_together(run, group.batches)
                finally:
                    group.is_done.set()
        elif not group.is_done.wait(timeouts.REQUEST_S):
            raise RequestTimeoutError(
                f"a batch must be predicted within {timeouts.REQUEST_S:g} s",
                server="the model",
            )
        answer = group.answers[place]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _enter(self, key: int, batch: PersiaBatch) -> tuple[_Group, int]:
        """Put a batch into a group; return the group and its place there."""
        with self._lock:
            group = self._open.get(key)
            if (
                group is None
                or group.num_samples + batch.batch_size > self._max_samples
            ):
                if group is not None:
                    group.is_full.set()
                group = self._open[key] = _Group()
            group.batches.append(batch)
            group.num_samples += batch.batch_size
            return group, len(group.batches) - 1

    def _leave(self, key: int, group: _Group) -> None:
        """Let no further batch into a group."""
        if self._open.get(key) is group:
            del self._open[key]


def _run_together(run: Run, batches: Sequence[PersiaBatch]) -> list[Floats | Exception]:
    """Return the predictions of each batch, or what it raises."""
    if len(batches) > 1:
        try:
            output = run(join(batches))
        except Exception:  # noqa: BLE001  # each gets its own
            return [_run_alone(run, batch) for batch in batches]
        ends = np.cumsum([batch.batch_size for batch in batches])
        return list(np.split(output, ends[:-1]))
    return [_run_alone(run, batch) for batch in batches]


def _run_alone(run: Run, batch: PersiaBatch) -> Floats | Exception:
    try:
        return run(batch)
    except Exception as exc:  # noqa: BLE001  # raised in the thread of the request
        return exc


def join(batches: Sequence[PersiaBatch]) -> PersiaBatch:
    """Return the samples of batches of the same features, one batch after the other."""
    id_features = zip(*(batch.id_type_features for batch in batches), strict=True)
    dense = zip(*(batch.non_id_type_features for batch in batches), strict=True)
    return PersiaBatch(
        [_join_ids(parts) for parts in id_features],
        [
            NonIDTypeFeature(np.concatenate([part.data for part in parts]))
            for parts in dense
        ],
        batch_size=sum(batch.batch_size for batch in batches),
        requires_grad=False,
    )


def _join_ids(parts: Sequence[IDFeature]) -> IDFeature:
    ids = np.concatenate([part.ids for part in parts])
    lengths = np.concatenate([part.lengths for part in parts])
    return IDTypeFeature.from_flat(parts[0].name, ids, lengths)
