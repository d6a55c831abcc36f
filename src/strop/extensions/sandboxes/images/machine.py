"""The image ``machine:``: a shell, a few programs and Python, copied from this machine. For tasks that need no more, and no registry.

Python is the interpreter of this process, without installed packages, at /usr/local. The copy is made once, and kept as other images are.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import IO

from strop.extensions.sandboxes.images.sources import Blob, ImageConfig, ImageManifest

PROGRAMS = (
    "sh bash cat ls sleep id env touch mkdir rmdir rm cp mv chmod chown date dd head tail tar stat true false test ln mkfifo kill tr seq "
    "cut sort uniq wc grep sed awk find xargs diff cmp tee basename dirname printf expr md5sum sha256sum gzip git patch"
)
_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "tkinter", "lib2to3", "ensurepip", "turtledemo", "pydoc_data"}
_FOLDERS = {"root", "tmp", "work", "home", "home/user"}
_TABLES = {
    "etc/passwd": b"root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n",
    "etc/group": b"root:x:0:\nuser:x:1000:\n",
}
_CONFIG = ImageConfig(
    environment={"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "LD_LIBRARY_PATH": "/usr/local/lib"}, workdir="/work"
)


def find_libraries(programs: Iterable[Path]) -> set[Path]:
    """Return the shared libraries of programs of this machine, and their loader, as ``ldd`` lists them."""
    listed = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True, check=False).stdout
    return {Path(path) for path in re.findall(r"^\s.*?(/\S+)", listed, re.MULTILINE)}


def collect_programs(names: str) -> dict[str, Path]:
    """Return the files of programs that this machine has, and of their libraries, by their paths in an image."""
    found = {name: shutil.which(name, path="/usr/bin:/bin") for name in names.split()}
    files = {f"bin/{name}": Path(path).resolve() for name, path in found.items() if path}
    return files | {str(library).lstrip("/"): library.resolve() for library in find_libraries(files.values())}


def collect_python() -> dict[str, Path]:
    """Return the files of this interpreter, its standard library and what that links to, by their paths in an image."""
    version, prefix = f"python3.{sys.version_info.minor}", Path(sys.base_prefix)
    binary, library = (prefix / "bin" / version).resolve(), prefix / "lib" / version
    files = {"usr/local/bin/python3": binary, f"usr/local/bin/{version}": binary, "usr/local/bin/python": binary}
    for folder, folders, names in os.walk(library):
        folders[:] = sorted(name for name in folders if name not in _LEFT_OUT and not name.startswith("config-"))
        for name in sorted(names):
            path = Path(folder, name)
            if ".opt-" not in name and path.is_file():
                files[f"usr/local/lib/{version}/{path.relative_to(library)}"] = path
    for shared in find_libraries([binary, *(library / "lib-dynload").glob("*.so")]):
        own = shared.is_relative_to(prefix)  # found next to the interpreter, which has another place in the image
        files[f"usr/local/lib/{shared.name}" if own else str(shared).lstrip("/")] = shared.resolve()
    return files


class MachineSource:
    """An ``ImageSource`` of one layer."""

    @cached_property
    def _layer(self) -> IO[bytes]:
        file = tempfile.TemporaryFile()  # noqa: SIM115 (closed with this source)
        files = collect_programs(PROGRAMS) | collect_python()
        folders = {str(parent) for name in (*files, *_TABLES) for parent in Path(name).parents}
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for name in sorted({*folders, *_FOLDERS} - {"."}):
                info = tarfile.TarInfo(name)
                info.type, info.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
                info.uid = info.gid = 1000 if name == "home/user" else 0
                archive.addfile(info)
            for name, path in sorted(files.items()):  # one order in every process: the layer is kept by its digest
                info = archive.gettarinfo(path, name)
                info.uid = info.gid = 0
                info.uname = info.gname = ""
                info.type, info.linkname = tarfile.REGTYPE, ""  # also of a file with several names
                info.size = path.stat().st_size
                with path.open("rb") as content:
                    archive.addfile(info, content)
            for name, text in _TABLES.items():
                info = tarfile.TarInfo(name)
                info.size = len(text)
                archive.addfile(info, io.BytesIO(text))
        return file

    def read_manifest(self) -> ImageManifest:
        return ImageManifest(_CONFIG, (Blob.of(self._layer),))

    @contextmanager
    def open_layer(self, blob: Blob, most: int) -> Iterator[IO[bytes]]:
        with self._layer as file:
            file.seek(0)
            yield file
