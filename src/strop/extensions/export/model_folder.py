"""Export weights as a Hugging Face folder."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.models.adapters import CONFIG_FILE, WEIGHTS_FILE, is_classifier_adapter
from strop.models.checkpoint_names import load_model_config
from strop.models.load_report import LoadReport, find_not_finite
from strop.models.loading import (
    cast_weights,
    find_auto_class,
    from_pretrained,
    load_generation_config,
    load_model,
    load_weights,
    quiet_transformers,
)
from strop.models.value_network import load_classifier

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class ExportFormat:
    """How weights are written."""

    dtype: str | None = None  # a key of DTYPES; None keeps the weights' dtype
    max_shard_size: str | None = None  # such as 5GB; None is Transformers' default

    @property
    def torch_dtype(self) -> torch.dtype | None:
        return None if self.dtype is None else DTYPES[self.dtype]


AS_THEY_ARE = ExportFormat()


class ConversionError(ValueError):
    """A folder cannot be converted; the message says why and what to do."""


def check_target(target: Path) -> None:
    """Raise ConversionError if ``target`` is not empty."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConversionError(f"{target} already exists; remove it, or name another folder")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a draft that becomes ``target`` at the end, or is removed after an error. Raises ConversionError if ``target`` is not empty."""
    check_target(target)
    draft = target.with_name(f".tmp_{target.name}")
    if draft.exists():
        shutil.rmtree(draft)
    try:
        draft.mkdir(parents=True)
        yield draft
        if target.exists():
            target.rmdir()
        draft.rename(target)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        if error.strerror is None or error.errno is None:
            raise
        raise ConversionError(f"{target} cannot be written: {error.strerror}; nothing was left behind") from error
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def export_weights(config: Any, weights: Mapping[str, Tensor], folder: Path, form: ExportFormat = AS_THEY_ARE) -> None:
    """Write ``weights`` as ``save_pretrained`` does, without copying them.

    ``config`` names the model class in ``architectures``. Raises ValueError for weights that do not fit it.
    """
    kind = find_model_class(config)
    with torch.device("meta"), quiet_transformers():
        model = kind(config)
    unexpected = model.load_state_dict(weights, strict=False, assign=True).unexpected_keys
    model.tie_weights()
    missing = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    report = LoadReport(missing=missing, unexpected=unexpected, not_finite=list(find_not_finite(weights.items())))
    report.refuse("the checkpoint", kind.__name__, key="")
    model.config.dtype = next((tensor.dtype for tensor in weights.values() if tensor.is_floating_point()), None)
    save_model(model, folder, form)


def load_saved_model(folder: str) -> Any:
    """Load a Hugging Face folder as the class named in it, in the data type of its weights."""
    if not (Path(folder) / "config.json").exists() or not any(Path(folder).glob("*.safetensors")):
        return load_model(folder)
    kind = find_model_class(load_model_config(folder))
    model, report = load_weights(partial(from_pretrained, kind), folder, folder, dtype="auto")
    report.refuse(folder, kind.__name__, key="")
    return model


def load_merged_model(adapters: Path) -> Any:
    """Load adapters merged into their base, in float32."""
    return (load_classifier if is_classifier_adapter(adapters) else load_model)(str(adapters))


def save_model(model: Any, folder: Path, form: ExportFormat = AS_THEY_ARE) -> None:
    """Write a Hugging Face folder."""
    if form.torch_dtype is not None:
        cast_weights(model, form.torch_dtype)
        model.config.dtype = form.torch_dtype
    options = {} if form.max_shard_size is None else {"max_shard_size": form.max_shard_size}
    with quiet_transformers():
        model.save_pretrained(folder, **options)


def save_model_config(config: Any, dtype: torch.dtype, folder: Path, *, scores: bool = False) -> None:
    """Write the configuration of a language model, or with ``scores`` of its sequence classifier, including the class name."""
    from transformers import AutoModelForSequenceClassification

    config = copy.deepcopy(config)
    auto: Any = AutoModelForSequenceClassification if scores else find_auto_class(config)
    if scores:
        config.num_labels = 1
    config.architectures = [auto._model_mapping[type(config)].__name__]
    config.dtype = dtype
    with quiet_transformers():
        config.save_pretrained(folder)
        generation = load_generation_config(Path(config.name_or_path))
        if generation is not None and not scores:
            generation.save_pretrained(folder)


def copy_adapters(source: Path, folder: Path, form: ExportFormat = AS_THEY_ARE) -> None:
    """Write the adapters of a folder in PEFT's format to another."""
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    dtype = form.torch_dtype
    tensors = {name: tensor if dtype is None else tensor.to(dtype) for name, tensor in load_file(source / WEIGHTS_FILE).items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text((source / CONFIG_FILE).read_text())


def find_model_class(config: Any) -> Any:
    """Return the model class named by a configuration. Raises ValueError if this version of Transformers lacks it."""
    import transformers

    kind = next((getattr(transformers, name, None) for name in config.architectures or ()), None)
    if kind is None:
        raise ValueError(
            f"config.json names the architecture {config.architectures}, which this version of Transformers ({transformers.__version__}) "
            "does not have"
        )
    return kind
