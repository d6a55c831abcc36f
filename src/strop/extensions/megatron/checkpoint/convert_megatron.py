"""Convert checkpoints and adapters of Megatron Core to Hugging Face's format, and models the other way, in one process."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from strop.checkpointing.saved_model import SavedModel, read_yaml
from strop.extensions.export.convert import MODEL_FILES, add_tokenizer, conversion_errors, convert_model
from strop.extensions.export.model_folder import ConversionError, check_target, copy_adapters, new_folder, save_model
from strop.extensions.megatron.adapter_folder import PREFIX, AdapterFolder, make_peft_config
from strop.extensions.megatron.checkpoint.hugging_face import (
    WeightShapes,
    read_hugging_face_weights,
    write_megatron_weights,
)
from strop.extensions.megatron.checkpoint.torch_dist import find_iteration, open_shards
from strop.extensions.megatron.families.architecture import LAYER, text_name
from strop.extensions.megatron.families.find_family import to_text_config
from strop.learner.parallel.shard_files import ShardedReader, TensorShard, is_sharded
from strop.models.adapters import adapter_folder, is_classifier_adapter, merge_adapters
from strop.models.checkpoint_names import load_model_config
from strop.models.load_report import LoadReport, find_not_finite
from strop.models.loading import find_model_folder, load_model
from strop.models.value_network import load_classifier

HALVES = {"lora_A": "linear_in", "lora_B": "linear_out"}


def read_adapter_shards(iteration: Path, config: Any, peft: Mapping[str, Any], *, base: str) -> AdapterFolder:
    """Read the adapters in an iter_XXXXXXX folder. Layers that share A in Megatron Core get a copy each.

    Args:
        config: Of the Hugging Face model that the adapters are for.
        peft: The section of run_config.yaml, which has dim and alpha.
        base: The name that this model is loaded by.

    Raises ValueError if they are not of this model, or on experts.
    """
    reader, model = open_shards(iteration), WeightShapes.of(config)
    unused = {name for name in reader.shapes if ".adapter." in name}
    tensors: dict[str, Tensor] = {}
    others: set[str] = set()
    for name, shape in model.shapes.items():
        match, layer = LAYER.match(name), name.removesuffix(".weight")
        parameter = model.rule(name).parameter.removesuffix(".weight")
        keys = {saved: _find_key(f"{parameter}.adapter.{inside}.weight", match, reader) for saved, inside in HALVES.items()}
        if match is None or not name.endswith(".weight") or model.rule(name).of_experts or None in keys.values():
            others.add(layer)
            continue
        unused -= set(keys.values())
        down, up = (_read(reader, key, int(match[1])) for key in keys.values())
        order = model.rule(name).order if model.rule(name).dim == 0 else None
        if order is not None:
            stored, up = up, up.new_empty(shape[0], up.shape[1])
            for piece in order.pieces(shape[0], 1):
                piece.of(up, 0).copy_(stored[piece.whole : piece.whole + piece.length])
        if (*up.shape, *down.shape) != (shape[0], int(peft["dim"]), int(peft["dim"]), shape[1]):
            raise ValueError(
                f"{iteration} has adapters of shapes {tuple(down.shape)} and {tuple(up.shape)} where {name} of shape {shape} needs rank "
                f"{peft['dim']}: they are of another model"
            )
        tensors |= {f"{PREFIX}{layer}.lora_A.weight": down, f"{PREFIX}{layer}.lora_B.weight": up}
    if unused or not tensors:
        found = ", ".join(sorted(unused)[:3]) or "none"
        raise ValueError(f"{iteration} has adapters that {type(config).__name__} has no layers for: {found}")
    layers = [name.removeprefix(PREFIX).removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]
    options = make_peft_config(layers, others, base=base, model_type=config.model_type, dim=int(peft["dim"]), alpha=peft["alpha"])
    return AdapterFolder(tensors, options, config.to_json_string())


def _find_key(name: str, match: re.Match[str] | None, reader: ShardedReader) -> str | None:
    """Return the stored name of half an adapter, of all layers or of one."""
    prefixes = ["decoder.layers."] if match is None else [f"decoder.layers.{match[1]}.", "decoder.layers."]
    return next((key for prefix in prefixes if (key := re.sub(r"^layers\.", prefix, name)) in reader.shapes), None)


def _read(reader: ShardedReader, key: str | None, layer: int) -> Tensor:
    assert key is not None
    shape = reader.shapes[key]
    stacked = len(shape) - 2
    part = torch.empty(shape[stacked:], dtype=reader.dtypes[key])
    reader.read_blocks([(key, TensorShard(part[(None,) * stacked], (*(layer,) * stacked, 0, 0), shape))])
    return part


def convert_megatron(source: Path, target: Path, *, model_name: str | None = None) -> None:
    """Convert a Megatron Core checkpoint, such as weights/iter_0000000, like ``convert_shards``. Raises ConversionError."""
    if find_iteration(source) is None:
        if is_sharded(source):
            raise ConversionError(
                f"{source} has no metadata.json: it was not saved by Megatron Core. Shards of the torch learner are converted by "
                f"strop export {source} {target}"
            )
        folders = ", ".join(sorted(path.name for path in source.iterdir() if path.is_dir())) if source.is_dir() else ""
        found = f"; folders there: {folders}" if folders else ""
        raise ConversionError(
            f"{source} has no checkpoint of Megatron Core, which is <checkpoint_dir>/step_<N>/policy/weights/iter_0000000{found}"
        )
    convert_model(SavedModel(str(source)), target, model_name=model_name)


def convert_to_megatron(model_name: str, target: Path) -> None:
    """Write a Hugging Face model and its tokenizer as a folder with iter_0000000, in one process.

    Raises ModelNotFound, ConversionError.
    """
    check_target(target)
    folder = find_model_folder(model_name)
    source = SavedModel(str(folder))
    with new_folder(target) as draft, conversion_errors(source):
        files = sorted(folder.glob("*.safetensors"))  # mapped, not read
        weights = {text_name(name): tensor for file in files for name, tensor in load_file(file).items()}
        config = load_model_config(source.weights)
        write_megatron_weights(weights, text := to_text_config(config), draft)
        for path in folder.iterdir():
            if path.is_file() and (path.name == "config.json" or not MODEL_FILES.fullmatch(path.name)):
                shutil.copyfile(path, draft / path.name)
        if text is not config:
            text.save_pretrained(draft)


def convert_megatron_adapters(
    adapters: Path, target: Path, *, model_name: str, base: Path | None = None, merge: bool = True
) -> None:
    """Write adapters of Megatron Core's layers in PEFT's format, or with ``merge`` the complete merged model, in float32.

    Args: adapters: A run's policy/weights, or an iter_XXXXXXX folder of NeMo-RL. model_name: The Hugging Face base model. base:
    An iter_XXXXXXX folder with that model's weights; None reads those of ``model_name``.

    Raises ModelNotFound, ConversionError.
    """
    check_target(target)
    with new_folder(target) as draft, conversion_errors(SavedModel(str(adapters))), tempfile.TemporaryDirectory() as temporary:
        folder = adapter_folder(str(adapters)) or _read_megatron_adapters(adapters, model_name, Path(temporary))
        if merge:
            model = load_classifier(model_name) if is_classifier_adapter(folder) else load_model(model_name)
            if base is not None:
                _load_base(model, base)
            save_model(merge_adapters(model, folder), draft)
        else:
            copy_adapters(folder, draft)
        add_tokenizer(folder, draft, model_name)


def _read_megatron_adapters(source: Path, model_name: str, folder: Path) -> Path:
    iteration = find_iteration(source)
    if iteration is None or not (iteration / "run_config.yaml").is_file():
        raise ConversionError(
            f"{source} has neither adapter_config.json, as policy/weights of a run that trains adapters, nor an iter_XXXXXXX folder with "
            "run_config.yaml, as NeMo-RL saves them"
        )
    peft = read_yaml(iteration / "run_config.yaml").get("peft")
    if not peft:
        raise ConversionError(f"{iteration / 'run_config.yaml'} has no section peft: its run trained no adapters")
    read_adapter_shards(iteration, load_model_config(model_name), peft, base=model_name).write(folder)
    return folder


def _load_base(model: Any, base: Path) -> None:
    """Load the weights of Megatron Core's checkpoint into a model."""
    if (iteration := find_iteration(base)) is None:
        raise ConversionError(
            f"{base} has no checkpoint of Megatron Core: name the iter_XXXXXXX folder of the base, or leave it out"
        )
    weights = read_hugging_face_weights(iteration, model.config)
    LoadReport(not_finite=list(find_not_finite(weights.items()))).refuse(str(base), type(model).__name__, key="")
    model.load_state_dict(weights, strict=False)  # all but tied weights, which the reader returns once
