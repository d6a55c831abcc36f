"""Convert checkpoints and adapters of Megatron Core to Hugging Face's format, and models the other way, in one process."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from strop.checkpointing.convert import MODEL_FILES, add_tokenizer, conversion_errors, convert_model
from strop.checkpointing.saved_model import SavedModel, read_yaml
from strop.extensions.megatron.checkpoint.adapter_shards import read_adapter_shards
from strop.extensions.megatron.checkpoint.hugging_face import read_hugging_face_weights, write_megatron_weights
from strop.extensions.megatron.checkpoint.torch_dist import find_iteration
from strop.learner.parallel.shard_files import is_sharded
from strop.models.adapters import adapter_folder, is_classifier_adapter, merge_adapters
from strop.models.classifiers import load_classifier
from strop.models.export import ConversionError, check_target, copy_adapters, load_model_config, new_folder, save_model
from strop.models.fit.load_report import LoadReport, find_not_finite
from strop.models.loading import find_model_folder, load_model


def convert_megatron(source: Path, target: Path, *, model_name: str | None = None) -> None:
    """Convert a Megatron Core checkpoint, such as weights/iter_0000000, like ``convert_shards``. Raises ConversionError."""
    if find_iteration(source) is None:
        if is_sharded(source):
            raise ConversionError(
                f"{source} has no metadata.json: it was not saved by Megatron Core. Shards of the torch learner are converted by "
                f"examples/converters/convert_dcp_to_hf.py, or strop export {source} {target}"
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
        weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
        write_megatron_weights(weights, load_model_config(source.weights), draft)
        for path in folder.iterdir():
            if path.is_file() and (path.name == "config.json" or not MODEL_FILES.fullmatch(path.name)):
                shutil.copyfile(path, draft / path.name)


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
