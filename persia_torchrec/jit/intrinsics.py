"""Intrinsics for compiled loops: memory by address, and the bits of numbers.

A compiled loop counts references to an array at each slice and call, with atomic
instructions that cost more than the work on a short row; an address (uint64) has no
count and no length. These functions exist in compiled loops only, as few instructions.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

Pointer = npt.NDArray[np.float32]
"""Where numbers begin; to mypy, which knows no pointers, an array. ``x[d]`` reads and
writes an element; there are no negative indices."""

HAS_CARRYLESS_PRODUCT = numba.config.CPU_NAME is None and bool(
    binding.get_host_cpu_features().get("pclmul")
)
"""Whether there is :func:`fold`."""

_BYTE, _HALF, _WORD = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_LINE = ir.VectorType(_WORD, 8)


def _emitted(returned: Any, *taken: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make an intrinsic of these types from the function that emits its instructions.

    That function gets llvmlite's builder, and the arguments as LLVM's values.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = emit(builder, *args)
            return context.get_dummy_value() if returned is types.void else value

        @intrinsic
        @wraps(emit)  # numba asks for the number of arguments
        def function(typingctx: Any, *args: Any) -> Any:
            return returned(*taken), build

        return function

    return decorate


def _pointer(dtype: Any, element: Any) -> Any:
    """Build the intrinsic that views an address as a pointer to numbers of a type."""
    to_pointer = _emitted(types.CPointer(dtype), types.uint64)
    return to_pointer(lambda builder, at: builder.inttoptr(at, element.as_pointer()))


floats_at = _pointer(types.float32, ir.FloatType())
halves_at = _pointer(types.uint16, ir.IntType(16))
words_at, integers_at = _pointer(types.uint64, _WORD), _pointer(types.int64, _WORD)
"""Return the pointer to the float32, uint16, uint64 or int64 numbers at an address."""


def _loader(integer: Any) -> Any:
    """Build the intrinsic that reads an unsigned integer, and widens it to uint64."""

    @_emitted(types.uint64, types.uint64)
    def load(builder: Any, address: Any) -> Any:
        value = builder.load(builder.inttoptr(address, integer.as_pointer()))
        return builder.zext(value, _WORD)  # nothing, if it is a word

    return load


def _storer(integer: Any) -> Any:
    """Build the intrinsic that writes the lowest bits of a uint64."""

    @_emitted(types.void, types.uint64, types.uint64)
    def store(builder: Any, address: Any, value: Any) -> None:
        pointer = builder.inttoptr(address, integer.as_pointer())
        builder.store(builder.trunc(value, integer), pointer)

    return store


load_u8, load_u32, load_u64 = _loader(_BYTE), _loader(_HALF), _loader(_WORD)
"""Return the integer of so many bits at an address, as uint64."""

store_u8, store_u32, store_u64 = _storer(_BYTE), _storer(_HALF), _storer(_WORD)
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


@_emitted(types.void, types.uint64, types.uint64, types.uint64)
def copy_bytes(builder: Any, target: Any, source: Any, num_bytes: Any) -> None:
    """Copy bytes from one address to another; they must not overlap."""
    pointer = _BYTE.as_pointer()
    copy = builder.module.declare_intrinsic("llvm.memcpy", [pointer, pointer, _WORD])
    to, from_ = builder.inttoptr(target, pointer), builder.inttoptr(source, pointer)
    is_volatile = ir.Constant(ir.IntType(1), 0)
    builder.call(copy, [to, from_, num_bytes, is_volatile])


def _streamer(kind: Any) -> Callable[[Any, Any, Any], None]:
    """Return what emits a store past the caches, of memory aligned to its own size."""
    num_bytes = kind.count * 8 if kind is _LINE else 8

    def emit(builder: Any, target: Any, value: Any) -> None:
        pointer = builder.inttoptr(target, kind.as_pointer())
        store = builder.store(value, pointer, align=num_bytes)
        hint = builder.module.add_metadata([ir.Constant(_HALF, 1)])
        store.set_metadata("nontemporal", hint)

    return emit


_stream_word, _stream_line = _streamer(_WORD), _streamer(_LINE)


@_emitted(types.void, types.uint64, types.uint64)
def stream_u64(builder: Any, address: Any, value: Any) -> None:
    """Write a word past the caches, for memory that is not read soon."""
    _stream_word(builder, address, value)


@_emitted(types.void, types.uint64, types.uint64)
def stream_line(builder: Any, target: Any, source: Any) -> None:
    """Copy 64 bytes past the caches; the target is aligned to them."""
    pointer = builder.inttoptr(source, _LINE.as_pointer())
    _stream_line(builder, target, builder.load(pointer, align=8))


@_emitted(types.void)
def fence(builder: Any) -> None:
    """Keep the compiler from moving reads and writes of memory across; no instruction.

    A reader of the memory of a killed process sees writes in this order.
    """
    builder.fence("seq_cst", "singlethread")


@_emitted(types.void, types.uint64)
def prefetch(builder: Any, address: Any) -> None:
    """Load the cache line at an address ahead of its use; any address is allowed."""
    pointer = _BYTE.as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [pointer, _HALF, _HALF, _HALF])
    hint = builder.module.declare_intrinsic("llvm.prefetch", [pointer], signature)
    for_read, keep_in_all_caches, data = (_HALF(value) for value in (0, 3, 1))
    at = builder.inttoptr(address, pointer)
    builder.call(hint, [at, for_read, keep_in_all_caches, data])


@_emitted(types.uint64, types.uint64, types.uint64)
def upper_halves_equal(builder: Any, address: Any, value: Any) -> Any:
    """Compare the upper halves of the 8 words of a cache line with a value.

    Returns a bit per word, the first word's lowest: whether its upper 32 bits are the
    lower 32 bits of ``value``. A few vector instructions, and no branch.
    """
    line = _load_line(builder, address)
    shifted = builder.lshr(line, ir.Constant(line.type, [32] * 8))
    upper = builder.trunc(shifted, ir.VectorType(_HALF, 8))
    vector = ir.Constant(upper.type, ir.Undefined)
    half = builder.trunc(value, _HALF)
    first = builder.insert_element(vector, half, ir.Constant(_HALF, 0))
    wanted = builder.shuffle_vector(first, vector, ir.Constant(upper.type, [0] * 8))
    equal = builder.icmp_unsigned("==", upper, wanted)
    return builder.zext(builder.bitcast(equal, _BYTE), _WORD)


@_emitted(types.uint64, types.uint64)
def words_empty(builder: Any, address: Any) -> Any:
    """Return a bit per word of the 8 of a cache line: whether it is zero."""
    line = _load_line(builder, address)
    empty = builder.icmp_unsigned("==", line, ir.Constant(line.type, [0] * 8))
    return builder.zext(builder.bitcast(empty, _BYTE), _WORD)


def _load_line(builder: Any, address: Any) -> Any:
    line = ir.VectorType(_WORD, 8)
    return builder.load(builder.inttoptr(address, line.as_pointer()), align=64)


@_emitted(types.void, *[types.uint64] * 4)
def fold(builder: Any, at: Any, data: Any, low: Any, high: Any) -> None:
    """Multiply both words at an address, without carries, and add two words of data.

    The words and their products are polynomials over GF(2), so that adding is xor.
    """
    pair = ir.VectorType(_WORD, 2)
    state, added = (builder.inttoptr(a, pair.as_pointer()) for a in (at, data))
    factors = ir.Constant(pair, ir.Undefined)
    for k, factor in enumerate((low, high)):
        factors = builder.insert_element(factors, factor, ir.Constant(_HALF, k))
    signature = ir.FunctionType(pair, [pair, pair, _BYTE])
    name = "llvm.x86.pclmulqdq"
    product = builder.module.declare_intrinsic(name, fnty=signature)
    words, total = builder.load(state, align=8), builder.load(added, align=1)
    for both in (0x00, 0x11):  # the low words, the high words
        one = builder.call(product, [words, factors, ir.Constant(_BYTE, both)])
        total = builder.xor(total, one)
    builder.store(total, state, align=8)


@_emitted(types.uint64, types.uint64)
def lowest_bit(builder: Any, bits: Any) -> Any:
    """Return the number of the lowest bit that is set; ``bits`` must not be zero."""
    return builder.cttz(bits, ir.Constant(ir.IntType(1), 1))


@_emitted(types.uint32, types.float32)
def to_bits(builder: Any, value: Any) -> Any:
    """Return the bits of a float32 as uint32."""
    return builder.bitcast(value, _HALF)


@_emitted(types.float32, types.uint32)
def from_bits(builder: Any, bits: Any) -> Any:
    """Return the float32 of these bits."""
    return builder.bitcast(bits, ir.FloatType())


@_emitted(types.float64, types.uint64)
def double_of(builder: Any, word: Any) -> Any:
    """Return the float64 of these bits."""
    return builder.bitcast(word, ir.DoubleType())


@_emitted(types.float32, types.uint16)
def widen_half(builder: Any, half: Any) -> Any:
    """Return the IEEE half of these 16 bits as float32."""
    return builder.fpext(builder.bitcast(half, ir.HalfType()), ir.FloatType())


@_emitted(types.uint16, types.float32)
def narrow_to_half(builder: Any, value: Any) -> Any:
    """Return the bits of the IEEE half nearest to a float32, ties to even."""
    return builder.bitcast(builder.fptrunc(value, ir.HalfType()), ir.IntType(16))
