"""The weights of an SGLang engine with injectable faults, modelled on real failures of engines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor

from strop.extensions.sglang.server.model_weights import AdapterSlot, ModelWeights, PublishedAdapters


class FaultyModelWeights(ModelWeights):
    fault = ""

    def plant(self, fault: str) -> None:
        self.fault = fault

    def _apply(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        kept = list(tensors)
        if self.fault == "dropped tensor":
            kept = [pair for pair in kept if not pair[0].endswith("layers.1.mlp.down_proj.weight")]
        if self.fault.startswith("drops "):
            kept = [pair for pair in kept if pair[0] != self.fault.removeprefix("drops ")]
        if self.fault == "swapped pair":
            names = {"model.layers.0.self_attn.o_proj.weight": "model.layers.1.self_attn.o_proj.weight"}
            names |= {other: name for name, other in names.items()}
            kept = [(names.get(name, name), tensor) for name, tensor in kept]
        if self.fault == "stale part of a fused matrix":
            kept = [pair for pair in kept if not pair[0].endswith("layers.0.self_attn.k_proj.weight")]
        if self.fault == "one changed number":
            changed = next(tensor for name, tensor in kept if name.endswith("layers.1.mlp.up_proj.weight"))
            changed.view(-1)[5] += 1e-6
        if self.fault == "killed half way":
            raise RuntimeError("injected fault: this rank fails in the middle of a publish")
        super()._apply(kept)

    def load_adapter(self, files: Any) -> float:
        if isinstance(self.adapters, AdapterSlot):
            self.adapters.__class__ = FaultySlot
            self.adapters.fault = self.fault  # type: ignore[attr-defined]
        return super().load_adapter(files)


class FaultySlot(AdapterSlot):
    fault = ""

    def write(self, adapters: PublishedAdapters) -> None:
        if self.fault == "adapter forgotten":
            return
        layers = dict(adapters.layers)
        if self.fault == "stale adapter in one layer":
            down, up = layers["model.layers.1.mlp.down_proj"]
            layers["model.layers.1.mlp.down_proj"] = (down, up * 0.5)
        super().write(replace(adapters, layers=layers))
