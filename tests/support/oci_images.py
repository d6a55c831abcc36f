"""Small images made on the spot from programs of this machine: OCI layouts and archives of ``docker save``."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

PROGRAMS = "sh cat ls sleep id env touch mkdir rm chmod date dd head tar base64 stat true ln mkfifo kill tr seq"
CONFIG = {"Env": ["PATH=/bin", "COLOUR=blue"], "WorkingDir": "/work"}
Entry = tarfile.TarInfo | tuple[tarfile.TarInfo, bytes]


def entry(name: str, content: bytes | None = None, **values: object) -> Entry:
    """An entry of a layer: a file with this content, or whatever ``type`` says."""
    found = tarfile.TarInfo(name)
    found.mode = 0o644 if content is not None else 0o755
    found.size = len(content or b"")
    for key, value in values.items():
        setattr(found, key, value)
    return (found, content) if content is not None else found


def folder(name: str, **values: object) -> Entry:
    return entry(name, type=tarfile.DIRTYPE, **values)


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> Entry:
    return entry(name, type=kind, linkname=target)


def make_layer(entries: Iterable[Entry]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for each in entries:
            info, content = each if isinstance(each, tuple) else (each, b"")
            archive.addfile(info, io.BytesIO(content) if content else None)
    return buffer.getvalue()


def find_libraries(*paths: Path) -> dict[str, Path]:
    """Return the shared libraries of files, by their paths in an image."""
    listed = subprocess.run(["ldd", *map(str, paths)], capture_output=True, text=True, check=False).stdout
    return {
        library.lstrip("/"): Path(library).resolve()
        for library in re.findall(r"(/\S+[^:\s])", listed)
        if f"{library}:" not in listed
    }


def python_layer() -> bytes:
    """This interpreter in /python, without packages and with its libraries."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    binary, library = Path(sys.base_prefix, "bin", version), Path(sys.base_prefix, "lib", version)
    left_out = {"test", "site-packages", "__pycache__", "idlelib", "ensurepip"}
    found = {path: path.relative_to(library) for path in library.rglob("*") if path.is_file()}
    files = {f"python/lib/{version}/{name}": path for path, name in found.items() if not left_out & set(name.parts)}
    files |= {"python/bin/python3": binary.resolve(), **find_libraries(binary, *library.glob("lib-dynload/*.so"))}
    names = sorted({str(parent) for name in files for parent in Path(name).parents} - {"."})
    return make_layer([*map(folder, names), *(entry(name, path.read_bytes(), mode=0o755) for name, path in files.items())])


@cache
def programs_layer() -> bytes:
    """A shell, a few programs and their libraries, with users as Debian has them."""
    files: dict[str, Path] = {}
    for name in PROGRAMS.split():
        path = Path(shutil.which(name, path="/usr/bin:/bin") or "").resolve()
        files |= {f"bin/{name}": path, **find_libraries(path)}
    tables = {
        "etc/passwd": b"root:x:0:0:root:/root:/bin/sh\nann:x:1000:1000::/home/ann:/bin/sh\n",
        "etc/group": b"root:x:0:\nann:x:1000:\nteam:x:2000:ann\n",
    }
    names = sorted({str(parent) for name in (*files, *tables) for parent in Path(name).parents} - {"."})
    entries: list[Entry] = [folder(name) for name in (*names, "root", "tmp", "work")]
    entries += [folder("home"), folder("home/ann", uid=1000, gid=1000)]
    entries += [entry(name, path.read_bytes(), mode=0o755) for name, path in files.items()]
    entries += [entry(name, content) for name, content in tables.items()]
    return make_layer(entries)


def write_layout(
    path: Path,
    layers: Sequence[bytes],
    config: Mapping[str, object] | None = None,
    *,
    tag: str = "latest",
    compress: bool = False,
) -> str:
    """Write an OCI layout. Return its reference."""
    blobs = path / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)

    def add(data: bytes, media_type: str) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

    kind = "application/vnd.oci.image.layer.v1.tar" + ("+gzip" if compress else "")
    described = [add(gzip.compress(layer, mtime=0) if compress else layer, kind) for layer in layers]
    settings = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": ["PATH=/bin", "COLOUR=blue"], "WorkingDir": "/work", **(config or {})},
    }
    manifest = {
        "schemaVersion": 2,
        "config": add(json.dumps(settings).encode(), "application/vnd.oci.image.config.v1+json"),
        "layers": described,
    }
    listed = add(json.dumps(manifest).encode(), "application/vnd.oci.image.manifest.v1+json")
    listed["annotations"] = {"org.opencontainers.image.ref.name": tag}
    (path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [listed]}))
    (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return f"oci:{path}:{tag}"


def write_docker_archive(path: Path, layers: Sequence[bytes], tag: str = "box:1") -> str:
    """Write what ``docker save`` writes. Return its reference."""
    digests = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
    config = json.dumps({"config": {"Env": ["PATH=/bin"], "WorkingDir": "/work"}, "rootfs": {"diff_ids": digests}}).encode()
    names = [f"{number}/layer.tar" for number in range(len(layers))]
    listed = json.dumps([{"Config": "config.json", "RepoTags": [tag], "Layers": names}]).encode()
    files = {"config.json": config, "manifest.json": listed, **dict(zip(names, layers, strict=True))}
    path.write_bytes(make_layer(entry(name, content) for name, content in files.items()))
    return f"docker-archive:{path}:{tag}"
