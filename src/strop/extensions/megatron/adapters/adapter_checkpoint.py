"""Adapters of a model's stages as a folder in PEFT's format, and back, in any layout."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from strop.extensions.megatron.adapters.adapter_folder import AdapterFolder, make_peft_config
from strop.extensions.megatron.adapters.stage_adapters import StageAdapters
from strop.extensions.megatron.weights.weight_reader import MemoryWeights
from strop.models.adapters import CONFIG_FILE, WEIGHTS_FILE, read_adapter_config


def gather_adapters(adapters: StageAdapters, *, copies: bool = False) -> AdapterFolder:
    """Gather the adapters of all stages. All ranks must call it, in their layout. ``copies``: they may be written during training."""
    tensors = adapters.gather()
    if copies:
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
    names = [each.name for each in adapters.adapted]
    config = make_peft_config(
        names,
        {placed.weight.name.removesuffix(".weight") for placed in adapters.weights.weights} - set(names),
        base=adapters.base,
        model_type=adapters.hf_config.model_type,
        dim=adapters.config.dim,
        alpha=adapters.config.alpha,
        dropout=adapters.config.dropout,
        scores=adapters.scores,
    )
    return AdapterFolder(tensors, config, adapters.hf_config.to_json_string())


def load_adapter_folder(adapters: StageAdapters, folder: Path, *, key: str = "megatron_cfg.peft") -> None:
    """Load adapters that a run with any layout saved, in place. Raises ValueError if they do not fit; warns of another base."""
    from safetensors.torch import load_file

    if not (folder / CONFIG_FILE).exists():
        raise ValueError(
            f"{folder} holds no adapters (no {CONFIG_FILE}), and this run trains adapters; set {key}.enabled=false to continue it, or "
            "start with another checkpointing.checkpoint_dir"
        )
    saved, own = read_adapter_config(folder), adapters.config
    for name, option, current in (("r", "dim", own.dim), ("lora_alpha", "alpha", own.alpha)):
        if saved.get(name) != current:
            raise ValueError(
                f"the adapters in {folder} have {name} = {saved.get(name)}, and this run's have {current}; set {key}.{option} as it was "
                "when they were saved"
            )
    stored = load_file(folder / WEIGHTS_FILE)
    names = {half.weight.name: half.weight.shape for _, half in adapters.iter_halves()}
    wrong = sorted(name for name in names if name not in stored or tuple(stored[name].shape) != names[name])
    extra = sorted(name for name in stored if ".lora_" in name and name not in names)
    if wrong or extra:
        raise ValueError(
            f"the adapters in {folder} do not fit those of this run; they differ in {', '.join([*wrong, *extra][:3])}; set {key} as it "
            "was when they were saved, or start with another checkpointing.checkpoint_dir"
        )
    _check_shared(adapters, stored, folder)
    if (base := saved.get("base_model_name_or_path")) != adapters.base:
        warnings.warn(
            f"the adapters in {folder} were trained on {base}, and this run adds them to {adapters.base}: they are valid only if both "
            "have the same weights",
            stacklevel=2,
        )
    adapters.load(MemoryWeights(stored))


def _check_shared(adapters: StageAdapters, stored: Mapping[str, Tensor], folder: Path) -> None:
    """Raise ValueError if layers that are one of Megatron Core's have different A: the torch learner trained them."""
    first: dict[str, str] = {}
    for each in adapters.adapted:
        name = each.down.weight.name
        other = first.setdefault(each.layer, name)
        if other != name and not stored[other].equal(stored[name]):
            raise ValueError(
                f"the adapters in {folder} have another A in {name} than in {other}, which share one in Megatron Core's "
                f"{each.layer.rpartition('.')[2]}: continue with policy.backend=torch"
            )
