"""Rewards -> credit, from the papers, over plain lists. ``rewards`` are those of one group, unless a formula is about the whole batch.

EPS stands beside every standard deviation that divides. A group whose rewards do not differ by more than rounding has no signal, and every
formula that divides by a deviation gives it zeros.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from conformance.formulas_common import deviation

EPS = 1e-6


def average(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def same(rewards: Sequence[float]) -> bool:
    """Whether what differs is only rounding: a millionth of the largest reward."""
    return max(rewards) - min(rewards) <= 1e-6 * max(abs(reward) for reward in rewards)


def grpo(rewards: Sequence[float]) -> list[float]:
    """A_i = (R_i - mean(R)) / std(R)  (2402.03300)."""
    if same(rewards):
        return [0.0 for _ in rewards]
    return [(reward - average(rewards)) / (deviation(rewards) + EPS) for reward in rewards]


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """A_i = R_i - mean(R)  (2503.20783)."""
    return [0.0 if same(rewards) else reward - average(rewards) for reward in rewards]


def rloo(rewards: Sequence[float]) -> list[float]:
    """A_i = R_i - 1/(G-1) sum over j != i of R_j  (2402.14740)."""
    others = [[reward for j, reward in enumerate(rewards) if j != i] for i in range(len(rewards))]
    return [0.0 if same(rewards) else reward - average(rest) for reward, rest in zip(rewards, others, strict=True)]


def grpo_leave_one_out(rewards: Sequence[float]) -> list[float]:
    """RLOO's baseline over the deviation of the whole group."""
    return [advantage / (deviation(rewards) + EPS) for advantage in rloo(rewards)]


def grpo_unbiased(rewards: Sequence[float]) -> list[float]:
    """GRPO over the deviation with Bessel's correction: sum of squares / (G - 1)."""
    spread = deviation(rewards) * math.sqrt(len(rewards) / (len(rewards) - 1))
    return [advantage / (spread + EPS) for advantage in dr_grpo(rewards)]


def grpo_others(rewards: Sequence[float]) -> list[float]:
    """RLOO's baseline over the unbiased deviation of the rewards that the baseline is the mean of (NeMo-RL); not divided where those
    are equal, or only one.
    """
    credit = []
    for i, advantage in enumerate(rloo(rewards)):
        rest = [reward for j, reward in enumerate(rewards) if j != i]
        credit.append(advantage if same(rest) else advantage / (deviation(rest) * math.sqrt(len(rest) / (len(rest) - 1)) + EPS))
    return credit


def plain(rewards: Sequence[float]) -> list[float]:
    """REINFORCE (Williams, 1992) without a baseline: A_i = R_i."""
    return list(rewards)


def remax(rewards: Sequence[float], greedy: float) -> list[float]:
    """A_i = R_i - R(greedy rollout)  (2310.10505)."""
    return [reward - greedy for reward in rewards]


def opo(rewards: Sequence[float], lengths: Sequence[float]) -> list[float]:
    """A_i = R_i - b, b = sum(l_i R_i) / sum(l_i): the variance-optimal baseline where |grad log pi|^2 grows with length (2505.23585)."""
    if same(rewards) or sum(lengths) == 0:
        return [0.0 for _ in rewards]
    weighted = math.fsum(length * reward for length, reward in zip(lengths, rewards, strict=True)) / math.fsum(lengths)
    return [reward - weighted for reward in rewards]


def maxrl(rewards: Sequence[float]) -> list[float]:
    """A_i = (R_i - mean(R)) / mean(R)  (2602.02710); zeros where nothing succeeded."""
    if same(rewards) or average(rewards) <= 0:
        return [0.0 for _ in rewards]
    return [(reward - average(rewards)) / average(rewards) for reward in rewards]


def pass_at_k(rewards: Sequence[float]) -> list[float]:
    """Leave-one-out credit for the best of the group: A_i = max(R) - max over j != i of R_j, which only the best sample gets
    (2503.19595).
    """
    credit = []
    for i in range(len(rewards)):
        rest = [reward for j, reward in enumerate(rewards) if j != i]
        credit.append(0.0 if same(rewards) else max(rewards) - max(rest))
    return credit


def pass_at_k_of_sets(rewards: Sequence[float], k: int) -> list[float]:
    """The same for sets of k out of the group: the mean over all sets that i is in, one after the other."""
    credit = []
    for i in range(len(rewards)):
        sets = [members for members in itertools.combinations(range(len(rewards)), k) if i in members]
        gains = []
        for members in sets:
            rest = [rewards[j] for j in members if j != i]
            gains.append(max(rewards[j] for j in members) - max(rest))
        credit.append(0.0 if same(rewards) else average(gains))
    return credit


def pass_at_k_analytic(rewards: Sequence[float], k: int) -> list[float]:
    """The mean best of the sets that i is in, less the mean over all sets, over their deviation (2508.10751, by listing
    the sets)."""
    best = {members: max(rewards[j] for j in members) for members in itertools.combinations(range(len(rewards)), k)}
    spread = deviation(list(best.values()))
    credit = []
    for i in range(len(rewards)):
        own = average([value for members, value in best.items() if i in members])
        credit.append(0.0 if same(rewards) else (own - average(list(best.values()))) / (spread + EPS))
    return credit


def whiten(values: Sequence[float]) -> list[float]:
    """(x - mean) / (std + eps) over everything given."""
    return [(value - average(values)) / (deviation(values) + EPS) for value in values]


def lite_ppo(batch: Sequence[Sequence[float]]) -> list[list[float]]:
    """A_i = (R_i - mean of its group) / std of the rewards of the whole batch  (2508.08221)."""
    spread = deviation([reward for rewards in batch for reward in rewards])
    return [[advantage / (spread + EPS) for advantage in dr_grpo(rewards)] for rewards in batch]


def reinforce_pp(
    batch: Sequence[Sequence[float]], lengths: Sequence[Sequence[int]], *, baseline: bool
) -> list[list[list[float]]]:
    """Whitened over all tokens of the global batch: A_t = (R - mean) / std; -baseline subtracts the group's mean first (2501.03262)."""
    centred = [dr_grpo(rewards) if baseline else list(rewards) for rewards in batch]
    tokens = [
        value for row, sizes in zip(centred, lengths, strict=True) for value, n in zip(row, sizes, strict=True) for _ in range(n)
    ]
    flat = iter(whiten(tokens))
    return [[[next(flat) for _ in range(n)] for n in sizes] for sizes in lengths]


def gdpo(batch: Sequence[Sequence[dict[str, float]]], weights: dict[str, float], *, bessel: bool = False) -> list[list[float]]:
    """Each reward normalised in its group, summed with weights, then whitened over the batch's rollouts (2601.05242)."""
    summed: list[list[float]] = []
    for group in batch:
        total = [0.0 for _ in group]
        for name, weight in weights.items():
            each = (grpo_unbiased if bessel else grpo)([rewards[name] for rewards in group])
            total = [so_far + weight * advantage for so_far, advantage in zip(total, each, strict=True)]
        summed.append(total)
    values = [value for row in summed for value in row]
    spread = deviation(values) * (math.sqrt(len(values) / (len(values) - 1)) if bessel else 1.0)
    return [[(value - average(values)) / (spread + EPS) for value in row] for row in summed]


def soft_overlong(length: int, *, max_length: int, buffer: int, penalty: float = 1.0) -> float:
    """R_length of DAPO (2503.14476, eq. 13): 0 up to L_max - L_cache, then a line down to -1 at L_max, then -1."""
    if length <= max_length - buffer:
        return 0.0
    if length <= max_length:
        return ((max_length - buffer) - length) / buffer * penalty
    return -penalty


def optimal_token_baseline(
    returns: Sequence[Sequence[float]],
    logprobs: Sequence[Sequence[float]],
    squares: Sequence[Sequence[float]],
    weights: Sequence[Sequence[float]],
    *,
    zero_tail: bool,
) -> list[list[float]]:
    """A_t = G_t - B_t, B_t = sum_i G_t W_t / (sum_i W_t + 1e-8), W_t = sum_{j <= t} w_j^2 (1 - 2 pi_j + sum_v pi_v^2), over the rollouts
    of one group that have a t-th token (verl, docs/algo/otb.md). ``zero_tail``: B_t = 0 where only one has.
    """
    flat = [value for values in returns for value in values]
    if not flat or same(flat):
        return [[0.0 for _ in values] for values in returns]
    energies = []
    for logs, sums, ratios in zip(logprobs, squares, weights, strict=True):
        each = [w**2 * (1 - 2 * math.exp(log) + square) for log, square, w in zip(logs, sums, ratios, strict=True)]
        energies.append([math.fsum(each[: t + 1]) for t in range(len(each))])
    credit = []
    for own in returns:
        advantages = []
        for t, value in enumerate(own):
            there = [(other[t], energy[t]) for other, energy in zip(returns, energies, strict=True) if t < len(other)]
            baseline = math.fsum(g * w for g, w in there) / (math.fsum(w for _, w in there) + 1e-8)
            advantages.append(value - (0.0 if zero_tail and len(there) == 1 else baseline))
        credit.append(advantages)
    return credit
