"""The losses that the Tinker SDK names: sums over tokens, of a batch that ``datum_batch`` made.

The loss is the negative sum of the following, with p the log-probability of the target under the weights that are trained, q = ``logprobs``
the one it was sampled with, A = ``advantages`` and r = exp(p - q):

    cross_entropy         weights p
    importance_sampling   r A
    ppo                   min(r A, clip(r, low, high) A)
    cispo                 clip(r, low, high) A p, without a gradient through the ratio
    dro                   A p - beta / 2 (p - q)^2
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from strop import metrics
from strop.algorithms.base import TokenOutputs
from strop.extensions.tinker.datum_batch import ADVANTAGES, LOGPROBS, WEIGHTS, TinkerRequestError
from strop.metrics import Metrics
from strop.types import Batch

SAMPLED = (LOGPROBS, ADVANTAGES)
NEEDED: Mapping[str, tuple[str, ...]] = {  # loss -> its inputs besides the targets
    "cross_entropy": (WEIGHTS,),
    "importance_sampling": SAMPLED,
    "ppo": SAMPLED,
    "cispo": SAMPLED,
    "dro": SAMPLED,
}
OPTIONS: Mapping[str, Mapping[str, float]] = {  # loss -> its options, with the SDK's defaults
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "dro": {"beta": 0.05},
}


@dataclass(frozen=True)
class SummedLoss:
    """One of the losses above, with its options."""

    name: str
    options: Mapping[str, float]

    @property
    def needed(self) -> tuple[str, ...]:
        return NEEDED[self.name]

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        loss = -self._objective(outputs.logprobs, batch).sum()
        return loss, {"loss:sum": metrics.total(loss.item())}

    def _objective(self, logprobs: Tensor, batch: Batch) -> Tensor:  # [N]
        if self.name == "cross_entropy":
            return batch.column(WEIGHTS) * logprobs
        difference = logprobs - batch.rollout_logprobs
        if self.name == "dro":
            return batch.advantages * logprobs - 0.5 * self.options["beta"] * difference.square()
        ratio = torch.exp(difference)
        if self.name == "importance_sampling":
            return ratio * batch.advantages
        clipped = ratio.clamp(self.options["clip_low_threshold"], self.options["clip_high_threshold"])
        if self.name == "cispo":
            return clipped.detach() * batch.advantages * logprobs
        return torch.minimum(ratio * batch.advantages, clipped * batch.advantages)


def make_loss(name: str, given: Mapping[str, float | str]) -> SummedLoss:
    """Return a loss. Raises TinkerRequestError for one that is not served, and for an option that it does not have."""
    if name not in NEEDED:
        raise TinkerRequestError(
            f"the loss {name!r} is not served here; use one of {', '.join(NEEDED)}, or forward_backward_custom: its loss runs in the client"
        )
    options = dict(OPTIONS.get(name, {}))
    for key, value in given.items():
        if key not in options or isinstance(value, str):
            raise TinkerRequestError(f"the loss {name} has no option {key}={value!r}; it has {', '.join(options) or 'none'}")
        options[key] = value
    return SummedLoss(name, options)
