"""Adapters in PEFT's format, which PEFT, vLLM and `strop export` load. Imports nothing of Megatron Core."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from strop.models.adapters import BASE_CONFIG_FILE, CLASSIFIER_TASK, CONFIG_FILE, WEIGHTS_FILE, AdapterTargets
from strop.weight_sync.base import AdapterFiles

PREFIX = "base_model.model."  # of each name in PEFT's files


@dataclass(frozen=True, eq=False)
class AdapterFolder:
    """What a folder of adapters has."""

    tensors: Mapping[str, Tensor]  # by their names in PEFT's files
    config: Mapping[str, Any]  # PEFT's
    base_config: str  # of the Hugging Face model, as JSON

    def files(self) -> AdapterFiles:
        """Return the two files that an engine loads."""
        from safetensors.torch import save

        return AdapterFiles(save(self._saved(), metadata={"format": "pt"}), json.dumps(self.config, indent=2, sort_keys=True))

    def write(self, folder: Path) -> None:
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file(self._saved(), folder / WEIGHTS_FILE, metadata={"format": "pt"})
        (folder / CONFIG_FILE).write_text(json.dumps(self.config, indent=2, sort_keys=True))
        (folder / BASE_CONFIG_FILE).write_text(self.base_config)

    def _saved(self) -> dict[str, Tensor]:
        """The tensors as files have them: layers that share A in Megatron Core have a copy each."""
        return {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in self.tensors.items()}


def make_peft_config(
    layers: Sequence[str],
    others: Collection[str],
    *,
    base: str,
    model_type: str,
    dim: int,
    alpha: float,
    dropout: float = 0.0,
    scores: bool = False,
) -> dict[str, Any]:
    """Return PEFT's configuration of adapters on ``layers`` of a Hugging Face model, which also has ``others``.

    ``base``: the name that the model is loaded by. ``model_type``: that of its configuration. ``scores``: it has a score layer, which is
    trained whole.
    """
    ends = {name.rpartition(".")[2] for name in layers}
    apart = all(name.rpartition(".")[2] not in ends for name in others)
    experts = any(".experts." in name for name in others)
    targets = AdapterTargets.of(sorted(ends) if apart else layers, model_type, experts=experts)
    return {
        "peft_type": "LORA",
        "task_type": CLASSIFIER_TASK if scores else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": dim,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        **targets.options(),
        "modules_to_save": ["score"] if scores else None,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
    }
