"""From a batch to predictions: look embeddings up, run the dense model on them."""

import contextlib
import io
import logging
import os
import threading
import time
from collections.abc import Iterator

import torch
from torch import nn

from persia_torchrec.checkpoint.catalog import complete_checkpoints, find_checkpoint
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    PersiaError,
)
from persia_torchrec.persia.batch import PersiaBatch
from persia_torchrec.persia.slot_tensors import dense_tensor
from persia_torchrec.serving.embeddings import SlotsReader

logger = logging.getLogger(__name__)

_CLOSE_S = 10.0
_RETRY_S = 10.0

_CPU = torch.device("cpu")

Predictions = list[float] | list[list[float]]


class Predictor:
    """Predicts. Any thread may call any method.

    The model takes a list of dense tensors and a list of embedding tensors, in the
    order of the batch's ID features; it returns a float tensor ``(B, ...)``.
    """

    def __init__(self, reader: SlotsReader, model: nn.Module, name: str) -> None:
        self.reader = reader
        self._started_s = time.monotonic()
        self.use(model, name)

    def use(self, model: nn.Module, name: str) -> None:
        """Predict with another model from now on, put into evaluation mode."""
        self._model, self.name = model.eval(), name

    def predict(self, batch: PersiaBatch) -> Predictions:
        """Return a number for each sample, or where the model gives several, a list."""
        pulled = self.reader.look_up(batch)
        device = self.reader.device
        dense = [dense_tensor(f.data, device) for f in batch.non_id_type_features]
        with torch.inference_mode():
            slots = self.reader.to_tensors(pulled)
            try:
                output = self._model(dense, list(slots.values()))
            except (RuntimeError, IndexError) as exc:
                reason = str(exc).strip().splitlines()[-1:]
                shapes = [f"{name} {tuple(slots[name].shape)}" for name in slots]
                raise BatchError(
                    "The model must be able to take the batch. Received: "
                    f"{[tuple(tensor.shape) for tensor in dense]} as dense features, "
                    f"{', '.join(shapes)} as embeddings; "
                    f"{type(exc).__name__}: {''.join(reason)}"
                ) from exc
        return _read_predictions(output, batch.batch_size)

    def health(self) -> dict[str, object]:
        """Return readiness, rows on the servers, model and uptime."""
        health: dict[str, object] = {"ready": True}
        try:
            health["rows"] = sum(self.reader.hello(of_any=True).num_rows)
            health.update(self.reader.status())
        except PersiaError as exc:
            health = {"ready": False, "error": str(exc)}
        uptime_s = round(time.monotonic() - self._started_s, 3)
        return {**health, "model": self.name, "uptime_s": uptime_s}


@contextlib.contextmanager
def following_model(
    predictor: Predictor, run: str | os.PathLike[str], name: str, poll_s: float = 1.0
) -> Iterator[None]:
    """Load the dense model of each later checkpoint of a folder, during a block.

    A checkpoint without a file of that name is ignored: one of embeddings alone.
    """
    ending = threading.Event()

    def follow() -> None:
        while not ending.wait(poll_s):
            try:
                _load_latest(predictor, Folder(run), name)
            except Exception as exc:  # the predictor continues with its model
                has_bug = not isinstance(exc, PersiaError)
                logger.warning("the previous model stays: %s", exc, exc_info=has_bug)
                ending.wait(_RETRY_S)

    thread = threading.Thread(target=follow, name="model", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join(_CLOSE_S)


def _load_latest(predictor: Predictor, run: Folder, name: str) -> None:
    for folder in complete_checkpoints(run):
        if name in folder.names():
            if folder.file_path(name) != predictor.name:
                model, path = load_model(folder.url, name, predictor.reader.device)
                predictor.use(model, path)
                logger.info("serving model=%s", path)
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


def load_model(
    path: str | os.PathLike[str], name: str, device: torch.device = _CPU
) -> tuple[nn.Module, str]:
    """Load a TorchScript model and its path, of the latest checkpoint or the folder.

    Its parameters are on the device, wherever they were when it was saved.
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
    try:
        data = io.BytesIO(folder.read(name))
        model = torch.jit.load(data, map_location=device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    except RuntimeError as exc:
        raise CheckpointError(
            f"{file} must be a TorchScript model, as torch.jit.script(model).save() "
            f"writes it ({str(exc).splitlines()[0]})."
        ) from exc
    return model, file


def _read_predictions(output: object, batch_size: int) -> Predictions:
    if not isinstance(output, torch.Tensor) or output.shape[:1] != (batch_size,):
        what = output.shape if isinstance(output, torch.Tensor) else type(output)
        raise PersiaError(
            f"The model must return a tensor whose first dimension is that of the "
            f"batch, {batch_size}. Received: {what}."
        )
    flat = output.to("cpu", torch.float32).reshape(batch_size, -1)
    if not bool(torch.isfinite(flat).all()):
        raise PersiaError(
            "The model must return finite numbers. Received: infinity or NaN."
        )
    values: Predictions = (flat[:, 0] if flat.shape[1] == 1 else flat).tolist()
    return values
