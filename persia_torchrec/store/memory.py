"""Memory by address: what the store's loops need and NumPy does not offer.

Address space is reserved for the whole capacity at the start, but the operating system
gives a page only when it is first written: memory grows with use, not with capacity.

The loops prefetch what they will touch a few ids later, and eviction reads row headers
of arrays of several shapes; both work on plain addresses. The intrinsics below become
one machine instruction each.
"""

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from persia_torchrec.errors import StoreError

# Absent from Python's mmap module before 3.13; the value of Linux on x86 and Arm.
_MAP_NORESERVE = 0x4000


def reserve(num_words: int) -> npt.NDArray[np.uint64]:
    """Reserve zeroed memory that costs nothing until it is written.

    Args:
        num_words: number of 8-byte words.

    Returns:
        uint64 ``(num_words,)``, all zero, aligned to a page, given back to the
        operating system when the array is no longer used.

    Raises:
        StoreError: the operating system refuses the address space.
    """
    num_bytes = max(num_words * 8, 1)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        memory = mmap.mmap(-1, num_bytes, flags=flags)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, OverflowError, ValueError) as exc:
        raise StoreError(
            "The operating system must grant address space for the store's capacity. "
            f"Received: {exc} for {num_bytes} bytes. Lower the capacity, or allow "
            "overcommitted memory (vm.overcommit_memory)."
        ) from exc
    return np.frombuffer(memory, dtype=np.uint64, count=num_words)


@intrinsic
def unowned(typingctx: Any, array: Any) -> Any:
    """View an array without counting references to it.

    numba counts the references to an array each time that a loop takes a slice or
    calls a function, with atomic instructions that cost more than the work on a row.
    A loop whose caller holds the arrays begins with views that are not counted.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        view = context.make_array(array)(context, builder, args[0])
        view.meminfo = view.meminfo.type(None)
        view.parent = view.parent.type(None)
        return view._getvalue()  # numba's own way to end such a function

    return array(array), build


@intrinsic
def floats_at(typingctx: Any, address: Any) -> Any:
    """Return the uint64 address as a pointer to float32, for ``numba.carray``."""
    pointer_type = types.CPointer(types.float32)

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(pointer_type))

    return pointer_type(types.uint64), build


@intrinsic
def load_word(typingctx: Any, address: Any) -> Any:
    """Read the uint64 at a uint64 address."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load(pointer)

    return types.uint64(types.uint64), build


@intrinsic
def store_word(typingctx: Any, address: Any, word: Any) -> Any:
    """Write a uint64 to a uint64 address."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        builder.store(args[1], pointer)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), build


@intrinsic
def load_half_word(typingctx: Any, address: Any) -> Any:
    """Read the uint32 at a uint64 address, as uint64."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(32).as_pointer())
        return builder.zext(builder.load(pointer), ir.IntType(64))

    return types.uint64(types.uint64), build


@intrinsic
def store_half_word(typingctx: Any, address: Any, value: Any) -> Any:
    """Write the lower 32 bits of a uint64 to a uint64 address."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(32).as_pointer())
        builder.store(builder.trunc(args[1], ir.IntType(32)), pointer)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), build


@intrinsic
def load_byte(typingctx: Any, address: Any) -> Any:
    """Read the byte at a uint64 address, as uint64."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        return builder.zext(builder.load(pointer), ir.IntType(64))

    return types.uint64(types.uint64), build


@intrinsic
def store_byte(typingctx: Any, address: Any, value: Any) -> Any:
    """Write the lowest 8 bits of a uint64 to a uint64 address."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        builder.store(builder.trunc(args[1], ir.IntType(8)), pointer)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), build


@intrinsic
def upper_halves_equal(typingctx: Any, address: Any, value: Any) -> Any:
    """Compare the upper halves of the 8 words of a cache line with a value.

    Returns:
        A bit for each word, the first word's lowest: whether its upper 32 bits are the
        lower 32 bits of ``value``. A few vector instructions, and no branch.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, half = ir.IntType(64), ir.IntType(32)
        line = _load_line(builder, args[0])
        upper = builder.trunc(
            builder.lshr(line, ir.Constant(line.type, [32] * 8)),
            ir.VectorType(half, 8),
        )
        wanted = _splat(builder, builder.trunc(args[1], half))
        bits = builder.bitcast(
            builder.icmp_unsigned("==", upper, wanted), ir.IntType(8)
        )
        return builder.zext(bits, word)

    return types.uint64(types.uint64, types.uint64), build


@intrinsic
def words_empty(typingctx: Any, address: Any) -> Any:
    """Return a bit for each of the 8 words of a cache line: whether it is zero."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = _load_line(builder, args[0])
        zeros = ir.Constant(line.type, [0] * 8)
        bits = builder.bitcast(builder.icmp_unsigned("==", line, zeros), ir.IntType(8))
        return builder.zext(bits, ir.IntType(64))

    return types.uint64(types.uint64), build


@intrinsic
def lowest_bit(typingctx: Any, bits: Any) -> Any:
    """Return the place of the lowest bit that is set; ``bits`` must not be zero."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), build


def _load_line(builder: Any, address: Any) -> Any:
    line = ir.VectorType(ir.IntType(64), 8)
    return builder.load(builder.inttoptr(address, line.as_pointer()), align=64)


def _splat(builder: Any, value: Any) -> Any:
    vector = ir.Constant(ir.VectorType(value.type, 8), ir.Undefined)
    first = builder.insert_element(vector, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(
        first, vector, ir.Constant(ir.VectorType(ir.IntType(32), 8), [0] * 8)
    )


@intrinsic
def copy_bytes(typingctx: Any, target: Any, source: Any, num_bytes: Any) -> Any:
    """Copy bytes from one uint64 address to another; they must not overlap."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer_type = ir.IntType(8).as_pointer()
        copy = builder.module.declare_intrinsic(
            "llvm.memcpy", [pointer_type, pointer_type, ir.IntType(64)]
        )
        to, from_ = (builder.inttoptr(args[i], pointer_type) for i in (0, 1))
        is_volatile = ir.Constant(ir.IntType(1), 0)
        builder.call(copy, [to, from_, args[2], is_volatile])
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.uint64), build


@intrinsic
def prefetch(typingctx: Any, address: Any) -> Any:
    """Ask for the cache line at a uint64 address; any address is allowed."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer_type = ir.IntType(8).as_pointer()
        flag = ir.IntType(32)
        hint = builder.module.declare_intrinsic(
            "llvm.prefetch",
            [pointer_type],
            ir.FunctionType(ir.VoidType(), [pointer_type, flag, flag, flag]),
        )
        pointer = builder.inttoptr(args[0], pointer_type)
        for_read, keep_in_all_caches, data = (flag(value) for value in (0, 3, 1))
        builder.call(hint, [pointer, for_read, keep_in_all_caches, data])
        return context.get_dummy_value()

    return types.void(types.uint64), build
