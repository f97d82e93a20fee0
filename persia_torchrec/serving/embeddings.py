"""Embeddings for inference: what looks them up, and servers that hold a checkpoint.

Ids take the same path as in training, so that equal rows give bit-identical embeddings.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from persia_torchrec import timeouts
from persia_torchrec.checkpoint.catalog import find_checkpoint
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.embedding.setting import import_settings
from persia_torchrec.jit.compiled import report_compilation
from persia_torchrec.lookup.bags import JaggedIds
from persia_torchrec.lookup.pooling import warm_up
from persia_torchrec.lookup.rows_state import RowsState
from persia_torchrec.lookup.sharded_lookup import (
    RowSource,
    SequenceLookup,
    ShardedLookup,
)
from persia_torchrec.server.cluster import EmbeddingCluster
from persia_torchrec.serving.local_rows import LocalRows

if TYPE_CHECKING:  # it needs TorchRec, which PERSIA's models do not
    from persia_torchrec.sharding.dense_half import CollectionDescription

_CPU = torch.device("cpu")


class RowReader(Protocol):
    """Looks batches up for inference. Any thread may call any method.

    Attributes:
        device: of the tensors that it gives.
        is_local: whether a lookup waits for no other process.
        lookup_timeout_s: seconds that a lookup may take.
    """

    device: torch.device
    is_local: bool
    lookup_timeout_s: float

    def hello(
        self, timeout_s: float | None = None, *, of_any: bool = False
    ) -> RowsState:
        """Return rows, and how far servers follow; PersiaError if one is not ready.

        With ``of_any``, it is enough that one of several that can look up is.
        """

    def set_lookup_timeout(self, timeout_s: float) -> None:
        """Set the seconds that a lookup may take from now on."""

    def look_up_ids(self, ids: JaggedIds) -> Any:
        """Look the ID features of a batch up, or raise BatchError or ServerError."""

    def to_tensors(self, pulled: Any) -> dict[str, torch.Tensor]:
        """Return what was looked up as a model takes it, in the order of its inputs."""


R = TypeVar("R", bound=RowReader)


class CollectionsReader:
    """Looks up what the collections of a TorchRec model give: ``DenseHalf`` takes it.

    A ``RowReader``.

    Any thread may call any method.

    Attributes:
        is_local: whether a lookup waits for no other process.
        lookup_timeout_s: seconds that a lookup may take.
    """

    def __init__(
        self,
        source: RowSource,
        collections: "Sequence[CollectionDescription]",
        device: torch.device = _CPU,
    ) -> None:
        self.device = device
        self.is_local = source.is_local
        self.lookup_timeout_s = timeouts.REQUEST_S
        self._source = source
        kinds = {"bags": ShardedLookup, "sequences": SequenceLookup}
        self._lookups = [kinds[one.kind](source, one.features) for one in collections]

    def hello(
        self, timeout_s: float | None = None, *, of_any: bool = False
    ) -> RowsState:
        """Return rows, and how far servers follow; PersiaError if one is not ready."""
        return RowsState.of(self._source.counters(timeout_s))

    def set_lookup_timeout(self, timeout_s: float) -> None:
        """Set the seconds that a lookup may take from now on."""
        self._source.timeout_s = self.lookup_timeout_s = timeout_s

    def look_up_ids(self, ids: JaggedIds) -> dict[str, torch.Tensor]:
        """Return ids and lengths of a batch, and the rows of each collection."""
        lengths = ids.lengths.reshape(len(ids), -1)
        arrays: list[npt.NDArray[Any]] = [ids.ids.view(np.int64), lengths]
        for lookup in self._lookups:
            keys = dict.fromkeys(feature.key for feature in lookup.features)
            arrays += lookup.pull(ids.of_keys(keys), None)[0]
        tensors = map(torch.from_numpy, arrays)
        return {str(i): t.to(self.device) for i, t in enumerate(tensors)}

    def to_tensors(self, pulled: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what was looked up."""
        return pulled


@contextlib.contextmanager
def host_checkpoint(
    path: str | os.PathLike[str],
    open_reader: Callable[[RowSource], R],
    *,
    num_servers: int = 1,
    increments_dir: str | None = None,
    imports: Sequence[str] = (),
) -> Iterator[R]:
    """Load a checkpoint, or the latest of a folder, for a block.

    ``open_reader`` makes what reads its rows. One server that follows nothing is this
    process: its rows stay as they are, and a lookup waits for no server. Others are
    processes; one that is killed is started again, and loads the same again.
    """
    if num_servers == 1 and increments_dir is None:
        import_settings(imports)
        with report_compilation():
            rows = LocalRows(find_checkpoint(path))
        with contextlib.closing(rows):
            yield open_reader(rows)
        return
    cluster = EmbeddingCluster.of_checkpoint(
        os.fspath(path),
        num_servers,
        increments_dir=increments_dir,
        imports=imports,
        restarts=True,
    )
    with contextlib.ExitStack() as stack:
        addresses = stack.enter_context(cluster).addresses
        client = EmbeddingClient.connect(addresses, timeout_s=timeouts.REQUEST_S)
        stack.callback(client.close)
        with report_compilation():
            warm_up()
        client.learn_tables()
        yield open_reader(client)
