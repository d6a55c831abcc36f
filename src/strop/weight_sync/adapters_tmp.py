"""LoRA adapters as they are sent to an engine that already has the base weights."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.models.adapters import CONFIG_FILE, WEIGHTS_FILE, LoraLayer, base_weights, lora_layers, save_adapters
from strop.weight_sync.base import AdapterFiles
from strop.weight_sync.fingerprints import fingerprint, normalize_zeros
from strop.weight_sync.weight_source import Weight, local_weights


class LocalAdapterSource:
    """The adapters and base weights of a model in this process."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def base_weights(self) -> Iterable[Weight]:
        return local_weights(base_weights(self.model))

    def export_files(self) -> AdapterFiles:
        with tempfile.TemporaryDirectory(prefix="strop-adapter-") as name:
            save_adapters(self.model, Path(name))
            return read_adapter_files(Path(name))

    @torch.no_grad()
    def fingerprints(self, dtype: torch.dtype) -> Mapping[str, int]:
        return fingerprint_adapters(((layer, layer.down, layer.up) for layer in lora_layers(self.model)), dtype)


def read_adapter_files(folder: Path) -> AdapterFiles:
    return AdapterFiles((folder / WEIGHTS_FILE).read_bytes(), (folder / CONFIG_FILE).read_text())


def fingerprint_adapters(layers: Iterable[tuple[LoraLayer, Tensor, Tensor]], dtype: torch.dtype) -> Mapping[str, int]:
    """Return fingerprints of adapters, given as (layer, whole A, whole B), by ``<layer>.A`` and ``<layer>.B``.

    B is multiplied by the scale, as engines store it.
    """
    found: dict[str, int] = {}
    for layer, down, up in layers:
        up = up.detach().to(dtype)
        up = up if layer.scale == 1 else up * layer.scale
        for side, matrix in (("A", down.detach().to(dtype)), ("B", up)):
            found[f"{layer.name}.{side}"] = fingerprint(normalize_zeros(matrix))
    return found
