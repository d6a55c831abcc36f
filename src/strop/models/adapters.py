"""LoRA adapters (arXiv 2106.09685) in a model: find, disable, merge, save and load them.

PEFT's layers hold the adapters: a layer ``y = W x`` becomes ``y = W x + scale * up (down x)``, with W frozen. This module works on those
layers without importing PEFT; ``strop.models.lora`` creates them.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from strop.models.layers.rounded_layers import RoundWeight, round_base_weight, weight_roundings
from strop.models.load_report import LoadReport, find_not_finite, naming_damaged_weights
from strop.sampling import at_least_float32

ADAPTER = "default"  # PEFT's name of the only adapter
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
BASE_CONFIG_FILE = "base_config.json"  # not config.json: the folder must not look like a full model
CLASSIFIER_TASK = "SEQ_CLS"  # PEFT's task type of sequence classifiers
_PREFIX = "base_model.model."  # of each name in PEFT's files
_DOWN = ".lora_A.weight"
_EXPERT_LAYERS = ("gate_proj", "up_proj", "down_proj")  # layers that PEFT takes for experts', by name


def identity(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, eq=False)
class LoraLayer:
    """One layer with an adapter, ``y = base(x) + scale * up (down x)``."""

    name: str  # name of the layer in the model without adapters
    module: nn.Module  # PEFT's layer, which wraps the base
    base: Any  # nn.Linear, or GPT-2's Conv1D with its transposed weight
    down: nn.Parameter  # [r, inputs]
    up: nn.Parameter  # [outputs, r]
    scale: float

    @torch.no_grad()
    def merged_weight(self, gather: Callable[[Tensor], Tensor] = identity) -> Tensor:
        """Return W + scale * up down as a new tensor in at least float32, so that small changes are not lost to rounding.

        W is rounded first if the layer rounds it.
        """
        base = round_base_weight(self.base, gather(self.base.weight))
        down, up, weight = (at_least_float32(tensor) for tensor in (gather(self.down), gather(self.up), base))
        change = (up @ down).mul_(self.scale)
        return weight + (change if isinstance(self.base, nn.Linear) else change.t())


def lora_layers(model: nn.Module) -> list[LoraLayer]:
    """Return the layers with an adapter, in the model's order; an empty list for an ordinary model."""
    return [_make_lora_layer(name, module) for name, module in model.named_modules() if _has_adapter(module)]


def _has_adapter(module: Any) -> bool:
    return hasattr(module, "base_layer") and ADAPTER in getattr(module, "lora_A", ())


def _make_lora_layer(name: str, module: Any) -> LoraLayer:
    down, up = module.lora_A[ADAPTER].weight, module.lora_B[ADAPTER].weight
    return LoraLayer(name, module, module.base_layer, down, up, float(module.scaling[ADAPTER]))


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Disable a model's adapters: each layer runs only its base, bitwise equal to the base model and without a copy.

    Raises RuntimeError while an engine has replaced the layers' forward methods.
    """
    layers = lora_layers(model)
    if any("forward" in vars(layer.module) for layer in layers):
        raise RuntimeError("the engine is using the model; adapters can only be disabled after it has been drained")
    for layer in layers:
        layer.module.forward = layer.base.forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.module.forward


def weights_with_layers(model: nn.Module) -> Iterator[tuple[str, Tensor, LoraLayer | None]]:
    """Yield (name without adapters, tensor, adapter layer or None) of each weight of the model. No copies."""
    layers = {layer.name: layer for layer in lora_layers(model)}
    for name, tensor in model.state_dict().items():
        owner, inside = _split_name(name, layers)
        if owner is None:
            yield name, tensor, None
        elif inside == "base_layer.weight":
            yield f"{owner.name}.weight", tensor, owner
        elif inside.startswith("base_layer."):
            yield f"{owner.name}.{inside.removeprefix('base_layer.')}", tensor, None


def merged_weights(model: nn.Module, gather: Callable[[Tensor], Tensor] = identity) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's weights under their names without adapters, with adapters merged in, one at a time.

    ``gather`` returns the full tensor of a sharded one. Rounded to bfloat16, merged weights lose changes below half a unit of precision of
    the weight: send base and adapters separately instead.
    """
    for name, tensor, adapter in weights_with_layers(model):
        yield name, gather(tensor) if adapter is None else adapter.merged_weight(gather)


def merged_roundings(model: nn.Module) -> dict[str, RoundWeight]:
    """Return the rounding functions of ``merged_weights`` for engines, by name. Layers with adapters, which are added to a
    rounded base, have none.
    """
    merged = {f"{layer.name}.weight" for layer in lora_layers(model)}
    return {name: rounding for name, rounding in weight_roundings(model).items() if name not in merged}


def base_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's weights under their names without adapters, with adapters not merged. No copies."""
    for name, tensor, _ in weights_with_layers(model):
        yield name, tensor


def _split_name(name: str, layers: Mapping[str, LoraLayer]) -> tuple[LoraLayer | None, str]:
    """Split a state dict name into the adapter layer that contains it, if any, and the rest of the name."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        if (layer := layers.get(".".join(parts[:length]))) is not None:
            return layer, ".".join(parts[length:])
    return None, name


def adapter_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the trained weights: the adapters and a classifier's score layer, under the names of PEFT's files. No copies."""
    weights: dict[str, Tensor] = {}
    layers = lora_layers(model)
    for layer in layers:
        weights[f"{_PREFIX}{layer.name}{_DOWN}"] = layer.down.detach()
        weights[f"{_PREFIX}{layer.name}.lora_B.weight"] = layer.up.detach()
    for module_name in (_peft_config(model).modules_to_save or ()) if layers else ():
        layer_state = model.get_submodule(module_name).state_dict()
        weights.update({f"{_PREFIX}{module_name}.{name}": tensor.detach() for name, tensor in layer_state.items()})
    return weights


def _peft_config(model: Any) -> Any:
    """Return PEFT's configuration of the model's adapters."""
    return model.peft_config[ADAPTER]


@dataclass(frozen=True)
class AdapterTargets:
    """The layers with adapters, as PEFT's configuration names them."""

    modules: list[str]  # target_modules
    parameters: list[str]  # target_parameters

    @classmethod
    def of(cls, names: Iterable[str], model_type: str, *, experts: bool = False) -> AdapterTargets:
        """Name layers, by full names or suffixes, so that PEFT finds exactly these in a model of this type.

        Since Transformers 5 keeps experts in one tensor, PEFT takes ``gate_proj`` and others in many mixtures of experts for
        expert layers, even in dense layers and shared experts, and puts adapters on the experts. For such layers their weights
        are named instead, which PEFT does not translate. ``experts``: whether the model has experts; needed only if PEFT is not installed.
        """
        names = list(names)
        renamed = {name for name in names if _is_renamed(name.rpartition(".")[2], model_type, experts)}
        modules = [name for name in names if name not in renamed]
        return cls(modules, [f"{name}.weight" for name in names if name in renamed])

    def options(self) -> dict[str, Any]:
        """Return the keys of PEFT's configuration."""
        if not self.parameters:
            return {"target_modules": self.modules}
        # PEFT refuses dropout together with parameter adapters, and dropout is only for training.
        return {"target_modules": self.modules, "target_parameters": self.parameters, "lora_dropout": 0.0}


@cache
def _is_renamed(layer: str, model_type: str, experts: bool) -> bool:
    """Return whether PEFT resolves this layer name to a different layer."""
    try:
        from peft import LoraConfig
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:
        return experts and layer in _EXPERT_LAYERS
    config = LoraConfig(target_modules=[layer])
    try:
        convert_peft_config_for_transformers(config, SimpleNamespace(config=SimpleNamespace(model_type=model_type)), None)
    except ValueError:  # gate_proj without up_proj
        return True
    return set(config.target_modules) != {layer}


def save_adapters(model: Any, folder: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Write the adapters in PEFT's format: ``PeftModel.from_pretrained(base, folder)`` loads them.

    ``tensors`` replace the weights of a sharded model by full tensors. The model's configuration is written next to them, so
    that a later merge builds the same model.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(_peft_config(model))
    config.inference_mode = True
    config.target_modules = sorted(config.target_modules)  # a set, whose order differs between runs
    config.target_parameters = sorted(config.target_parameters or ()) or None
    config.save_pretrained(str(folder))
    model.config.to_json_file(folder / BASE_CONFIG_FILE)
    save_file(
        {name: tensor.cpu().contiguous() for name, tensor in (tensors or adapter_weights(model)).items()},
        folder / WEIGHTS_FILE,
        metadata={"format": "pt"},
    )


@torch.no_grad()
def load_adapters(model: nn.Module, folder: Path, fill: Callable[[Tensor, Tensor], Any] = Tensor.copy_) -> None:
    """Load what ``save_adapters`` wrote into a model's adapters, in place. Raises ValueError if they do not fit.

    ``fill(tensor, full)`` copies a full tensor into the model's tensor, which may be a shard of it.
    """
    from safetensors.torch import load_file

    _check_adapter_config(model, folder)
    stored, current = load_file(folder / WEIGHTS_FILE), adapter_weights(model)
    differing = sorted(stored.keys() ^ current.keys()) or [name for name in current if current[name].shape != stored[name].shape]
    if differing:
        raise ValueError(
            f"the adapters in {folder} do not fit those of this run; they differ in {', '.join(differing[:3])}; set "
            "dtensor_cfg.lora_cfg as it was when they were saved, or start with another checkpointing.checkpoint_dir"
        )
    for name, tensor in current.items():
        fill(tensor, stored[name])


def _check_adapter_config(model: nn.Module, folder: Path) -> None:
    """Raises ValueError for adapters of another rank or scale; warns if their base model has another name."""
    if not (folder / CONFIG_FILE).exists():
        raise ValueError(
            f"{folder} holds no adapters (no {CONFIG_FILE}), and this run trains adapters; set "
            "dtensor_cfg.lora_cfg.enabled=false to continue it, or start with another checkpointing.checkpoint_dir"
        )
    saved, current = read_adapter_config(folder), _peft_config(model)
    for name, key in (("r", "dim"), ("lora_alpha", "alpha"), ("use_rslora", "use_rslora")):
        if saved.get(name) != getattr(current, name):
            raise ValueError(
                f"the adapters in {folder} have {name} = {saved.get(name)}, but this run's have {getattr(current, name)}; set "
                f"dtensor_cfg.lora_cfg.{key} as it was when they were saved"
            )
    if (saved_base := saved.get("base_model_name_or_path")) != current.base_model_name_or_path:
        warnings.warn(
            f"the adapters in {folder} were trained on {saved_base}, and this run adds them to {current.base_model_name_or_path}: "
            "they are valid only if both have the same weights",
            stacklevel=3,
        )


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Read PEFT's configuration from a folder of adapters."""
    config: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text())
    return config


def adapter_folder(name: str) -> Path | None:
    """Return the folder if a model name is a folder of adapters, else None."""
    folder = Path(name).expanduser()
    return folder if (folder / CONFIG_FILE).exists() else None


def base_model_name(folder: Path) -> str:
    """Return the name of the model that the adapters in a folder were trained on. Raises ValueError if it is not recorded."""
    base = read_adapter_config(folder).get("base_model_name_or_path")
    if not base:
        raise ValueError(
            f"{folder / CONFIG_FILE} does not name its base: set base_model_name_or_path in it to a hub name or a folder"
        )
    return str(base)


def is_classifier_adapter(folder: Path) -> bool:
    """Return whether a folder has the adapters and the score layer of a sequence classifier."""
    return bool(read_adapter_config(folder).get("task_type") == CLASSIFIER_TASK)


def merge_adapters(model: Any, folder: Path) -> Any:
    """Merge the adapters in ``folder`` into ``model`` and return an ordinary model. Accepts any adapters that PEFT can merge.

    Raises DamagedWeights, and WeightsDoNotFit for adapters that do not match their configuration or the model.
    """
    from peft import PeftModel

    with warnings.catch_warnings(), naming_damaged_weights(folder):
        warnings.filterwarnings("ignore", message="Found missing adapter keys")  # refused below
        config = _correct_peft_config(model, folder)
        adapted = PeftModel.from_pretrained(model, str(folder), **({} if config is None else {"config": config}))
    loaded = adapted.load_adapter(
        str(folder), ADAPTER, ignore_mismatched_sizes=True
    )  # again, because only this call returns the load result
    own = [(name, tensor) for name, tensor in adapted.state_dict().items() if f".{ADAPTER}." in name]
    report = LoadReport(missing=loaded.missing_keys, unexpected=loaded.unexpected_keys, not_finite=list(find_not_finite(own)))
    report.refuse(str(folder), f"the adapters of {type(model).__name__}")
    return adapted.merge_and_unload().requires_grad_(True)  # PEFT froze it


def _correct_peft_config(model: Any, folder: Path) -> Any:
    """Return a configuration with which PEFT finds all layers of a folder whose names it would take for experts; None if not
    needed.

    Such are files of PEFT with Transformers 4, and of Strop's older versions. PEFT itself would leave these layers out.
    """
    from peft import PeftConfig
    from safetensors import safe_open

    config = PeftConfig.from_pretrained(str(folder))
    if getattr(config, "target_parameters", None) or not (folder / WEIGHTS_FILE).exists():
        return None
    with safe_open(folder / WEIGHTS_FILE, "pt") as file:
        names = file.keys()
    saved = [name.removeprefix(_PREFIX).removesuffix(_DOWN) for name in names if name.endswith(_DOWN)]
    modules = dict(model.named_modules())
    found = [name for name in saved if name in modules]
    targets = AdapterTargets.of(found, model.config.model_type)
    if not targets.parameters:
        return None
    if len(found) == len(saved):  # otherwise some are single experts, which PEFT combines
        config.target_modules = set(targets.modules)
    config.target_parameters, config.lora_dropout = targets.parameters, 0.0
    return config
