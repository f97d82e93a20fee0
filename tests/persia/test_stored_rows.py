"""One file of rows as PERSIA writes them: found, ranked, and rejected with the byte."""

import numpy as np
import pytest

from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.embedding.optim import SGD, Adagrad
from persia_torchrec.errors import CheckpointError
from persia_torchrec.persia.stored_rows import Form, RowFile
from persia_torchrec.table import TableSpec
from tests.support.persia_files import Row, file_bytes, prefixed

BITS, DIM, NUM_FREE = 8, 2, 3
HEAD_BYTES = 28


def form(*optimizers):
    return Form(
        {
            type(one).__name__: [TableSpec(name="item", dim=DIM, optimizer=one)]
            for one in optimizers
        },
        BITS,
    )


@pytest.fixture
def stored(tmp_path):
    """Return the file of some ids, in the order of eviction, and what opens it."""
    ids = [prefixed(number, 1, BITS) for number in (7, 3, 9, 1)]
    rows = [Row(id_, np.full(DIM, n, np.float32), DIM) for n, id_ in enumerate(ids)]
    data = file_bytes(rows, len(rows) + NUM_FREE, np.random.default_rng(0))

    def opened(content=data):
        (tmp_path / "rows.emb").write_bytes(content)
        return RowFile(Folder(str(tmp_path)), "rows.emb", 0, 1)

    return ids, data, opened


def test_each_row_has_its_rank_in_the_order_of_eviction(stored):
    ids, _, opened = stored
    file, of_sgd, read = opened(), form(SGD(0.1)), []
    ranks = file.ranks(of_sgd, read.append)
    assert (file.num_rows, file.num_slots) == (4, 4 + NUM_FREE)
    found = {}
    for chunk in file.chunks(of_sgd):
        for slot, id_ in zip(chunk.slots, chunk.ids, strict=True):
            found[int(ranks[slot])] = int(id_)
    assert [found[rank] for rank in sorted(found)] == ids
    assert sum(read) == file.size_bytes - HEAD_BYTES


def test_the_optimizer_is_that_whose_rows_have_as_many_floats(stored):
    _, _, opened = stored
    both = form(SGD(0.1), Adagrad())
    assert both.fitting == ["SGD", "Adagrad"]
    for _ in opened().chunks(both):
        pass
    assert both.fitting == ["SGD"]


def test_an_id_is_found_with_its_byte(stored):
    ids, data, opened = stored
    (place,) = opened().find_id(ids[2], form(SGD(0.1)))
    at = int(place.rpartition(" ")[2])
    assert data.index(ids[2].to_bytes(8, "little")) > at
    assert opened().find_id(12345, form(SGD(0.1))) == []


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: data[:-3], "is cut off"),
        (lambda data: data + b"\0", "more bytes after the last slot"),
        (lambda data: data[:5], "is cut off: more must follow byte 0"),
        (lambda data: b"\xff" * 8 + data[8:], "a head that says"),
    ],
)
def test_a_damaged_file_is_rejected(stored, spoil, message):
    _, data, opened = stored
    with pytest.raises(CheckpointError, match=message):
        opened(spoil(data)).ranks(form(SGD(0.1)), lambda _: None)
