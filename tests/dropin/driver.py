"""Run one program, plain or patched, from known weights; write losses and tables.

    python -m tests.dropin.driver PROGRAM FOLDER OUTPUT KIND STEPS LOADED [arguments]

KIND is plain or servers; LOADED is a folder with a checkpoint of the program's own, or
nothing. The program is imported as it stands in FOLDER, and the module of this folder
that is named like PROGRAM calls it. Around it, and in it nowhere: each weight begins
with numbers of its key, tables of the plain program are whole on this trainer, and
hooks note the loss of each training batch and each metric.
"""

import hashlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardedTensor

import persia_torchrec

CACHED_ROWS = "CACHED_ROWS"
"""How many rows `remote_sharders` caches: a variable of a driver."""
WHOLE = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])


@dataclass
class Run:
    """One run of a program: what it is asked for, and what it has given so far."""

    folder: Path
    output: Path
    is_plain: bool
    steps: int
    loaded: Path | None
    arguments: list[str]
    losses: list[float] = field(default_factory=list)
    metrics: list[tuple[str, float]] = field(default_factory=list)
    models: list[DistributedModelParallel] = field(default_factory=list)

    @property
    def checkpoint(self) -> Path:
        """Where the program saves its own checkpoint."""
        return self.output / "checkpoint"

    def option(self, name: str) -> str:
        """Return the value of an argument NAME=VALUE, or nothing."""
        given = dict(argument.split("=", 1) for argument in self.arguments)
        return given.get(name, "")

    def note_metrics(self, values: Mapping[str, Any]) -> None:
        """Note metrics, to 6 digits, in the order of their names."""
        self.metrics += [(n, round(float(values[n]), 6)) for n in sorted(values)]

    def shard(
        self, loss_of: Callable[[Any], torch.Tensor] | None = None
    ) -> Callable[..., DistributedModelParallel]:
        """Return what shards a model, gives it weights and notes its losses.

        Without ``loss_of`` another part of the program has them.
        """

        def made(*args: Any, **settings: Any) -> DistributedModelParallel:
            model = DistributedModelParallel(*args, **settings)
            begin(model)
            self.models.append(model)

            forward = model.forward

            def noted(*args: Any, **settings: Any) -> Any:
                result = forward(*args, **settings)
                if loss_of and model.training and torch.is_grad_enabled():
                    self.losses.append(float(loss_of(result).detach()))
                return result

            model.forward = noted  # a hook is not called by model.forward(...)
            return model

        return made

    def write(self) -> None:
        """Write losses, metrics and the tables of the last model."""
        torch.save(tables(self.models[-1]), self.output / "tables.pt")
        noted = json.dumps([self.losses, self.metrics])
        (self.output / "losses.json").write_text(noted)


def first_weights(key: str, shape: torch.Size) -> torch.Tensor:
    """Return what a weight begins with, float32, by its key alone."""
    digest = hashlib.blake2b(key.encode(), digest_size=6).digest()
    random = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.rand(shape, generator=random) * 0.2 - 0.1


def begin(model: DistributedModelParallel) -> None:
    """Give a model its first weights; tables by what TorchRec's tensors offer."""
    with torch.no_grad():
        for key, value in model.state_dict().items():
            if isinstance(value, ShardedTensor):
                weights = first_weights(key, value.metadata().size)
                for shard in value.local_shards():
                    start, num = shard.metadata.shard_offsets[0], len(shard.tensor)
                    shard.tensor.copy_(weights[start : start + num])
            elif isinstance(value, torch.Tensor) and value.is_floating_point():
                value.copy_(first_weights(key, value.shape))


def tables(model: DistributedModelParallel) -> dict[str, torch.Tensor]:
    """Return the tables of a model as ordinary float32 tensors."""
    return {
        key: torch.cat([shard.tensor.clone() for shard in value.local_shards()]).float()
        for key, value in model.state_dict().items()
        if isinstance(value, ShardedTensor)
    }


class _Missing(ModuleType):
    """A module that is not to be had: whatever is imported from it does nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, made := MagicMock())
        return made


def stand_in(*names: str, **functions: Any) -> None:
    """Let imports of modules that are not to be had succeed."""
    for name in names:
        sys.modules[name] = _Missing(name)
        vars(sys.modules[name]).update(functions)


def main(name: str, *rest: str) -> None:
    """Run the program."""
    folder, output, kind, steps, loaded, *arguments = rest
    run = Run(
        folder=Path(folder),
        output=Path(output),
        is_plain=kind == "plain",
        steps=int(steps),
        loaded=Path(loaded) if loaded else None,
        arguments=arguments,
    )
    rows = int(os.environ.get(CACHED_ROWS, "0"))
    if rows and not run.is_plain:  # what a program imports
        cache = persia_torchrec.Cache(rows=rows)
        given = partial(persia_torchrec.remote_sharders, cache=cache)
        persia_torchrec.remote_sharders = given  # type: ignore[assignment]
    importlib.import_module(f"tests.dropin.{name}").main(run)
    run.write()


if __name__ == "__main__":
    main(*sys.argv[1:])
