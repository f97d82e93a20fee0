"""Calls the DLRM of facebookresearch/recipes: ``fit`` of PyTorch Lightning."""

import importlib
import sys
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from tests.dropin.driver import Run, stand_in
from tests.dropin.examples import DIM, NUM_IDS, sharded


def main(run: Run) -> None:
    """Train, and evaluate."""
    sys.path.insert(0, str(run.folder))
    stand_in("hydra", "hydra.core", "hydra.core.config_store")
    stand_in("torchrecipes.core.conf", DataModuleConf=object)
    stand_in("torchrecipes.rec.datamodules.criteo_datamodule")
    types: Any = importlib.import_module("pytorch_lightning.utilities.types")
    types._PATH = str  # no longer there
    module: Any = importlib.import_module("torchrecipes.rec.modules.lightning_dlrm")
    program: Any = importlib.import_module("torchrecipes.rec.dlrm_main")
    module.DistributedModelParallel = partial(sharded, run)
    module.metrics.Accuracy = partial(module.metrics.Accuracy, "binary")
    # TorchRec's pipeline fails after an iterator that left it one batch, as its has.
    program.pl.Trainer = partial(program.pl.Trainer, num_sanity_val_steps=0)
    _follow(run, module.LightningDLRM)
    torch.manual_seed(1)
    given = {"embedding_dim": DIM, "num_embeddings": NUM_IDS, "num_workers": 0}
    given |= {"epochs": 1, "limit_train_batches": run.steps, "limit_val_batches": 5}
    sizes = {"dense": f"32,{DIM}", "over": "32,1"}
    arguments = [f"--{name}={value}" for name, value in given.items()]
    arguments += [f"--{n}_arch_layer_sizes={size}" for n, size in sizes.items()]
    program.main([*arguments, f"--checkpoint_output_path={run.checkpoint}"])


def _follow(run: Run, model: Any) -> None:
    """Note what a model logs; call its steps as Lightning 2 does."""
    for name in ("training_step", "validation_step"):
        setattr(model, name, _step_of(getattr(model, name)))
    log = model.log

    def noted(self: Any, name: str, value: Any, **settings: Any) -> None:
        if name == "train_loss":
            run.losses.append(float(value.detach()))
        elif name.endswith("accuracy"):
            run.note_metrics({name: value})
        log(self, name, value, **settings)

    model.log = noted


def _step_of(step: Any) -> Any:
    """Return a step without an index, on batches that come in tuples."""
    batches: dict[Any, Any] = {}  # a pipeline needs one iterator at each step

    def taken(self: Any, dataloader_iter: Any) -> Any:
        if dataloader_iter not in batches:
            batches[dataloader_iter] = map(itemgetter(0), dataloader_iter)
        return step(self, batches[dataloader_iter], 0)

    return taken
