"""The data loader of the Adult example: one pass over the training rows.

The ids of a batch go to an embedding worker, the numbers and labels to a trainer.
With several data loaders, loader ``i`` of ``n`` sends batches ``i``, ``i + n``, ...
"""

import argparse
import logging
from collections.abc import Iterator

from adult import ID_COLUMNS, AdultRows
from obtain import obtain_adult

from persia_torchrec.ctx import DataCtx
from persia_torchrec.embedding.data import (
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia_torchrec.env import data_dir, get_replica_index, get_replica_size
from persia_torchrec.logger import get_default_logger

BATCH_SIZE = 128


def batches(
    rows: AdultRows, *, requires_grad: bool, first: int = 0, step: int = 1
) -> Iterator[PersiaBatch]:
    """Yield batches ``first``, ``first + step``, ... of the rows, in file order.

    The last batch holds the rows that are left.

    Args:
        rows: what to cut into batches of 128.
        requires_grad: whether the batches are there to train on.
        first: number of the first batch, from 0.
        step: distance from one batch to the next.
    """
    for start in range(first * BATCH_SIZE, len(rows.labels), step * BATCH_SIZE):
        part = slice(start, start + BATCH_SIZE)
        yield PersiaBatch(
            [
                IDTypeFeatureWithSingleID(name, rows.ids[part, column])
                for column, name in enumerate(ID_COLUMNS)
            ],
            non_id_type_features=[NonIDTypeFeature(rows.dense[part], name="numbers")],
            labels=[Label(rows.labels[part], name="income")],
            requires_grad=requires_grad,
        )


def main() -> None:
    """Send every n-th batch of the training rows, for n loaders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", default=data_dir(), help="folder of adult.data")
    data = obtain_adult(parser.parse_args().data_dir)
    logger = get_default_logger("data_loader")
    level = logging.WARNING if data.is_made_up else logging.INFO
    logger.log(level, "data: %s", data.source)

    own_batches = batches(
        data.train,
        requires_grad=True,
        first=get_replica_index(),
        step=get_replica_size(),
    )
    with DataCtx() as ctx:
        for batch in own_batches:
            ctx.send_data(batch)


if __name__ == "__main__":
    main()
