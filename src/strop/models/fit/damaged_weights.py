"""Files of weights that cannot be read are named, with what is wrong with them: cut off, a pointer of Git LFS, Python objects in a pickle.

Readers of weights raise what their format does (``SafetensorError``, ``UnpicklingError``, ``EOFError``, ...) and name no file. Only after
such an error are the files looked at again.
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
_FOREIGN = re.compile(r"(?:GLOBAL|class|function) ([A-Za-z_][\w.]*\.\w+)")  # as torch.load names what it refuses


class DamagedWeights(ValueError):
    """A file of weights cannot be read. The message names it, why, and what to do."""


@contextmanager
def naming_damaged_weights(folder: str | Path) -> Iterator[None]:
    """Raise DamagedWeights for an error of the code inside, if a file of weights in ``folder``, or in the hub's cache, is damaged."""
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
    """Return what is wrong with a file of weights, and what to do; "" if it can be read."""
    again = "copy or download it again"
    if not path.exists():
        return f"an index beside it lists it, and it is missing; {again}"
    with path.open("rb") as file:
        begin = file.read(len(_POINTER))
    if not begin:
        return f"it is empty; {again}"
    if begin == _POINTER:
        return "it is a pointer of Git LFS to the file; fetch the file itself: git lfs pull"
    try:
        return _read_through(path)
    except Exception as error:  # each format has its own
        text = str(error)
        if path.suffix == ".bin" and (foreign := _FOREIGN.search(text)):
            return (
                f"it is a pickle with Python objects beside tensors ({foreign[1]}), and loading these could run code; if you trust where "
                "it comes from, load it elsewhere and save its tensors as safetensors"
            )
        brief = (text.strip().splitlines() or [""])[0][:120].rstrip(".")
        reason = "" if "weights_only" in brief or "Weights only" in brief or not brief else f" ({brief})"
        return f"its contents are damaged, or it was cut off{reason}; {again}"


def _read_through(path: Path) -> str:
    """Read a file as its loaders do. Return why its contents are no weights, "" if they are; raises what the format does."""
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
    """Return the indices of a folder, then its files of weights, with those that an index lists and that are missing."""
    indices = sorted(folder.glob("*.index.json"))
    files = {path for pattern in ("*.safetensors", "*model*.bin") for path in folder.glob(pattern)}
    for index in indices:
        if not describe_damage(index):
            files |= {folder / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    return [*indices, *sorted(files)]


def _find_folder(name: str | Path) -> Path:
    """Return a folder, or where the cache of the hub has a model."""
    folder = Path(name).expanduser()
    if folder.is_dir() or str(name).count("/") > 1 or folder.is_absolute():
        return folder
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(str(name), "config.json")
    return Path(cached).parent if isinstance(cached, str) else folder
