"""Direct Preference Optimization (arXiv 2305.18290)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import logsigmoid

from strop.algorithms.preference import ReferencedPreference


@dataclass(frozen=True, kw_only=True)
class DPO(ReferencedPreference):
    """-log sigmoid(beta (h(chosen) - h(rejected))), with h = log pi - log pi_ref of a completion.

    At the reference it is log 2. ``average_log_probs`` is NeMo-RL's preference_average_log_probs and TRL's "sigmoid_norm": h per token.
    """

    def compare(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return -logsigmoid(self.beta * (chosen - rejected))
