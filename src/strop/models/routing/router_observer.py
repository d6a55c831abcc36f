"""Router losses (load balancing, large logits), and the distribution of tokens over experts.

Both losses are sums over the N trained tokens of a batch (at the token each is predicted from), divided by their number in the
optimizer step (``Totals.tokens``). Load balancing compares experts within one rollout, which is never split. So neither depends
on micro-batches, shared prompts or ranks (law 1). For a rollout with n tokens, k of E experts chosen for each, and probabilities
p (softmax of the logits, or their sigmoids divided by the sum, depending on the router),

    f(e) = E / (k n)  times the number of tokens that chose e,      P(e) = mean of p(e),      loss = n / N  sum over e of f(e) P(e).

It is 1 if the load is even. In the backward pass, the gradient of a router's loss is added directly at its logits, so the loss
does not pass through the model's outputs, and checkpointed layers add it once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from strop import metrics
from strop.metrics import Metrics
from strop.models.routing.router_config import RouterLossConfig
from strop.models.routing.router_replay import TOPK, find_routers
from strop.sampling import at_least_float32

SIGMOID = (torch.sigmoid, torch.Tensor.sigmoid, torch.nn.functional.sigmoid)
LINEAR = (torch.nn.functional.linear,)


@dataclass(eq=False)
class RouterStatistics:
    """Sums over the passes of a step."""

    layers: int
    experts: int
    device: torch.device
    sums: Tensor = field(init=False)  # [layers, experts + 2]: tokens of each expert, load-balancing loss, large-logit loss

    def __post_init__(self) -> None:
        self.sums = torch.zeros(self.layers, self.experts + 2, dtype=torch.float64, device=self.device)


class ObservedRouters:
    """The routers of a model, observed in passes within ``observing``."""

    def __init__(self, model: Any, config: RouterLossConfig, section: str = "policy") -> None:
        """Raises ValueError for a model without routers that choose experts."""
        layers: nn.ModuleList | None = getattr(model.get_decoder(), "layers", None)
        found = [] if layers is None else [(layer, router) for layer in layers for router in find_routers(layer)]
        if not found:
            raise ValueError(
                f"{section}.router_losses: {type(model).__name__} has no routers that choose experts for a token; set its coefficients to "
                "0 and log_expert_load=false"
            )
        self.config = config
        self.active = False
        self.statistics = RouterStatistics(len(found), max(int(router.num_experts) for _, router in found), torch.device("cpu"))
        for index, (layer, router) in enumerate(found):
            kind = type(router)
            if not isinstance(router, ObservedRouter):
                router.__class__ = type(f"Observed{kind.__name__}", (ObservedRouter, kind), {})
                block: Any = layer
                block.register_forward_pre_hook(_hand_observer_down, with_kwargs=True)
                block.observed = (*getattr(block, "observed", ()), router)  # in a tuple: not registered as a submodule again
            router.observed_index, router.observer = index, None

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Observe the routers in the passes within."""
        self.active = True
        try:
            yield
        finally:
            self.active = False

    def observe(self, source: Tensor, sequence: Tensor, mask: Tensor, total: int) -> Mapping[str, RouterObserver]:
        """Return the decoder's keyword argument for a pass; empty where nothing is observed.

        Args:
            source: The token of the pass that predicts each trained token, [N].
            sequence: The rollout of each, [N].
            mask: Whether it counts, [N].
            total: The number of counted tokens of the optimizer step.
        """
        return {"observer": RouterObserver(self, source, sequence, mask, max(1, total))} if self.active else {}

    def take(self, add: Callable[[Tensor], Tensor]) -> Metrics:
        """Return the observations since the last call. ``add`` sums over the ranks that read other rollouts."""
        old = self.statistics
        self.statistics = RouterStatistics(old.layers, old.experts, old.device)
        sums = add(old.sums).cpu()
        load = sums[:, : old.experts]
        if not load.sum():
            return {}
        even = load.mean(1)
        found = {
            "moe/expert_load_max_over_mean": metrics.mean(float((load.max(1).values / even).mean()), 1),
            "moe/experts_without_tokens": metrics.mean(float((load == 0).double().mean()), 1),
        }
        if self.config.aux_loss_coeff:
            found["moe/load_balancing_loss"] = metrics.mean(float(sums[:, -2].mean()), 1)
        if self.config.z_loss_coeff:
            found["moe/z_loss"] = metrics.mean(float(sums[:, -1].mean()), 1)
        return found


def _hand_observer_down(layer: Any, _: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for router in layer.observed:
        router.observer = kwargs.get("observer")


class ObservedRouter(nn.Module):
    """Mixin for the class of a router."""

    observed_index: int
    observer: RouterObserver | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.observer is None:
            return super().forward(*args, **kwargs)
        record = _RouterCall(self, self.observer)
        with record:
            result = super().forward(*args, **kwargs)
        record.check()
        return result


class _RouterCall(TorchFunctionMode):
    """A router's computation in one pass: its logits, its probabilities, and the experts it takes."""

    def __init__(self, router: Any, observer: RouterObserver) -> None:
        super().__init__()
        self.router, self.observer = router, observer
        self.logits: Tensor | None = None
        self.chosen: Tensor | None = None
        self.sigmoid = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        experts = self.router.num_experts
        if func in LINEAR and self.logits is None and result.shape[-1] == experts:
            self.logits = result
            return _AddedGradient.apply(result, self)  # type: ignore[no-untyped-call]
        if func in SIGMOID and result.shape[-1] == experts:
            self.sigmoid = True
        if func in TOPK and result[1].shape[-1] == self.router.top_k and args[0].shape[-1] == experts:
            self.chosen = result[1].detach()
        return result

    def check(self) -> None:
        """Raises RuntimeError for an unsupported router; otherwise the losses are counted."""
        if self.logits is None or self.chosen is None:
            raise RuntimeError(
                f"{type(self.router).__name__} of layer {self.router.observed_index} makes no logits with torch's linear, or takes no "
                "experts with topk: its losses cannot be computed; set policy.router_losses.aux_loss_coeff=0, z_loss_coeff=0 and "
                "log_expert_load=false"
            )
        self.observer.count(self)

    def loss_terms(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two losses of this call, without their coefficients."""
        assert self.chosen is not None
        return self.observer.losses(logits, self.chosen, sigmoid=self.sigmoid)


class _AddedGradient(torch.autograd.Function):
    """Returns logits unchanged, and adds the gradient of their losses in the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, call: _RouterCall) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.call = call
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        config: RouterLossConfig = ctx.call.observer.routers.config
        if not config.has_loss:
            return gradient, None
        (logits,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            balance, large = ctx.call.loss_terms(leaf)
            (own,) = torch.autograd.grad(config.aux_loss_coeff * balance + config.z_loss_coeff * large, leaf)
        return gradient + own, None


class RouterObserver:
    """Observes the routers of one pass."""

    def __init__(self, routers: ObservedRouters, source: Tensor, sequence: Tensor, mask: Tensor, total: int) -> None:
        self.routers, self.total = routers, total
        self.source, self.mask = source, mask
        rollouts, self.rollout = sequence.unique(return_inverse=True)
        self.lengths = mask.new_zeros(len(rollouts)).index_add(0, self.rollout, mask)  # [S] tokens that count
        self._counted: set[int] = set()

    def losses(self, logits: Tensor, chosen: Tensor, *, sigmoid: bool) -> tuple[Tensor, Tensor]:
        """Return (load balancing, large logits) of the logits [t, E] and the experts [t, k] of a layer."""
        logits = at_least_float32(logits).reshape(-1, logits.shape[-1])
        scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
        scores = scores / scores.sum(-1, keepdim=True) if sigmoid else scores
        mask = self.mask.to(logits.dtype)
        lengths = self.lengths.to(logits.dtype)
        share = self._sum_by_rollout(self._choices(chosen, logits)) * (logits.shape[-1] / chosen.shape[-1])
        probability = self._sum_by_rollout(scores)
        balance = ((share * probability).sum(-1) / lengths.clamp(min=1)).sum() / self.total
        large = (mask * logits.logsumexp(-1)[self.source].square()).sum() / self.total
        return balance, large

    def _choices(self, chosen: Tensor, logits: Tensor) -> Tensor:  # [t, E]: 1 for each expert that a token chose
        return torch.zeros_like(logits).scatter(1, chosen.reshape(len(logits), -1), 1.0)

    def _sum_by_rollout(self, column: Tensor) -> Tensor:
        """[t, E] -> sums over the counted tokens of each rollout, [S, E]."""
        rows = column[self.source] * self.mask.to(column.dtype)[:, None]
        return rows.new_zeros(len(self.lengths), rows.shape[1]).index_add(0, self.rollout, rows)

    @torch.no_grad()
    def count(self, call: _RouterCall) -> None:
        """Add up load and losses of a layer, once, since a checkpointed layer runs again in the backward pass."""
        index = call.router.observed_index
        if index in self._counted:
            return
        self._counted.add(index)
        assert call.logits is not None and call.chosen is not None
        logits = at_least_float32(call.logits.detach()).reshape(-1, call.logits.shape[-1])
        load = self._sum_by_rollout(self._choices(call.chosen, logits)).sum(0)
        sums = self.routers.statistics.sums
        self.routers.statistics.sums = sums = sums.to(logits.device)
        sums[index, : len(load)] += load
        sums[index, -2:] += torch.stack(call.loss_terms(logits)).to(sums.dtype)
