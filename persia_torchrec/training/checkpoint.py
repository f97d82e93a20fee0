"""Checkpoints of both halves: the dense model, and the rows on the servers.

A TorchRec user's dense half is a checkpoint of torch's own, ``DENSE`` below; that of
PERSIA's contexts is a few files of ``torch.save`` and ``torch.jit.save``:

    path/
      checkpoint-00000001/           each takes the next number
        DENSE/  or  dense.pt ...     the dense half
        shard-00000-of-00002.rows    one per server
        manifest.json                written last: the checkpoint is complete
        delta-00000001/              of schedule.py: what has changed since
          DENSE/
          delta.json                 written last; positions in the servers' logs
      dense.pt ...                   of a context: as in the latest complete one

    every trainer   flush: its updates are acknowledged by the servers
    all             wait for each other
    rank 0          makes a new folder; the servers begin to write their rows into it
    every trainer   writes its shards of the dense half (of a context: rank 0, first)
    rank 0          waits for the servers, and writes the manifest last

No trainer trains meanwhile, so that both halves are of the same step. When a trainer or
server fails, all trainers raise, and the previous checkpoint is still the latest; what
was written of the new one is deleted.
"""

import contextlib
import dataclasses
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.optim import Optimizer
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer

from persia_torchrec import env, timeouts
from persia_torchrec.checkpoint import catalog
from persia_torchrec.checkpoint.fitting import has_changed, plan_tables
from persia_torchrec.checkpoint.folder import Folder, require_received
from persia_torchrec.client.checkpoint_client import SavedCheckpoint, Task, tell_job
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.errors import CheckpointError, ConfigError, PersiaError
from persia_torchrec.job import trainer_group
from persia_torchrec.job.member import JobMember
from persia_torchrec.parsing.decoding import decoder_of
from persia_torchrec.sharding.optimizer import keeping_tensors, set_values
from persia_torchrec.sharding.planned import Placeholder
from persia_torchrec.sharding.state_dict import without_rows
from persia_torchrec.sharding.table_control import Sharders, table_controls
from persia_torchrec.training.dense_reader import (
    DenseOnly,
    LoadPlanner,
    SavePlanner,
    reader_of,
    writer_of,
)
from persia_torchrec.training.shared_tables import (
    copy_rows,
    find_parts,
    load_first,
    shared_names,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

Target = nn.Module | Optimizer


@JobMember.pausing()
def save_checkpoint(
    path: str | os.PathLike[str],
    state: dict[str, Any],
    client: EmbeddingClient,
    sharders: Sharders,
    *,
    step: int | None = None,
    keep: int = 0,
    timeout_s: float = timeouts.CHECKPOINT_S,
) -> SavedCheckpoint:
    """Write the dense half and the servers' half as one checkpoint; return it.

    Every trainer of the process group calls it, between two steps: a batch whose rows
    are pulled, and whose gradient is not pushed yet, is in neither half.

    Args:
        path: of a folder that trainers and servers share, made if it is missing, or a
            URL that fsspec knows. Each checkpoint gets a new folder in it.
        state: the dense half, as ``torch.distributed.checkpoint.save`` takes it: what
            has a ``state_dict`` (the ``DistributedModelParallel``, its dense optimizer,
            schedulers, ``sharder.optimizer``), tensors, numbers.
        client: of the servers.
        sharders: what puts tables on the servers: ``remote_sharders(...)``, or the
            sharders one by one.
        step: of the training, kept in the manifest.
        keep: how many of the newest checkpoints in the folder stay, with their deltas.
            When this one is complete, older ones are deleted, and increments that none
            of those that stay needs. 0: all stay.
        timeout_s: seconds that the servers may take.

    Raises:
        CheckpointError: a trainer or a server failed; there is no new checkpoint.
        ConfigError: ``keep`` is negative.
    """
    if keep < 0:
        raise ConfigError(f"keep must be >= 0. Received: {keep}.")

    def begin() -> str:
        # So that deltas do not hold rows again that changed before.
        client.checkpoints.require_free(path)
        client.checkpoints.end_increments(timeout_s=timeout_s)
        return catalog.begin_checkpoint(path).url

    limit_s = timeouts.exchange_s(client.recovery_s, timeout_s)
    flush_all(sharders)
    folder = Folder(at_first(begin, str, limit_s))

    def complete() -> SavedCheckpoint:
        assert servers is not None  # rank 0 does this
        manifest = dataclasses.replace(
            servers.wait(),
            dense=describe_dense(begun, sharders),
            num_batches=num_batches,
            files=catalog.sum_files(folder),
        )
        manifest.write(folder)
        tell_job(folder)
        if keep:
            catalog.delete_older(Folder(path), keep)
            client.checkpoints.prune()
        return SavedCheckpoint.of(folder, manifest)

    servers = None
    with discarding(folder, catalog.MANIFEST):
        if _rank() == 0:
            start = client.checkpoints.start_files
            servers = start(folder, step=step, timeout_s=timeout_s)
        num = client.batches.trained
        num_batches, begun = save_dense_beside(servers, state, folder, num_batches=num)
        return at_first(complete, SavedCheckpoint, limit_s)


def discarding(
    folder: Folder, complete: str
) -> contextlib.AbstractContextManager[None]:
    """Let rank 0 delete what a block has written if it fails, and is not complete.

    Not if a trainer is not heard of (JobError), as it may still write.
    """
    if not is_first():
        return contextlib.nullcontext()
    return catalog.discarding(folder, complete, CheckpointError)


def flush_all(sharders: Sharders) -> None:
    """Let every trainer wait until its updates are applied."""

    def flush() -> None:
        for sharder in table_controls(sharders):
            sharder.flush()

    everywhere(flush)


def save_dense_beside(
    servers: Task[Any] | None,
    state: dict[str, Any],
    folder: Folder,
    *,
    num_batches: int = 0,
) -> tuple[int, list[str]]:
    """Save the dense half while the servers write theirs; stop them if that fails.

    Each trainer saves the ``state`` that it has: one at the end of its data leaves out
    what others have trained since. ``num_batches`` are those that it has trained.

    Returns:
        The largest ``num_batches`` of a trainer, and the names of the optimizers that
        have a state at one.
    """

    def save() -> tuple[int, list[str]]:
        _save_dense(state, folder.child(catalog.DENSE))
        optimizers = {n: v for n, v in state.items() if isinstance(v, Optimizer)}
        with without_rows():
            begun = [n for n, v in optimizers.items() if v.state]
        return num_batches, begun

    try:
        told = from_all(save, tuple[int, list[str]])
    except BaseException:
        if servers is not None:  # the servers must be free for the next attempt
            _give_up(servers, timeouts.SAVE_CANCEL_S)
        raise
    names = dict.fromkeys(name for _, begun in told for name in begun)
    return max(num for num, _ in told), [*names]


def describe_dense(begun: Sequence[str], sharders: Sharders) -> catalog.DenseEntries:
    """Return what a manifest says of the dense half, whose optimizers have begun."""
    return catalog.DenseEntries(tuple(begun), shared_names(table_controls(sharders)))


@JobMember.pausing()
def load_checkpoint(
    path: str | os.PathLike[str],
    state: dict[str, Any],
    client: EmbeddingClient,
    *,
    missing: catalog.Missing = "error",
    on_change: catalog.OnChange = "error",
    rename: Mapping[str, str] | None = None,
    job: str = "",
    timeout_s: float = timeouts.CHECKPOINT_S,
) -> SavedCheckpoint:
    """Load both halves, with any number of trainers and servers.

    Every trainer calls it, before its first batch, when its model is sharded. What the
    servers hold is replaced.

    Args:
        path: that of :func:`save_checkpoint`, for the latest that is complete: a delta,
            or a checkpoint; or the path of one.
        state: as it was saved, by name; what has a ``load_state_dict`` is loaded, other
            values are replaced in the dictionary. Names may be left out. Optimizers
            may be fresh: their state is made first.
        client: of the servers.
        missing: what becomes of tables that the model does not have: "error", "skip"
            leaves them out. Tables that the checkpoint does not have begin again, each
            with a line in the log.
        on_change: what becomes of a table with another dim or optimizer, and of dense
            parameters that are new or have another shape: "error", or they begin again.
            With "reset state" a table keeps its weights, if the dim is the same; with
            "reset table" it does not. Another weight dtype is converted.
        rename: by names of the checkpoint's tables, what the model calls them.
        job: id of the job whose latest checkpoint is meant, where the folder holds
            those of several that have not continued each other.
        timeout_s: seconds that the servers may take.

    Raises:
        CheckpointError: there is no complete checkpoint, it is damaged, or it does not
            fit model or tables. Unless the dense half is at fault, nothing has changed.
    """
    own = tuple(name for name, table in client.tables.items() if table.is_own)
    rules = catalog.LoadRules(missing, on_change, dict(rename or {}), own)

    def load_servers() -> SavedCheckpoint:
        folder = next(catalog.saved_states(path, job=job), None)
        found = catalog.Saved.read(folder or catalog.find_checkpoint(path, job=job))
        _dense_of(found.folder)
        delta = found.delta
        logs = None
        if delta is not None:
            logs = require_received(delta.increments, [found.folder.url])
        parts = find_parts(found, client, rules)
        saved = client.checkpoints.load(
            found.checkpoint.url,
            increments=logs,
            until=None if delta is None else delta.positions,
            rules=load_first(rules, parts),
            timeout_s=timeout_s,
        )
        copy_rows(client, parts)
        if delta is None:
            return saved
        of_delta, step = found.folder.url, delta.step
        num = delta.num_batches
        return dataclasses.replace(saved, path=of_delta, step=step, num_batches=num)

    limit_s = timeouts.exchange_s(client.recovery_s, timeout_s)
    saved = at_first(load_servers, SavedCheckpoint, limit_s)
    client.batches.continue_after(saved.num_batches)
    load_dense(Folder(saved.path), state, resets=on_change != "error")
    return saved


def load_dense(folder: Folder, state: dict[str, Any], *, resets: bool = False) -> None:
    """Load the dense half of a checkpoint only; every trainer calls it.

    With ``resets`` what it lacks, or has in another shape, stays as it is.
    """

    def check() -> tuple[str, ...]:
        begun = _dense_of(folder).begun
        catalog.require_files(folder, f"{catalog.DENSE}/")
        return begun

    begun = at_first(check, tuple[str, ...])
    dense = folder.child(catalog.DENSE)
    everywhere(lambda: _load_dense(state, dense, begun, resets=resets))


def require_rows_stay(
    client: EmbeddingClient, found: catalog.Saved, rules: catalog.LoadRules
) -> None:
    """Reject rows that stay as they are on the servers, if their table has changed.

    With ``on_change="reset table"`` it begins again, with a line.
    """
    url = found.folder.url
    known = {name: of.spec for name, of in client.tables.items() if of.is_own}
    tables = catalog.renamed(found.tables, rules.rename)
    plans, notes = plan_tables(
        url, [t for t in tables if t.name in known], known, rules, replaces=False
    )
    kept = [name for name, plan in plans.items() if plan.has_rows and name in known]
    changed = [n for n in kept if has_changed(plans[n], known[n])]
    if changed:
        raise CheckpointError(
            f'With resume="rows_ahead" tables must be as in {url}. Received: others, '
            f'{changed}, whose rows are not on the servers. resume="exact" takes them '
            'from there; on_change="reset table" begins them again.'
        )
    for note in notes:
        logger.warning("%s: %s", url, note)


def _dense_of(folder: Folder) -> catalog.DenseEntries:
    dense = catalog.Saved.read(folder).dense
    if dense is None:
        raise CheckpointError(
            f"{folder.url} must have both halves, and has that of the servers "
            "only. Load it with client.checkpoints.load."
        )
    return dense


def _save_dense(state: dict[str, Any], folder: Folder) -> None:
    folder.make()
    save = partial(save_state, storage_writer=writer_of(folder))
    _let_torch(save, state, SavePlanner(), folder)


def names_in(folder: Folder) -> list[str]:
    """Return the names of what the dense half of a checkpoint has."""
    _dense_of(folder)
    return list(
        reader_of(folder.child(catalog.DENSE)).read_metadata().state_dict_metadata
    )


def _load_dense(
    state: dict[str, Any], folder: Folder, begun: Iterable[str], *, resets: bool
) -> None:
    for name in begun:
        if isinstance(optimizer := state.get(name), Optimizer):
            _make_state(optimizer)
    reader = reader_of(folder)
    reader.read_metadata()  # of what is wrong with it, torch 2.11 says nothing
    load = partial(state_dict_loader.load, storage_reader=reader)
    with contextlib.ExitStack() as stack:
        for value in state.values():
            if isinstance(value, Optimizer):
                stack.enter_context(keeping_tensors(value))
        planner = LoadPlanner()
        planner.resets = resets
        _let_torch(load, state, planner, folder)


def _let_torch(
    act: Callable[..., object], state: dict[str, Any], planner: DenseOnly, at: Folder
) -> None:
    """Let torch save or load the dense half; raise its errors as ours."""
    how: dict[str, Any] = {"no_dist": not dist.is_initialized()}
    how["process_group"] = trainer_group.exchange_group(timeouts.exchange_s())
    try:
        with without_rows(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            act(state, planner=planner, checkpoint_id=at.url, **how)
    except CheckpointException as exc:  # no Exception, and of all trainers
        raise _own_error(exc, at) from exc


class _OthersFailedError(CheckpointError):
    """This trainer has no failure of its own: torch tells it those of the others."""


def _own_error(exc: CheckpointException, at: Folder) -> CheckpointError:
    """Return why this trainer's part of the dense half failed, the cause first."""
    cause, _ = exc.failures.get(_rank(), (None, None))
    if cause is None:
        return _OthersFailedError(f"Trainers {sorted(exc.failures)} failed.")
    if isinstance(cause, PersiaError):
        what = str(cause)
    elif isinstance(cause, OSError) and cause.strerror:
        what = cause.strerror
    else:  # of torch, whose text may have many lines, and the stack of C++ last
        text = " ".join(str(cause).split())
        what = f"{type(cause).__name__}: {text:.1000}"
    return CheckpointError(f"{what} (the dense half in {at.url})")


def _make_state(optimizer: Optimizer) -> None:
    """Let an optimizer make its state, which is loaded into: by a step of nothing."""
    for inner in _plain_parts(optimizer):
        if not inner.state:
            _step_by_nothing(inner)


def _step_by_nothing(optimizer: Optimizer) -> None:
    groups = optimizer.param_groups
    rates = [group["lr"] for group in groups]
    every = _parameters(optimizer)
    # Placeholders stand for tables on the servers, and get no gradients.
    parameters = [p for p in every if p.requires_grad and _is_dense(p)]
    grads = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in groups:
        group["lr"] = 0.0 * group["lr"]  # a tensor stays one
    optimizer.step()
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad


def copy_states(optimizers: Iterable[Optimizer], is_current: bool) -> None:
    """Copy the states of optimizers from a trainer that trained last to the others.

    Every trainer calls it, and says whether it ``is_current``. Tensors are copied in
    place; settings of groups, such as rates, stay as they are.
    """
    told = from_all(lambda: is_current, bool)
    if all(told) or not any(told):
        return
    inner = [one for optimizer in optimizers for one in _plain_parts(optimizer)]
    source, group = (
        told.index(True),
        trainer_group.exchange_group(timeouts.exchange_s()),
    )
    own = b""
    if _rank() == source:
        own = state_bytes([dict(_states(one)) for one in inner])
    data = io.BytesIO(trainer_group.broadcast(own, source, group))
    if is_current:
        return
    copies = torch.load(data, map_location="cpu", weights_only=True)
    for optimizer, states in zip(inner, copies, strict=True):
        _make_state(optimizer)
        every = _parameters(optimizer)
        for number, state in states.items():
            set_values(optimizer.state[every[number]], state)


def _plain_parts(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield the optimizers of a combined one whose state is the trainers'."""
    if isinstance(optimizer, CombinedOptimizer):
        for _, inner in optimizer.optimizers:
            yield from _plain_parts(inner)
    elif not isinstance(optimizer, FusedOptimizer):
        yield optimizer


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _is_dense(parameter: nn.Parameter) -> bool:
    return not isinstance(parameter, Placeholder) and parameter.numel() > 0


def _states(optimizer: Optimizer) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the state of each parameter that has one, by its number in all groups."""
    for number, parameter in enumerate(_parameters(optimizer)):
        if _is_dense(parameter) and parameter in optimizer.state:
            yield number, optimizer.state[parameter]


def _give_up(task: Task[Any], timeout_s: float) -> None:
    task.cancel()
    with contextlib.suppress(PersiaError, TimeoutError):
        task.wait(timeout_s)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def at_first(
    work: Callable[[], T], kind: Any = None, limit_s: float = timeouts.exchange_s()
) -> T:
    """Let rank 0 do something; every trainer returns its result or raises its error.

    The result travels as JSON, and is a ``kind``. The others wait for ``limit_s``
    seconds at most.
    """
    result: T = everywhere(lambda: work() if _rank() == 0 else None, kind, limit_s)
    return result


def everywhere(
    work: Callable[[], object],
    kind: Any = None,
    limit_s: float = timeouts.exchange_s(),
) -> Any:
    """Do something at every trainer; return rank 0's result, or raise all errors.

    The result of a ``kind`` travels as JSON, without one it does not.
    """
    return decoder_of(kind).decode(_outcomes(work, kind, limit_s)[0])


def from_all(work: Callable[[], T], kind: Any) -> list[T]:
    """Do something at every trainer; return all results by rank, or raise all errors.

    The results travel as JSON, and are each a ``kind``.
    """
    told = _outcomes(work, kind, timeouts.exchange_s())
    return [decoder_of(kind).decode(one) for one in told]


def _outcomes(
    work: Callable[[], object], kind: Any, limit_s: float
) -> list[msgspec.Raw]:
    group = trainer_group.exchange_group(limit_s)
    result, error = None, None
    try:
        result = work()
    except _OthersFailedError:
        error = ""
    except CheckpointError as exc:
        error = str(exc)
    except Exception as exc:  # noqa: BLE001  # raised by every trainer
        error = f"{type(exc).__name__}: {exc}"
    told = msgspec.json.encode((None if kind is None else result, error))
    texts = trainer_group.gather(told, group)
    outcome = tuple[msgspec.Raw, str | None]
    outcomes = [decoder_of(outcome).decode(text) for text in texts]
    errors = {r: error for r, (_, error) in enumerate(outcomes) if error is not None}
    if errors:
        causes = [f"trainer {r}: {error}" for r, error in errors.items() if error]
        raise CheckpointError("; ".join(causes))
    return [result for result, _ in outcomes]


class ContextCheckpoints:
    """Dumps and loads of one trainer's contexts, at most one of each under way.

    The call that waits, or the next one, raises their error. Only rank 0 uses the
    client. ``rules`` are those of loads.
    """

    def __init__(self, client: EmbeddingClient, flush: Callable[[], None]) -> None:
        self._client = client
        self._flush = flush
        self.rules = catalog.LoadRules()
        self._dump: Task[SavedCheckpoint] | None = None
        self._load: Task[SavedCheckpoint] | None = None
        self._is_loading = False

    @JobMember.pausing()
    def dump(self, path: str, files: Mapping[str, bytes], *, blocking: bool) -> None:
        """Write files, and then rows; ranks other than 0 wait for their updates only.

        Unless ``blocking``, the call returns when the files are written.
        """
        for name in files:
            taken = name == catalog.MANIFEST or name.endswith(".rows")
            if not name or "/" in name or taken:
                raise ConfigError(
                    "A file's name must be a plain one, neither "
                    f"{catalog.MANIFEST} nor *.rows. Received: {name!r}."
                )
        self.wait_for_dump()
        self._flush()
        if not is_first():
            return
        self._dump = self._client.checkpoints.start_dump(path, files=files)
        if blocking:
            self.wait_for_dump()

    def wait_for_dump(self) -> None:
        """Wait for the dump under way, if there is one, and raise its error."""
        task, self._dump = self._dump, None
        if task is not None:
            task.wait()

    @JobMember.pausing()
    def load(
        self,
        path: str,
        targets: Mapping[str, Target],
        map_location: str | None = None,
        *,
        blocking: bool,
    ) -> Folder:
        """Load rows, and files into targets; return the folder. All ranks call this."""
        if env.get_world_size() > 1 and not dist.is_initialized():
            raise ConfigError(
                f"The {env.get_world_size()} trainers of a job must load together. "
                "Received: an EmbeddingCtx without a process group. Load within the "
                "TrainCtx, or call torch.distributed.init_process_group before."
            )
        folder = Folder(at_first(lambda: catalog.find_checkpoint(path).url, str))
        num_batches = at_first(lambda: catalog.Manifest.read(folder).num_batches, int)
        states: dict[str, Any] = {}
        reads = ((name, read_state(folder, name, map_location)) for name in targets)

        def apply() -> None:
            for name, target in targets.items():
                apply_state(target, states[name], folder.file_path(name))

        def start() -> None:
            start_load = self._client.checkpoints.start_load
            self._load = start_load(folder.url, rules=self.rules)

        everywhere(lambda: states.update(reads))
        self.wait_for_dump()
        self.wait_for_load()
        everywhere(self._flush)
        self._is_loading = True
        at_first(start)
        self._client.batches.continue_after(num_batches)
        if blocking:
            self.wait_for_load()
        everywhere(apply)
        return folder

    @JobMember.pausing()
    def wait_for_load(self) -> None:
        """Wait for the load under way, if there is one; all ranks call this."""
        if not self._is_loading:
            return
        self._is_loading = False
        task, self._load = self._load, None
        at_first(lambda: task.wait() if task is not None else None)

    def close(self) -> None:
        """Give up what is under way. May be called twice."""
        for task in (self._dump, self._load):
            if task is not None:
                _give_up(task, timeouts.SAVE_CLOSE_S)
        self._dump = self._load = None


def is_first() -> bool:
    """Return whether this trainer writes the files: rank 0, or the only one."""
    return (dist.get_rank() if dist.is_initialized() else env.get_rank()) == 0


def state_bytes(state: object) -> bytes:
    """Return a state dictionary as ``torch.save`` writes it."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def script_bytes(
    model: Target, extra_files: Mapping[str, bytes] | None = None
) -> bytes:
    """Return a model as TorchScript, for ``torch.jit.load``, or raise ConfigError.

    ``extra_files`` are kept in it by name, as ``torch.jit.save`` does.
    """
    buffer = io.BytesIO()
    try:
        with warnings.catch_warnings():
            # torch deprecates TorchScript; PERSIA's file is TorchScript all the same.
            warnings.filterwarnings("ignore", ".*torch.jit.*")
            script = torch.jit.script(model)
            torch.jit.save(script, buffer, _extra_files=dict(extra_files or {}))
    except Exception as exc:  # the compiler raises a class for each kind of mistake
        raise ConfigError(
            "The dense model must be scriptable by torch.jit.script; annotate the "
            "lists of tensors that its forward gets. Received: "
            f"{type(model).__name__} ({exc})."
        ) from exc
    return buffer.getvalue()


def read_state(folder: Folder, name: str, map_location: str | None = None) -> Any:
    """Return what :func:`state_bytes` wrote to a file, on the CPU by default."""
    if folder.file_size(name) is None:
        raise CheckpointError(
            f"{folder.file_path(name)} must exist. Received: {folder.described()}. "
            "A dump of the embeddings alone is for load_embedding."
        )
    data = io.BytesIO(catalog.read_file(folder, name))
    try:
        return torch.load(data, map_location=map_location or "cpu", weights_only=True)
    except Exception as exc:  # what a damaged file makes the reader raise has no list
        raise CheckpointError(
            f"{folder.file_path(name)} must be a file of torch.save. Received: {exc}."
        ) from exc


def apply_state(target: Target, state: Any, path: str) -> None:
    """Load a state dictionary into a model or an optimizer."""
    try:
        with contextlib.ExitStack() as stack:
            if isinstance(target, Optimizer):
                stack.enter_context(keeping_tensors(target))
            target.load_state_dict(state)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise CheckpointError(
            f"{path} must fit the {type(target).__name__}. Received: {exc}."
        ) from exc
