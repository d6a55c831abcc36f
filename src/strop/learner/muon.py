"""Muon (arXiv 2502.16982): the momentum of matrices, orthogonalized by Newton-Schulz iterations; AdamW for all other parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration; not convergent, but steep at zero

ApplyWhole = Callable[[str, Tensor, Callable[[Tensor], Tensor]], Tensor]


def apply_here(name: str, local: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    return function(local)


class Muon(torch.optim.AdamW):
    """Matrices take Muon's step: a semi-orthogonal matrix, scaled by 0.2 sqrt(longer side) to the size of AdamW's, so that one learning
    rate fits both. Vectors, and parameters whose name contains one of ``adamw``, take AdamW's. A parameter of three dimensions is one
    matrix per expert.

    ``apply_whole``: applies a function to a matrix of which each rank has a shard, and returns this rank's shard of the result.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adamw: Sequence[str] = ("embed", "lm_head", "score"),
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused)
        self.momentum, self.nesterov, self.ns_steps, self.adamw = momentum, nesterov, ns_steps, tuple(adamw)
        self.apply_whole: ApplyWhole = apply_here

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        stepped: list[tuple[nn.Parameter, Tensor]] = []
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if parameter.grad is not None and parameter.ndim > 1 and not any(part in name for part in self.adamw):
                    self._step_matrix(name, parameter, parameter.grad, group)
                    stepped.append((parameter, parameter.grad))
                    parameter.grad = None  # AdamW's step leaves it out
        super().step()
        for parameter, grad in stepped:
            parameter.grad = grad

    def _step_matrix(self, name: str, parameter: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)  # read by AdamW when it restores a state
            state["momentum_buffer"] = torch.zeros_like(grad)
        state["step"] += 1
        momentum: Tensor = state["momentum_buffer"]
        momentum.lerp_(grad, 1 - self.momentum)
        update = grad.lerp(momentum, self.momentum) if self.nesterov else momentum
        update = self.apply_whole(name, update, self._orthogonalize)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update.to(parameter.dtype), alpha=-group["lr"])

    def _orthogonalize(self, matrix: Tensor) -> Tensor:
        """Return a matrix with about the same singular vectors whose singular values are about 1, times the size of AdamW's step."""
        scale = 0.2 * max(matrix.shape[-2:]) ** 0.5
        a, b, c = COEFFICIENTS
        tall = matrix.shape[-2] > matrix.shape[-1]
        found = matrix if matrix.dtype == torch.float64 else matrix.bfloat16()
        found = found.mT if tall else found
        found = found / found.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
        for _ in range(self.ns_steps):
            gram = found @ found.mT
            found = a * found + (b * gram + c * gram @ gram) @ found
        step: Tensor = scale * (found.mT if tall else found).to(matrix.dtype)
        return step
