"""The losses that routers add to that of the algorithm, as metrics. Megatron Core adds them up in a table of the process."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker, get_moe_layer_wise_logging_tracker

from strop import metrics
from strop.extensions.megatron.layout import MegatronLayout
from strop.metrics import Metrics

dist: Any = torch.distributed

NAMES = {  # moe_router_load_balancing_type -> Megatron Core's name of its loss
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


class RouterLosses:
    """The losses of a model's routers, without their coefficients: means over layers and micro-batches."""

    def __init__(self, config: Any, layout: MegatronLayout, *, per_layer: bool) -> None:
        """``config``: Megatron Core's TransformerConfig. ``per_layer``: of each layer too."""
        self.layout, self.per_layer, self.layers = layout, per_layer, int(config.num_layers)
        self.names: list[str] = []
        if not config.num_moe_experts:
            return
        frequency = config.moe_layer_freq
        pattern = frequency if isinstance(frequency, list) else [int(layer % frequency == 0) for layer in range(self.layers)]
        self.routed = [layer for layer, routed in enumerate(pattern) if routed]
        kinds, weights = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
        kinds = [kinds] if isinstance(kinds, str) else kinds
        weights = weights if isinstance(weights, list) else [weights] * len(kinds)
        self.names = [NAMES[kind] for kind, weight in zip(kinds, weights, strict=True) if weight > 0 and kind in NAMES]
        self.names += ["z_loss"] if config.moe_z_loss_coeff else []

    def start(self) -> None:
        """Forget the losses of passes before, also of other models in this process."""
        clear_aux_losses_tracker()

    def take(self, micro_batches: int) -> Metrics:
        """Return the losses since ``start``. All ranks must call it; those that lead a copy of the model return all, to be merged."""
        table, found = get_moe_layer_wise_logging_tracker(), {}
        for name in self.names:
            recorded = table.get(name)  # a stage without routers has none
            values = torch.zeros(self.layers, device=self.layout.device) if recorded is None else recorded["values"].clone()
            for group in (self.layout.pipeline, self.layout.tensor, self.layout.context):
                dist.all_reduce(values, group=group)
            values /= micro_batches
            if name == "z_loss":  # a mean over the tokens of a rank; the others are its part of a sum
                values /= self.layout.dims.tensor * self.layout.dims.context
            elif name == NAMES["global_aux_loss"]:  # a part of the sum over all ranks
                values *= self.layout.dims.data
            losses = values[self.routed].tolist()
            found[f"moe/{name}"] = metrics.mean(sum(losses) / len(losses), micro_batches)
            if self.per_layer:
                found |= {
                    f"moe/{name}_layer_{layer}": metrics.mean(loss, micro_batches)
                    for layer, loss in zip(self.routed, losses, strict=True)
                }
        return found
