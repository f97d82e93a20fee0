"""``join(model)``: trainers whose numbers of batches differ."""

import contextlib
import functools
from collections.abc import Iterator

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel

from persia_torchrec.errors import ConfigError
from persia_torchrec.sharding.checks import remote_collections


@contextlib.contextmanager
def join(model: nn.Module) -> Iterator[None]:
    """Train inside this block where trainers' data may not end at the same batch.

    A trainer at the end of the block, even without a batch, no longer delays the
    others: it answers the all-reduces of their dense gradients, and joint updates
    proceed without its gradients. The block ends when all trainers are there; all then
    have the dense model and the loss scale of the last one, and the next steps are
    joint again. Gradients are divided by the number of all trainers throughout, as in
    ``torch.nn.parallel.DistributedDataParallel.join``.

    An exception ends the block at once, on this trainer alone.

    Args:
        model: a ``DistributedModelParallel``, the same on every trainer.

    Raises:
        ConfigError: the dense half was wrapped with ``static_graph``, as TorchRec's
            default wrapper does: a trainer without a first batch would break it.
        PersiaError: an earlier update failed.

    Example:
        ``with join(model): train(model, this_trainers_batches)``, where the model was
        made with ``data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=
        False)``.
    """
    collections = remote_collections(model)
    replicas = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    if any(replica.static_graph for replica in replicas):
        raise ConfigError(
            "Data may end unevenly only without static_graph. Received: a model that "
            "was wrapped with it. Give DistributedModelParallel(data_parallel_wrapper="
            "DefaultDataParallelWrapper(static_graph=False))."
        )
    agreements = dict.fromkeys(c.remote_tables.agreement for c in collections)
    clocks = dict.fromkeys(c.remote_tables.clock for c in collections)
    joinables: list[Joinable] = [*replicas[:1]]
    joinables += [a for a in agreements if a and a.is_needed]
    joinables += filter(None, clocks)
    start = functools.partial(Join, joinables, divide_by_initial_world_size=True)
    with contextlib.ExitStack() as stack:
        if joinables and dist.get_world_size(joinables[0].join_process_group) > 1:
            # Join's own end leaves an all-reduce in each forward pass that follows, so
            # that one trainer could not evaluate alone.
            stack.callback(start, enable=False)
            stack.enter_context(start())
        yield
        for collection in collections:
            collection.pipeline.leave()
