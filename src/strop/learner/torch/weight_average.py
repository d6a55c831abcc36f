"""An exponential moving average (EMA) of the weights, which often evaluates better than the last weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class AveragedWeights:
    """average <- decay * average + (1 - decay) * weights after each optimizer step, in float32 (float64 for float64 weights).

    The average starts at the weights, not at zero, and needs no bias correction. Up to ``start_step`` it equals the weights.
    """

    def __init__(self, named_parameters: Sequence[tuple[str, Tensor]], *, decay: float, start_step: int = 0) -> None:
        """``named_parameters`` are the parameters to average: those that the optimizer steps, which are the masters of bfloat16 weights.

        Raises ValueError unless 0 <= decay < 1 and start_step >= 0.
        """
        if not 0 <= decay < 1:
            raise ValueError(
                f"policy.ema.decay: found {decay}; it must be at least 0 and below 1: at 1 nothing would be averaged"
            )
        if start_step < 0:
            raise ValueError(f"policy.ema.start_step: found {start_step}; it must be at least 0")
        self.decay = decay
        self.start_step = start_step
        self._source = dict(named_parameters)
        self._average = {
            name: torch.empty_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
            for name, weight in named_parameters
        }
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Restart the average from the current weights."""
        self.steps = 0
        torch._foreach_copy_(list(self._average.values()), list(self._source.values()))

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the current weights. Call it after each optimizer step that was not skipped."""
        self.steps += 1
        averages, weights = list(self._average.values()), list(self._source.values())
        if self.steps <= self.start_step:
            torch._foreach_copy_(averages, weights)
        else:
            wide = [weight.to(average.dtype) for weight, average in zip(weights, averages, strict=True)]
            torch._foreach_lerp_(averages, wide, 1 - self.decay)

    @contextmanager
    def swap_in(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> Iterator[None]:
        """Replace a module's trained parameters by the average, rounded to their dtype; restore them on exit.

        The swap is in place, so everything that shares the module sees it. An engine that keeps copies of the weights must refresh them on
        entry and on exit. No second copy of the weights is needed: they are stored in the average's memory, or restored from the masters.
        """
        undo: list[Callable[[], object]] = []
        try:
            with torch.no_grad():
                for name, parameter in named_parameters:
                    undo.append(self._swap(name, parameter))
            yield
        finally:
            with torch.no_grad():
                for restore in undo:
                    restore()

    def _swap(self, name: str, parameter: Tensor) -> Callable[[], object]:
        """Replace a parameter by its average; return a function that restores both."""
        average, source = self._average[name], self._source[name]
        if parameter.dtype == average.dtype:
            _exchange(parameter, average)
            return partial(_exchange, parameter, average)
        weight = parameter.clone() if source.dtype == parameter.dtype else source  # a weight is its rounded master
        parameter.copy_(average)
        return partial(parameter.copy_, weight)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "average": dict(self._average)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state_dict``. Raises ValueError for the average of other parameters."""
        saved: Mapping[str, Tensor] = state["average"]
        if saved.keys() != self._average.keys():
            differing = sorted(saved.keys() ^ self._average.keys())
            raise ValueError(
                f"the checkpoint has the average of {len(saved)} weights and this run trains {len(self._average)}; they differ in "
                f"{', '.join(differing[:3])}; start with another checkpointing.checkpoint_dir"
            )
        self.steps = int(state["steps"])
        for name, average in self._average.items():
            average.copy_(saved[name])


@torch.no_grad()
def _exchange(left: Tensor, right: Tensor) -> None:
    kept = left.clone()
    left.copy_(right)
    right.copy_(kept)
