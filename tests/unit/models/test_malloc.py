"""Memory that a step frees is there for the next one."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import ctypes, resource
from strop.learner.budget.device_memory import reuse_freed_memory
assert reuse_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(64 << 20)
    ctypes.memset(block, 1, 64 << 20)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
first = step()
assert first > 0 and step() <= first // 10, first
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone can be told to keep memory")
def test_a_second_step_touches_no_new_pages() -> None:
    subprocess.run([sys.executable, "-c", FAULTS], check=True)
