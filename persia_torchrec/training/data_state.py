"""Saved state of data, random numbers and buffers of all trainers.

Of a ``WorkQueue`` all trainers save the same, the rows that no trainer has trained. So
any number of trainers may load it.
"""

import io
import logging
import random
from collections.abc import Mapping
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn

from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.datasets.dataset import RowDataset
from persia_torchrec.datasets.sources import require_same_files
from persia_torchrec.errors import CheckpointError, ConfigError
from persia_torchrec.training.checkpoint import (
    at_first,
    from_all,
    names_in,
    state_bytes,
)

logger = logging.getLogger(__name__)


def state_of_data(dataset: RowDataset, num_trained: int | None) -> dict[str, Any]:
    """Return the state of a dataset; all trainers call it between the same two steps.

    Args:
        dataset: of this trainer.
        num_trained: of the batches of its iteration; None: all that were yielded.

    Raises:
        CheckpointError: a trainer has failed, or the host of the queue is gone.
    """
    if not dataset.is_shared:
        return dataset.state_dict(num_trained)
    # What is taken after this question is in no state, and so taken again.
    num_taken = at_first(dataset.num_taken, int)
    leases = from_all(
        lambda: dataset.leases(num_taken, num_trained), list[tuple[int, int]]
    )
    return dataset.joint_state(num_taken, list(chain(*leases)))


def require_same_data(state: Mapping[str, Any]) -> None:
    """Require that datasets of several trainers divide the same files; all call it.

    Raises:
        ConfigError: the files of a dataset differ; it names them.
    """

    def files() -> dict[str, list[str]]:
        datasets = {n: d for n, d in state.items() if isinstance(d, RowDataset)}
        return {name: dataset.divided_files() for name, dataset in datasets.items()}

    told = from_all(files, dict[str, list[str]])
    for name in told[0]:
        require_same_files([of_trainer.get(name, []) for of_trainer in told])


def num_trainers_of(folder: Folder) -> int:
    """Return how many trainers have saved a checkpoint; all call it.

    Raises:
        CheckpointError: the checkpoint is none of ``recoverable``.
    """

    def count() -> int:
        return sum(name.startswith("trainer ") for name in names_in(folder))

    if num_saved := at_first(count, int):
        return num_saved
    raise CheckpointError(
        f"{folder.url} must be a checkpoint of recoverable(). Received: one without "
        "the state of a trainer."
    )


Generator = (
    torch.Generator | np.random.Generator | np.random.RandomState | random.Random
)


def state_of_generator(generator: Generator) -> Any:
    """Return the state of a random generator, of tensors, numbers and text."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return _packed(generator.bit_generator.state)
    return _packed(generator.get_state(legacy=False))


def set_generator(generator: Generator, state: Any) -> None:
    """Go back to a :func:`state_of_generator`."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _unpacked(state)
    else:
        generator.set_state(_unpacked(state))


def _packed(state: Any) -> Any:
    """Return a state of NumPy with a list and its dtype in place of each array."""
    if isinstance(state, dict):
        return {name: _packed(value) for name, value in state.items()}
    if isinstance(state, np.ndarray):
        return [state.dtype.str, state.tolist()]
    # Of 128 bits: a number of NumPy is none for those who read checkpoints.
    return int(state) if isinstance(state, np.integer) else state


def _unpacked(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _unpacked(value) for name, value in state.items()}
    return np.array(state[1], state[0]) if isinstance(state, list) else state


def require_savable(state: Mapping[str, Any]) -> None:
    """Require that each value of a script's own can be saved, and loaded again.

    Raises:
        ConfigError: one cannot; it names the value and its type.
    """
    for name, value in state.items():
        saves, loads = (hasattr(value, f"{verb}state_dict") for verb in ("", "load_"))
        if (saves and loads) or isinstance(value, Generator):
            continue
        if saves:
            raise _unsavable(name, value, "load_state_dict")
        try:
            unpack(state_bytes({name: value}))
        except Exception as exc:  # what cannot be pickled raises what it likes
            raise _unsavable(name, value, "state_dict") from exc


def _unsavable(name: str, value: object, lacks: str) -> ConfigError:
    return ConfigError(
        "A value in state must have state_dict and load_state_dict, be a random "
        "generator, or consist of tensors, numbers, text, lists and dictionaries. "
        f"Received: {name!r}, a {type(value).__name__} without {lacks}. Leave out what "
        "each start makes again, such as a DataLoader: run.skip counts its batches."
    )


def random_state(
    generators: Mapping[str, Generator] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the state of the random numbers of torch, NumPy, Python and a script."""
    kind, key, *rest = np.random.get_state()  # noqa: NPY002  # scripts draw from it
    state = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(key, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "generators": {n: state_of_generator(one) for n, one in generators.items()},
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(
    state: dict[str, Any],
    generators: Mapping[str, Generator] = MappingProxyType({}),
) -> None:
    """Go back to a :func:`random_state`."""
    for name, value in state.get("generators", {}).items():
        if name in generators:
            set_generator(generators[name], value)
    kind, key, *rest = state["numpy"]
    random.setstate(state["python"])
    numbers = kind, key.numpy().astype(np.uint32), *rest
    np.random.set_state(numbers)  # noqa: NPY002  # as above
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


class Buffers:
    """The buffers of a model, such as running means, which are each trainer's own.

    With ``resets`` those of another shape than the saved ones stay as they are.
    """

    def __init__(self, model: nn.Module, *, resets: bool = False) -> None:
        self._model = model
        self._resets = resets

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the buffers by name."""
        weights = {name for name, _ in self._model.named_parameters()}
        return {
            name: value
            for name, value in self._model.state_dict().items()
            if type(value) is torch.Tensor and name not in weights
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Set the buffers that are in ``state``.

        Raises:
            CheckpointError: one has another shape, and must not begin again.
        """
        own = self.state_dict()
        changed = {
            name: value
            for name, value in state.items()
            if name in own and own[name].shape != value.shape
        }
        told = "; ".join(
            f"{name} has shape {list(own[name].shape)}, and had {list(value.shape)}"
            for name, value in sorted(changed.items())
        )
        if changed and not self._resets:
            raise CheckpointError(
                "The model's buffers must be those of the checkpoint. Received: "
                f'{told}. With on_change="reset state" of recoverable or TrainCtx, '
                "these begin again."
            )
        if changed:
            logger.warning(
                "the model's buffers, reset to their initial values: %s", told
            )
        rest = {name: value for name, value in state.items() if name not in changed}
        self._model.load_state_dict(rest, strict=False)


def unpack(data: bytes) -> dict[str, Any]:
    """Return the state of a script, of the bytes that a checkpoint has."""
    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as exc:  # what cannot be read makes the reader raise has no list
        raise ConfigError(
            "The state of a script in checkpoints must consist of tensors, numbers, "
            "text, "
            f"lists and dictionaries. Received: {exc}."
        ) from exc
    return dict(state)
