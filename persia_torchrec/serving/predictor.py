"""From a batch to predictions: look embeddings up, run the dense model on them."""

import contextlib
import dataclasses
import io
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.fx import GraphModule

from persia_torchrec import timeouts
from persia_torchrec.arrays import Floats
from persia_torchrec.checkpoint.catalog import (
    complete_checkpoints,
    find_checkpoint,
    read_file,
)
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.signature import (
    EXTRA_FILE,
    SERVED_MODEL,
    DenseInput,
    ModelSignature,
)
from persia_torchrec.device.transfer import dense_tensor
from persia_torchrec.errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    PersiaError,
    without_secrets,
)
from persia_torchrec.lookup.bags import Bags, JaggedIds
from persia_torchrec.serving.batching import (
    Batcher,
    Batching,
    Dense,
    Features,
    Inputs,
    Waited,
    ignore_wait,
    require_dense,
)
from persia_torchrec.serving.embeddings import RowReader

if TYPE_CHECKING:  # it needs TorchRec, which PERSIA's models do not
    from persia_torchrec.sharding.dense_half import CollectionDescription

logger = logging.getLogger(__name__)


SCRIPT_MODEL = "jit_dense.pt"
"""Name of the file of a model of PERSIA, TorchScript."""

_CPU = torch.device("cpu")
_MADE_UP = 1, 2, 1, 2  # samples of each batch


class Trust(NamedTuple):
    """What of a checkpoint may run, beyond operators on tensors.

    Attributes:
        factories: "module:function" of each that may make a model.
        torchscript: whether TorchScript may come from anywhere; else from a folder
            of this machine that no other user may write to.
    """

    factories: tuple[str, ...] = ()
    torchscript: bool = False


_NOTHING = Trust()


class DenseModel(NamedTuple):
    """A dense model that was loaded.

    Attributes:
        module: TorchScript, or what ``export_for_serving`` wrote; in evaluation mode.
        path: its file.
        signature: its inputs by name; None in a file without, as of earlier versions.
        collections: of a TorchRec model; None: it takes PERSIA's slots.
    """

    module: nn.Module
    path: str
    signature: ModelSignature | None = None
    collections: "Sequence[CollectionDescription] | None" = None

    @property
    def version(self) -> str:
        """The number of its checkpoint; 1 of a file that is in none."""
        return read_version(self.path)


class UnknownVersionError(CheckpointError):
    """A request names a checkpoint that is not there."""


def checkpoint_of(run: str | os.PathLike[str], number: str | None) -> Folder:
    """Return a complete checkpoint of a folder by number, or the latest for None."""
    if number is None:
        return find_checkpoint(run)
    for folder in complete_checkpoints(Folder(run)):
        if read_version(folder.file_path("")) == number:
            return folder
    raise UnknownVersionError(
        f"{os.fspath(run)} must hold a complete checkpoint of this number. "
        f"Received: {number!r:.40}."
    )


def newest_version(run: str | os.PathLike[str], model: str) -> str | None:
    """Return the number of the latest complete checkpoint with a model, or None."""
    for folder in complete_checkpoints(Folder(run)):
        if model in folder.names():
            return read_version(folder.file_path(model))
    return None


@lru_cache(maxsize=64)
def read_version(path: str) -> str:
    """Return the number of the checkpoint of a file; 1 if it is in none."""
    found = re.search(r"checkpoint-(\d+)/[^/]*$", path)
    return str(int(found[1])) if found else "1"


class Predictor:
    """Predicts. Any thread may call any method.

    The model takes a list of dense tensors and a list of embedding tensors, in the
    order of its signature, or else of the batch; it returns a float tensor
    ``(B, ...)``. With ``batching`` those of several requests are predicted together.

    Attributes:
        reader: looks the embeddings up.
        model: what it predicts with; a call in progress keeps the previous one.
    """

    def __init__(
        self,
        reader: RowReader,
        model: DenseModel,
        batching: Batching | None = None,
    ) -> None:
        self.reader = reader
        self._started_s = time.monotonic()
        self._num_made_up = 0  # ids without a row
        self._batcher = None if batching is None else Batcher(batching)
        self.use(model)

    def warm_up(self, model: DenseModel | None = None) -> None:
        """Predict for made-up samples, so that the first request is a fast one.

        TorchScript compiles in the first calls, and once more for another size of the
        batch. Of a model without a signature no inputs are known.

        Args:
            model: what is to predict; None: the current one.

        Raises:
            PersiaError: it cannot predict, or the embeddings do not answer.
        """
        model = self.model if model is None else model
        if model.signature is None:
            return
        _put_into_evaluation(model)
        num_before = self.reader.hello(of_any=True).misses
        for num in _MADE_UP:
            self._run(model, make_up(model.signature, num), must_be_finite=False)
        self._num_made_up += self.reader.hello(of_any=True).misses - num_before

    def use(self, model: DenseModel) -> None:
        """Predict with another model from now on, put into evaluation mode."""
        _put_into_evaluation(model)
        self.model = model

    @property
    def is_batching(self) -> bool:
        """Whether requests are predicted together, by :meth:`predict_together`."""
        return self._batcher is not None and self.model.signature is not None

    def predict(
        self,
        batch: Features | Inputs,
        *,
        is_text: bool = False,
        waited: Waited = ignore_wait,
    ) -> Floats:
        """Return what the model gives for each sample, float32 ``(B, ...)``.

        With ``is_text`` the batch was JSON: its features have no order, and its dense
        ones are float32, whatever the model takes. ``waited`` is given the seconds that
        it waits for its group.

        Raises:
            BatchError: the features are not those of the model, or a dense one has a
                number that is not finite.
            ServerError: the embeddings do not answer.
            PersiaError: the model gives no finite tensor of the batch's size.
        """
        model = self.model
        inputs = self._arrange(model, batch, is_text=is_text)
        run = partial(self._run, model)
        if self._batcher is None or model.signature is None:  # they may not fit
            return run(inputs)
        return self._batcher.predict(model, run, inputs, waited)

    async def predict_together(
        self,
        batch: Features | Inputs,
        *,
        is_text: bool = False,
        waited: Waited = ignore_wait,
    ) -> Floats:
        """Do :meth:`predict` with other batches; no thread waits for it."""
        assert self._batcher is not None, "it is batching"
        model = self.model
        inputs = self._arrange(model, batch, is_text=is_text)
        run = partial(self._run, model)
        return await self._batcher.predict_async(model, run, inputs, waited)

    def _arrange(
        self, model: DenseModel, batch: Features | Inputs, *, is_text: bool
    ) -> Inputs:
        """Return the inputs of the model, checked."""
        if isinstance(batch, Inputs):
            inputs = batch
            if inputs.signature != model.signature:
                raise BatchError(
                    f"{model.path} must have the inputs of the request. Received: a "
                    "model that has changed meanwhile. Send it again."
                )
        elif model.signature is not None:
            inputs = arrange(batch, model.signature, converts=is_text)
        elif is_text and len(batch.ids) > 1:
            raise BatchError(
                f"{model.path} must have the order of its ID features, as "
                "files of dump_checkpoint(with_jit_model=True) do. Received: one "
                "without. Write the checkpoint again, or send PersiaBatch.to_bytes()."
            )
        else:
            inputs = Inputs.of(batch)
        names = (
            [feature.name for feature in inputs.signature.dense]
            if (inputs.signature is not None)
            else [f"number {n}" for n in range(len(inputs.dense))]
        )
        require_finite(names, inputs.dense)
        return inputs

    def _run(
        self, model: DenseModel, inputs: Inputs, *, must_be_finite: bool = True
    ) -> Floats:
        """Look a batch up and run the model on it."""
        reader = self.reader
        pulled, device = reader.look_up_ids(inputs.ids), reader.device
        dense = [dense_tensor(data, device) for data in inputs.dense]
        with torch.inference_mode():
            slots = reader.to_tensors(pulled)
            try:
                output = model.module(dense, list(slots.values()))
            except (RuntimeError, IndexError) as exc:
                reason = str(exc).strip().splitlines()[-1:]
                shapes = [f"{name} {tuple(slots[name].shape)}" for name in slots]
                raise BatchError(
                    "The model must be able to take the batch. Received: "
                    f"{[tuple(tensor.shape) for tensor in dense]} as dense features, "
                    f"{', '.join(shapes)} as embeddings; "
                    f"{type(exc).__name__}: {''.join(reason)}"
                ) from exc
            found = _read_output(output, inputs.batch_size)
        if must_be_finite and not np.isfinite(found).all():
            raise PersiaError(
                "The model must return finite numbers. Received: infinity or NaN."
            )
        return found

    def close(self) -> None:
        """Accept no more batches to predict together. May be called twice."""
        if self._batcher is not None:
            self._batcher.close()

    def health(self) -> dict[str, object]:
        """Return readiness, rows on the servers, model and uptime.

        The servers have as long to answer as for a lookup, and a second at most.
        """
        health: dict[str, object] = {"ready": True}
        timeout_s = min(self.reader.lookup_timeout_s, timeouts.MODEL_READY_S)
        try:
            hello = self.reader.hello(timeout_s, of_any=True)
            health["rows"] = sum(hello.num_rows)
            health["ids_without_row"] = max(hello.misses - self._num_made_up, 0)
            if hello.following is not None:
                health["following"] = dataclasses.asdict(hello.following)
        except PersiaError as exc:
            health = {"ready": False, "error": str(exc)}
        uptime_s = round(time.monotonic() - self._started_s, 3)
        path = without_secrets(self.model.path)
        return {**health, "model": path, "uptime_s": uptime_s}


def _put_into_evaluation(model: DenseModel) -> None:
    """Put a model into evaluation mode."""
    if not isinstance(model.module, GraphModule):  # which is exported as such
        model.module.eval()


def make_up(signature: ModelSignature, num: int) -> Inputs:
    """Return so many samples, each of one id per ID feature and zeros."""
    bags = Bags(np.zeros(num, np.uint64), np.ones(num, np.int32))
    dense = [np.zeros((num, *one.shape), one.dtype) for one in signature.dense]
    ids = JaggedIds.of(dict.fromkeys(signature.slots, bags))
    return Inputs(ids, tuple(dense), num, signature)


def arrange(
    features: Features, signature: ModelSignature, *, converts: bool = False
) -> Inputs:
    """Return the features of a request as a model takes them, in its order.

    Dense features are found by name, or, where none of the request has a name of the
    model, by their order. With ``converts`` they get the dtypes of the model.

    Raises:
        BatchError: a feature is missing or unknown, or a dense one has another dtype or
            shape.
    """
    _require_names("ID feature", signature.slots, features.ids)
    names, expected = [*features.dense], [dense.name for dense in signature.dense]
    if len(names) == len(expected) and not set(names).intersection(expected):
        names = expected
    dense = dict(zip(names, features.dense.values(), strict=True))
    _require_names("dense feature", expected, dense)
    for due in signature.dense:
        if converts:
            dense[due.name] = _convert(dense[due.name], due)
        require_dense(due, dense[due.name])
    ordered = Features(
        {name: features.ids[name] for name in signature.slots},
        {name: dense[name] for name in expected},
        features.batch_size,
    )
    return Inputs.of(ordered, signature)


def _convert(data: Any, due: DenseInput) -> Dense:
    """Return a dense feature with the dtype of the model, a column in its shape."""
    if data.ndim == 1 and due.shape == (1,):
        data = data[:, np.newaxis]
    with np.errstate(invalid="ignore"):
        converted: Dense = data.astype(due.dtype)
    if np.dtype(due.dtype).kind != "f" and (converted != data).any():
        raise BatchError(
            f"Dense feature {due.name!r} must have numbers of {due.dtype}. Received: "
            f"{data[converted != data][0]}."
        )
    return converted


def _require_names(
    kind: str, expected: Sequence[str], received: Collection[str]
) -> None:
    missing = [name for name in expected if name not in received]
    unknown = [name for name in received if name not in expected]
    if missing or unknown:
        found = []
        if missing:
            found.append(f"none for {', '.join(map(repr, missing))}")
        if unknown:
            found.append(f"unknown {', '.join(map(repr, unknown))}")
        raise BatchError(
            f"A batch must have each {kind} of the model, {list(expected)}. "
            f"Received: {'; '.join(found)}."
        )


def require_finite(names: Sequence[str], dense: Sequence[Dense]) -> None:
    """Check that no dense feature has infinity or NaN, or raise BatchError."""
    for name, data in zip(names, dense, strict=True):
        if data.dtype.kind == "f" and not np.isfinite(data).all():
            raise BatchError(
                f"Dense feature {name!r} must have finite numbers. Received: "
                "infinity or NaN."
            )


@contextlib.contextmanager
def following_model(
    predictor: Predictor,
    run: str | os.PathLike[str],
    name: str,
    poll_s: float = 1.0,
    trust: Trust = _NOTHING,
) -> Iterator[None]:
    """Load the dense model of each later checkpoint of a folder, during a block.

    A checkpoint without a file of that name is ignored: one of embeddings alone.
    """
    work = partial(_load_latest, predictor, Folder(run), name, trust)
    with repeating(work, "model", poll_s):
        yield


@contextlib.contextmanager
def repeating(work: Callable[[], object], what: str, poll_s: float) -> Iterator[None]:
    """Call a function, as one that replaces something, again and again, in a block.

    An error is logged, and it is called again later: what there was stays.
    """
    ending = threading.Event()

    def repeat() -> None:
        while not ending.wait(poll_s):
            try:
                work()
            except Exception as exc:
                has_bug = not isinstance(exc, PersiaError)
                logger.warning(
                    "keeping the previous %s: %s", what, exc, exc_info=has_bug
                )
                ending.wait(timeouts.PREDICTOR_RETRY_S)

    thread = threading.Thread(target=repeat, name=what, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join(timeouts.PREDICTOR_CLOSE_S)


def _load_latest(predictor: Predictor, run: Folder, name: str, trust: Trust) -> None:
    for folder in complete_checkpoints(run):
        if name in folder.names():
            if folder.file_path(name) != predictor.model.path:
                device = predictor.reader.device
                model = load_model(folder.url, name, device, trust)
                predictor.warm_up(model)
                predictor.use(model)
                logger.info("serving model=%s", predictor.model.path)
            return


def choose_device(kind: str, replica: int = 0) -> torch.device:
    """Return the device to predict on; replicas of a host take its GPUs in turn.

    Args:
        kind: "cpu"; "cuda"; or "auto", which is a GPU where there is one.
        replica: index of this server among those of a job.

    Raises:
        ConfigError: there is no GPU, and it must be one.
    """
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return _CPU
    num_devices = torch.cuda.device_count()
    if kind not in ("auto", "cuda") or num_devices == 0:
        raise ConfigError(
            "device must be cpu, cuda or auto, and cuda one that this process sees. "
            f"Received: {kind}, and {num_devices} CUDA devices. Look at "
            "CUDA_VISIBLE_DEVICES and nvidia-smi, or take the CPU."
        )
    return torch.device("cuda", replica % num_devices)


def find_model(path: str | os.PathLike[str]) -> str:
    """Return the name of the model's file in a checkpoint: PERSIA's or TorchRec's."""
    run = Folder(path)
    latest = next(complete_checkpoints(run), run)
    return SERVED_MODEL if SERVED_MODEL in latest.names() else SCRIPT_MODEL


def load_model(
    path: str | os.PathLike[str],
    name: str,
    device: torch.device = _CPU,
    trust: Trust = _NOTHING,
) -> DenseModel:
    """Load a model, of the latest checkpoint or the folder.

    Its parameters are on the device, wherever they were when it was saved.

    Raises:
        CheckpointError: there is no such file, or it is no model.
        ConfigError: the model would run code that ``trust`` does not name.
    """
    run = Folder(path)
    latest = next(complete_checkpoints(run), run)
    folder = next((f for f in (latest, run) if name in f.names()), None)
    if folder is None:
        folder = find_checkpoint(path)
    file = folder.file_path(name)
    if name not in folder.names():
        raise CheckpointError(
            f"{file} must be a TorchScript model. Received: no such file. Save the "
            "dense model there: torch.jit.script(model).save(path)."
        )
    if name == SERVED_MODEL:
        return _load_torchrec(read_file(folder, name), file, device, trust)
    if not trust.torchscript and (why := folder.writers(name)):
        raise ConfigError(
            "A TorchScript model, which is a program, must be in a folder of this "
            "machine to which only this user, or root, may write. Received: "
            f"{file}: {why}. If you trust who can, add --allow-torchscript."
        )
    extra = {EXTRA_FILE: b""}  # torch puts in what the file has
    try:
        data = io.BytesIO(read_file(folder, name))
        model = torch.jit.load(data, device, extra)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    except RuntimeError as exc:
        raise CheckpointError(
            f"{file} must be a TorchScript model, as torch.jit.script(model).save() "
            f"writes it ({str(exc).splitlines()[0]})."
        ) from exc
    text = extra[EXTRA_FILE]
    signature = ModelSignature.decode(text, file) if text else None
    return DenseModel(model, file, signature)


def _load_torchrec(
    data: bytes, file: str, device: torch.device, trust: Trust
) -> DenseModel:
    from persia_torchrec.sharding.dense_half import load_served  # needs TorchRec

    module, about = load_served(data, file, trust.factories)
    return DenseModel(module.to(device), file, about.signature, about.collections)


def _read_output(output: object, batch_size: int) -> Floats:
    if not isinstance(output, torch.Tensor) or output.shape[:1] != (batch_size,):
        what = output.shape if isinstance(output, torch.Tensor) else type(output)
        raise PersiaError(
            f"The model must return a tensor whose first dimension is that of the "
            f"batch, {batch_size}. Received: {what}."
        )
    found: Floats = output.to("cpu", torch.float32).numpy()
    return found
