"""The models of an inference server, by name, each with its versions.

    load     opens a version beside those there are, predicts for made-up samples, and
             makes it current
    unload   takes a version out; requests in progress end with it, then it is closed

A version is a dense model and the rows of the same checkpoint, so that an answer never
joins two. Its number is that of the checkpoint.
"""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from persia_torchrec import timeouts
from persia_torchrec.arrays import Floats
from persia_torchrec.checkpoint.signature import ModelSignature
from persia_torchrec.errors import BatchError, CheckpointError, PersiaError, ServerError
from persia_torchrec.serving.batching import Features, Inputs
from persia_torchrec.serving.breaker import Breaker, NotAskedError
from persia_torchrec.serving.predictor import Predictor, repeating
from persia_torchrec.serving.statistics import Statistics

logger = logging.getLogger(__name__)


class UnknownModelError(PersiaError):
    """A request names a model or a version that is not loaded."""


class Prediction(NamedTuple):
    """What is predicted for a batch.

    Attributes:
        output: float32 ``(B, ...)``.
        is_degraded: whether it is the default, as embeddings did not answer.
    """

    output: Floats
    is_degraded: bool = False


@dataclass
class Version:
    """One version of a model; ``close`` frees its rows.

    ``small_s`` is the processor time of its last small request.
    """

    predictor: Predictor
    close: Callable[[], None] = lambda: None
    num_users: int = 0
    breaker: Breaker = field(default_factory=Breaker)
    small_s: float = math.inf

    @property
    def is_quick(self) -> bool:
        """Whether other requests may wait for a small one, as it ends soon.

        It waits for no server and no GPU, and the last one took little time.
        """
        reader = self.predictor.reader
        is_here = reader.is_local and reader.device.type == "cpu"
        return is_here and self.small_s < timeouts.MODEL_QUICK_S

    @property
    def number(self) -> str:
        """The number of the checkpoint."""
        return self.predictor.model.version


Open = Callable[[str | None], Version]
"""Opens a version: of the checkpoint of a number, or the latest one for None."""


@dataclass
class ServedModel:
    """One model with its versions. Any thread may call any method.

    Attributes:
        name: in the paths of the protocol.
        open: opens a version; None: requests load none.
        statistics: of all predictions.
        default_answer: what is predicted for each sample while embeddings do not
            answer; None: nothing, the request gets their error.
    """

    name: str
    open: Open | None = None
    statistics: Statistics = field(default_factory=Statistics)
    default_answer: float | None = None
    _versions: dict[str, Version] = field(default_factory=dict)
    _current: str | None = None
    _tell_s: float = 0.0
    _is_draining: bool = False
    _has_started: bool = False

    def __post_init__(self) -> None:
        self.statistics.begin(self.name)
        self._changed = threading.Condition()  # guards all of it
        self._loading = threading.Lock()
        self._asking = threading.Lock()  # of two answers the later one is kept
        self._asked_s, self._health = self._ask_health()
        self._renewing: contextlib.ExitStack | None = None

    def add(self, version: Version) -> None:
        """Make a version the current one, beside the others."""
        with self._changed:
            number = version.number
            previous = self._versions.get(number)
            self._versions[number] = version
            self._current = number
            self._has_started = True
        self._renew_health()
        self._keep_renewing()
        if previous is not None:
            self._drain(previous)
        logger.info("model %s: version %s is current", self.name, number)

    def begin(self, version: Version) -> None:
        """Predict with a version for made-up samples, and make it the current one.

        The first version is current in any case: no other can answer.

        Raises:
            CheckpointError: a later one cannot predict; it is closed.
        """
        path = version.predictor.model.path
        try:
            version.predictor.warm_up()
        except Exception as exc:
            why = f"{path} must predict for made-up samples ({exc})."
            if self._has_started:
                self._drain(version)
                raise CheckpointError(why) from exc
            logger.warning("model %s: %s", self.name, why)
        self.add(version)

    def load(self, number: str | None = None) -> str:
        """Open a version, the latest for None, and make it current; return its number.

        Raises:
            PersiaError: it cannot be opened; the current one stays.
        """
        if self.open is None:
            raise BatchError(
                "Only a model with its own servers can be loaded by a request. "
                "Received: embedding workers, whose rows stay."
            )
        with self._loading:  # two at once would need the memory of two
            version = self.open(number)
            self.begin(version)
            return version.number

    def unload(self, number: str | None = None) -> None:
        """Take a version out, or all; requests in progress end with it."""
        with self._changed:
            numbers = [*self._versions] if number is None else [number]
            leaving = [self._require(n) for n in numbers]
            for n in numbers:
                del self._versions[n]
            if self._current not in self._versions:
                self._current = max(self._versions, key=_order, default=None)
        self._renew_health()
        for version in leaving:
            self._drain(version)
            if version.number not in self.versions():  # nor loaded again meanwhile
                self.statistics.forget(self.name, version.number)
        if numbers:
            logger.info(
                "model %s: version %s is unloaded", self.name, ", ".join(numbers)
            )

    def close(self) -> None:
        """Unload all. May be called twice."""
        if self.versions():
            self.unload()
        if self._renewing is not None:
            self._renewing.close()

    def versions(self) -> list[str]:
        """Return the numbers of all versions, ascending."""
        with self._changed:
            return sorted(self._versions, key=_order)

    @contextlib.contextmanager
    def using(self, number: str | None = None) -> Iterator[Version]:
        """Hold a version, the current one for None, until the end of a block."""
        with self._changed:
            version = self._require(number)
            version.num_users += 1
        try:
            yield version
        finally:
            with self._changed:
                version.num_users -= 1
                self._changed.notify_all()

    def signature(self, number: str | None = None) -> ModelSignature:
        """Return the inputs of a version by name, or raise BatchError if unknown."""
        with self.using(number) as version:
            return require_signature(version)

    def predict(
        self, version: Version, batch: Features | Inputs, *, is_text: bool = False
    ) -> Prediction:
        """Predict with a version that is held; see :meth:`Predictor.predict`."""
        size, predictor = batch.batch_size, version.predictor
        try:
            with (
                self.statistics.timed(self.name, version.number, size),
                version.breaker.asking(),
            ):
                waited = partial(self.statistics.queued, self.name, version.number)
                output = predictor.predict(batch, is_text=is_text, waited=waited)
                return Prediction(output)
        except ServerError as exc:
            return self._default(exc, version, size)

    async def predict_together(
        self, version: Version, batch: Features | Inputs, *, is_text: bool = False
    ) -> Prediction:
        """Predict as :meth:`predict`, with other requests; no thread waits for it."""
        size, predictor = batch.batch_size, version.predictor
        try:
            with (
                self.statistics.timed(self.name, version.number, size),
                version.breaker.asking(),
            ):
                waited = partial(self.statistics.queued, self.name, version.number)
                output = await predictor.predict_together(
                    batch, is_text=is_text, waited=waited
                )
                return Prediction(output)
        except ServerError as exc:
            return self._default(exc, version, size)

    def _default(self, exc: ServerError, version: Version, size: int) -> Prediction:
        """Return the default answer; without one, raise why it would be given."""
        if isinstance(exc, NotAskedError):
            self.statistics.short_circuited.labels(self.name).inc()
        if self.default_answer is None:
            raise exc
        self.statistics.degraded.labels(self.name).inc(size)
        self._tell_degraded(exc)
        signature = version.predictor.model.signature
        shape = (1,) if signature is None else signature.output or ()
        value = np.float32(self.default_answer)
        return Prediction(np.full((size, *shape), value), is_degraded=True)

    def _tell_degraded(self, exc: ServerError) -> None:
        """Log why answers are the default ones, once in a while."""
        with self._changed:
            now_s = time.monotonic()
            is_due = now_s >= self._tell_s
            self._tell_s = now_s + timeouts.MODEL_TELL_S if is_due else self._tell_s
        if is_due:
            logger.warning(
                "model %s answers %g: %s", self.name, self.default_answer, exc
            )

    def rows_age_s(self) -> float | None:
        """Return how old rows that follow a training are, at most; None: unknown."""
        following = self._health.get("following")
        if not isinstance(following, dict):
            return None
        return float(following["delay_s"]) + time.monotonic() - self._asked_s

    def health(self) -> dict[str, object]:
        """Return readiness, model and rows, as they were a moment ago; does not wait.

        A thread of the model's own asks its servers ``timeouts.MODEL_READY_S`` after
        the last answer, from the first version until :meth:`close`.
        """
        if self._is_draining and self._health["ready"]:
            return {**self._health, "ready": False, "error": "The server drains."}
        return self._health

    def drain(self) -> None:
        """Be not ready from now on, and predict all the same."""
        self._is_draining = True

    def _ask_health(self) -> tuple[float, dict[str, object]]:
        """Ask the servers; return when, and what they answer."""
        asked_s = time.monotonic()
        try:
            with self.using() as version:
                health = version.predictor.health()
                health["version"] = version.number
        except UnknownModelError as exc:
            health = {"ready": False, "error": str(exc)}
        return asked_s, health

    def _keep_renewing(self) -> None:
        """Have a thread renew the health, unless there is one."""
        with self._changed:
            if self._renewing is None:
                self._renewing = contextlib.ExitStack()
                renew = repeating(self._renew_health, "health", timeouts.MODEL_READY_S)
                self._renewing.enter_context(renew)

    def _renew_health(self) -> None:
        """Ask the servers, and keep and measure what they answer."""
        with self._asking:
            previous = self._health
            self._asked_s, self._health = self._ask_health()
            health = self._health
        if isinstance(num := health.get("ids_without_row"), int):
            self.statistics.without_row.labels(self.name).set(num)
        following = health.get("following")
        if isinstance(following, dict):
            self.statistics.age.labels(self.name).observe(following["delay_s"])
        of_versions = "version" in previous and "version" in health
        if of_versions and previous["ready"] != health["ready"]:
            what = "ready" if health["ready"] else f"not ready: {health['error']}"
            logger.warning("model %s is %s", self.name, what)

    def require_ready(self) -> None:
        """Raise ServerError unless it is ready."""
        health = self.health()
        if not health["ready"]:
            raise ServerError(str(health["error"]), server=f"model {self.name}")

    def _require(self, number: str | None) -> Version:
        number = self._current if number is None else number
        if number is None or number not in self._versions:
            raise UnknownModelError(
                f"Model {self.name!r} must have this version; it has "
                f"{sorted(self._versions, key=_order) or 'none'}. Received: "
                f"{number if number is not None else 'none that is current'}."
            )
        return self._versions[number]

    def _drain(self, version: Version) -> None:
        """Close a version when the requests in progress have ended."""
        with (
            self._changed,
            timeouts.saying(
                logger, lambda: f"waiting for {version.num_users} requests of a version"
            ),
        ):
            self._changed.wait_for(
                lambda: version.num_users == 0, timeouts.MODEL_DRAIN_S
            )
        version.predictor.close()
        version.close()


class Models:
    """The models of a server, by name. Any thread may call any method but ``add``.

    Attributes:
        statistics: of all models.
    """

    def __init__(self) -> None:
        self.statistics = Statistics()
        self._models: dict[str, ServedModel] = {}

    def add(
        self,
        name: str,
        open_version: Open | None = None,
        *,
        default_answer: float | None = None,
    ) -> ServedModel:
        """Add a model, which has no version yet; see :class:`ServedModel`."""
        model = ServedModel(name, open_version, self.statistics, default_answer)
        self._models[name] = model
        return model

    def __iter__(self) -> Iterator[ServedModel]:
        """Iterate over the models, in the order in which they were added."""
        return iter(self._models.values())

    def __getitem__(self, name: str) -> ServedModel:
        """Return a model, or raise UnknownModelError."""
        model = self._models.get(name)
        if model is None:
            names = " or ".join(map(repr, self._models))
            raise UnknownModelError(
                f"The model must be {names}. Received: {name!r:.100}."
            )
        return model

    def only(self) -> ServedModel:
        """Return the one model, or raise BatchError where there are several."""
        if len(self._models) != 1:
            raise BatchError(
                "A path must name the model, as /predict/MODEL does. Received: none; "
                f"there are {', '.join(map(repr, self._models))}."
            )
        return next(iter(self))

    def health(self) -> dict[str, object]:
        """Return readiness, models and rows; see :func:`join_health`."""
        return join_health({model.name: model.health() for model in self})

    def drain(self) -> None:
        """Be not ready from now on, so that no more clients come, and predict."""
        for model in self:
            model.drain()

    def close(self) -> None:
        """Unload all. May be called twice."""
        for model in self:
            model.close()


def join_health(healths: Mapping[str, dict[str, object]]) -> dict[str, object]:
    """Return the health of a server of that of each model by name.

    It is ready while each model is that has a version, and one has. That of the only
    model is returned as it is.
    """
    if len(healths) == 1:
        return next(iter(healths.values()))
    loaded = {name: one for name, one in healths.items() if "version" in one}
    ready = [bool(one["ready"]) for one in loaded.values()]
    joined: dict[str, object] = {"ready": bool(ready) and all(ready), "models": healths}
    if not joined["ready"]:
        errors = [
            f"model {name}: {one['error']}"
            for name, one in (loaded or healths).items()
            if not one["ready"]
        ]
        joined["error"] = "; ".join(errors)
    return joined


@contextlib.contextmanager
def following_checkpoints(
    model: ServedModel, newest: Callable[[], str | None], poll_s: float = 1.0
) -> Iterator[None]:
    """Load each later checkpoint, rows and dense model together, during a block.

    ``newest`` returns the number of the latest complete one; None if there is none. The
    previous version is unloaded when the new one is current. A version that a request
    has loaded stays until a later checkpoint; a model that was unloaded stays so.
    """
    seen = next(reversed(model.versions()), None)

    def load_newest() -> None:
        nonlocal seen
        number, held = newest(), model.versions()
        if number is None or number == seen or not held:
            return
        if number not in held:
            model.load(number)
            for previous in held:
                model.unload(previous)
        seen = number

    with repeating(load_newest, "version", poll_s):
        yield


def require_signature(version: Version) -> ModelSignature:
    """Return the inputs of a version by name, or raise BatchError if unknown."""
    model = version.predictor.model
    if model.signature is None:
        raise BatchError(
            f"{model.path} must have the names of its inputs, as files of "
            "dump_checkpoint(with_jit_model=True) do. Received: one without. Write the "
            "checkpoint again, or send PersiaBatch.to_bytes() to /predict."
        )
    return model.signature


def _order(number: str) -> tuple[int, str]:
    return int(number) if number.isdigit() else 0, number
