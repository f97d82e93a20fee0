"""Compile a Python loop to machine code, once and for all processes.

Every hot loop of this package is a function under :func:`compiled`: numba translates
it on its first call and keeps the machine code in ``__pycache__`` (or, where that
cannot be written, in the user's cache folder), so that a second process only loads it.
It is made anew when any file with such loops has changed.

The settings, and why:

* ``nogil``: other threads, such as the network's, run meanwhile.
* ``error_model="numpy"``: a division by zero gives inf, as in NumPy. numba's default
  checks every division, which keeps LLVM from using vector instructions.
* ``fastmath`` allows sums to be reordered and multiply-adds to be fused, no more: NaN
  and inf keep their meaning.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from numba.core import event
from numba.core.caching import FunctionCache

logger = logging.getLogger(__name__)

P = ParamSpec("P")
S = TypeVar("S", bound=np.generic)
R = TypeVar("R")

_MARKS = (b"@compiled", b"@inlined", b"@intrinsic")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function``, compiled on its first call.

    Args:
        function: takes and returns numbers and NumPy arrays.
    """
    return _compiled(function, {"reassoc", "contract", "nsz"})


def compiled_as_written(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function``, compiled on its first call, without ``fastmath``.

    For floats that must be the same, bit for bit, on every machine: where a processor
    has fused multiply-adds, ``fastmath`` uses them, and they round otherwise.

    Args:
        function: takes and returns numbers and NumPy arrays.
    """
    return _compiled(function, set())


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function``, which becomes a part of each compiled function it is in.

    For what a loop does with every row: handing several arrays to a function takes
    longer than the work on a short row.

    Args:
        function: as for :func:`compiled`.
    """
    return _compiled(function, {"reassoc", "contract", "nsz"}, inline=True)


def sources_stamp(folder: Path) -> str:
    """Return a hash of all files of a folder, at any depth, that hold compiled loops.

    Args:
        folder: of Python files.
    """
    stamp = sha256()
    for path in sorted(folder.rglob("*.py")):
        source = path.read_bytes()
        if any(mark in source for mark in _MARKS):
            stamp.update(source)
    return stamp.hexdigest()


@contextlib.contextmanager
def telling_of_compilation(tell: Callable[[bool], object] = bool) -> Iterator[None]:
    """Say so if loops have to be compiled within a block, which calls each of them.

    A line is logged when the first one is compiled, and one at the end. Loops that are
    only loaded are not worth a word.

    Args:
        tell: called with True when the first one is compiled, and with False at the
            end; in the thread that does so.
    """
    compilation = _Compilation(tell)
    with event.install_listener("numba:compile", compilation):
        try:
            yield
        finally:
            compilation.end()


class _Compilation(event.Listener):  # type: ignore[misc]  # untyped
    """Hears from numba of each loop that it compiles, and did not find on disk."""

    def __init__(self, tell: Callable[[bool], object]) -> None:
        self._tell = tell
        self._start_s: float | None = None
        self._num_loops = 0

    def on_start(self, _event: event.Event) -> None:
        self._num_loops += 1
        if self._start_s is None:
            self._start_s = time.monotonic()
            logger.info(
                "compiling loops, once for this machine and version; it takes up to "
                "half a minute of processor time"
            )
            self._tell(True)

    def on_end(self, _event: event.Event) -> None:
        pass

    def end(self) -> None:
        if self._start_s is not None:
            seconds = time.monotonic() - self._start_s
            logger.info("compiled %d loops in %.1f s", self._num_loops, seconds)
            self._tell(False)


class _SourceCache(FunctionCache):  # type: ignore[misc]  # untyped
    """numba's cache of one loop, whose entries hold for one state of all loops.

    numba itself looks at the file of the loop alone, and would go on running an old
    version of a function that the loop calls and that stands in another file. Checked
    with numba 0.61 to 0.68.
    """

    def _index_key(self, sig: object, codegen: object) -> tuple[object, ...]:
        return (*super()._index_key(sig, codegen), _stamp_of_package())


@cache
def _stamp_of_package() -> str:
    return sources_stamp(Path(__file__).parent)


def _compiled(
    function: Callable[P, R], fastmath: set[str], *, inline: bool = False
) -> Callable[P, R]:
    dispatcher = numba.njit(
        nogil=True, error_model="numpy", fastmath=fastmath, forceinline=inline
    )(function)
    dispatcher._cache = _SourceCache(function)
    return cast("Callable[P, R]", dispatcher)


def read_only(array: npt.NDArray[S]) -> npt.NDArray[S]:
    """Return a C-contiguous view that cannot be written to.

    numba compiles a loop anew for arrays that may be written to and for those that may
    not, as bytes from the network. Passing all inputs through here makes them one kind.
    """
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view
