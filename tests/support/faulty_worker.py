"""A vLLM worker with injectable faults, modelled on real failures of engines."""

from __future__ import annotations

from typing import Any

from strop.generation.vllm.worker import StropWorker


class FaultyWorker(StropWorker):
    fault = ""

    def plant(self, fault: str) -> None:
        self.fault = fault

    def _strop_apply_weights(self, tensors: Any) -> None:
        kept = list(tensors)
        if self.fault == "dropped tensor":
            kept = [pair for pair in kept if not pair[0].endswith("layers.1.mlp.down_proj.weight")]
        if self.fault.startswith("second rank drops ") and self.rank == 1:
            kept = [pair for pair in kept if pair[0] != self.fault.removeprefix("second rank drops ")]
        if self.fault.startswith("drops "):
            kept = [pair for pair in kept if pair[0] != self.fault.removeprefix("drops ")]
        if self.fault == "swapped pair":
            names = {"model.layers.0.self_attn.o_proj.weight": "model.layers.1.self_attn.o_proj.weight"}
            names |= {other: name for name, other in names.items()}
            kept = [(names.get(name, name), tensor) for name, tensor in kept]
        if self.fault == "stale tied head":
            self.model_runner.reload_weights(weights_iterator=iter(kept))
            return
        if self.fault == "killed half way":
            raise RuntimeError("injected fault: this worker fails in the middle of a publish")
        super()._strop_apply_weights(kept)
        if self.fault.startswith("expert keeps a weight "):
            self._spoil_expert(int(self.fault.removeprefix("expert keeps a weight ")))

    def _spoil_expert(self, expert: int) -> None:
        """Change one weight of one expert of the last layer, in the buffer that its kernel reads."""
        layers = [module for module in self.model_runner.get_model().modules() if hasattr(module, "w13_weight")]
        layers[-1].w2_weight.data[expert].view(-1)[5] += 0.25

    def strop_read_adapter_fingerprints(self, adapter: int) -> bytes:
        """Inject adapter faults just before the read-back, as if they had happened during loading."""
        manager = self.model_runner.lora_manager._adapter_manager
        if self.fault == "adapter forgotten":
            manager.remove_all_adapters()
        if self.fault == "stale adapter in one layer":
            manager.modules["model.layers.1.mlp.down_proj"].lora_b_stacked[0].add_(0.01)
        return super().strop_read_adapter_fingerprints(adapter)
