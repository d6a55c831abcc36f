"""Credit over turns, in plain loops. A rollout is a list of turns, a turn (tokens, reward, state); a group is a list of rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from conformance.formulas_common import deviation, mean

EPS = 1e-6


@dataclass(frozen=True)
class PlayedTurn:
    tokens: int
    reward: float
    state: str | None = None


Played = Sequence[PlayedTurn]


def normalised(value: float, others: Sequence[float], *, normalize: bool) -> float:
    """(x - mean) / (std + eps); 0 where nothing varies."""
    if max(others) == min(others):
        return 0.0
    return float((value - mean(others)) / (deviation(others) + EPS if normalize else 1.0))


def return_to_go(rollout: Played, turn: int, gamma: float) -> float:
    """R_t = sum over k >= t of gamma^(k - t) r_k."""
    return sum(gamma ** (k - turn) * rollout[k].reward for k in range(turn, len(rollout)))


def gigpo(group: Sequence[Played], *, gamma: float, omega: float, normalize: bool = True) -> list[list[float]]:
    """A = A^E(tau_i) + omega A^S(a_t^i), A^S over G^S(s) = {(a_t^i, R_t^i): s_t^i = s} (2505.10978, eq. 3 to 8), each token."""
    totals = [sum(turn.reward for turn in rollout) for rollout in group]
    credit: list[list[float]] = []
    for i, rollout in enumerate(group):
        episode = normalised(totals[i], totals, normalize=normalize)
        tokens: list[float] = []
        for t, turn in enumerate(rollout):
            anchored = [
                return_to_go(other, k, gamma)
                for other in group
                for k, one in enumerate(other)
                if one.state == turn.state and turn.state is not None
            ]
            step = normalised(return_to_go(rollout, t, gamma), anchored, normalize=normalize) if anchored else 0.0
            tokens += [episode + omega * step] * turn.tokens
        credit.append(tokens)
    return credit


def turn_returns(group: Sequence[Played], *, gamma: float, same_turn: bool, normalize: bool = True) -> list[list[float]]:
    """The discounted return of each turn, normalised over all turns of the group, or over those of the same number (2507.11948)."""
    credit: list[list[float]] = []
    for rollout in group:
        tokens: list[float] = []
        for t, turn in enumerate(rollout):
            compared = [return_to_go(other, k, gamma) for other in group for k in range(len(other)) if k == t or not same_turn]
            tokens += [normalised(return_to_go(rollout, t, gamma), compared, normalize=normalize)] * turn.tokens
        credit.append(tokens)
    return credit


def bi_level_gae(
    rollout: Played, values: Sequence[float], *, gamma: float, lam: float, turn_gamma: float, turn_lambda: float
) -> list[float]:
    """A of the turns backwards over their last tokens, then A of the tokens backwards within each turn (2510.16907)."""
    starts = [sum(turn.tokens for turn in rollout[:k]) for k in range(len(rollout))]
    ends = [start + turn.tokens - 1 for start, turn in zip(starts, rollout, strict=True)]
    advantages = [0.0] * len(values)
    of_turn, next_value = 0.0, 0.0
    for k in reversed(range(len(rollout))):
        delta = rollout[k].reward + turn_gamma * next_value - values[ends[k]]
        of_turn = delta + turn_gamma * turn_lambda * of_turn
        next_value = values[ends[k]]
        advantages[ends[k]] = running = of_turn
        for t in reversed(range(starts[k], ends[k])):
            running = gamma * values[t + 1] - values[t] + gamma * lam * running
            advantages[t] = running
    return advantages
