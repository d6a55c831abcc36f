"""Weights on disk and in memory: what loaded, what is missing, and what is damaged."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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


# Checks a load: weights that do not match the model are refused, naming the tensors.
#
# Transformers and PEFT fill missing weights with random numbers, with a warning. Here, every tensor that is missing, unexpected,
# of another shape or not finite is an error. Exceptions are tied weights and weights that a model's class declares ignorable
# (``_keys_to_ignore_on_load_missing`` and ``..._unexpected``): Transformers leaves both out of its report.

SHOWN = 5  # names of tensors of each kind in a message


class WeightsDoNotFit(ValueError):
    """The weights of a folder do not match the model. The message names the tensors."""


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """The problematic tensors of a load."""

    missing: Collection[str] = ()
    unexpected: Collection[str] = ()
    mismatched: Collection[str] = ()  # names with both shapes
    not_finite: Collection[str] = ()
    unconverted: Collection[str] = ()  # combined from several tensors, such as experts, some of which are missing

    @classmethod
    def of_transformers(cls, info: Mapping[str, Any], model: nn.Module) -> LoadReport:
        """Read the result of ``from_pretrained(..., output_loading_info=True)``, and check the values."""
        shapes = (f"{name} (found {_format_shape(found)}, the model has {_format_shape(own)})" for name, found, own in
                  info["mismatched_keys"])  # fmt: skip
        return cls(
            missing=info["missing_keys"],
            unexpected=info["unexpected_keys"],
            mismatched=list(shapes),
            not_finite=list(find_not_finite(model.state_dict().items())),
        )

    def refuse(self, name: str, kind: str, key: str = "policy.model_name: ") -> None:
        """Raise WeightsDoNotFit if there is any problem. ``name``: folder or hub model; ``kind``: the model's class."""
        kinds = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "of another shape": self.mismatched,
            "with NaN or infinite values": self.not_finite,
            "with parts that are missing or do not fit": self.unconverted,
        }
        if found := [f"{what} {_list_names(names)}" for what, names in kinds.items() if names]:
            raise WeightsDoNotFit(f"{key}the weights in {name} do not fit {kind}: {'; '.join(found)}. {self._advise()}")

    def _advise(self) -> str:
        if prefix := _find_prefix(self.missing, self.unexpected):
            return f"Every name begins with {prefix!r}, which a wrapper has added: save the inner model, or rename the tensors"
        if self.not_finite and not (self.missing or self.unexpected or self.mismatched):
            return "Nothing can be computed with them: use an earlier checkpoint, or download or convert the model again"
        return (
            "Missing weights would be random numbers: use a complete copy of the model, or correct its config.json (and "
            "policy.hf_config_overrides), which determines the model's weights"
        )


def find_conversion_errors(error: RuntimeError) -> list[str]:
    """Return the weights that Transformers failed to combine: it logs them, and raises an error that does not name them."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return sorted(getattr(frame.f_locals.get("loading_info"), "conversion_errors", None) or ())


def find_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
    """Yield the names of tensors with NaN or infinite values. One pass over memory for those without, and no copy."""
    seen: set[tuple[int, torch.Size]] = set()
    for name, tensor in tensors:
        if not tensor.is_floating_point() or tensor.is_meta or not tensor.numel():
            continue
        place = (tensor.data_ptr(), tensor.shape)
        if place in seen:  # tied
            continue
        seen.add(place)
        if tensor.dtype.itemsize == 1:  # FP8 has no sum
            tensor = tensor.to(torch.float32)
        if not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():  # a sum may overflow
            yield name


def _list_names(names: Collection[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:SHOWN]) + (f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else "")


def _format_shape(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape)) or "a single value"


def _find_prefix(missing: Collection[str], unexpected: Collection[str]) -> str | None:
    """Return the prefix of all unexpected names, if removing it yields missing names."""
    first = next(iter(unexpected), "")
    for name in missing:
        prefix = first.removesuffix(name)
        if prefix != first and all(each.startswith(prefix) and each.removeprefix(prefix) in missing for each in unexpected):
            return prefix
    return None
