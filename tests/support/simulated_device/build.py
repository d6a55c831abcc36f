"""Compile the native half of the simulated GPU, once per machine, source and version of torch."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

SOURCE = Path(__file__).with_name("device.cpp")
NAME = "strop_simulated_device"


def find_obstacle() -> str | None:
    """Return why it cannot be compiled here; None if it can."""
    if _find_compiler() is None:
        return "the simulated GPU is compiled with a C++ compiler, and there is none here (g++, or what CXX names)"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "the simulated GPU is compiled with Python's headers, and there are none here (python3-dev)"
    return None


def load() -> ModuleType:
    """Return the extension, compiled if this is the first time. Several processes may ask at once: one compiles, the others wait."""
    library = _find_library()
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with library.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _compile(library)
    spec = importlib.util.spec_from_file_location(NAME, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _find_compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def _find_library() -> Path:
    parts = [SOURCE.read_bytes(), Path(__file__).read_bytes(), torch.__version__.encode(), sys.version.encode()]
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "strop-tests" / f"{NAME}-{digest}.so"


def _compile(library: Path) -> None:
    from torch.utils.cpp_extension import include_paths, library_paths

    compiler, unfinished = _find_compiler(), library.with_suffix(f".{os.getpid()}")
    assert compiler is not None
    includes = [f"-I{path}" for path in (*include_paths(), sysconfig.get_paths()["include"])]
    libraries = [f"-L{path}" for path in library_paths()]
    command = [compiler, "-O0", "-w", "-std=c++20", "-shared", "-fPIC", f"-DTORCH_EXTENSION_NAME={NAME}",
               f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}", *includes, str(SOURCE), "-o", str(unfinished),
               *libraries, "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]  # fmt: skip
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    if said.returncode != 0:
        raise RuntimeError(f"the simulated GPU does not compile:\n{said.stderr[-4000:]}")
    unfinished.replace(library)
