"""Compile Python loops to machine code, once for all processes.

numba translates a function under :func:`compiled` on its first call, and keeps the
machine code in ``__pycache__`` (or, where that cannot be written, in the user's cache
folder, or else in a temporary one), so that a second process only loads it. What a
setting does to a row is a plain function, a kernel; :func:`inlined_kernel` compiles it
for :func:`specialized` loops.

* ``nogil``: other threads, such as the network's, run meanwhile.
* ``error_model="numpy"``: a division by zero gives inf, as in NumPy. numba's default
  checks every division, which keeps LLVM from using vector instructions.
* ``fastmath`` allows sums to be reordered and multiply-adds to be fused, no more: NaN
  and inf keep their meaning.
* Of several processes that miss a loop at once, as the servers of one machine, the
  first compiles it, and the others wait for its machine code. :func:`share` has them
  compile different loops.
* The cache: numba ties an entry to the file of the loop alone, and would keep running
  an old version of a function inlined from another file. Here an entry also names a
  hash of every source that may be inlined.
"""

import contextlib
import fcntl
import logging
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from numba.core import event
from numba.core.caching import FunctionCache
from numba.core.errors import NumbaError
from numba.core.registry import CPUDispatcher
from numba.core.runtime import rtsys

from persia_torchrec import timeouts
from persia_torchrec.errors import ConfigError
from persia_torchrec.jit import intrinsics

logger = logging.getLogger(__name__)

P = ParamSpec("P")
S = TypeVar("S", bound=np.generic)
R = TypeVar("R")

_TURN_POLL_S = 0.02
_MARKS = (b"@compiled", b"@inlined", b"@intrinsic", b"specialized(")
_IMPORT = re.compile(
    r"^from persia_torchrec([\w.]*) import (\([^)]*\)|.*)", re.MULTILINE
)


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function``, on numbers and NumPy arrays, compiled on its first call."""
    return _compiled(function)


def compiled_as_written(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function``, compiled on its first call, without ``fastmath``.

    For floats that must have the same bits on every machine: fused multiply-adds, which
    not every processor has, round otherwise.
    """
    return _compiled(function, is_exact=True)


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function``, which becomes a part of each compiled function it is in.

    For work on every row: passing several arrays takes longer than a short row does.
    Python may call it, too, and compiles it once more for that in each process.
    """
    return _compiled(function, is_inlined=True)


@cache
def inlined_kernel(
    kernel: Callable[P, R], *, is_as_written: bool = False
) -> Callable[P, R]:
    """Compile a plain function for use in loops, with the plain ones that it calls.

    It calls only NumPy's, ``math``'s and plain functions, by names of its own module.
    ``is_as_written`` keeps the order of operations on floats; so does a function with
    the attribute of that name.
    """
    plain: Any = kernel
    is_exact = is_as_written or getattr(plain, "is_as_written", False)
    names = dict(plain.__globals__)
    for name, helper in _helpers(plain).items():
        if hasattr(helper, "intrinsic"):
            names[name] = getattr(intrinsics, helper.intrinsic)
        else:
            names[name] = inlined_kernel(helper, is_as_written=is_exact)
    copy = FunctionType(plain.__code__, names, plain.__name__)
    return _compiled(copy, is_exact=is_exact, is_inlined=True, is_cached=False)


def specialized(loop: Callable[P, R], kernel: Callable[..., Any]) -> Callable[P, R]:
    """Compile a loop whose closure holds a compiled kernel, apart from other kernels'.

    The files of the plain ``kernel`` and of all that it calls are part of the cache's
    key, as are those from which they import.
    """
    loop.__qualname__ = f"{loop.__name__}_{kernel.__module__}.{kernel.__qualname__}"
    seen: set[Any] = set()
    left: list[Any] = [kernel]
    while left:
        function = left.pop()
        if function not in seen:
            seen.add(function)
            left += _helpers(function).values()
    files = {Path(function.__code__.co_filename) for function in seen}
    return _compiled(loop, stamp=_hash_files(Path(__file__).parent, files))


def compile_for(loop: Callable[..., Any], *arguments: object) -> None:
    """Compile a loop, or load it, for arguments of these types, if it never was.

    A kernel that cannot be compiled is a ConfigError with the compiler's message.
    """
    if _is_known(loop, arguments):
        return
    dispatcher: Any = loop
    try:
        dispatcher.compile(tuple(map(numba.typeof, arguments)))
    except NumbaError as exc:
        raise ConfigError(
            "A kernel must be made of what numba compiles: numbers, pointers, NumPy's "
            f"and math's functions. Received: {loop.__qualname__}: {exc}"
        ) from exc
    _known.add((loop, *map(_type_of, arguments)))


_known: set[tuple[object, ...]] = set()
"""Loops with types of arguments for which they are compiled, in this process."""


def _is_known(loop: Callable[..., Any], arguments: Iterable[object]) -> bool:
    return (loop, *map(_type_of, arguments)) in _known


def _type_of(argument: object) -> object:
    """Return what ``numba.typeof`` tells apart of an argument, in a tenth of its time.

    Of a number that is its class: arguments are numbers that int64 has.
    """
    if isinstance(argument, np.ndarray):
        return argument.dtype, argument.ndim, argument.flags.num
    if isinstance(argument, tuple):
        return tuple(map(_type_of, argument))
    return type(argument)


def compile_all(*calls: tuple[Any, ...]) -> None:
    """Compile loops, each for arguments of these types, as :func:`compile_for` does.

    A call is a loop and its arguments. Processes :func:`share` them.
    """
    left = [(loop, at) for loop, *at in calls if not _is_known(loop, at)]
    if left:
        share({loop.__qualname__: partial(compile_for, loop, *at) for loop, at in left})


def share(parts: Mapping[str, Callable[[], object]]) -> None:
    """Run all parts, which compile loops; last those that another process is running.

    So the processes of a machine that start at once, and have named parts alike,
    compile different loops, and load those that the others have compiled. Parts must
    be in any order.
    """
    try:
        folder = Path(_SourceCache(share, "").cache_path)
    except _NoFolderError:  # nothing is kept that others could load
        folder = None
    left = []
    for name, part in parts.items():
        turn = _Turn(folder, f"part {name}") if folder else None
        if turn is None:
            part()
        elif turn.take():
            try:
                part()
            finally:
                turn.end()
        else:
            left.append(part)
    for part in left:
        part()


def sources_stamp(folder: Path) -> str:
    """Hash the files of a package with compiled functions, and what these import.

    Constants are inlined too.
    """
    sources = {path: path.read_bytes() for path in folder.rglob("*.py")}
    marked = [p for p, text in sources.items() if any(mark in text for mark in _MARKS)]
    return _hash_files(folder, marked)


_sources_stamp = cache(sources_stamp)


@contextlib.contextmanager
def report_compilation(tell: Callable[[bool], object] = bool) -> Iterator[None]:
    """Log when the first loop of a block is compiled, not only loaded, and the end.

    ``tell`` is called then, with True and False, in the thread that compiles.
    """
    compilation = _Compilation(tell)
    with event.install_listener("numba:compile", compilation):
        try:
            yield
        finally:
            if compilation.num_loops:
                seconds = time.monotonic() - compilation.start_s
                count = compilation.num_loops
                logger.info("compiled %d loops in %.1f s", count, seconds)
                tell(False)


def read_only(array: npt.NDArray[S]) -> npt.NDArray[S]:
    """Return a C-contiguous view that cannot be written to.

    numba compiles a loop once for arrays that may be written to, and again for others,
    as bytes from the network. Passing all inputs through here makes them one kind.
    """
    if array.flags.writeable or not array.flags.c_contiguous:
        array = np.ascontiguousarray(array).view()
        array.flags.writeable = False
    return array


class _Compilation(event.Listener):  # type: ignore[misc]  # untyped
    """Hears from numba of each loop that it compiles, and did not find on disk."""

    def __init__(self, tell: Callable[[bool], object]) -> None:
        self._tell = tell
        self.num_loops, self.start_s = 0, 0.0

    def on_start(self, _event: event.Event) -> None:
        self.num_loops += 1
        if self.num_loops == 1:
            self.start_s = time.monotonic()
            logger.info(
                "compiling loops, once per machine and version; it takes up to half a "
                "minute of processor time"
            )
            self._tell(True)

    def on_end(self, _event: event.Event) -> None:
        pass


class _NoFolderError(Exception):
    """The machine code of a function can be kept nowhere."""


class _Turn:
    """A loop's turn to be compiled, which one process has: a byte of a file is locked.

    A process loses it with its end. Where files cannot be locked, all have it.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._place = int.from_bytes(sha256(name.encode()).digest()[:6], "little")

    def wait(self) -> None:
        """Take the turn, when no other process has it, or after a deadline."""
        if self.take():
            return
        # Listeners hear of the wait as of a compilation.
        with event.trigger_event("numba:compile", data={}):
            deadline = time.monotonic() + timeouts.COMPILING_TURN_S
            while not self.take() and time.monotonic() < deadline:
                time.sleep(_TURN_POLL_S)

    def take(self) -> bool:
        """Take the turn; return whether no other process has it."""
        try:
            file = _lock_file(self._folder)
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._place)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def end(self) -> None:
        """Leave the turn to other processes."""
        with contextlib.suppress(OSError):
            fcntl.lockf(_lock_file(self._folder), fcntl.LOCK_UN, 1, self._place)


@cache
def _lock_file(folder: Path) -> int:
    """Open the file of the turns; it stays open, as closing it would end all."""
    folder.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    return os.open(folder / "compiling.lock", flags, 0o600)


class _Failures(event.Listener):  # type: ignore[misc]  # untyped
    """Ends the turn of a loop that cannot be compiled."""

    def on_start(self, _event: event.Event) -> None:
        pass

    def on_end(self, ended: event.Event) -> None:
        dispatcher: Any = (ended.data or {}).get("dispatcher")
        cached = getattr(dispatcher, "_cache", None)
        if not isinstance(cached, _SourceCache):
            return
        if tuple(ended.data["args"]) not in dispatcher.overloads:
            cached.turn.end()


event.register("numba:compile", _Failures())


class _SourceCache(FunctionCache):  # type: ignore[misc]  # untyped
    """numba's cache of one loop, whose entries hold for one state of all sources."""

    def __init__(self, function: Callable[..., Any], stamp: str) -> None:
        code: Any = function
        source = Path(code.__code__.co_filename)
        beside, given = source.parent / "__pycache__", numba.config.CACHE_DIR
        try:
            own = beside if beside.exists() else source.parent
            if not (given or _has_home() or os.access(own, os.W_OK)):
                raise RuntimeError  # numba would make a folder named "~"
            super().__init__(function)
        except RuntimeError:  # no folder can be written to
            if (folder := _temporary_folder()) is None or not source.is_file():
                raise _NoFolderError from None
            try:
                numba.config.CACHE_DIR = folder
                super().__init__(function)
            finally:
                numba.config.CACHE_DIR = given
            _copy_code(beside, Path(self.cache_path))
        self._stamps = sha256(code.__code__.co_code).hexdigest(), stamp
        self.turn = _Turn(Path(self.cache_path), code.__qualname__)

    def load_overload(self, sig: object, target_context: object) -> object:
        # numba would prepare to compile first, which takes longer than all loops take.
        rtsys.initialize(target_context)
        found = self._load(sig, target_context)
        if found is None:
            self.turn.wait()
            found = self._load(sig, target_context)  # another process may have saved it
            if found is not None:
                self.turn.end()
        return found

    def _load(self, sig: object, target_context: object) -> object:
        try:
            return self._load_overload(sig, target_context)
        except (AttributeError, ImportError):
            # The entries of another release name a class that is gone.
            self.flush()
            return None

    def save_overload(self, sig: object, data: object) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as exc:
            _say_not_kept(f"{self.cache_path}: {exc.strerror}")
        finally:
            self.turn.end()

    def _index_key(self, sig: object, codegen: Any) -> tuple[object, ...]:
        # numba's own key pickles the closure, whose functions differ by process.
        package = _sources_stamp(Path(__file__).parent)
        return (sig, codegen.magic_tuple(), *self._stamps, package)


class _Inlined(CPUDispatcher):  # type: ignore[misc]
    """A function for compiled callers; Python's calls get one of their own."""

    _for_python: CPUDispatcher | None = None

    def add_overload(self, cres: Any) -> None:
        """Note what is compiled, but not for Python: it has no entry for that."""
        self.overloads[tuple(cres.signature.args)] = cres

    def _compile_for_args(self, *_args: object, **_kwargs: object) -> CPUDispatcher:
        """Return what numba calls with the arguments of a call by Python."""
        if self._for_python is None:
            options = {**self.targetoptions, "no_cpython_wrapper": False}
            self._for_python = CPUDispatcher(self.py_func, targetoptions=options)
        return self._for_python


def _compiled(
    function: Callable[P, R],
    *,
    is_exact: bool = False,
    is_inlined: bool = False,
    is_cached: bool = True,
    stamp: str = "",
) -> Callable[P, R]:
    fastmath = set() if is_exact else {"reassoc", "contract", "nsz"}
    options = {
        "nopython": True,
        "fastmath": fastmath,
        "nogil": True,
        "error_model": "numpy",
        "forceinline": is_inlined,
        # Entries for callers in C and in Python: a fifth of the time of compilation.
        "no_cfunc_wrapper": True,
        "no_cpython_wrapper": is_inlined,
    }
    kind = _Inlined if is_inlined else CPUDispatcher
    dispatcher = kind(function, targetoptions=options)
    # Without a stamp the key would not tell one closure, or kernel, from another.
    is_unique = getattr(function, "__closure__", None) is None and is_cached
    if stamp or is_unique:
        with contextlib.suppress(_NoFolderError):  # each process compiles it
            dispatcher._cache = _SourceCache(function, stamp)
    return cast("Callable[P, R]", dispatcher)


def _has_home() -> bool:
    try:
        Path.home()
    except RuntimeError:
        return False
    return True


@cache
def _temporary_folder() -> str | None:
    """Make a folder that only this user can write to, for machine code; None: none."""
    try:
        folder = Path(tempfile.gettempdir(), f"persia_torchrec-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as exc:
        _say_not_kept(str(exc))
        return None
    # What another user has put there would be run.
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_own or found.st_mode & 0o022 or not os.access(folder, os.W_OK):
        _say_not_kept(f"{folder} is another user's, or others can write to it")
        return None
    logger.warning(
        "compiled loops are kept in %s: neither the package's folder nor a home can be "
        "written to. Set NUMBA_CACHE_DIR to choose another folder.",
        folder,
    )
    return str(folder)


@cache
def _say_not_kept(why: str) -> None:
    logger.warning(
        "compiled loops are not kept, so that each process compiles them, for up to "
        "a minute: %s. Set NUMBA_CACHE_DIR to a folder with room that can be "
        "written to.",
        why,
    )


@cache
def _copy_code(source: Path, target: Path) -> None:
    """Copy the machine code of a read-only package, as of an image, if there is any."""
    for path in source.glob("*.nb[ic]"):
        copy = target / path.name
        with contextlib.suppress(OSError):
            if not copy.exists():
                part = copy.with_suffix(f"{copy.suffix}.{os.getpid()}")
                try:
                    shutil.copyfile(path, part)
                    part.replace(copy)
                finally:
                    part.unlink(missing_ok=True)


def _helpers(kernel: Any) -> dict[str, Any]:
    """Return the plain functions that a kernel calls, by their names in it."""
    values = {name: kernel.__globals__.get(name) for name in kernel.__code__.co_names}
    return {n: value for n, value in values.items() if isinstance(value, FunctionType)}


def _hash_files(package: Path, files: Iterable[Path]) -> str:
    """Hash files, and the files of the package from which they import."""
    known = {path for path in files if path.is_file()}
    for path in list(known):
        for module, names in _IMPORT.findall(path.read_text(encoding="utf-8")):
            folder = package.joinpath(*module.split("."))
            modules = (folder / name for name in re.findall(r"\w+", names))
            known.update(path.with_suffix(".py") for path in (folder, *modules))
    texts = [path.read_bytes() for path in sorted(known) if path.is_file()]
    return sha256(b"".join(texts)).hexdigest()
