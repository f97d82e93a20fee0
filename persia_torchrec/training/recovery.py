"""Automatic checkpoints of a training, and its resume from the last one.

    step    every trainer counts; rank 0, whose clock decides, tells all now and then
            after how many steps to ask again, or that it is time now. Then all save
            both halves (``checkpoint.py``) and what each trainer has of its own: how
            far its data have come, random numbers, loss scale, schedules
    resume  trainers that are started again load the newest complete checkpoint
    skip    of trained batches; then the trainer's own state is set, random numbers last
    end     what no checkpoint has is saved: when the training ends well, and when the
            job is told to end (``job/member.py``), after the current step. A trainer at
            the end of its data, within ``join``, saves with the others: its own part,
            since what is shared is older there

``exact`` also takes the servers back: rows, optimizer state, settings and steps of the
tables. With ``rows_ahead`` rows stay as they are, with the updates since; the batches
after the checkpoint are trained on them a second time, as PERSIA does. Batches that
were looked up ahead are in no checkpoint: only rows that lookups made.
"""

import contextlib
import itertools
import logging
import time
from collections import ChainMap, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from msgspec import structs
from torch import nn
from torch.optim import Optimizer

from persia_torchrec import env, timeouts
from persia_torchrec.checkpoint import catalog
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.client.checkpoint_client import tell_job
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.datasets.dataset import RowDataset
from persia_torchrec.errors import CheckpointError, ConfigError
from persia_torchrec.job.member import JobMember
from persia_torchrec.job.saves import Saves
from persia_torchrec.parsing.settings import present_name
from persia_torchrec.sharding.optimizer import restore_groups
from persia_torchrec.sharding.state_dict import without_rows
from persia_torchrec.sharding.table_control import Sharders, table_controls
from persia_torchrec.sharding.trainer_metrics import TrainerMetrics
from persia_torchrec.training.checkpoint import (
    at_first,
    copy_states,
    from_all,
    is_first,
    load_checkpoint,
    load_dense,
    require_rows_stay,
    save_checkpoint,
    state_bytes,
)
from persia_torchrec.training.data_pass import (
    DataPass,
    NumberedBatches,
    has_position,
)
from persia_torchrec.training.data_state import (
    Buffers,
    Generator,
    num_trainers_of,
    random_state,
    require_same_data,
    require_savable,
    set_generator,
    set_random_state,
    state_of_data,
    state_of_generator,
    unpack,
)
from persia_torchrec.training.loader_workers import (
    WorkerDeaths,
    is_of_worker,
    let_workers_outlive_signals,
    restart_stateful_workers,
)
from persia_torchrec.training.schedule import (
    CheckpointClock,
    RecoveryConfig,
    save_delta,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Recovery:
    """Saves a training from time to time, and resumes it; see the head of this file.

    ``state`` has all that a training is made of, by name: modules and optimizers are
    saved once for all trainers, unless they differ (``is_replicated`` is False); of
    anything else each trainer saves its own, by ``state_dict`` if it has one. All
    trainers call each method together, on the thread that trains.

    Attributes:
        resumed_from: path of the checkpoint, if the training was resumed.
        num_steps: that are trained.
        num_batches: that are trained of the current pass of the data.
        last_numbers: of the batches that came from data loaders: the last of each.
    """

    def __init__(
        self,
        config: RecoveryConfig,
        client: EmbeddingClient,
        sharders: Sharders,
        state: dict[str, Any],
        *,
        is_replicated: bool = True,
    ) -> None:
        self._config = config
        self._client = client
        self._sharders = table_controls(sharders)
        self._state = state
        self._is_replicated = is_replicated
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._num_trainers = dist.get_world_size() if dist.is_initialized() else 1
        self._key = f"trainer {self._rank}"
        self._saved: dict[str, Any] | None = None  # of this trainer, to continue from
        self._tables: dict[str, Any] = {}  # their settings then
        self.num_steps = self._num_passes = 0
        self._random = self._random_state()  # at the beginning of the pass
        self._is_checked = self._has_warned = False
        self._is_behind_resume = False  # the next pass is the first after that
        self.clock = CheckpointClock(
            config.interval_s,
            save_steps=config.save_steps,
            delta_interval_s=config.delta_interval_s,
            must_end=_must_end,
            must_save=self._must_save,
        )
        self.clock.save_ended = self._save_ended
        self.clock.catch_up = self._catch_up
        self._saves = Saves(step=0)  # what this job knows of them
        self._deaths = WorkerDeaths()
        self._num_sent = 0  # batches whose gradients were sent by the last step
        self._may_continue = False  # a checkpoint, by a delta
        self._release: Callable[[], None] = lambda: None  # the folder
        self._require_folder: Callable[[], None] = lambda: None  # of rank 0
        self._num_saved = 0  # steps that a checkpoint has
        self._has_ended = False  # its data, while other trainers continue
        self.resumed_from: str | None = None
        self.num_batches = 0
        self._pass: DataPass | None = None  # the current one
        # What is left to do with the data of a pass that had ended before a resume.
        self._finish: Callable[[], object] = lambda: None
        self._num_epochs = 0  # of run.epochs; 0: it was not called
        self._epoch: int | None = None
        self._num_passes_before = 0  # the epoch
        self._loaded: set[str] = set()  # data in ``state``, when the block was entered
        self.last_numbers: dict[int, int] = {}
        # Of batches of data loaders that are handed out, and not trained.
        self._taken = deque[tuple[int, int]]()

    def begin_generation(self) -> None:
        """Have the servers reject what trainers of an earlier start still send."""
        client, is_restart = self._client, env.num_group_restarts() > 0
        generation = at_first(lambda: client.generation + is_restart, int)
        client.begin_generation(generation)
        for sharder in self._sharders:
            for pipeline, _ in sharder.remote_tables.pipelines:
                pipeline.set_generation(generation)

    def resume(self, *, is_restart: bool) -> None:
        """Load the newest checkpoint that can be loaded; before the first batch.

        A restart without one starts again without rows, or with ``rows_ahead``.
        """
        self._resume(is_restart=is_restart)
        self._num_sent = self._client.batches.trained
        self._tell_saves(step=self._num_trained, trained=self._num_trained)

    def _resume(self, *, is_restart: bool) -> None:
        is_restart = at_first(lambda: is_restart, bool)  # one of others may join late
        require_savable(self._split()[1])
        require_same_data(self._state)
        if self._config.saves and (why := at_first(self._own_folder, str)):
            raise ConfigError(why)  # which no restart mends
        if self._config.delta_interval_s:
            self._require_increments()
        own = self._client.checkpoints.job
        run, is_exact = Folder(self._config.folder), self._config.resume == "exact"
        found = at_first(
            lambda: [f.url for f in catalog.saved_states(run.url, own=own)], list[str]
        )
        for path in found:
            try:
                num_left_out = self._load(Folder(path), is_exact=is_exact)
            except CheckpointError as exc:
                if path == found[-1]:
                    raise
                logger.warning("falling back to the previous checkpoint: %s", exc)
            else:
                self.resumed_from = path
                self._may_continue = True
                how: str = self._config.resume
                if num_left_out:
                    how = f"without {num_left_out} rows, for which was no room"
                logger.info("training resumes from %s (%s)", path, how)
                return
        if is_restart and is_exact:
            at_first(self._client.clear)
        if is_restart:
            rows = "all rows were dropped" if is_exact else "rows stay as they are"
            logger.warning("training starts again without a checkpoint: %s", rows)

    def _require_increments(self) -> None:
        def are_written() -> bool:
            counters = self._client.counters()
            return all("increments_waiting" in of_server for of_server in counters)

        if not at_first(are_written, bool):
            raise ConfigError(
                "Deltas need servers that write increments. Received: an interval of "
                f"{self._config.delta_interval_s:g} s, and servers without "
                "increments_dir. Give them one, a job by --increments_dir of its "
                "component, or leave the deltas out."
            )

    def skip(self, batches: Iterable[T], dataset: object = None) -> Iterator[T]:
        """Return the batches of a pass of the data that were not trained before.

        ``dataset`` is where they come from, if they do not say it.
        """
        self._num_passes += 1
        if self._pass is not None and self._pass.is_over and self._pass.num_ahead:
            logger.warning(
                "pass %d of the data begins, and %d batches of the pass before are not "
                "trained: a checkpoint from here on does not have them, and counts "
                "them as this pass's. Give a train pipeline an iterator for each "
                "pass, and call run.step() for each batch",
                self._num_passes,
                self._pass.num_ahead,
            )
        self._finish()
        self._finish = lambda: None
        self._prepare_workers(batches)
        saved = self._saved
        if saved is not None and self._is_trained(saved):
            if dataset is None and not self._num_epochs:
                logger.info(
                    "pass %d of the data was trained before the resume: it has no "
                    "batches now. for epoch in run.epochs(n) begins at the epoch that "
                    "is not over",
                    self._num_passes,
                )
            # A generator expression of the next pass begins to read when it is made.
            self._set_own(saved, set(saved.get("pass", {}).get("names", ())))
            return iter(())
        self._saved = None
        data = {n: v for n, v in self._split()[1].items() if has_position(v)}
        hidden, generators = (self._state, self), self._generators()
        self._pass = current = DataPass(batches, data, hidden, generators.values())
        if current.unsaved and self._config.saves and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a %s shuffles by a random generator that is not in state: a resume in "
                "a later pass gets another order, which is an error. Put the generator "
                "into state, or the loader if it continues by itself",
                current.unsaved[0],
            )
        if saved is not None:
            self._restore(saved, current)
            current.set_epochs(saved)
        if saved is None or self._num_passes > saved["num_passes"]:
            if saved is not None:
                set_random_state(saved["random"], self._generators())
            self.num_batches = 0
            # A stream continues: what earlier passes had of it is trained.
            numbered = batches if isinstance(batches, NumberedBatches) else dataset
            self.last_numbers = dict(getattr(numbered, "handed", {}))
            is_resumed, self._is_behind_resume = self._is_behind_resume, False
            return current.begin(self._note_random, is_resumed=is_resumed)
        return self._resume_pass(batches, saved)

    def _prepare_workers(self, batches: object) -> None:
        """Prepare the workers of loaders for a pass: see ``loader_workers.py``."""
        if JobMember.current is not None:
            for one in (batches, *self._state.values()):
                let_workers_outlive_signals(one)
        for one in self._state.values():
            restart_stateful_workers(one)

    def skip_ahead(self, batches: Iterable[T], dataset: object) -> Iterator[T]:
        """Do as ``skip``, for batches that another thread takes ahead of training."""
        rest, current = self.skip(batches, dataset), self._pass

        def taken() -> Iterator[T]:
            for batch in rest:
                if current is not None:
                    current.take(batch)
                yield batch

        return taken()

    def begin_epochs(self, num: int) -> int:
        """Return the first epoch that is not over; the loop is over ``num`` of them."""
        data = [v for v in self._state.values() if isinstance(v, RowDataset)]
        told = f"{num} epochs" if num < 1 else ""
        if self._num_epochs:
            told = "a second call"
        elif any(one.is_queued for one in data):
            told = "a dataset with a WorkQueue in state"
        if told:
            raise ConfigError(
                "run.epochs(n) must be called once, with n >= 1, and without a "
                f"WorkQueue, whose pass has all its epochs. Received: {told}."
            )
        self._num_epochs = num
        saved = self._saved
        if saved is None:
            return 0
        epoch: int | None = saved.get("epoch")
        if epoch is None:  # of a script that counts them by itself, one pass each
            epoch = max(saved["num_passes"] - 1, 0)
            self._num_passes = epoch
        else:
            self._num_passes = saved["num_passes_before"]
        return epoch

    def begin_epoch(self, epoch: int) -> None:
        """Note that the epochs before one are over, with what stands behind a pass."""
        if self._pass is not None:
            self._pass.leave()
        self._epoch, self._num_passes_before = epoch, self._num_passes

    @property
    def num_epochs_left(self) -> int:
        """Epochs after the current one, if they are known."""
        return max(self._num_epochs - 1 - (self._epoch or 0), 0)

    def _is_trained(self, saved: Mapping[str, Any]) -> bool:
        """Return whether a checkpoint has all of the current pass."""
        is_left = saved.get("pass", {}).get("is_left", False)
        return bool(self._num_passes < saved["num_passes"] + is_left)

    def _resume_pass(
        self, batches: Iterable[T], saved: Mapping[str, Any]
    ) -> Iterator[T]:
        current = self._pass
        assert current is not None
        self._random, self._is_behind_resume = saved["random_at_pass"], True
        self.num_batches, self.last_numbers = saved["num_batches"], saved["last"]
        if isinstance(batches, NumberedBatches):
            batches.leave_out(self.last_numbers)

        def set_random() -> None:
            set_random_state(self._random, self._generators())

        # A queue, data loaders and streams say by themselves what is left for whom.
        says_itself = isinstance(batches, NumberedBatches | Iterator)
        if saved.get("has_ended") and not (says_itself or _is_queued(batches)):
            return self._end_pass(batches, saved, set_random)
        rest = current.resume(saved, set_random, self._report_others)
        set_random_state(saved["random"], self._generators())
        logger.info(
            "pass %d of the data continues after %d batches%s",
            self._num_passes,
            self.num_batches,
            current.how,
        )
        return rest

    def _end_pass(
        self,
        batches: Iterable[T],
        saved: Mapping[str, Any],
        set_random: Callable[[], None],
    ) -> Iterator[T]:
        """Leave out the rest of a pass, which had ended at this trainer alone."""
        current = self._pass
        assert current is not None
        if isinstance(batches, RowDataset):
            current.stand_at(self.num_batches)
            self._finish = lambda: batches.set_epoch(batches.epoch + 1)
        elif current.names:  # its state is that of the place where it has ended
            rest = current.resume(saved, set_random, self._report_others)
            self._finish = lambda: deque(rest, maxlen=0)
        set_random_state(saved["random"], self._generators())
        logger.info(
            "pass %d of the data had ended at trainer %d after %d",
            self._num_passes,
            self._rank,
            self.num_batches,
        )
        return iter(())

    def _report_others(self, loader: str, what: str) -> None:
        """Say that a pass has other batches than before the resume, or raise."""
        told = (
            "A resumed training must get the batches of its pass again. Received: of "
            f"{loader}, in pass {self._num_passes}, {what}."
        )
        if self._config.on_other_batches == "error":
            raise ConfigError(
                f"{told} Put the loader's random generator, or a loader that continues "
                "by itself (a StatefulDataLoader, a dataset of this package), into "
                "state, of a TrainCtx by register_state. With "
                'on_other_batches="continue" of recoverable or TrainCtx it trains on: '
                "then some samples of this pass are trained twice, and others not."
            )
        TrainerMetrics.num_other_passes += 1
        logger.warning("%s Some of its samples are trained twice, others not.", told)

    def _generators(self) -> dict[str, Generator]:
        own = self._split()[1]
        return {n: value for n, value in own.items() if isinstance(value, Generator)}

    def _note_random(self) -> None:
        self._random = self._random_state()

    def _random_state(self) -> dict[str, Any]:
        return random_state(self._generators())

    def count(self, batches: Iterator[T]) -> Iterator[T]:
        """Count the batches of a pass when they are handed out, to be trained next."""
        for batch in self.watch(batches):
            self.num_batches += 1
            if self._pass is not None:
                self._pass.count(1)
            loader = getattr(batch, "loader", None)
            batch_id = getattr(batch, "batch_id", None)
            if loader is not None and batch_id is not None:
                self.last_numbers[loader] = batch_id
            yield batch

    def watch(self, batches: Iterator[T]) -> Iterator[T]:
        """Return batches; in a job the death of a worker is raised between steps."""
        return batches if JobMember.current is None else self._deaths.watch(batches)

    def take(self, batch: object) -> None:
        """Note a batch that is handed out, to be trained behind those before it."""
        if (loader := getattr(batch, "loader", None)) is not None:
            self._taken.append((loader, getattr(batch, "batch_id", 0)))
        if self._pass is not None:
            self._pass.take(batch)

    def end_pass(self) -> None:
        """Note that the last batch of the pass is handed out."""
        if self._pass is not None:
            self._pass.is_over = True

    def count_trained(self, num_batches: int) -> None:
        """Count the batches of a step."""
        self.num_batches += num_batches
        if self._pass is not None:
            self._pass.count(num_batches)
        for _ in range(min(num_batches, len(self._taken))):
            loader, batch_id = self._taken.popleft()
            self.last_numbers[loader] = batch_id

    def step(self, *, may_save: bool = True) -> None:
        """Count a training step, and save a checkpoint if it is time.

        It is if the job is told to end: then the trainer ends, by SystemExit.
        """
        self.num_steps += 1
        self._num_sent = self._client.batches.trained
        if may_save and self._config.saves and self.clock.is_time():
            self._save_in_time()
        if JobMember.current is not None:
            self._deaths.end_step()

    def _save_ended(self) -> None:
        """Save with trainers that train on, at the end of this one's data."""
        self._has_ended = True
        try:
            self._save_in_time()
        finally:
            self._has_ended = False

    def _catch_up(self, is_current: bool) -> None:
        """Take the state of optimizers of a trainer that trained last."""
        shared = [*self._split()[0].values()]
        copy_states([v for v in shared if isinstance(v, Optimizer)], is_current)

    def _save_in_time(self) -> None:
        if self.clock.is_last:
            self._save_last()
            return
        began_s = time.monotonic()
        is_delta = at_first(lambda: self.clock.is_delta, bool) and self._may_continue
        if not self._try_to_save(is_delta=is_delta):
            self._may_continue &= not is_delta  # a whole one is next
        self.clock.restart(time.monotonic() - began_s, was_delta=is_delta)

    def _save_last(self) -> None:
        """Save, and end as the job is told to."""
        member = JobMember.current
        if member is not None:
            member.report_last_step()
        if self._has_news():
            self._tell_saves(trained=self._num_trained)
            self._try_to_save(is_delta=False)
        if member is not None:
            member.end_as_told()

    def _try_to_save(self, *, is_delta: bool) -> bool:
        try:
            self._save_and_tell(is_delta=is_delta)
        except CheckpointError as exc:
            if is_first():
                told = "%s; there is no automatic checkpoint, and the last one stays"
                logger.warning(told, str(exc).removesuffix("."))
            return False
        return True

    def _end_if_told(self, exc: Exception) -> None:
        """Save the last step where the data have ended first, as the job is told to.

        A signal to all processes also reaches what feeds this trainer.
        """
        member = JobMember.current if self._config.saves else None
        if member is None or not member.learns_to_end(is_likely=is_of_worker(exc)):
            return
        is_whole = self._client.batches.trained == self._num_sent
        steps = from_all(lambda: self._num_trained if is_whole else -1, int)
        if {*steps} == {self._num_trained}:
            logger.info("the data have ended with the job: %s", exc)
            self._save_last()
            return
        logger.warning(
            "no last checkpoint; the previous one stays: the data have ended within a "
            "step, or trainers are at several ones: %s",
            steps,
        )

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Save what is trained in the block, if it ends well or the job is told to end.

        Raises:
            CheckpointError: the last checkpoint failed.
        """
        member = JobMember.current if self._config.saves else None
        if member is not None:
            member.saves_at_end = True
        try:
            try:
                yield
            except Exception as exc:
                self._end_if_told(exc)
                raise
            if self._config.saves and self._has_news():
                self._save_and_tell(is_delta=False)
        finally:
            self._deaths.close()
            if member is not None:
                member.saves_at_end = False
            self._release()

    def _own_folder(self) -> str:
        """Become the writer of the folder; return why that is not possible, or ""."""
        try:
            folder = self._client.checkpoints.own(self._config.folder)
        except ConfigError as exc:
            return str(exc)
        self._require_folder, self._release = folder.require, folder.release
        return ""

    def _has_news(self) -> bool:
        """Return whether a trainer has steps that no checkpoint has; all call it."""
        return any(from_all(lambda: self.num_steps > self._num_saved, bool))

    @property
    def _num_trained(self) -> int:
        """Steps of the training, those of other trainers included."""
        return max(self.num_steps, self.clock.num_trained)

    @contextlib.contextmanager
    def joinable(self) -> Iterator[None]:
        """Let trainers at the end of their data take part, within ``join(model)``."""
        tables = [sharder.remote_tables for sharder in self._sharders]
        for of_sharder in tables if self._config.saves else ():
            of_sharder.clock = self.clock
            self.clock.timeout_s = timeouts.exchange_s(self._client.recovery_s)
            if of_sharder.agreement is not None:
                self.clock.trainers = of_sharder.agreement.trainers
        try:
            yield
        finally:
            for of_sharder in tables:
                of_sharder.clock = None

    def save(self) -> None:
        """Save a checkpoint now; CheckpointError if a trainer or a server failed."""
        self._save_and_tell(is_delta=False)

    def _must_save(self) -> bool:
        """Return whether rank 0 is asked to save, by ``persia-torchrec scale``."""
        member = JobMember.current
        return member is not None and member.save_request != self._saves.request

    def _tell_saves(self, **changes: Any) -> None:
        """Make known in the job how the saves go."""
        self._saves = structs.replace(self._saves, **changes)
        member = JobMember.current
        if member is not None and self._config.saves and is_first():
            member.tell_saves(self._saves)

    def _save_and_tell(self, *, is_delta: bool) -> None:
        member, trained = JobMember.current, self._num_trained
        request = self._saves.request
        if member is not None and not is_delta:
            request = member.save_request
        try:
            self._save(is_delta=is_delta)
        except CheckpointError as exc:
            lines = str(exc).splitlines() or [type(exc).__name__]
            num, cause = self._saves.num_failed + 1, lines[0]
            self._tell_saves(
                trained=trained, num_failed=num, cause=cause, request=request
            )
            raise
        self._tell_saves(
            step=trained, trained=trained, num_failed=0, cause="", request=request
        )

    def _save(self, *, is_delta: bool) -> None:
        began_s = time.monotonic()
        step = max(from_all(self._begin_save, int))
        shared, own = self._parts()
        if not self._is_checked:  # at the first time, not when it is needed
            unpack(own)
            self._is_checked = True
        run = Folder(self._config.folder)
        # What is shared is older here than at those that train on.
        state = {**({} if self._has_ended else shared), self._key: own}
        both = self._client, self._sharders
        if is_delta:
            saved = save_delta(run.url, state, *both, step=step)
        else:
            keep = self._config.keep
            saved = save_checkpoint(run.url, state, *both, step=step, keep=keep)
            self._may_continue = True
        self._num_saved = self.num_steps
        if is_first():
            took = time.monotonic() - began_s
            logger.info("automatic checkpoint %s in %.1f s", saved.path, took)

    def _begin_save(self) -> int:
        """Require that the folder is still this run's; return how many steps it has."""
        self._require_folder()
        return self._num_trained

    def _parts(self) -> tuple[dict[str, Any], bytes]:
        """Return what is saved once for all trainers, and what is this one's own."""
        shared, own = self._split()
        state = {
            "num_steps": self.num_steps,
            "num_passes": self._num_passes,
            "epoch": self._epoch,
            "num_passes_before": self._num_passes_before,
            "num_batches": self.num_batches,
            "num_numbered": self._client.batches.trained,
            "has_ended": self._has_ended,
            "last": self.last_numbers,
            "pass": self._pass.saved() if self._pass is not None else {},
            "random": self._random_state(),
            "random_at_pass": self._random,
            "groups": {name: _groups(value) for name, value in shared.items()},
            "rates": dict(ChainMap(*(s.rates() for s in self._sharders))),
            "own": {name: self._state_of(value) for name, value in own.items()},
        }
        return shared, state_bytes(state)

    def _state_of(self, value: Any) -> Any:
        """Return the state of this trainer's own value: of data, of what is trained."""
        if self._pass is not None and self._pass.reads(value):
            return self._pass.state_of(value)
        if isinstance(value, RowDataset):
            return state_of_data(value, None)
        if isinstance(value, Generator):
            return state_of_generator(value)
        with without_rows():
            return value.state_dict() if hasattr(value, "state_dict") else value

    def _split(self) -> tuple[dict[str, Any], dict[str, Any]]:
        kinds = nn.Module | Optimizer
        shared = {
            name: value
            for name, value in self._state.items()
            if self._is_replicated and isinstance(value, kinds)
        }
        own = {n: value for n, value in self._state.items() if n not in shared}
        resets = self._config.rules.on_change != "error"
        for name, value in shared.items():
            if isinstance(value, nn.Module):
                own[f"buffers of {name}"] = Buffers(value, resets=resets)
        return shared, own

    def _load(self, folder: Folder, *, is_exact: bool) -> int:
        """Load a checkpoint; return how many rows did not fit."""
        num_left_out, rules = 0, self._config.rules
        found = catalog.Saved.read(folder)
        shared, own = self._split()
        num_saved, num_now = num_trainers_of(folder), self._num_trainers
        key = f"trainer {self._rank % num_saved}"
        state = {**shared, key: b""}
        left_out = range(num_now, num_saved) if is_first() else ()
        state |= {f"trainer {rank}": b"" for rank in left_out}
        if is_exact:
            loaded = load_checkpoint(
                folder.url,
                state,
                self._client,
                missing=rules.missing,
                on_change=rules.on_change,
                rename=rules.rename,
            )
            num_left_out = loaded.num_left_out
        else:
            at_first(lambda: require_rows_stay(self._client, found, rules))
            load_dense(folder, state, resets=rules.on_change != "error")
        self._saved = saved = unpack(state[key])
        left = {rank: self._describe(state[f"trainer {rank}"]) for rank in left_out}
        self._require_divisible(num_saved, saved)
        if told := [f"of trainer {rank} {what}" for rank, what in left.items() if what]:
            logger.warning(
                "trainers that continue: %d, of %d that have saved. Left out: %s",
                num_now,
                num_saved,
                "; ".join(told),
            )
        self._set_own(saved)
        self._loaded = {n for n in saved["own"] if has_position(own.get(n))}
        self.num_steps = self._num_saved = saved["num_steps"]
        self.clock.num_trained = max(found.step or 0, self.num_steps)
        self.last_numbers = saved["last"]
        num_batches = saved.get("num_numbered", found.num_batches)
        self._client.batches.continue_after(num_batches)
        self._client.checkpoints.note_continued(found.manifest)
        if is_first():
            tell_job(found.checkpoint)
        tables = catalog.renamed(found.tables, rules.rename)
        self._tables = {table.name: table.spec for table in tables}
        return num_left_out

    def _describe(self, data: bytes) -> str:
        """Return what a trainer has saved that no other one continues."""
        saved, queued = unpack(data), self._queued()
        names = [
            name
            for name in saved["own"]
            if name not in queued and not name.startswith("buffers of ")
        ]
        told = [", ".join(map(repr, names))] if names else []
        if _has_position(saved) and not queued:
            told.append(
                "the position after {} batches of pass {}".format(
                    saved["num_batches"], saved["num_passes"]
                )
            )
        return ", ".join(told)

    def _require_divisible(self, num_saved: int, saved: dict[str, Any]) -> None:
        """Require that more trainers than have saved can divide what is left."""
        cannot = [
            name
            for name, value in self._split()[1].items()
            if has_position(value) and name not in self._queued()
        ]
        if _has_position(saved) and not self._queued():
            cannot.insert(0, "the position in the data")
        of_all = itertools.chain(*from_all(lambda: cannot, list[str]))
        told = dict.fromkeys(of_all)
        if told and num_saved < self._num_trainers:
            raise ConfigError(
                f"A training that {num_saved} trainers have saved must continue with "
                f"as many, or fewer: {', '.join(told)} cannot be divided among more. "
                f"Received: {self._num_trainers} trainers. Start {num_saved}, or let "
                "trainers take their data from a WorkQueue."
            )

    def _queued(self) -> set[str]:
        """Return the names of data that trainers take from a queue."""
        return {name for name, value in self._state.items() if _is_queued(value)}

    def _restore(self, saved: dict[str, Any], current: DataPass) -> None:
        """Set the own state again, and rates and settings that the script changed.

        Data that something has begun to read stay as they were loaded at first.
        """
        again = set() if current.is_begun else set(current.names)
        names = saved["own"].keys() - (self._loaded - again)
        if lacking := self._set_own(saved, names):
            raise ConfigError(
                "All state must be passed to recoverable() before the first batch. "
                f"Received: a checkpoint that also has {lacking}."
            )
        shared, _ = self._split()
        for name, groups in saved["groups"].items():
            restore_groups([*shared[name].param_groups] if groups else [], groups)
        for sharder in self._sharders:
            sharder.restore(self._tables, saved["rates"], timeouts.RESTORE_SETTINGS_S)

    def _set_own(
        self, saved: dict[str, Any], names: Collection[str] | None = None
    ) -> list[str]:
        """Set what is this trainer's own; return the names that the script lacks."""
        _, own = self._split()
        with without_rows():
            for name, value in saved["own"].items():
                current = own.get(name)
                if names is not None and name not in names:
                    continue
                if isinstance(current, Generator):
                    set_generator(current, value)
                elif current is not None and hasattr(current, "load_state_dict"):
                    if value is not None:  # data whose next pass begins by itself
                        current.load_state_dict(value)
                elif name in own:
                    self._state[name] = value
        return sorted(saved["own"].keys() - own.keys())


def _has_position(saved: Mapping[str, Any]) -> bool:
    """Return whether a trainer had trained a part of the pass in which it saved."""
    is_left = saved.get("pass", {}).get("is_left", False)
    return bool(saved["num_batches"]) and not is_left


def _is_queued(data: object) -> bool:
    return isinstance(data, RowDataset) and data.is_queued


def _must_end() -> bool:
    """Return whether this trainer must save, as its job is told to end."""
    return JobMember.current is not None and JobMember.current.is_ending


def folder_of_job(job_id: str) -> str:
    """Return the folder of a job's checkpoints, in that of the job."""
    name, previous = env.RUN_DIR
    if env.text(name) is None and env.text(previous) is not None:
        present_name(previous, name)
    own = Folder(env.checkpoint_dir()).file_path(job_id.replace("/", "_"))
    return catalog.checkpoints_of_run(Folder(env.run_dir() or own)).url


def _groups(value: Any) -> list[dict[str, Any]]:
    """Return the settings of an optimizer's groups, which schedules change."""
    groups = value.param_groups if isinstance(value, Optimizer) else []
    return [{k: v for k, v in group.items() if k != "params"} for group in groups]
