"""Where images come from: an OCI layout or an archive of ``docker save`` on this machine, or a registry that the reference names."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Protocol, cast

from strop.extensions.sandboxes.base import FailureCause, SandboxFailure
from strop.extensions.sandboxes.images.layers import broken

INDEX_TYPES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
MANIFEST_TYPES = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
MAX_JSON = 4 << 20  # bytes of a manifest or a configuration
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Blob:
    """One content-addressed file of an image."""

    digest: str
    size: int | None = None  # bytes, where it is known
    media_type: str = ""

    @classmethod
    def read(cls, descriptor: Any) -> Blob:
        """Read a descriptor of a manifest. Raises SandboxFailure."""
        digest = descriptor.get("digest") if isinstance(descriptor, Mapping) else None
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise broken(f"{digest!r:.100} is no sha256 digest")
        size = descriptor.get("size")
        return cls(digest, size if isinstance(size, int) and size >= 0 else None, str(descriptor.get("mediaType", "")))

    @classmethod
    def of(cls, file: IO[bytes]) -> Blob:
        """Describe a whole file, which is at its start afterwards."""
        file.seek(0)
        digest = hashlib.sha256()
        while part := file.read(1 << 20):
            digest.update(part)
        file.seek(0)
        return cls(f"sha256:{digest.hexdigest()}")


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """How commands of an image run, if nothing else is set."""

    environment: Mapping[str, str]
    workdir: str = "/"
    user: str = ""

    @classmethod
    def read(cls, values: Any) -> ImageConfig:
        """Read a configuration of OCI's or Docker's. Raises SandboxFailure."""
        config = (values.get("config") if isinstance(values, Mapping) else None) or {}
        if not isinstance(config, Mapping):
            raise broken("its configuration is no object")
        pairs = [str(each).partition("=") for each in config.get("Env") or ()]
        return cls(
            environment={name: value for name, _, value in pairs if name},
            workdir=str(config.get("WorkingDir") or "/"),
            user=str(config.get("User") or ""),
        )


@dataclass(frozen=True)
class ImageManifest:
    """An image as its source describes it."""

    config: ImageConfig
    layers: tuple[Blob, ...]  # the lowest first


class ImageSource(Protocol):
    """One image. Its methods block."""

    def read_manifest(self) -> ImageManifest:
        """Raises SandboxFailure."""
        ...

    def open_layer(self, blob: Blob, most: int) -> Any:
        """Return a context manager that yields the verified file of a layer, of at most ``most`` bytes. Raises SandboxFailure."""
        ...


def choose_platform(index: Mapping[str, Any]) -> Blob:
    """Return the manifest of an index that this machine runs. Raises SandboxFailure."""
    wanted = _ARCHITECTURES.get(platform.machine(), platform.machine())
    found = [each for each in index.get("manifests") or () if isinstance(each, Mapping)]
    for each in found:
        where = each.get("platform") or {}
        if where.get("os", "linux") == "linux" and where.get("architecture", wanted) == wanted:
            return Blob.read(each)
    raise broken(f"it has no variant for linux on {wanted}")


def read_json(data: bytes, what: str) -> dict[str, Any]:
    """Parse an object of an image. Raises SandboxFailure."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise broken(f"its {what} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise broken(f"its {what} is no object")
    return values


def read_manifest(values: Mapping[str, Any], config: ImageConfig) -> ImageManifest:
    layers = values.get("layers")
    if not isinstance(layers, list) or not layers:
        raise broken("its manifest has no layers")
    return ImageManifest(config, tuple(Blob.read(each) for each in layers))


class Verifying:
    """Copies data to a file, and compares its length and digest with what was promised."""

    def __init__(self, blob: Blob, most: int) -> None:
        self.blob, self.most = blob, most
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 (closed by its user)
        self.sum, self.size = hashlib.sha256(), 0

    def write(self, part: bytes) -> None:
        self.size += len(part)
        if self.size > self.most:
            raise broken(f"a layer is larger than the {self.most >> 20} MB that are left for the image (sandboxes.max_image_mb)")
        self.sum.update(part)
        self.file.write(part)

    def finish(self) -> IO[bytes]:
        if f"sha256:{self.sum.hexdigest()}" != self.blob.digest or self.blob.size not in (None, self.size):
            raise SandboxFailure(
                FailureCause.REGISTRY, f"a layer arrived damaged: it is not {self.blob.digest}; it will be fetched again"
            )
        self.file.seek(0)
        return cast(IO[bytes], self.file)


@dataclass(frozen=True)
class LocalSource:
    """An OCI layout, as a folder or a tar archive, or an archive of ``docker save``."""

    path: Path
    tag: str = ""  # org.opencontainers.image.ref.name, or a tag of Docker; "": the only one

    def read_manifest(self) -> ImageManifest:
        with self._opened() as files:
            if (index := files.read("index.json")) is not None:
                return self._read_layout(files, read_json(index, "index.json"))
            if (listed := files.read("manifest.json")) is not None:
                return self._read_docker(files, listed)
        raise broken(f"{self.path} has neither an index.json (OCI) nor a manifest.json (docker save)")

    def _read_layout(self, files: _Files, index: Mapping[str, Any]) -> ImageManifest:
        found = [each for each in index.get("manifests") or () if isinstance(each, Mapping)]
        names = [str((each.get("annotations") or {}).get("org.opencontainers.image.ref.name", "")) for each in found]
        chosen = [each for each, name in zip(found, names, strict=True) if self.tag in ("", name)]
        if not chosen or (len(chosen) > 1 and not self.tag):
            raise broken(f"{self.path} has {len(chosen)} images that {self.tag or 'no tag'} may mean; it has the tags {names}")
        values = read_json(files.read_blob(Blob.read(chosen[0])), "manifest")
        if values.get("manifests"):
            values = read_json(files.read_blob(choose_platform(values)), "manifest")
        config = read_json(files.read_blob(Blob.read(values.get("config"))), "configuration")
        return read_manifest(values, ImageConfig.read(config))

    def _read_docker(self, files: _Files, listed: bytes) -> ImageManifest:
        images = json.loads(listed)
        chosen = [each for each in images if not self.tag or self.tag in (each.get("RepoTags") or ())]
        if len(chosen) != 1:
            raise broken(f"{self.path} has {len(chosen)} images that {self.tag or 'no tag'} may mean")
        values = read_json(files.read(str(chosen[0]["Config"])) or b"", "configuration")
        digests = (values.get("rootfs") or {}).get("diff_ids") or ()
        names = [str(each) for each in chosen[0].get("Layers") or ()]
        if not names or len(names) != len(digests):
            raise broken("its manifest.json and its configuration list different layers")
        layers = [Blob.read({"digest": each, "mediaType": f"file:{name}"}) for each, name in zip(digests, names, strict=True)]
        return ImageManifest(ImageConfig.read(values), tuple(layers))

    @contextmanager
    def open_layer(self, blob: Blob, most: int) -> Iterator[IO[bytes]]:
        name = blob.media_type.removeprefix("file:") if blob.media_type.startswith("file:") else f"blobs/sha256/{blob.digest[7:]}"
        copy = Verifying(blob, most)
        with copy.file, self._opened() as files:
            with files.open(name) as source:
                while part := source.read(1 << 20):
                    copy.write(part)
            yield copy.finish()

    @contextmanager
    def _opened(self) -> Iterator[_Files]:
        if self.path.is_dir():
            yield _Files(self.path, None)
            return
        try:
            with tarfile.open(self.path, "r:*") as archive:
                yield _Files(self.path, archive)
        except tarfile.TarError as error:
            raise broken(f"{self.path} is no tar archive: {error}") from error


@dataclass(frozen=True)
class _Files:
    """The files of a layout, in a folder or an archive. Names come from the image: none leads out of it."""

    path: Path
    archive: tarfile.TarFile | None

    @cached_property
    def names(self) -> dict[str, tarfile.TarInfo]:
        return {each.name.removeprefix("./"): each for each in (self.archive.getmembers() if self.archive else ())}

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        if name.startswith("/") or ".." in name.split("/"):
            raise broken(f"it names the file {name!r:.100}, outside of itself")
        try:
            if self.archive is None:
                path = self.path / name
                if not path.resolve().is_relative_to(self.path.resolve()):
                    raise broken(f"its file {name!r:.100} is a link that leads out of it")
                with path.open("rb") as file:
                    yield file
                return
            found = self.archive.extractfile(self.names[name])  # follows links inside the archive, as docker save writes them
        except (OSError, KeyError) as error:
            raise broken(f"{self.path} has no file {name!r:.100}") from error
        if found is None:
            raise broken(f"{self.path} has no file {name!r:.100}")
        with found:
            yield found

    def read(self, name: str) -> bytes | None:
        """Return a small file; None if there is none."""
        if not ((self.path / name).is_file() if self.archive is None else name in self.names):
            return None
        with self.open(name) as file:
            data = file.read(MAX_JSON + 1)
        if len(data) > MAX_JSON:
            raise broken(f"{name} is larger than {MAX_JSON >> 20} MB")
        return data

    def read_blob(self, blob: Blob) -> bytes:
        data = self.read(f"blobs/sha256/{blob.digest[7:]}")
        if data is None or f"sha256:{hashlib.sha256(data).hexdigest()}" != blob.digest:
            raise broken(f"{self.path} lacks {blob.digest}, or it is damaged")
        return data


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
