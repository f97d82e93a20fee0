"""The inputs of a model as flat arrays, and those of several requests as one batch.

A group takes requests until its window is over or it is full, and no longer than the
group before it is predicted. One thread predicts the groups, one after the other; a
request waits for a future, not in a thread. Of a group that a bad batch makes fail,
each batch is predicted alone, so that each request gets an answer of its own. A group
waits for embeddings no longer than its first request would: if they do not answer, that
is the answer of all.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from persia_torchrec import timeouts
from persia_torchrec.arrays import Floats
from persia_torchrec.checkpoint.signature import DenseInput, ModelSignature
from persia_torchrec.errors import (
    BatchError,
    PersiaError,
    RequestTimeoutError,
    ServerError,
)
from persia_torchrec.lookup.bags import MAX_BATCH_SIZE, Bags, JaggedIds, check_bags

Dense = npt.NDArray[np.generic]


class Features(NamedTuple):
    """Features of a request by name, in its order; they fit one another.

    Attributes:
        ids: of each ID feature.
        dense: ``(B, ...)`` each; the second of one name has ``.1`` behind it.
        batch_size: how many samples there are.
    """

    ids: dict[str, Bags]
    dense: dict[str, Dense]
    batch_size: int


class Inputs(NamedTuple):
    """Features of a batch in the order of a model, checked.

    Attributes:
        ids: of the ID features, side by side.
        dense: ``(B, ...)`` each.
        batch_size: how many samples there are.
        signature: of the model; None: they have the order of a request.
    """

    ids: JaggedIds
    dense: tuple[Dense, ...]
    batch_size: int
    signature: ModelSignature | None = None

    @classmethod
    def of(
        cls, features: Features, signature: ModelSignature | None = None
    ) -> "Inputs":
        """Return those of a request, in its order."""
        check_bags(features.ids)
        ids, dense = JaggedIds.of(features.ids), tuple(features.dense.values())
        return cls(ids, dense, features.batch_size, signature)


Run = Callable[[Inputs], Floats]

Waited = Callable[[float], object]
"""Is given the seconds that a request has waited until it is predicted."""


def ignore_wait(_: float) -> None:
    """Do nothing."""


def require_dense(due: DenseInput, data: Dense) -> None:
    """Check dtype and shape of a dense feature, or raise BatchError."""
    if str(data.dtype) != due.dtype or data.shape[1:] != due.shape:
        raise BatchError(
            f"Dense feature {due.name!r} must be {due.dtype} of shape "
            f"{('batch', *due.shape)}. Received: {data.dtype} of {data.shape}."
        )


def join(parts: Sequence[Inputs]) -> Inputs:
    """Return the samples of inputs of the same features, one after the other."""
    first = parts[0].ids
    ids, lengths = [], []
    for key in first:
        for part in parts:
            bags = part.ids[key]
            ids.append(bags.ids)
            lengths.append(bags.lengths)
    sizes = [len(first), len(parts)]
    num_ids = np.array(list(map(len, ids))).reshape(sizes).sum(axis=1)
    num_bags = np.array(list(map(len, lengths))).reshape(sizes).sum(axis=1)
    joined = JaggedIds(
        first,
        {key: k for k, key in enumerate(first)},
        np.concatenate(ids),
        np.concatenate(lengths),
        np.concatenate([[0], num_ids.cumsum()]),
        np.concatenate([[0], num_bags.cumsum()]),
    )
    dense = zip(*(part.dense for part in parts), strict=True)
    return Inputs(
        joined,
        tuple([np.concatenate(of_feature) for of_feature in dense]),
        sum([part.batch_size for part in parts]),
        parts[0].signature,
    )


class Batching(NamedTuple):
    """Settings of batching.

    Attributes:
        window_s: seconds that the first request of a group waits for others.
        max_samples: of a group; a larger batch is predicted alone.
        timeout_s: a request that has waited so long for its turn is not predicted.
    """

    window_s: float
    max_samples: int
    timeout_s: float = timeouts.REQUEST_S


class _Group:
    """Batches that are predicted together."""

    def __init__(self, run: Run, window_s: float) -> None:
        self.run = run
        self.batches: list[Inputs] = []
        self.futures: list[Future[Floats]] = []
        self.waits: list[tuple[float, Waited]] = []  # since when
        self.num_samples = 0
        self.is_full = False
        self.began_s = time.monotonic()
        self.due_s = self.began_s + window_s


class Batcher:
    """Predicts batches of the same features together. Any thread may call it."""

    def __init__(self, batching: Batching) -> None:
        self._batching = batching
        self._max_samples = min(batching.max_samples, MAX_BATCH_SIZE)
        self._changed = threading.Condition()  # guards all that follows
        self._open: dict[int, _Group] = {}  # by the model, of whose signature they are
        self._groups: list[_Group] = []  # that wait, the oldest first
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="batches", daemon=True)
        self._thread.start()

    def submit(
        self, model: object, run: Run, batch: Inputs, waited: Waited = ignore_wait
    ) -> Future[Floats]:
        """Put a batch into a group; the future has its predictions, ``(B, ...)``.

        Args:
            model: those of one model are predicted together.
            run: predicts a batch of one or more requests.
            batch: in the order of the model's signature, and checked.
            waited: is called when it begins to be predicted; it must not raise.
        """
        future: Future[Floats] = Future()
        with self._changed:
            if self._is_closed:
                raise PersiaError("The model is unloaded.")
            group = self._open.get(id(model))
            most = self._max_samples
            if group is None or group.num_samples + batch.batch_size > most:
                if group is not None:
                    group.is_full = True
                group = _Group(run, self._batching.window_s)
                self._groups.append(group)
                self._open[id(model)] = group
            group.batches.append(batch)
            group.futures.append(future)
            group.waits.append((time.monotonic(), waited))
            group.num_samples += batch.batch_size
            if group.num_samples >= most:
                group.is_full = True
            if group.is_full or len(group.batches) == 1:
                self._changed.notify_all()
        return future

    def predict(
        self, model: object, run: Run, batch: Inputs, waited: Waited = ignore_wait
    ) -> Floats:
        """Put a batch into a group, and wait for its predictions.

        Raises:
            RequestTimeoutError: there are none in time.
            PersiaError: what ``run`` raises for this batch.
        """
        with self._in_time() as limit_s:
            return self.submit(model, run, batch, waited).result(limit_s)

    async def predict_async(
        self, model: object, run: Run, batch: Inputs, waited: Waited = ignore_wait
    ) -> Floats:
        """Do :meth:`predict`; no thread waits for it."""
        with self._in_time() as limit_s:
            future = asyncio.wrap_future(self.submit(model, run, batch, waited))
            return await asyncio.wait_for(future, limit_s)

    @contextlib.contextmanager
    def _in_time(self) -> Iterator[float]:
        """Give the most seconds for an answer; say so when they are over."""
        limit_s = self._batching.timeout_s + timeouts.REQUEST_S
        try:
            yield limit_s
        except TimeoutError as exc:
            if isinstance(exc, PersiaError):
                raise
            raise _too_late(limit_s) from exc

    def flush(self) -> None:
        """Let no group wait for others any longer."""
        with self._changed:
            for group in self._groups:
                group.is_full = True
            self._changed.notify_all()

    def close(self) -> None:
        """Predict what waits, and accept no more. May be called twice."""
        self.flush()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while (group := self._next()) is not None:
            now_s = time.monotonic()
            for since_s, waited in group.waits:
                waited(now_s - since_s)
            waited_s = now_s - group.began_s
            answers: Sequence[Floats | Exception]
            if waited_s > self._batching.timeout_s + self._batching.window_s:
                late = _too_late(self._batching.timeout_s)
                answers = [late] * len(group.batches)
            else:
                answers = _run_together(group.run, group.batches)
            for future, answer in zip(group.futures, answers, strict=True):
                if not future.set_running_or_notify_cancel():
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)

    def _next(self) -> _Group | None:
        """Wait for a group that is full or has waited long enough; None at the end."""
        with self._changed:
            while True:
                now_s = time.monotonic()
                for group in self._groups:
                    if group.is_full or group.due_s <= now_s:
                        self._groups.remove(group)
                        for key in [k for k, g in self._open.items() if g is group]:
                            del self._open[key]
                        return group
                if self._is_closed:
                    return None
                wait_s = self._groups[0].due_s - now_s if self._groups else None
                self._changed.wait(wait_s)


def _too_late(timeout_s: float) -> RequestTimeoutError:
    why = f"a batch must be predicted within {timeout_s:g} s"
    return RequestTimeoutError(why, server="the model")


def _run_together(run: Run, batches: Sequence[Inputs]) -> list[Floats | Exception]:
    """Return the predictions of each batch, or what it raises."""
    if len(batches) > 1:
        try:
            output = run(join(batches))
        except ServerError as exc:  # each alone would wait as long again
            return [exc] * len(batches)
        except Exception:  # noqa: BLE001  # each gets its own
            return [_run_alone(run, batch) for batch in batches]
        ends = np.cumsum([batch.batch_size for batch in batches])
        return list(np.split(output, ends[:-1]))
    return [_run_alone(run, batch) for batch in batches]


def _run_alone(run: Run, batch: Inputs) -> Floats | Exception:
    try:
        return run(batch)
    except Exception as exc:  # noqa: BLE001  # raised where the request is answered
        return exc
