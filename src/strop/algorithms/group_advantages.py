"""The credit of rollouts relative to their group."""

from __future__ import annotations

from typing import Literal

from strop.algorithms.functional import EPS, rounding_of, varies
from strop.lazy_torch import Tensor, torch

# What a reward is divided by: the deviation of its group as a population, with Bessel's correction, or that of the group's other rewards.
Deviation = Literal["population", "unbiased", "others"]


def group_advantages(
    rewards: Tensor,
    *,
    baseline: bool = True,
    leave_one_out: bool = False,
    normalize: bool = True,
    deviation: Deviation = "population",
    eps: float = EPS,
) -> Tensor:
    """Return (r - baseline) / (standard deviation + eps), [G] -> [G].

    If the group does not vary, the result is exactly zero, or the unchanged rewards without a baseline.

    The baseline is the group's mean (GRPO, arXiv 2402.03300) or, with ``leave_one_out``, the mean of the other rollouts (RLOO,
    2402.14740). ``normalize=False`` is Dr.GRPO (2503.20783). The scale is the deviation of the whole group. With ``deviation`` others it
    is that of the group's other rewards, as in NeMo-RL, which gives a single success too little credit, and the group a net credit that
    is not 0.
    """
    if not varies(rewards):
        return torch.zeros_like(rewards) if baseline else rewards
    centred = rewards
    if baseline and leave_one_out:
        count = len(rewards)
        if count < 2:
            raise ValueError("a leave-one-out baseline needs at least 2 rollouts a group")
        centred = rewards - (rewards.sum() - rewards) / (count - 1)
    elif baseline:
        centred = rewards - rewards.mean()
    if not normalize:
        return centred
    if deviation == "others":
        return centred / _deviation_of_others(rewards, eps)
    return centred / (rewards.std(correction=int(deviation == "unbiased")) + eps)


def _deviation_of_others(rewards: Tensor, eps: float) -> Tensor:
    """Return the unbiased deviation of the other rewards of the group, plus eps, [G] -> [G]; 1 where they are equal, or only one."""
    count = len(rewards)
    others = rewards.expand(count, count)[~torch.eye(count, dtype=torch.bool, device=rewards.device)].view(count, count - 1)
    squares = (others - others.mean(1, keepdim=True)).square().sum(1)
    vary = others.amax(1) - others.amin(1) > rounding_of(others) * others.abs().amax(1)
    return torch.where(vary, (squares / max(count - 2, 1)).sqrt() + eps, 1.0)


def indices_by_label(label: Tensor) -> list[Tensor]:
    """Return, for each label in order, the indices that have it, ascending; the label -1 is left out."""
    order = label.argsort(stable=True)
    order = order[label[order] >= 0]
    _, counts = label[order].unique_consecutive(return_counts=True)
    return list(order.split(counts.tolist()))
