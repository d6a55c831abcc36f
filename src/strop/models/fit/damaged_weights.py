"""Names weight files that cannot be read, and the cause: truncated, a Git LFS pointer, or Python objects in a pickle.

Weight readers raise format-specific errors (``SafetensorError``, ``UnpicklingError``, ``EOFError``, ...) that do not name the
file. The files are checked only after such an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

_POINTER = b"version https://git-lfs"
_FOREIGN = re.compile(r"(?:GLOBAL|class|function) ([A-Za-z_][\w.]*\.\w+)")  # how torch.load names a refused object


class DamagedWeights(ValueError):
    """A weight file cannot be read. The message names the file, the cause and the fix."""


@contextmanager
def naming_damaged_weights(folder: str | Path) -> Iterator[None]:
    """Convert an error of the block into DamagedWeights if a weight file in ``folder``, or in the hub's cache, is damaged."""
    try:
        yield
    except DamagedWeights:
        raise
    except Exception as error:
        for path in _list_files(_find_folder(folder)):
            if why := describe_damage(path):
                raise DamagedWeights(f"{path} cannot be read: {why}") from error
        raise


def describe_damage(path: Path) -> str:
    """Describe what is wrong with a weight file, and how to fix it; "" if it can be read."""
    again = "copy or download it again"
    if not path.exists():
        return f"the index file lists it, but it is missing; {again}"
    with path.open("rb") as file:
        begin = file.read(len(_POINTER))
    if not begin:
        return f"it is empty; {again}"
    if begin == _POINTER:
        return "it is a pointer of Git LFS to the file; fetch the file itself: git lfs pull"
    try:
        return _read_through(path)
    except Exception as error:  # each format has its own errors
        text = str(error)
        if path.suffix == ".bin" and (foreign := _FOREIGN.search(text)):
            return (
                f"it is a pickle with Python objects besides tensors ({foreign[1]}), and loading these could run code; if you trust where "
                "it comes from, load it elsewhere and save its tensors as safetensors"
            )
        brief = (text.strip().splitlines() or [""])[0][:120].rstrip(".")
        reason = "" if "weights_only" in brief or "Weights only" in brief or not brief else f" ({brief})"
        return f"its contents are damaged, or it was cut off{reason}; {again}"


def _read_through(path: Path) -> str:
    """Read a file as its loaders do. Return why its contents are not weights, or "" if they are; raises the format's own errors."""
    if path.suffix == ".json":
        json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()
    elif path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, framework="pt") as stored:
            stored.keys()
    else:
        found = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(found, Mapping):
            return f"it holds a {type(found).__name__} in place of tensors by name; save the model's state_dict()"
        if foreign := next((name for name, value in found.items() if not isinstance(value, Tensor)), None):
            kind = type(found[foreign]).__name__
            return f"its entry {foreign!r} is of type {kind}, no tensor; save the model's state_dict(), and nothing else"
    return ""


def _list_files(folder: Path) -> list[Path]:
    """Return the index files of a folder, then its weight files, including missing ones listed by an index."""
    indices = sorted(folder.glob("*.index.json"))
    files = {path for pattern in ("*.safetensors", "*model*.bin") for path in folder.glob(pattern)}
    for index in indices:
        if not describe_damage(index):
            files |= {folder / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    return [*indices, *sorted(files)]


def _find_folder(name: str | Path) -> Path:
    """Return a folder, or the hub cache's folder of a model."""
    folder = Path(name).expanduser()
    if folder.is_dir() or str(name).count("/") > 1 or folder.is_absolute():
        return folder
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(str(name), "config.json")
    return Path(cached).parent if isinstance(cached, str) else folder
