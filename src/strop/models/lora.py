"""LoRA (arXiv 2106.09685): add trainable low-rank adapters to a frozen model.

The layers are PEFT's, so that other programs can load what is saved. The PyTorch engine replaces their forward pass
(``strop.generation.torch.fast_linears``), and the reference policy is the same model with its adapters disabled.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from strop.models.adapters import ADAPTER, CLASSIFIER_TASK, AdapterTargets, lora_layers
from strop.models.lora_config import LoraConfig
from strop.models.value_network import get_score_layer
from strop.packages import install_command
from strop.user_code import suggest_names

# Initialization of `down`; `up` is zero, so that the model initially equals its base.
INITIALISERS: dict[str, Callable[..., Tensor]] = {
    "xavier": nn.init.xavier_normal_,
    "uniform": partial(nn.init.kaiming_uniform_, a=math.sqrt(5)),
}


def add_adapters(model: Any, options: LoraConfig, *, base: str, seed: int = 0) -> None:
    """Freeze a causal LM or a classifier with one label and add adapters to it, in place. Its outputs do not change.

    Only the adapters are trained, and the score layer of a classifier, which is newly initialized. Adapters are float32 for a bfloat16
    model and depend only on ``seed``. ``base`` is the name that the base model can be loaded by; it is saved with the adapters. Raises
    ValueError for patterns without a match, and ImportError without PEFT.
    """
    if lora_layers(model):
        raise ValueError(f"{type(model).__name__} already has adapters; reload the model")
    names = find_target_layers(model, options)
    with torch.random.fork_rng(devices=[]):  # PEFT initializes weights, which are initialized again below
        _inject_adapters(model, names, options, base)
    if [layer.name for layer in lora_layers(model)] != names:
        raise ValueError(
            f"PEFT did not add adapters to exactly the selected layers of {type(model).__name__}; exclude unsupported layers with "
            "dtensor_cfg.lora_cfg.exclude_modules"
        )
    _init_adapters(model, options, seed)
    model.requires_grad_(False)
    for layer in lora_layers(model):
        layer.down.requires_grad_(True)
        layer.up.requires_grad_(True)
    for name in _modules_to_save(model):
        model.get_submodule(name).requires_grad_(True)


def _inject_adapters(model: Any, names: Sequence[str], options: LoraConfig, base: str) -> None:
    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise ImportError(
            f"dtensor_cfg.lora_cfg.enabled needs the package peft: {install_command('lora')}, or set it to false"
        ) from error
    layers = dict(model.named_modules())
    targets = _shorten_names(names, layers)
    config = PeftConfig(
        r=options.dim,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        use_rslora=options.use_rslora,
        target_modules=targets,
        fan_in_fan_out=not any(isinstance(layers[name], nn.Linear) for name in names),
        task_type=CLASSIFIER_TASK if _is_classifier(model) else "CAUSAL_LM",
        base_model_name_or_path=base,
    )
    # PEFT replaces some layer names by those of experts (see AdapterTargets), unless the model has no configuration.
    plain = nn.Module()
    for name, child in model.named_children():
        plain.add_module(name, child)
    inject_adapter_in_model(config, plain, adapter_name=ADAPTER)
    # Set after the injection: otherwise PEFT would wrap the score layer and create parametrizations for parameter targets.
    saved = AdapterTargets.of(targets, model.config.model_type).options()
    model.peft_config = {ADAPTER: replace(config, **saved, modules_to_save=_modules_to_save(model) or None)}


def _shorten_names(names: Sequence[str], layers: Collection[str]) -> list[str]:
    """Return the last parts of the names if these select the same layers, as usual in PEFT's files; otherwise the full names."""
    ends = {name.rpartition(".")[2] for name in names}
    same = {name for name in layers if name.rpartition(".")[2] in ends} == set(names)
    return sorted(ends) if same else list(names)


def _init_adapters(model: nn.Module, options: LoraConfig, seed: int) -> None:
    """Initialize the adapters' weights, in at least float32, and set their dropout."""
    generator = torch.Generator().manual_seed(seed)
    for layer in lora_layers(model):
        wrapper: Any = layer.module
        for weight in (layer.down, layer.up):
            weight.data = weight.data.to(torch.promote_types(layer.base.weight.dtype, torch.float32))
        initial = INITIALISERS[options.lora_A_init](torch.empty(layer.down.shape), generator=generator)
        with torch.no_grad():
            layer.down.copy_(initial)
            layer.up.zero_()
        dropout = _TrainingDropout(options.dropout) if options.dropout else nn.Identity()
        wrapper.lora_dropout[ADAPTER] = dropout if options.dropout_position == "pre" else nn.Identity()
        if options.dropout and options.dropout_position == "post":
            wrapper.lora_B[ADAPTER].register_forward_hook(dropout.after)


class _TrainingDropout(nn.Module):
    """Dropout that is active only while gradients are enabled, whatever the module's mode: scoring and sampling use no dropout."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p, training=torch.is_grad_enabled())

    def after(self, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        return self(output)  # type: ignore[no-any-return]


# --- which layers --------------------------------------------------------------------------------------------------------


def find_target_layers(model: Any, options: LoraConfig) -> list[str]:
    """Return the names of the layers that get adapters, in the model's order. Raises ValueError for a pattern without a match."""
    linear = _linear_layers(model)
    selected = _match_layers("target_modules", options.target_modules, linear, model) if options.target_modules else set(linear)
    selected -= _match_layers("exclude_modules", options.exclude_modules, linear, model)
    if not selected:
        raise ValueError(
            f"dtensor_cfg.lora_cfg: of the {len(linear)} linear layers of {type(model).__name__} all are excluded from adapters; list "
            "fewer in exclude_modules"
        )
    if not options.target_modules and (fused := _expert_weights(model)):
        warnings.warn(
            f"the experts' weights {', '.join(fused)} of {type(model).__name__} are not linear layers and get no adapters: "
            "they are not trained",
            stacklevel=3,
        )
    return [name for name in linear if name in selected]


def _linear_layers(model: Any) -> list[str]:
    """Return the names of the decoder's linear layers, without the output layer, which is applied in chunks and may be tied."""
    from transformers.pytorch_utils import Conv1D

    decoder = model.base_model if _is_classifier(model) else model.get_decoder()
    inside = {id(module) for module in decoder.modules()}
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and id(module) in inside and not _has_own_forward(module)
    ]


def _has_own_forward(layer: nn.Module) -> bool:
    """Return whether a model's linear layer multiplies in another way than torch's, by groups of its inputs for example (DeepSeek V4)."""
    kind = type(layer)
    return issubclass(kind, nn.Linear) and kind.__module__.startswith("transformers.models.") and "forward" in vars(kind)


def _match_layers(key: str, patterns: Sequence[str], names: Sequence[str], model: nn.Module) -> set[str]:
    matches: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if _matches(pattern, name)}
        if not matched:
            reason = (
                _explain_mismatch(pattern, model)
                or f"matches nothing{suggest_names(pattern, {name.rpartition('.')[2] for name in names})}"
            )
            raise ValueError(f"dtensor_cfg.lora_cfg.{key}: {pattern!r} {reason}")
        matches |= matched
    return matches


def _matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches the full name, a suffix of it after a dot or, with * ? or [, the full name as a shell
    pattern.
    """
    return name == pattern or name.endswith(f".{pattern}") or fnmatchcase(name, pattern)


def _explain_mismatch(pattern: str, model: Any) -> str | None:
    """Explain why a pattern matches only modules that cannot have adapters."""
    for name, module in model.named_modules():
        if name and _matches(pattern, name):
            head = None if _is_classifier(model) else model.get_output_embeddings()
            what = "the output layer" if module is head else f"a {type(module).__name__}"
            return f"matches {name}, which is {what}: only linear layers of the decoder can have adapters"
    for name, _ in model.named_parameters():
        if _matches(pattern, name):
            return f"matches the weight {name}, which is not a linear layer: only linear layers of the decoder can have adapters"
    return None


def _expert_weights(model: nn.Module) -> list[str]:
    """Return the names of weights that hold all experts of a layer in one tensor, with ``*`` for the layer index."""
    convolutions = {id(module.weight) for module in model.modules() if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)}
    fused = [name for name, weight in model.named_parameters() if weight.dim() == 3 and id(weight) not in convolutions]
    return list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in fused))


def _is_classifier(model: Any) -> bool:
    with suppress(ValueError):
        return get_score_layer(model) is not None
    return False


def _modules_to_save(model: Any) -> list[str]:
    """Return the names of layers that are fully trained and saved together with the adapters."""
    if not _is_classifier(model):
        return []
    layer = get_score_layer(model)
    return [name for name, module in model.named_modules() if module is layer]


# --- parameter counts and export -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParameterCount:
    """Parameter counts of a model; tied parameters count once."""

    trained: int
    total: int
    adapted_layers: int

    def __str__(self) -> str:
        text = f"{self.trained:,} of {self.total:,} parameters are trained ({self.trained / self.total:.2%})"
        return f"{text}, in adapters on {self.adapted_layers} layers" if self.adapted_layers else text


def count_parameters(model: nn.Module) -> ParameterCount:
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    trained = sum(size for size, trainable in sizes if trainable)
    return ParameterCount(trained, sum(size for size, _ in sizes), len(lora_layers(model)))
