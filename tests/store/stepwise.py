"""The store's loops as plain Python, which dies after any store to a memory file.

The functions that the shipped loops are compiled from run as they are written; what
they do to memory goes through this file, where it is counted.
"""

import ctypes
from types import SimpleNamespace

import numpy as np
from numpy.lib.stride_tricks import as_strided

from persia_torchrec.embedding import kernel
from persia_torchrec.store import (
    index,
    loops,
    memory,
    memory_file,
    recency,
    recovery,
    row_moves,
    tables,
)

U8, U32, U64, F32 = ctypes.c_uint8, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_float
MODULES = index, loops, memory, recency, recovery, row_moves
MASK = 2**64 - 1


class DiedError(BaseException):
    """The process would be gone now."""


class Stores:
    """Counts stores to the file; dies after the last of ``left``, if that is set."""

    def __init__(self):
        self.num, self.left = 0, None

    def happened(self):
        self.num += 1
        if self.left is not None:
            self.left -= 1
            if self.left <= 0:
                raise DiedError


class Counted(np.ndarray):
    """Words of the file."""

    stores: Stores

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        self.stores.happened()


class Pointer:
    """What ``floats_at`` and the others return."""

    def __init__(self, kind, convert, address, happened):
        self.kind, self.convert = kind, convert
        self.address, self.size = int(address), ctypes.sizeof(kind)
        self.happened = happened

    def __getitem__(self, at):
        value = self.kind.from_address(self.address + self.size * int(at)).value
        return self.convert(value)

    def __setitem__(self, at, value):
        address = self.address + self.size * int(at)
        self.kind.from_address(address).value = self.kind(value.item()).value
        self.happened(address)


class Machine:
    """The intrinsics, in Python."""

    def __init__(self, stores):
        self.stores, self.begin = stores, 0
        for bits, kind in ((8, U8), (32, U32), (64, U64)):
            setattr(self, f"load_u{bits}", self.loader(kind))
            setattr(self, f"store_u{bits}", self.storer(kind))

    def happened(self, address):
        if self.begin <= address < self.begin + memory_file.FILE_BYTES:
            self.stores.happened()

    def loader(self, kind):
        return lambda address: np.uint64(kind.from_address(int(address)).value)

    def storer(self, kind):
        def store(address, value):
            kind.from_address(int(address)).value = int(value)
            self.happened(int(address))

        return store

    def copy_bytes(self, target, source, num_bytes):
        for at in range(0, int(num_bytes), 8):
            num = min(8, int(num_bytes) - at)
            ctypes.memmove(int(target) + at, int(source) + at, num)
            self.happened(int(target))

    def floats_at(self, address):
        return Pointer(F32, np.float32, address, self.happened)

    def words_at(self, address):
        return Pointer(U64, np.uint64, address, self.happened)

    def integers_at(self, address):
        return Pointer(ctypes.c_int64, np.int64, address, self.happened)

    def carray(self, pointer, shape):
        dtype = np.int64 if pointer.kind is ctypes.c_int64 else np.uint64
        words = np.ctypeslib.as_array((U64 * 1).from_address(pointer.address))
        words = words.view(dtype).view(Counted)
        strides = np.cumprod([8, *shape[:0:-1]])[::-1].tolist()
        return as_strided(words, shape, strides, subok=True)

    def prefetch(self, address):
        pass

    def fence(self):
        pass

    def unowned(self, array):
        return array

    def line(self, address):
        return [U64.from_address(int(address) + at).value for at in range(0, 64, 8)]

    def upper_halves_equal(self, address, value):
        equal = [word >> 32 == int(value) % 2**32 for word in self.line(address)]
        return np.uint64(sum(1 << at for at, is_equal in enumerate(equal) if is_equal))

    def words_empty(self, address):
        words = enumerate(self.line(address))
        return np.uint64(sum(1 << at for at, word in words if word == 0))

    def lowest_bit(self, bits):
        return np.uint64((int(bits) & -int(bits)).bit_length() - 1)


class CountedNumPy:
    """NumPy for ``memory_file.py``, whose words are counted."""

    def __init__(self, machine):
        self.machine = machine

    def __getattr__(self, name):
        return getattr(np, name)

    def frombuffer(self, buffer, dtype):
        words = np.frombuffer(buffer, dtype).view(Counted)
        self.machine.begin = words.ctypes.data
        return words


def run_stepwise(monkeypatch):
    """Make all stores that are opened from now on run in Python; return the counter."""
    stores = Counted.stores = Stores()
    machine = Machine(stores)
    for module in MODULES:
        for name, value in list(vars(module).items()):
            if hasattr(value, "py_func"):
                monkeypatch.setattr(module, name, value.py_func)
        monkeypatch.setattr(module, "cpu", machine, raising=False)
        monkeypatch.setattr(module, "inlined", lambda function: function, raising=False)
    monkeypatch.setattr(memory, "numba", SimpleNamespace(carray=machine.carray))
    monkeypatch.setattr(memory_file, "np", CountedNumPy(machine))
    for name in ("keep_words", "keep_row"):
        monkeypatch.setattr(memory, name, getattr(kernel, name))
    names = {"load_word": "load_u64", "store_word": "store_u64"}
    for name in ("load_word", "store_word", "copy_bytes", "fence", "prefetch"):
        monkeypatch.setattr(kernel, name, getattr(machine, names.get(name, name)))
    for module, builders in (
        (loops, ("build_insert", "build_update")),
        (tables, ("_build_admit",)),
    ):
        for name in builders:
            monkeypatch.setattr(module, name, getattr(module, name).__wrapped__)
        monkeypatch.setattr(module, "inlined_kernel", lambda kernel, **_: kernel)
        monkeypatch.setattr(module, "specialized", lambda loop, _: loop)
    monkeypatch.setattr(tables, "compile_for", lambda *_: None)
    return stores
