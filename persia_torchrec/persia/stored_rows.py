"""PERSIA's files of rows, read in chunks.

A file has the rows of one internal shard of a server: a linked list in the slots of an
array, which is as long as the capacity. Numbers are little-endian::

    rows u64 | first u32 | last u32 | free u32 | end u32 | slots u32 | slot | slot ...

    free slot   next u32 | previous u32 | 0 u8
    used slot   next u32 | previous u32 | 1 u8 | F u32 | F float32 | dim u64 | id u64

The floats are weights and then optimizer state. ``first`` and ``next`` number the slots
from 1; the first row is the next to be evicted. An id has the prefix of its feature
group. What does not fit raises a CheckpointError that names the file and the byte.

Dimension key:
    S: slots, of a file or of a chunk
    N: rows of a chunk
    K: rows of one table among them
    T: tables
    O: optimizers
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Bools, Bytes, Floats, Ids, Offsets, Words
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.errors import CheckpointError
from persia_torchrec.jit import intrinsics as cpu
from persia_torchrec.jit.compiled import compiled, inlined, read_only
from persia_torchrec.routing.route import is_of_shard
from persia_torchrec.store.row_columns import RowColumns, RowShape
from persia_torchrec.table import TableSpec

Ranks = npt.NDArray[np.uint32]

_HEAD = struct.Struct("<QIIIII")
_FREE_BYTES = 9  # of a free slot
_USED_BYTES = 29  # of a used one without its floats
_FLOATS_AT = 13  # where the floats of a used one begin
_CHUNK_BYTES = 2**23


class _Rules(NamedTuple):
    """What a row must be, by the table that its prefix names.

    ``dims`` are ``(T,)``, ``num_floats`` ``(T, O)``. An optimizer that does not fit a
    row is struck off ``fits``, ``(O,)``.
    """

    prefix_shift: np.uint64
    dims: Words
    num_floats: Words
    fits: Bools


class _Found(NamedTuple):
    """What is found in a chunk: links ``(S,)``, others ``(N,)``; with room for more."""

    links: Ranks
    slots: Offsets
    floats: Offsets
    ids: Ids
    tables: npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Whole slots of a file: ``num_bytes`` of ``data``, which begin at ``offset``.

    ``links`` are the ``next`` of each slot, ``(S,)``; the other arrays are ``(N,)``.
    ``slots`` are indices in the file, ``floats`` where in ``data`` the floats begin.
    """

    data: bytes
    offset: int
    num_bytes: int
    first_slot: int
    links: Ranks
    slots: Offsets
    floats: Offsets
    ids: Ids
    tables: npt.NDArray[np.uint16]

    def byte_of(self, n: int) -> int:
        """Return where in the file the slot of a row begins."""
        return self.offset + int(self.floats[n]) - _FLOATS_AT


class Form:
    """What the rows of a checkpoint may be: the tables, with one of some optimizers.

    ``tables`` are in the order of their prefixes, by the name of the optimizer. An id's
    top ``prefix_bits`` are the number of its table, from 1.
    """

    def __init__(
        self, tables: Mapping[str, Sequence[TableSpec]], prefix_bits: int
    ) -> None:
        self._tables = tables
        self._some = next(iter(tables.values()))
        num_floats = [[s.dim + s.num_state_floats for s in t] for t in tables.values()]
        self._rules = _Rules(
            np.uint64(64 - prefix_bits),
            np.array([spec.dim for spec in self._some], dtype=np.uint64),
            np.array(num_floats, dtype=np.uint64).T.copy(),
            np.ones(len(tables), dtype=np.bool_),
        )
        self._max_floats = int(self._rules.num_floats.max())

    @property
    def fitting(self) -> list[str]:
        """Names of the optimizers that fit all rows so far."""
        names = zip(self._tables, self._rules.fits.tolist(), strict=True)
        return [name for name, fits in names if fits]

    def find(self, data: bytes, offset: int, first_slot: int, num_slots: int) -> Chunk:
        """Find the slots that begin some bytes: those before one that does not fit."""
        most_slots = min(len(data) // _FREE_BYTES, num_slots)
        most_rows = min(len(data) // _USED_BYTES, num_slots)
        found = _Found(
            np.empty(most_slots, dtype=np.uint32),
            np.empty(most_rows, dtype=np.int64),
            np.empty(most_rows, dtype=np.int64),
            np.empty(most_rows, dtype=np.uint64),
            np.empty(most_rows, dtype=np.uint16),
        )
        bytes_ = read_only(np.frombuffer(data, dtype=np.uint8))
        slots, rows, num_bytes = _find(bytes_, num_slots, self._rules, found)
        found.slots[:rows] += first_slot
        return Chunk(
            data,
            offset,
            num_bytes,
            first_slot,
            found.links[:slots],
            found.slots[:rows],
            found.floats[:rows],
            found.ids[:rows],
            found.tables[:rows],
        )

    def fault(self, slot: bytes) -> str:
        """Say why the slot that begins some bytes does not fit.

        Returns nothing if more bytes must tell.
        """
        if len(slot) < _FREE_BYTES:
            return ""
        if slot[8] != 1:
            return (
                f"a slot that begins with {slot[:9].hex()}, at its end neither 0 nor 1"
            )
        if len(slot) < _FLOATS_AT:
            return ""
        (num_floats,) = struct.unpack_from("<I", slot, 9)
        if num_floats > self._max_floats:
            return f"a row of {num_floats} floats, where {self._max_floats} is the most"
        if len(slot) < _USED_BYTES + 4 * num_floats:
            return ""
        dim, id_ = struct.unpack_from("<QQ", slot, _FLOATS_AT + 4 * num_floats)
        prefix = id_ >> int(self._rules.prefix_shift)
        row = f"id {id_} with prefix {prefix}, and {num_floats} floats of dim {dim}"
        if not 1 <= prefix <= len(self._some):
            return f"{row}; the prefixes of the config are 1 to {len(self._some)}"
        spec, sizes = self._some[prefix - 1], self._rules.num_floats[prefix - 1]
        choices = [f"{s} ({o})" for s, o in zip(sizes, self._tables, strict=True)]
        return f"{row}; {spec.name!r} has {' or '.join(choices)} of dim {spec.dim}"

    def split(self, chunk: Chunk, uses_N: Words) -> Iterator[tuple[int, RowColumns]]:
        """Yield the rows of a chunk, by the number of their table."""
        tables = self._tables[self.fitting[0]]
        order_N = np.argsort(chunk.tables, kind="stable")
        begins = np.searchsorted(chunk.tables[order_N], np.arange(len(tables) + 1))
        data = read_only(np.frombuffer(chunk.data, dtype=np.uint8))
        for table in np.flatnonzero(np.diff(begins)).tolist():
            at_K = order_N[begins[table] : begins[table + 1]]
            rows = RowShape(tables[table], has_metadata=False).empty(len(at_K))
            rows.ids[:], rows.uses[:] = chunk.ids[at_K], uses_N[at_K]
            _copy_floats(data, chunk.floats[at_K], rows.weights, rows.state)
            yield table, rows


class RowFile:
    """One file of a server, whose head has been checked."""

    def __init__(
        self, folder: Folder, name: str, server: int, num_servers: int
    ) -> None:
        self.path = folder.file_path(name)
        self._folder, self._name = folder, name
        self._server, self._num_servers = server, num_servers
        self.size_bytes = folder.file_size(name) or 0
        with folder.opened(name) as file:
            head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            raise self._cut_off(0, len(head))
        self.num_rows, self._first, _, _, _, self.num_slots = _HEAD.unpack(head)
        least_bytes = _HEAD.size + _FREE_BYTES * self.num_slots
        if self.num_rows > self.num_slots or least_bytes > self.size_bytes:
            rows = f"a head that says {self.num_rows} rows in {self.num_slots} slots"
            raise self._damaged(f"{rows}, in a file of {self.size_bytes} bytes", 0)

    def chunks(self, form: Form) -> Iterator[Chunk]:
        """Yield all slots, each checked by itself."""
        with self._folder.opened(self._name) as file:
            offset, rest, num_found = len(file.read(_HEAD.size)), b"", 0
            while num_found < self.num_slots:
                read = file.read(_CHUNK_BYTES)
                data = rest + read
                chunk = form.find(data, offset, num_found, self.num_slots - num_found)
                yield chunk
                num_found += len(chunk.links)
                offset += chunk.num_bytes
                rest = data[chunk.num_bytes :]
                if num_found == self.num_slots:
                    break
                if fault := form.fault(rest):
                    raise self._damaged(fault, offset)
                if not read:
                    raise self._cut_off(offset, len(rest))
            if rest or file.read(1):
                raise self._damaged("more bytes after the last slot", offset)

    def ranks(self, form: Form, progress: Callable[[int], object]) -> Ranks:
        """Check the whole file; return the rank of each slot in the order of eviction.

        ``progress`` is told how many bytes each step has read.
        """
        next_S = np.empty(self.num_slots, dtype=np.uint32)
        is_used_S = np.zeros(self.num_slots, dtype=np.bool_)
        for chunk in self.chunks(form):
            self._require_own(chunk)
            first = chunk.first_slot
            next_S[first : first + len(chunk.links)] = chunk.links
            is_used_S[chunk.slots] = True
            progress(chunk.num_bytes)
        num_used = int(is_used_S.sum())
        ranks_S, num_linked = _follow(next_S, is_used_S, self._first, self.num_rows)
        if not num_linked == num_used == self.num_rows:
            raise self._damaged(
                f"a head that says {self.num_rows} rows, {num_used} rows in the slots, "
                f"and links that lead from slot {self._first} to {num_linked} of them",
                0,
            )
        return ranks_S

    def find_id(self, id_: int, form: Form) -> list[str]:
        """Return where an id is in the file."""
        return [
            f"{self.path} byte {chunk.byte_of(n)}"
            for chunk in self.chunks(form)
            for n in np.flatnonzero(chunk.ids == id_).tolist()
        ]

    def _require_own(self, chunk: Chunk) -> None:
        ids_N = read_only(chunk.ids)
        is_own_N = is_of_shard(ids_N, self._server, self._num_servers)
        for n in np.flatnonzero(~is_own_N)[:1].tolist():
            of = f"{self._server} of {self._num_servers}"
            received = f"id {ids_N[n]}, which is of another server than {of}"
            raise self._damaged(received, chunk.byte_of(n))

    def _damaged(self, received: str, offset: int) -> CheckpointError:
        return CheckpointError(
            f"{self.path} must have rows as PERSIA writes them, that fit the embedding "
            f"config and the optimizer. Received at byte {offset}: {received}."
        )

    def _cut_off(self, offset: int, num_bytes: int) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is cut off: more must follow byte {offset}. "
            f"Received: {num_bytes} bytes."
        )


@compiled
def _find(
    data: Bytes, num_slots: int, rules: _Rules, found: _Found
) -> tuple[int, int, int]:
    """Find whole slots that fit; return how many, their rows, and their bytes."""
    base = np.uint64(data.ctypes.data)
    slot = row = end = 0
    while slot < num_slots and end + _FREE_BYTES <= len(data):
        address, num_bytes = base + np.uint64(end), np.int64(_FREE_BYTES)
        if data[end + 8] != 0:
            if data[end + 8] != 1 or end + _USED_BYTES > len(data):
                break
            num_floats = cpu.load_u32(address + np.uint64(9))
            num_bytes = _USED_BYTES + 4 * np.int64(num_floats)
            if end + num_bytes > len(data):
                break
            last = address + np.uint64(num_bytes)
            id_ = cpu.load_u64(last - np.uint64(8))
            dim = cpu.load_u64(last - np.uint64(16))
            table = np.int64(id_ >> rules.prefix_shift) - 1
            if not 0 <= table < len(rules.dims) or dim != rules.dims[table]:
                break
            if not _fit(num_floats, rules.num_floats[table], rules.fits):
                break
            found.slots[row], found.floats[row] = slot, end + _FLOATS_AT
            found.ids[row], found.tables[row] = id_, table
            row += 1
        found.links[slot] = cpu.load_u32(address)
        slot += 1
        end += int(num_bytes)
    return slot, row, end


@inlined
def _fit(num_floats: np.uint64, num_floats_O: Words, fits_O: Bools) -> bool:
    """Return whether an optimizer is left that fits a row; strike the others off."""
    fits_any = False
    for o in range(len(fits_O)):
        fits_any |= fits_O[o] and num_floats == num_floats_O[o]
    if fits_any:
        for o in range(len(fits_O)):
            fits_O[o] &= num_floats == num_floats_O[o]
    return fits_any


@compiled
def _follow(
    next_S: Ranks, is_used_S: Bools, first: int, num_rows: int
) -> tuple[Ranks, int]:
    """Follow the links; return the rank of each slot, and how many have got one.

    ``is_used_S`` is overwritten, so that a loop ends where it began.
    """
    ranks_S = np.zeros(len(next_S), dtype=np.uint32)
    at = np.int64(first)
    for rank in range(num_rows):
        if not 0 < at <= len(next_S) or not is_used_S[at - 1]:
            return ranks_S, rank
        is_used_S[at - 1] = False
        ranks_S[at - 1] = rank
        at = np.int64(next_S[at - 1])
    return ranks_S, num_rows


@compiled
def _copy_floats(
    data: Bytes, at_K: Offsets, weights_KD: Floats, state_KS: Floats
) -> None:
    """Copy the floats that begin at bytes of ``data``."""
    base = np.uint64(data.ctypes.data)
    weights, state = np.uint64(weights_KD.ctypes.data), np.uint64(state_KS.ctypes.data)
    weight_bytes = np.uint64(4 * weights_KD.shape[1])
    state_bytes = np.uint64(4 * state_KS.shape[1])
    for k in range(len(at_K)):
        row, address = np.uint64(k), base + np.uint64(at_K[k])
        cpu.copy_bytes(weights + row * weight_bytes, address, weight_bytes)
        cpu.copy_bytes(state + row * state_bytes, address + weight_bytes, state_bytes)
