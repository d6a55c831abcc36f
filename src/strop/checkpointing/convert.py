"""Conversion of a sharded checkpoint to a Hugging Face folder, in one process.

The weights are read into memory once and written from there, so this needs memory for one copy and no process group.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from strop.learner.parallel.shard_files import METADATA, ShardedReader, TensorShard, is_sharded
from strop.models.adapters import adapter_folder
from strop.models.export import export_weights, load_model_config
from strop.models.loading import load_tokenizer

SHARD_FILE_SUFFIXES = (METADATA, ".distcp")  # endings of shard files, which are not copied


class ConversionError(ValueError):
    """A folder cannot be converted; the message says why and what to do."""


def convert_shards(source: Path, target: Path, *, model_name: str | None = None) -> None:
    """Convert the sharded weights in ``source`` to a folder that ``from_pretrained`` reads, with its tokenizer.

    ``target`` is created atomically. Configuration and tokenizer come from ``source``, or else from ``model_name``. Raises ConversionError.
    """
    _check_paths(source, target)
    draft = target.with_name(f".tmp_{target.name}")
    if draft.exists():
        shutil.rmtree(draft)
    config = _load_config(source, model_name)
    try:
        export_weights(config, _read_weights(source), draft)
    except ValueError as error:
        raise ConversionError(f"{source}: {error}") from error
    _add_tokenizer(source, draft, model_name)
    if target.exists():
        target.rmdir()
    draft.rename(target)


def _read_weights(source: Path) -> dict[str, torch.Tensor]:
    reader = ShardedReader(source)
    weights = {name: torch.empty(shape, dtype=reader.dtypes[name]) for name, shape in reader.shapes.items()}
    reader.read({name: TensorShard(tensor, (0,) * tensor.dim(), tuple(tensor.shape)) for name, tensor in weights.items()})
    return weights


def _check_paths(source: Path, target: Path) -> None:
    if not source.is_dir():
        raise ConversionError(f"there is no folder {source}; weights are in <checkpoint_dir>/step_<N>/policy/weights")
    if adapter_folder(str(source)) is not None:
        raise ConversionError(
            f"{source} holds LoRA adapters in PEFT's format, not a whole model; merge them into their base: "
            f"python -m strop.models.lora merge {source} {target}"
        )
    if not is_sharded(source):
        inner = next((path for path in (source / "weights", source / "policy" / "weights") if is_sharded(path)), None)
        if inner is not None:
            raise ConversionError(f"{source} itself holds no weights; name {inner}")
        if any(source.glob("*.safetensors")):
            raise ConversionError(
                f"{source} is a Hugging Face folder already (saved by one process): use it as it is, or copy it"
            )
        raise ConversionError(f"{source} is not a complete sharded checkpoint: it has no {METADATA}, which is written last")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConversionError(f"{target} already exists; remove it, or name another folder")


def _load_config(source: Path, model_name: str | None) -> Any:
    name = str(source) if (source / "config.json").exists() else model_name
    if name is None:
        raise ConversionError(
            f"{source} has no config.json; name the run's config.yaml, so that the model is known from its policy.model_name"
        )
    return load_model_config(name)


def _add_tokenizer(source: Path, draft: Path, model_name: str | None) -> None:
    """Copy the other files of ``source``, such as tokenizer and chat template. Without any, save the tokenizer of ``model_name``."""
    written = {path.name for path in draft.iterdir()}
    for path in source.iterdir():
        if path.is_file() and path.name not in written and not path.name.endswith(SHARD_FILE_SUFFIXES):
            shutil.copyfile(path, draft / path.name)
    if not (draft / "tokenizer_config.json").exists() and model_name is not None:
        load_tokenizer(model_name).save_pretrained(draft)
