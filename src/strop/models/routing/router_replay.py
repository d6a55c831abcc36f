"""Routers whose choice of experts can be recorded and replayed (R3, arXiv 2510.11370).

A router of Transformers computes a score for each expert, takes the ``topk`` of them, and turns their scores into weights.
Replay replaces the indices returned by ``topk``, and gathers the scores at them. The rest, from the softmax to the scaling, is
the router's own code, so the weights are the learner's, and their gradient reaches the router.

The recorder or replayer of a pass is the decoder's keyword argument ``routes``, which is passed down to the layers like those of
attention. A layer passes it to its router before it runs, including when activation checkpointing reruns it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from strop.models.routing.recorded_experts import RecordedRoutes, ReplayedRoutes, RoutedLayers

TOPK = (torch.topk, torch.Tensor.topk)
MASKED_FILL = (torch.masked_fill, torch.Tensor.masked_fill)


def install_router_replay(model: Any) -> RoutedLayers:
    """Enable the routers of a model to record and replay, in place. Without ``routes`` they work as before.

    Raises ValueError for a model without routers, or with routers that are not found.
    """
    layers: nn.ModuleList | None = getattr(model.get_decoder(), "layers", None)
    routers = {} if layers is None else {index: list(find_routers(layer)) for index, layer in enumerate(layers)}
    found = {index: members for index, members in routers.items() if members}
    if layers is None or not found:
        raise ValueError(
            f"policy.router_replay.enabled: {type(model).__name__} has no routers that choose experts for a token; set it to false"
        )
    if several := next((index for index, members in found.items() if len(members) > 1), None):
        raise ValueError(
            f"policy.router_replay.enabled: layer {several} of {type(model).__name__} has {len(found[several])} routers, and replay knows "
            "one a layer; set it to false"
        )
    for index, (router,) in found.items():
        kind = type(router)
        if not isinstance(router, ReplayableRouter):
            router.__class__ = type(f"Replayable{kind.__name__}", (ReplayableRouter, kind), {})
            layer: Any = layers[index]
            layer.register_forward_pre_hook(_hand_down, with_kwargs=True)
            layer.replayable = (router,)  # in a tuple: not registered as a submodule again
        router.layer, router.routes = index, None
    top_k = {index: int(members[0].top_k) for index, members in found.items()}
    return RoutedLayers(len(layers), top_k, max(top_k.values()), max(int(members[0].num_experts) for members in found.values()))


def replayable_layers(decoder: Any) -> list[int]:
    """Return the indices of the decoder layers on this pipeline stage that replay recorded routes."""
    return [index for index, layer in enumerate(decoder.layers) if "replayable" in vars(layer)]


def find_routers(layer: nn.Module) -> Iterator[Any]:
    """Yield the innermost modules of a layer that have a number of experts to take."""
    for module in layer.modules():
        if _is_router(module) and not any(_is_router(child) for child in module.modules() if child is not module):
            yield module


def _is_router(module: nn.Module) -> bool:
    return isinstance(getattr(module, "top_k", None), int) and isinstance(getattr(module, "num_experts", None), int)


def _hand_down(layer: Any, _: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Pass the routes of a call to the layer's router, or None. Copies of a model have their own routers."""
    for router in layer.replayable:
        router.routes = kwargs.get("routes")


class ReplayableRouter(nn.Module):
    """Mixin for the class of a router."""

    layer: int
    routes: RecordedRoutes | ReplayedRoutes | None  # of the tokens of one forward pass

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.routes is None:
            return super().forward(*args, **kwargs)
        choice = _ExpertChoice(self)
        with choice:
            result = super().forward(*args, **kwargs)
        if choice.taken != 1:
            raise RuntimeError(
                f"{type(self).__name__} of layer {self.layer} took the best experts {choice.taken} times, not once with torch.topk: its "
                "choice can be neither recorded nor replayed; set policy.router_replay.enabled=false"
            )
        return result


class _ExpertChoice(TorchFunctionMode):
    """Replaces the result of the one ``topk`` over all experts."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.router = router
        self.taken = 0
        self._unmasked: list[tuple[Tensor, Tensor]] = []  # scores before and after masking the experts of other groups

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in MASKED_FILL and args[0].shape[-1:] == (self.router.num_experts,):
            self._unmasked.append((result, args[0]))
        if func in TOPK and self._takes_experts(args, kwargs or {}):
            self.taken += 1
            chosen = self.router.routes.choose(self.router.layer, result[1])
            if chosen is not None:
                return torch.return_types.topk((self._scores(args[0]).gather(-1, chosen), chosen))
        return result

    def _takes_experts(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        count = args[1] if len(args) > 1 else kwargs["k"]
        scores: Tensor = args[0]
        return scores.dim() == 2 and scores.shape[-1] == self.router.num_experts and count == self.router.top_k

    def _scores(self, scores: Tensor) -> Tensor:
        """Return the scores before the mask of group-limited routing, because a recorded expert may be in a group that the
        learner masked.
        """
        return next((before for after, before in self._unmasked if after is scores), scores)
