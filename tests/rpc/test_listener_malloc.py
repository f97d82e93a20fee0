import ctypes
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

from persia_torchrec.rpc.listener import keep_freed_memory

FAULTS_OF_NEW_BLOCKS = """
import ctypes, resource
from persia_torchrec.rpc.listener import keep_freed_memory
if {keep}:
    assert keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
def use(size):
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    libc.free(block)
use(20_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    block = [libc.malloc(20_000_000) for _ in range(3)]
    for part in block:
        ctypes.memset(part, 1, 20_000_000)
    for part in block:
        libc.free(part)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can do it")
def test_memory_of_large_messages_is_reused():
    def faults(keep):
        code = FAULTS_OF_NEW_BLOCKS.format(keep=keep)
        return int(subprocess.check_output([sys.executable, "-c", code]))

    assert faults(keep=True) * 3 < faults(keep=False)


def test_memory_is_not_reused_where_the_c_library_has_no_mallopt(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())  # as of musl
    assert not keep_freed_memory()
