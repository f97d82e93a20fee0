"""Blocks around a training loop.

join(model)               trainers' numbers of batches may differ
accumulate(sharders, n)   the gradients of n batches are one update
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel

from persia_torchrec.errors import ConfigError
from persia_torchrec.sharding.checks import remote_collections
from persia_torchrec.sharding.table_control import SharderApi


@contextlib.contextmanager
def accumulate(
    sharders: SharderApi | Iterable[SharderApi], num_parts: int
) -> Iterator[None]:
    """Make every ``num_parts`` training batches one update of the tables.

    Around a loop, or around one step. In it the gradients of that many batches, in the
    order of their backward passes, are summed for each id, and the servers apply the
    optimizer once: Adam's ``t`` counts one, and so does a step of several trainers. The
    staleness bounds the batches that are in flight, as without. That is the update of
    one batch with all their samples, if the mean loss of each part is scaled by its
    fraction of their samples (``1 / num_parts`` for parts of one size only), and the
    dense optimizer steps when its gradients are added up, as always in torch. A dataset
    with ``micro_batches`` yields such parts, ``num_parts`` for every step, and each
    knows its ``batch.fraction``. An admission decides with each part.

    At the end of the block the parts of an update that has begun are one; if it is left
    by an exception, these are dropped. Between, a part without a backward pass adds
    nothing; one whose gradients are not finite under a loss scale drops its update.
    Batches of evaluation do not count. Checkpoints are for between two updates.

    Args:
        sharders: what puts tables on the servers: ``remote_sharders(...)``, or the
            sharders one by one; of models that are sharded.
        num_parts: batches of an update, ``>= 1``.

    Raises:
        ConfigError: ``num_parts`` is not positive, nothing is sharded yet, blocks are
            nested, or tables of the same collections, or cached rows, are in this
            process, which updates them with every backward pass.

    Example:
        ``with accumulate(sharders, 4):``, in it ``(loss * batch.fraction).backward()``
        for each of four parts, and then ``optimizer.step()``
    """
    given = [sharders] if isinstance(sharders, SharderApi) else list(sharders)
    of_all = {id(s.remote_tables): s.remote_tables for s in given}.values()
    pipelines = [pipeline for tables in of_all for pipeline, _ in tables.pipelines]
    for must, holds in (
        ("num_parts must be an integer >= 1", num_parts >= 1),
        ("the model must be sharded", pipelines),
        ("blocks must not be nested", not any(t.accumulates for t in of_all)),
        ("all tables must be on servers", not any(t.has_local for t in of_all)),
        ("rows must not be cached", not any(t.cache for t in of_all)),
    ):
        if not holds:
            raise ConfigError(
                f"accumulate: {must}. Received: num_parts={num_parts!r}, "
                f"{len(pipelines)} collections."
            )
    for tables in of_all:
        tables.accumulates = True
    try:
        for pipeline in pipelines:
            pipeline.accumulate(num_parts)
        yield
    except BaseException:
        for pipeline in pipelines:
            pipeline.drop_update()
        raise
    finally:
        for tables in of_all:
            tables.accumulates = False
        for pipeline in pipelines:
            pipeline.accumulate(1)


@contextlib.contextmanager
def join(model: nn.Module) -> Iterator[None]:
    """Train inside this block where trainers' data may not end at the same batch.

    A trainer at the end of the block, even without a batch, no longer delays the
    others: it answers the all-reduces of their dense gradients, and joint updates
    proceed without its gradients. The block ends when all trainers are there; all then
    have the dense model and the loss scale of the last one, and within ``recoverable``
    the state of its dense optimizers; the next steps are joint again. Gradients are
    divided by the number of all trainers throughout, as in
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
