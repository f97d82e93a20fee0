"""What torch's checkpoints save and load of a model: all but the tables on servers."""

import io
import logging
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import default_planner

from persia_torchrec.errors import CheckpointError
from persia_torchrec.sharding.state import is_state_entry

logger = logging.getLogger(__name__)

_WHOLE = torch.Tensor, nn.Parameter  # others may be a part, and have their own checks


class DenseOnly:
    """Leaves out the entries of tables on the servers, which save their own rows."""

    state_dict: dict[str, Any]
    mappings: dict[str, Any]

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Plan without the entries of tables."""
        args = state_dict, storage_meta, is_coordinator  # a planner's, of either kind
        super().set_up_planner(*args)  # type: ignore[misc]
        state = self.state_dict.items()
        self.state_dict = {k: v for k, v in state if not is_state_entry(v)}
        self.mappings = {key: self.mappings[key] for key in self.state_dict}


class SavePlanner(DenseOnly, default_planner.DefaultSavePlanner):
    """Saves the dense half."""


class LoadPlanner(DenseOnly, default_planner.DefaultLoadPlanner):
    """Loads what the checkpoint has in the same shape; other things are an error.

    With ``resets`` they stay as they are, and are named.
    """

    resets = False
    _leaves_out = False

    def create_local_plan(self) -> Any:
        """Plan what is loaded; torch would look for a key that is left out."""
        if not self._leaves_out or self.metadata is None:
            return super().create_local_plan()
        given = self.state_dict, self.metadata
        return default_planner.create_default_local_load_plan(*given)

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Leave out what cannot be loaded, or raise an error that names all of it."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        saved = storage_meta.state_dict_metadata
        changed = {}
        for key, value in self.state_dict.items():
            received = getattr(saved.get(key), "size", None)
            if key not in saved:
                changed[key] = "is new"
            elif type(value) in _WHOLE and value.shape != received:
                size = "no tensor" if received is None else list(received)
                changed[key] = f"has shape {list(value.shape)}, and had {size}"
        self._leaves_out = bool(changed)
        if not changed:
            return
        told = "; ".join(f"{key} {what}" for key, what in sorted(changed.items()))
        if not self.resets:
            raise CheckpointError(
                "The model's parameters must be those of the checkpoint. Received: "
                f'{told}. With on_change="reset state" of load_checkpoint, recoverable '
                "or TrainCtx, these begin again."
            )
        if is_coordinator:
            logger.warning("the dense half: these begin again: %s", told)
        state = self.state_dict.items()
        self.state_dict = {k: v for k, v in state if k not in changed}
        self.mappings = {key: self.mappings[key] for key in self.state_dict}

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Read what is no tensor, without running anything that a file names."""
        torch.load(value, weights_only=True)  # torch's own reader runs what it finds
        value.seek(0)
        super().load_bytes(read_item, value)
