"""Direct Preference Optimization (arXiv 2305.18290)."""

from __future__ import annotations

from dataclasses import dataclass

from strop.algorithms.preference.referenced import ComparedPreference
from strop.lazy_torch import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class DPO(ComparedPreference):
    """-log sigmoid(beta (h(chosen) - h(rejected))), with h = log pi - log pi_ref of a completion.

    The loss is log 2 at the reference policy. With ``average_log_probs``, h is the mean per token (NeMo-RL's preference_average_log_probs,
    TRL's "sigmoid_norm").
    """

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return -torch.nn.functional.logsigmoid(self.beta * (chosen - rejected))
