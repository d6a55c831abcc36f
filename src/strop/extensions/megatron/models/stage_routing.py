"""Router replay in the stages of a model: the routers of Megatron Core ask for recorded experts where they would take the best ones.

A row carries its experts (``StageRow.experts``). A layer hands them to its router before it runs, so that it does not matter which
micro-batches a pipeline schedule has under way, nor whether the whole layer is computed again in the backward pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from strop.models.routing.recorded_experts import ReplayedRoutes, RoutedLayers


class LayerReplay:
    """The ``router_replay`` of a router of Megatron Core: in place of its own, which keeps all routers of a process in one list."""

    def __init__(self, layer: int, *, recomputed: bool) -> None:
        """``recomputed``: the router alone is computed again in the backward pass, without its layer."""
        self.layer, self.recomputed = layer, recomputed
        self._experts: ReplayedRoutes | None = None
        self._waiting: deque[ReplayedRoutes | None] = deque()  # of the passes whose backward pass is to come, in their order

    def hand_down(self, _: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the experts of the row that the layer is about to read."""
        self._experts = kwargs["packed_seq_params"].experts
        if self.recomputed and torch.is_grad_enabled():
            self._waiting.append(self._experts)

    def forget(self) -> None:
        self._waiting.clear()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and indices [n, k] of the recorded experts; of those with the best scores [n, E] where there are none."""
        assert default_compute_topk is not None
        best, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        # Megatron Core's checkpointing computes without gradients first, and with them when it computes again.
        experts = self._waiting.popleft() if self.recomputed and torch.is_grad_enabled() else self._experts
        if experts is None:
            return best, own
        chosen = experts.choose(self.layer, own)
        return scores.gather(1, chosen), chosen


def install_stage_replay(stages: Sequence[Any]) -> tuple[RoutedLayers, list[LayerReplay]]:
    """Make the routers of a rank's stages able to replay. Return its layers with experts, and what their routers ask.

    Raises ValueError for a model without experts, or with routers that fused kernels compute.
    """
    config, architecture = stages[0].config, stages[0].architecture
    if not config.num_moe_experts:
        raise ValueError(
            "policy.router_replay.enabled: the model has no routers that choose experts for a token; set it to false"
        )
    if getattr(config, "moe_router_fusion", False):
        raise ValueError(
            "policy.router_replay.enabled is true, but with megatron_cfg.moe_router_fusion the choice of experts is inside of a kernel; "
            "set one of them to false"
        )
    modules = config.recompute_modules or ()
    recomputed = config.recompute_granularity == "selective" and "moe" in modules
    replays = []
    for layer, router in _find_layers(stages):
        replay = LayerReplay(layer.layer_number - 1, recomputed=recomputed)
        router.router_replay = replay
        layer.register_forward_pre_hook(replay.hand_down, with_kwargs=True)
        replays.append(replay)
    width = int(config.moe_router_topk)
    top_k = {replay.layer: width for replay in replays}
    return RoutedLayers(architecture.num_layers, top_k, width, int(config.num_moe_experts)), replays


def _find_layers(stages: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    for stage in stages:
        for layer in stage.decoder.layers:
            if (router := getattr(layer.mlp, "router", None)) is not None:
                yield layer, router
