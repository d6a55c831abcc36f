"""LoRA adapters as they are sent to an engine that already has the base weights."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.models.adapters import CONFIG_FILE, WEIGHTS_FILE, LowRank, base_weights, low_rank_layers, save_adapters
from strop.weights.base import AdapterFiles
from strop.weights.fingerprints import fingerprint, positive_zeros
from strop.weights.source import Weight, weights_of


class LowRankSource:
    """The adapters and base weights of a model in this process."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def base(self) -> Iterable[Weight]:
        return weights_of(base_weights(self.model))

    def files(self) -> AdapterFiles:
        with tempfile.TemporaryDirectory(prefix="strop-adapter-") as name:
            save_adapters(self.model, Path(name))
            return files_in(Path(name))

    @torch.no_grad()
    def marks(self, dtype: torch.dtype) -> Mapping[str, int]:
        return adapter_marks(((layer, layer.down, layer.up) for layer in low_rank_layers(self.model)), dtype)


def files_in(folder: Path) -> AdapterFiles:
    return AdapterFiles((folder / WEIGHTS_FILE).read_bytes(), (folder / CONFIG_FILE).read_text())


def adapter_marks(layers: Iterable[tuple[LowRank, Tensor, Tensor]], dtype: torch.dtype) -> Mapping[str, int]:
    """Return fingerprints of adapters, given as (layer, whole A, whole B), by ``<layer>.A`` and ``<layer>.B``.

    B is multiplied by the scale, as engines store it.
    """
    found: dict[str, int] = {}
    for layer, down, up in layers:
        up = up.detach().to(dtype)
        up = up if layer.scale == 1 else up * layer.scale
        for side, matrix in (("A", down.detach().to(dtype)), ("B", up)):
            found[f"{layer.name}.{side}"] = fingerprint(positive_zeros(matrix))
    return found
