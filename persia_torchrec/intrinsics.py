"""What compiled loops need and numba lacks: memory by address, and the bits of numbers.

A compiled loop counts the references to an array each time that it takes a slice or
calls a function, with atomic instructions that cost more than the work on a short row.
An address is not counted. It has no length either: the caller knows how far the memory
reaches, and that it lives long enough. Each of these functions becomes one machine
instruction, or none; they exist in compiled loops only. All addresses are uint64.
"""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

Pointer: TypeAlias = npt.NDArray[np.float32]
"""Where numbers begin; to mypy, which knows no pointers, an array. ``x[d]`` reads and
writes an element; there are no negative indices."""

_WORD = ir.IntType(64)


def _pointer(dtype: Any, element: Any) -> Any:
    """Build the intrinsic that views an address as a pointer to numbers of a type."""

    @intrinsic
    def pointer_at(typingctx: Any, address: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], element.as_pointer())

        return types.CPointer(dtype)(types.uint64), build

    return pointer_at


floats_at = _pointer(types.float32, ir.FloatType())
"""Return the pointer to the float32 numbers at an address."""

halves_at = _pointer(types.uint16, ir.IntType(16))
"""Return the pointer to the uint16 numbers at an address."""

words_at = _pointer(types.uint64, _WORD)
"""Return the pointer to the uint64 numbers at an address."""

integers_at = _pointer(types.int64, _WORD)
"""Return the pointer to the int64 numbers at an address."""


def _loader(num_bits: int) -> Any:
    """Build the intrinsic that reads an unsigned integer, and widens it to uint64."""

    @intrinsic
    def load(typingctx: Any, address: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], ir.IntType(num_bits).as_pointer())
            value = builder.load(pointer)
            return value if num_bits == 64 else builder.zext(value, _WORD)

        return types.uint64(types.uint64), build

    return load


def _storer(num_bits: int) -> Any:
    """Build the intrinsic that writes the lowest bits of a uint64."""

    @intrinsic
    def store(typingctx: Any, address: Any, value: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            integer = ir.IntType(num_bits)
            bits = args[1] if num_bits == 64 else builder.trunc(args[1], integer)
            builder.store(bits, builder.inttoptr(args[0], integer.as_pointer()))
            return context.get_dummy_value()

        return types.void(types.uint64, types.uint64), build

    return store


load_u8, load_u32, load_u64 = _loader(8), _loader(32), _loader(64)
"""Return the integer of so many bits at an address, as uint64."""

store_u8, store_u32, store_u64 = _storer(8), _storer(32), _storer(64)
"""Write so many bits of a uint64 to an address."""


@intrinsic
def unowned(typingctx: Any, array: Any) -> Any:
    """View an array without counting references to it, while the caller holds it."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        view = args[0]
        for member in (0, 1):  # the memory's owner, and the Python object
            none = ir.Constant(view.type.elements[member], None)
            view = builder.insert_value(view, none, member)
        return view

    return array(array), build


@intrinsic
def copy_bytes(typingctx: Any, target: Any, source: Any, num_bytes: Any) -> Any:
    """Copy bytes from one address to another; they must not overlap."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer_type = ir.IntType(8).as_pointer()
        copy = builder.module.declare_intrinsic(
            "llvm.memcpy", [pointer_type, pointer_type, _WORD]
        )
        to, from_ = (builder.inttoptr(args[i], pointer_type) for i in (0, 1))
        is_volatile = ir.Constant(ir.IntType(1), 0)
        builder.call(copy, [to, from_, args[2], is_volatile])
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.uint64), build


@intrinsic
def prefetch(typingctx: Any, address: Any) -> Any:
    """Load the cache line at an address ahead of its use; any address is allowed."""

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


@intrinsic
def upper_halves_equal(typingctx: Any, address: Any, value: Any) -> Any:
    """Compare the upper halves of the 8 words of a cache line with a value.

    Returns:
        A bit per word, the first word's lowest: whether its upper 32 bits are the lower
        32 bits of ``value``. A few vector instructions, and no branch.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        half = ir.IntType(32)
        line = _load_line(builder, args[0])
        shifted = builder.lshr(line, ir.Constant(line.type, [32] * 8))
        upper = builder.trunc(shifted, ir.VectorType(half, 8))
        wanted = _repeat(builder, builder.trunc(args[1], half))
        equal = builder.icmp_unsigned("==", upper, wanted)
        return builder.zext(builder.bitcast(equal, ir.IntType(8)), _WORD)

    return types.uint64(types.uint64, types.uint64), build


@intrinsic
def words_empty(typingctx: Any, address: Any) -> Any:
    """Return a bit per word of the 8 of a cache line: whether it is zero."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = _load_line(builder, args[0])
        zeros = ir.Constant(line.type, [0] * 8)
        empty = builder.icmp_unsigned("==", line, zeros)
        return builder.zext(builder.bitcast(empty, ir.IntType(8)), _WORD)

    return types.uint64(types.uint64), build


@intrinsic
def lowest_bit(typingctx: Any, bits: Any) -> Any:
    """Return the number of the lowest bit that is set; ``bits`` must not be zero."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), build


@intrinsic
def to_bits(typingctx: Any, value: Any) -> Any:
    """Return the bits of a float32 as uint32."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), build


@intrinsic
def from_bits(typingctx: Any, bits: Any) -> Any:
    """Return the float32 of these bits."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), build


@intrinsic
def widen_half(typingctx: Any, half: Any) -> Any:
    """Return the IEEE half of these 16 bits as float32."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), build


@intrinsic
def narrow_to_half(typingctx: Any, value: Any) -> Any:
    """Return the bits of the IEEE half nearest to a float32, ties to even."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), build


def _load_line(builder: Any, address: Any) -> Any:
    line = ir.VectorType(_WORD, 8)
    return builder.load(builder.inttoptr(address, line.as_pointer()), align=64)


def _repeat(builder: Any, value: Any) -> Any:
    vector = ir.Constant(ir.VectorType(value.type, 8), ir.Undefined)
    first = builder.insert_element(vector, value, ir.Constant(ir.IntType(32), 0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), 8), [0] * 8)
    return builder.shuffle_vector(first, vector, lanes)
