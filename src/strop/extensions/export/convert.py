"""Write a saved model of any layout as a Hugging Face folder, or adapters in PEFT's format, in one process.

The weights are read into memory once and written from there, so this needs memory for one copy and no process group.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from strop.checkpointing.saved_model import SavedModel, SavedModelNotFound, read_yaml
from strop.extensions.export.model_folder import (
    AS_THEY_ARE,
    ConversionError,
    ExportFormat,
    check_target,
    copy_adapters,
    export_weights,
    load_merged_model,
    load_saved_model,
    new_folder,
    save_model,
)
from strop.learner.parallel.shard_files import METADATA, SafetensorsReader, TensorReader, is_sharded
from strop.models.adapters import adapter_folder
from strop.models.checkpoint_names import load_model_config
from strop.models.load_report import DamagedWeights, naming_damaged_weights
from strop.models.loading import ModelNotFound, load_tokenizer
from strop.models.rank_shards import find_shards

MODEL_FILES = re.compile(r"(adapter_)?(config|model.*|base_config)\.(json|safetensors(\.index\.json)?)|pytorch_model.*|.*\.gguf")
SPACE_MARGIN = 1.05  # for the tokenizer and configuration next to the weights


def convert_model(
    source: SavedModel,
    target: Path,
    form: ExportFormat = AS_THEY_ARE,
    *,
    merge: bool = False,
    model_name: str | None = None,
    finish: Callable[[Path], object] = lambda draft: None,
) -> None:
    """Write the model and its tokenizer to ``target``, atomically.

    Args:
        merge: Merge adapters into their base. Without it adapters stay adapters.
        model_name: The model that provides configuration and tokenizer if there are none next to the weights.
        finish: Adds further files to the folder before it appears.

    Raises ConversionError.
    """
    check_target(target)
    with conversion_errors(source):
        _check_space(source, target, form, merge=merge)
    with new_folder(target) as draft:
        with conversion_errors(source):
            _write_weights(source, draft, form, merge=merge, model_name=model_name)
        add_tokenizer(_model_folder(source), draft, model_name)
        finish(draft)


@contextmanager
def conversion_errors(source: SavedModel) -> Iterator[None]:
    """Convert a ValueError of the block into a ConversionError that names the folder, and DamagedWeights into one that names the
    file.
    """
    try:
        with naming_damaged_weights(source.weights):
            yield
    except ConversionError:
        raise
    except DamagedWeights as error:
        raise ConversionError(str(error)) from error
    except ModelNotFound as error:
        raise ConversionError(str(error.with_key("CHECKPOINT"))) from error  # the name in `strop export --help`
    except ValueError as error:
        raise ConversionError(f"{source.weights}: {error}") from error


def convert_shards(source: Path, target: Path, *, model_name: str | None = None) -> None:
    """Convert the sharded weights in ``source`` to a folder that ``from_pretrained`` reads, with its tokenizer.

    ``target`` is created atomically. Configuration and tokenizer come from ``source``, or else from ``model_name``. Raises ConversionError.
    """
    _check_shards(source, target)
    convert_model(SavedModel(str(source)), target, model_name=model_name)


def _model_folder(source: SavedModel) -> Path:
    """Return the folder with configuration and tokenizer."""
    if source.shards is None:
        return Path(source.weights)
    reader, shards = source.shards
    return reader.model_folder(shards)


def _write_weights(source: SavedModel, draft: Path, form: ExportFormat, *, merge: bool, model_name: str | None) -> None:
    folder = Path(source.weights)
    if source.shards is not None:
        reader, shards = source.shards
        config = _load_config(_model_folder(source), model_name)
        export_weights(config, reader.read_shards(shards, config), draft, form)
        return
    match source.layout:
        case "adapters" if merge:
            save_model(load_merged_model(folder), draft, form)
        case "adapters":
            copy_adapters(folder, draft, form)
        case "value head":
            shutil.copytree(folder, draft, dirs_exist_ok=True)
        case _:
            save_model(load_saved_model(source.weights), draft, form)


def _check_shards(source: Path, target: Path) -> None:
    if not source.is_dir():
        raise ConversionError(f"there is no folder {source}; weights are in <checkpoint_dir>/step_<N>/policy/weights")
    if adapter_folder(str(source)) is not None:
        raise ConversionError(
            f"{source} holds LoRA adapters in PEFT's format, not a whole model; merge them into their base: "
            f"strop export {source} {target} --merge"
        )
    if find_shards(source) is None:
        inner = next((path for path in (source / "weights", source / "policy" / "weights") if is_sharded(path)), None)
        if inner is not None:
            raise ConversionError(f"{source} itself holds no weights; name {inner}")
        if any(source.glob("*.safetensors")):
            raise ConversionError(
                f"{source} is a Hugging Face folder already (saved by one process): use it as it is, or copy it"
            )
        raise ConversionError(f"{source} is not a complete sharded checkpoint: it has no {METADATA}, which is written last")


def _check_space(source: SavedModel, target: Path, form: ExportFormat, *, merge: bool) -> None:
    """Raise ConversionError if the disk has too little space for the folder."""
    needed = _estimate_bytes(source, form, merge=merge) * SPACE_MARGIN
    parent = target.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise ConversionError(
            f"{parent} has {free / 1e9:.2f} GB free, and {target.name} needs about {needed / 1e9:.2f} GB: make room, name a folder on "
            "another disk, or halve it with --dtype bfloat16"
        )


def _estimate_bytes(source: SavedModel, form: ExportFormat, *, merge: bool) -> float:
    """Return the approximate size of the weights in bytes; 0 if unknown before loading."""
    folder = Path(source.weights)
    if source.layout == "hub" or (source.layout == "adapters" and merge):
        return 0.0
    reader: TensorReader = SafetensorsReader(folder)
    if source.shards is not None:
        reader = source.shards[0].open_shards(source.shards[1])
    return sum(
        torch.Size(shape).numel() * (form.torch_dtype or reader.dtypes[name]).itemsize for name, shape in reader.shapes.items()
    )


def _load_config(source: Path, model_name: str | None) -> Any:
    name = str(source) if (source / "config.json").exists() else model_name
    if name is None:
        raise ConversionError(
            f"{source} has no config.json; name the run's config.yaml, so that the model is known from its policy.model_name"
        )
    return load_model_config(name)


def add_tokenizer(source: Path, draft: Path, model_name: str | None) -> None:
    """Copy the other files of ``source``, such as tokenizer and chat template. Without any, save the tokenizer of ``model_name``.

    The generation configuration of ``source`` replaces the one derived from the model's.
    """
    written = {path.name for path in draft.iterdir()} - {"generation_config.json"}
    found = find_shards(source)
    for path in source.iterdir() if source.is_dir() else ():
        of_shards = found is not None and found[0].is_index(path.name)
        copied = path.is_file() and path.name not in written and not of_shards
        if (
            copied
            and (path.name == "base_config.json" or not MODEL_FILES.fullmatch(path.name))
            and not _is_merged_away(path, draft)
        ):
            shutil.copyfile(path, draft / path.name)
    if not (draft / "tokenizer_config.json").exists() and not (draft / "value_head.json").exists() and model_name is not None:
        load_tokenizer(model_name).save_pretrained(draft)


def _is_merged_away(path: Path, draft: Path) -> bool:
    """Whether a file describes adapters that are merged."""
    return path.name in ("base_config.json", "README.md") and (draft / "config.json").exists()


def read_model_name(config_file: Path) -> str | None:
    """Return the model named by a run's configuration, None if it names none. Raises ConversionError if the file is not a run's
    configuration.
    """
    if not config_file.is_file():
        raise ConversionError(
            f"there is no file {config_file}; each checkpoint contains the run's configuration as step_<N>/config.yaml"
        )
    try:
        found = read_yaml(config_file)
    except SavedModelNotFound as error:
        raise ConversionError(str(error)) from error
    name = (found.get("policy") or {}).get("model_name")
    return str(name) if name else None


@contextmanager
def loadable_folder(
    model: SavedModel, note: Callable[[str], object], *, merge: bool = False, shared: Path | None = None
) -> Iterator[str]:
    """Yield a folder from which models can be loaded: the model's own, or a temporary one for shards of several ranks and for
    adapters to merge. ``shared``: its parent folder, visible to several nodes.
    """
    if not model.needs_conversion and not (merge and model.layout == "adapters"):
        yield model.weights
        return
    folder = Path(tempfile.mkdtemp(prefix="strop-model-", dir=shared)).resolve()
    try:
        work = "merging the adapters" if merge else "the checkpoint has shards of several ranks; converting them"
        note(f"{work} to a temporary folder, {folder}")
        base = model.run_values.get("policy", {}).get("model_name")
        convert_model(model, folder / "model", merge=merge, model_name=base)
        yield str(folder / "model")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
