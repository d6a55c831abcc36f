"""Folders in Megatron Core's ``torch_dist`` format: shards (DCP), ``metadata.json`` and ``common.pt``. Imports neither it nor torch.

A learner's ``weights/`` has the configuration of the Hugging Face model, the tokenizer, and shards under Megatron Core's names::

    weights/latest_checkpointed_iteration.txt
    weights/iter_0000000/
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strop.learner.parallel.shard_files import ShardedReader

ITERATION = "iter_0000000"  # the folder in weights/, which holds one moment only
COMMON = "common.pt"
CONFIG = "metadata.json"
LATEST = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_\d{7}")
_CORE, _TORCH = "megatron.core.dist_checkpointing.strategies.torch", "torch.distributed.checkpoint"
_RENAMED = {  # by earlier versions of Megatron Core
    (_CORE, "MCoreMetadata"): (f"{_TORCH}.metadata", "Metadata"),
    (_CORE, "MCoreSavePlan"): (f"{_TORCH}.planner", "SavePlan"),
}
_FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}


def is_torch_dist(folder: Path) -> bool:
    """Return whether a folder itself holds shards in this format."""
    return (folder / CONFIG).is_file() and (folder / ".metadata").is_file()


def find_iteration(folder: Path) -> Path | None:
    """Return the iter_XXXXXXX folder that a folder is, or that it names as its latest, or its last one; None without one."""
    if is_torch_dist(folder):
        return folder
    if not folder.is_dir():
        return None
    found = sorted(path for path in folder.iterdir() if _ITERATION.fullmatch(path.name) and is_torch_dist(path))
    latest = folder / LATEST
    if latest.is_file() and (number := latest.read_text().strip()).isdigit():
        named = folder / f"iter_{int(number):07d}"
        return named if named in found else None
    return found[-1] if found else None


def model_folder(iteration: Path) -> Path:
    """Return the folder with the configuration of the model in an iter_XXXXXXX folder: the one around it, if that has one."""
    return iteration.parent if (iteration.parent / "config.json").is_file() else iteration


def open_shards(iteration: Path) -> ShardedReader:
    """Open an iter_XXXXXXX folder, to read its tensors."""
    from strop.learner.parallel.shard_files import ShardedReader

    return ShardedReader(iteration, renamed=_RENAMED)


def write_common(folder: Path, common: Mapping[str, Any]) -> None:
    """Write what is not sharded, and ``metadata.json``, which completes the folder."""
    import torch

    torch.save(dict(common), folder / COMMON)
    (folder / CONFIG).write_text(json.dumps(_FORMAT))


def read_common(folder: Path) -> Mapping[str, Any]:
    """Return what is not sharded: numbers, text and tensors."""
    import torch

    common = torch.load(folder / COMMON, map_location="cpu", weights_only=True)
    if not isinstance(common, Mapping):
        raise ValueError(f"{folder / COMMON} is {type(common).__name__}, not a mapping")
    return common
