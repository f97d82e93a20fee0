"""Runs the introduction of TorchRec, a notebook, until its part on inference."""

import json
from functools import partial
from typing import Any

import torch
from torchrec.distributed import planner
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

from persia_torchrec import RemoteEmbeddingBagCollectionSharder
from tests.dropin.driver import WHOLE, Run, begin

NOTEBOOK = "TorchRec_Interactive_Tutorial_Notebook_OSS_version.ipynb"
LEFT_OUT = "!pip3", "._input_dists", "._output_dists", "._lookups"
"""Cells that install packages, and that show private parts of TorchRec's class."""


def main(run: Run) -> None:
    """Run its cells, which have one step, and note the two losses that it prints."""
    kind: Any = EmbeddingBagCollectionSharder
    if run.is_plain:
        constraints = dict.fromkeys(("product_table", "user_table"), WHOLE)
        whole = partial(planner.EmbeddingShardingPlanner, constraints=constraints)
        planner.EmbeddingShardingPlanner = whole
    else:
        kind = RemoteEmbeddingBagCollectionSharder
    shard = kind.shard

    def begun(*args: Any, **settings: Any) -> Any:
        begin(model := shard(*args, **settings))
        return model

    def noted(*args: Any) -> None:
        if "Iteration Loss: " in str(args[0]):
            run.losses.append(float(args[0].partition(": ")[2]))

    kind.shard = begun
    torch.manual_seed(1)
    names: dict[str, Any] = {"print": noted, "__name__": "__main__"}
    for cell in json.loads((run.folder / NOTEBOOK).read_text())["cells"]:
        source = "".join(cell["source"])
        if source.startswith("## Inference"):
            break
        if cell["cell_type"] == "code" and not any(part in source for part in LEFT_OUT):
            here = source.replace('"cuda"', '"cpu"').replace('"29500"', '"0"')
            exec(compile(here, NOTEBOOK, "exec"), names)
    run.models.append(names["sharded_ebc_fused_params"])
