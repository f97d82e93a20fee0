import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec.errors import BatchError
from persia_torchrec.routing.dedup import unique_ids
from persia_torchrec.routing.shard import split_by_shard
from persia_torchrec.routing.tables import route_ids
from tests.strategies import id_arrays

tables = st.lists(id_arrays(), min_size=1, max_size=5)


@given(tables, st.integers(1, 4))
def test_each_table_is_routed_as_if_it_were_alone(tables, num_shards):
    num_ids = [len(ids) for ids in tables]
    routed = route_ids(np.concatenate(tables), num_ids, num_shards)
    inverses = np.split(routed.inverse, np.cumsum(num_ids)[:-1])
    assert len(routed.tables) == len(tables)
    for ids_L, split, inverse_L in zip(tables, routed.tables, inverses, strict=True):
        unique = unique_ids(ids_L)
        alone = split_by_shard(unique.ids, num_shards)
        assert split.ids.tolist() == alone.ids.tolist()
        assert split.offsets.tolist() == alone.offsets.tolist()
        assert split.place.tolist() == alone.place.tolist()
        assert inverse_L.tolist() == alone.place[unique.inverse].tolist()
        assert np.array_equal(split.ids[inverse_L], ids_L)


def test_tables_may_be_of_very_different_lengths():
    short, long_ = np.arange(3, dtype=np.uint64), np.arange(100_000, dtype=np.uint64)
    routed = route_ids(np.concatenate([short, long_, short]), [3, 100_000, 3], 2)
    assert [len(split.ids) for split in routed.tables] == [3, 100_000, 3]


@pytest.mark.parametrize(
    "ids", [np.zeros(3, dtype=np.int64), np.zeros((2, 2), dtype=np.uint64)]
)
def test_what_are_no_ids_is_refused(ids):
    with pytest.raises(BatchError, match=r"flat uint64 array. Received: dtype="):
        route_ids(ids, [ids.size], 1)
