"""``accumulate(model)``: the gradients of several batches in one update."""

import contextlib
from collections.abc import Iterable, Iterator

from persia_torchrec.errors import ConfigError
from persia_torchrec.sharding.table_control import TableControl


@contextlib.contextmanager
def accumulate(
    sharders: TableControl | Iterable[TableControl], num_parts: int
) -> Iterator[None]:
    """Make every ``num_parts`` training batches one update of the tables.

    Around a loop, or around one step. In it the gradients of that many batches, in the
    order of their forward passes, are summed for each id, and the servers apply the
    optimizer once: Adam's ``t`` counts one, and so do a step of several trainers, the
    staleness and a permit. That is the update of one batch with all their samples,
    if the mean loss of each part is scaled by its fraction of their samples (``1 /
    num_parts`` for parts of one size only), and the dense optimizer steps when its
    gradients are added up, as always in torch. A dataset with ``micro_batches`` yields
    such parts, ``num_parts`` for every step, and each knows its ``batch.fraction``. An
    admission decides with each part.

    At the end of the block the parts of an update that has begun are one; if it is left
    by an exception, updates that have begun are dropped. Between, a part without a
    backward pass adds nothing; one whose gradients are not finite under a loss scale
    drops its update. Batches of evaluation do not count. Checkpoints are for between
    two updates.

    Args:
        sharders: what puts tables on the servers: ``remote_sharders(...)``, or the
            sharders one by one; of models that are sharded.
        num_parts: batches of an update, ``>= 1``.

    Raises:
        ConfigError: ``num_parts`` is not positive, nothing is sharded yet, blocks are
            nested, or tables of the same collections are in this process, where
            TorchRec updates them with every backward pass.

    Example:
        ``with accumulate(sharders, 4):``, in it ``(loss * batch.fraction).backward()``
        for each of four parts, and then ``optimizer.step()``
    """
    given = [sharders] if isinstance(sharders, TableControl) else list(sharders)
    of_all = {id(s.remote_tables): s.remote_tables for s in given}.values()
    pipelines = [pipeline for tables in of_all for pipeline, _ in tables.pipelines]
    for must, holds in (
        ("num_parts must be an integer >= 1", num_parts >= 1),
        ("the model must be sharded", pipelines),
        ("blocks must not be nested", not any(t.accumulates for t in of_all)),
        ("all tables must be on servers", not any(t.has_local for t in of_all)),
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
            pipeline.drop_updates()
        raise
    finally:
        for tables in of_all:
            tables.accumulates = False
        for pipeline in pipelines:
            pipeline.accumulate(1)
