"""Importance weights: the ratio of learner to sampler, of a token or of its whole rollout.

w = pi_o / mu, with mu the probability that the sampler recorded and pi_o that of the learner before the update. All corrections are based
on w. None of them changes the denominator of a loss: a dropped token still counts in every total, so the others do not gain weight.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from strop.algorithms.functional import MAX_EXPONENT, MAX_LOG_RATIO, bounded_exp, sequence_mean, sequence_sum
from strop.algorithms.policy_gradient.parts import Correction, Mismatch
from strop.lazy_torch import Tensor, torch

Level = Literal["token", "sequence"]


def log_ratios(mismatch: Mismatch) -> Tensor:
    """Return log w of each token, [N] float64; finite, and 0 for tokens that do not count."""
    counted = mismatch.batch.mask > 0
    ratios = torch.where(counted, mismatch.log_ratio.detach().double(), 0.0)
    return ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def log_weights(mismatch: Mismatch, level: Level) -> Tensor:
    """Return log w of each token, or of the product over its rollout's counted tokens, [N] float64."""
    ratios = log_ratios(mismatch)
    if level == "token":
        return ratios
    return sequence_sum(ratios, mismatch.batch)[mismatch.batch.sequence]


def geometric_mean_weights(mismatch: Mismatch) -> Tensor:
    """Return exp(mean log w) over the counted tokens of each token's rollout, [N] float64; 1 if no token of the rollout counts."""
    return bounded_exp(sequence_mean(log_ratios(mismatch), mismatch.batch))[mismatch.batch.sequence]


def check_ratio_range(low: float, high: float, what: str) -> None:
    """Check the bounds of a ratio. Raises ValueError if no ratio can lie in [low, high]."""
    if not 0 <= low <= high or high == 0:
        raise ValueError(
            f"{what} is kept in [{low}, {high}], which contains no ratio of probabilities; set 0 <= low <= high and high above 0, "
            "around 1, the ratio at which sampler and learner agree"
        )


@dataclass(frozen=True, kw_only=True)
class Importance(Correction):
    """w without bounds: unbiased, but with unbounded variance.

    With ``level`` sequence, each token gets the product over its rollout. Logs ``importance_weight``.
    """

    rejects: ClassVar[bool] = False
    level: Level = "token"

    def weights(self, mismatch: Mismatch) -> tuple[Tensor, dict[str, Tensor]]:
        weights = bounded_exp(log_weights(mismatch, self.level)).to(mismatch.log_ratio.dtype)
        return weights, {"importance_weight": weights}


# Truncated importance sampling (Ionides, 2008): the ratio of learner to sampler, clamped to bound its variance.


@dataclass(frozen=True, kw_only=True)
class Tis(Correction):
    """max(floor, min(w, cap)), w per token (Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025).

    With ``level`` sequence, w of each token is the product over its rollout. Logs ``tis_weight``, and ``tis_cut``, the share of tokens
    with w outside the bounds.
    """

    rejects: ClassVar[bool] = False
    cap: float = 2.0
    floor: float = 0.0
    level: Level = "token"

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= self.cap or self.cap == 0:
            raise ValueError(
                f"w is clamped to [{self.floor}, {self.cap}]: the floor must not be negative or above the cap, and the cap must be "
                "above 0; set for example cap 2.0 and floor 0"
            )

    def weights(self, mismatch: Mismatch) -> tuple[Tensor, dict[str, Tensor]]:
        ratios = bounded_exp(log_weights(mismatch, self.level))
        dtype = mismatch.log_ratio.dtype
        weights = ratios.clamp(self.floor, self.cap).to(dtype)
        return weights, {"tis_weight": weights, "tis_cut": ((ratios < self.floor) | (ratios > self.cap)).to(dtype)}


# Masked importance sampling: the ratio of learner to sampler within bounds, and 0 outside them.


@dataclass(frozen=True, kw_only=True)
class Mis(Correction):
    """w if low <= w <= high, else 0 (Liu, Li et al., "When speed kills stability", 2025).

    With ``level`` sequence, w is the product over the rollout, which is kept or dropped as a whole. Dropped tokens still count in the
    denominators of the loss. Logs ``mis_weight``, and ``mis_cut``, the share of dropped tokens.
    """

    name: ClassVar[str] = "mis"
    low: float = 0.0
    high: float = 2.0
    level: Level = "token"

    def __post_init__(self) -> None:
        check_ratio_range(self.low, self.high, "w")

    def weights(self, mismatch: Mismatch) -> tuple[Tensor, dict[str, Tensor]]:
        ratios = bounded_exp(log_weights(mismatch, self.level))
        dtype = mismatch.log_ratio.dtype
        kept = (ratios >= self.low) & (ratios <= self.high)
        weights = torch.where(kept, ratios, 0.0).to(dtype)
        return weights, {f"{self.name}_weight": weights, f"{self.name}_cut": (~kept).to(dtype)}


@dataclass(frozen=True, kw_only=True)
class Icepop(Mis):
    """Mis of tokens with the wide band of IcePop (Ling team, "Small leak can sink a great ship", 2025).

    Logs ``icepop_weight`` and ``icepop_cut``.
    """

    name: ClassVar[str] = "icepop"
    low: float = 0.5
    high: float = 5.0


# Rejection of rollouts on which sampler and learner disagree too much. The other rollouts are not reweighted.


@dataclass(frozen=True, kw_only=True)
class Rejection(Correction):
    """Weight 1 for tokens of kept rollouts and 0 for the others, which still count in the denominators of the loss.

    Logs ``<name>_cut``, the share of dropped tokens, and the measure that is compared with the bounds.
    """

    reweights: ClassVar[bool] = False
    measure_name: ClassVar[str]  # name of the measure in the logged metrics

    @abstractmethod
    def measure(self, mismatch: Mismatch) -> Tensor:
        """Return the measure of each token's rollout that is compared with the bounds, [N] float64."""

    @abstractmethod
    def accepts(self, measured: Tensor, mismatch: Mismatch) -> Tensor:
        """Return whether each token's rollout is kept, [N] bool."""

    def weights(self, mismatch: Mismatch) -> tuple[Tensor, dict[str, Tensor]]:
        measured = self.measure(mismatch)
        kept = self.accepts(measured, mismatch).to(mismatch.log_ratio.dtype)
        return kept, {f"{self.name}_cut": 1 - kept, f"{self.name}_{self.measure_name}": measured.to(kept.dtype)}


@dataclass(frozen=True, kw_only=True)
class GeometricRejection(Rejection):
    """Keeps rollouts with low <= exp(mean log w) <= high, independent of their length ("When speed kills stability", 2025).

    Logs ``geometric_rejection_cut`` and ``geometric_rejection_ratio``.
    """

    name: ClassVar[str] = "geometric_rejection"
    measure_name: ClassVar[str] = "ratio"
    low: float = 0.999
    high: float = 1.001

    def __post_init__(self) -> None:
        check_ratio_range(self.low, self.high, "the geometric mean of w")

    def measure(self, mismatch: Mismatch) -> Tensor:
        return geometric_mean_weights(mismatch)

    def accepts(self, measured: Tensor, mismatch: Mismatch) -> Tensor:
        return (measured >= self.low) & (measured <= self.high)


@dataclass(frozen=True, kw_only=True)
class K3Rejection(Rejection):
    """Keeps rollouts with a mean of w - log w - 1, a non-negative estimate of KL(mu || pi_o), of at most ``cap`` nats.

    Logs ``k3_rejection_cut`` and ``k3_rejection_divergence``.
    """

    name: ClassVar[str] = "k3_rejection"
    measure_name: ClassVar[str] = "divergence"
    cap: float = 0.01

    def __post_init__(self) -> None:
        if self.cap <= 0:
            raise ValueError(
                f"cap is {self.cap}: w - log w - 1 is 0 only where sampler and learner agree to the last bit, so every other rollout would "
                "be dropped; set for example 0.01"
            )

    def measure(self, mismatch: Mismatch) -> Tensor:
        ratios = log_ratios(mismatch)
        divergence = sequence_mean(torch.expm1(ratios.clamp(max=MAX_EXPONENT)) - ratios, mismatch.batch)
        return divergence[mismatch.batch.sequence]

    def accepts(self, measured: Tensor, mismatch: Mismatch) -> Tensor:
        return measured <= self.cap


# Rejection of tokens or rollouts by an estimate of the divergence between sampler and learner (verl's ``rollout_rs``).


@dataclass(frozen=True, kw_only=True)
class DivergenceRejection(Rejection):
    """Keeps tokens, or rollouts by the sum, mean or maximum over their counted tokens, with an estimate within bounds.

    k2 = (log w)^2 / 2 and k3 = w - 1 - log w are at most ``high`` nats. k1 is log w, with low <= exp(k1) <= high: ``token`` drops tokens
    as ``mis`` does, without weights for the others, ``mean`` is ``geometric_rejection``, and ``sum`` compares the product of w. verl's
    bounds of k1 are those of mu / pi_old: "0.8_1.6" there is low 0.625 and high 1.25 here.

    Logs ``divergence_rejection_cut`` and ``divergence_rejection_estimate``, which for k1 is the ratio.
    """

    name: ClassVar[str] = "divergence_rejection"
    measure_name: ClassVar[str] = "estimate"
    estimator: Literal["k1", "k2", "k3"] = "k3"
    level: Literal["token", "sum", "mean", "max"] = "mean"
    low: float = 0.0  # of k1 only
    high: float = 0.01

    def __post_init__(self) -> None:
        if self.estimator == "k1":
            check_ratio_range(self.low, self.high, "exp(k1)")
            if not self.low <= 1 <= self.high:
                raise ValueError(
                    f"low is {self.low} and high {self.high}: where sampler and learner agree exp(k1) is 1, and would be rejected; set low "
                    "to at most 1 and high to at least 1, for example 0.5 and 2.0"
                )
        elif self.high <= 0 or self.low:
            raise ValueError(
                f"low is {self.low} and high {self.high}: {self.estimator} is never negative, and 0 only where sampler and learner agree "
                "to the last bit; set high above 0, for example 0.01, and low to 0"
            )
        if self.estimator == "k1" and self.level == "max":
            raise ValueError("level max is the largest divergence, and k1 has both signs; set the estimator to k2 or k3")

    def measure(self, mismatch: Mismatch) -> Tensor:
        logs, batch = log_ratios(mismatch), mismatch.batch
        match self.estimator:
            case "k1":
                estimates = logs
            case "k2":
                estimates = logs.square() / 2
            case "k3":
                estimates = torch.expm1(logs.clamp(max=MAX_EXPONENT)) - logs
        match self.level:
            case "sum":
                estimates = sequence_sum(estimates, batch)[batch.sequence]
            case "mean":
                estimates = sequence_mean(estimates, batch)[batch.sequence]
            case "max":  # at least 0, as every k2 and k3, and 0 for tokens that do not count
                largest = estimates.new_zeros(batch.num_sequences).scatter_reduce(0, batch.sequence, estimates, "amax")
                estimates = largest[batch.sequence]
        return bounded_exp(estimates) if self.estimator == "k1" else estimates

    def accepts(self, measured: Tensor, mismatch: Mismatch) -> Tensor:
        return (measured >= self.low) & (measured <= self.high)


# Rejection of rollouts combined with importance sampling of the tokens of kept rollouts.


@dataclass(frozen=True, kw_only=True)
class SequenceMaskTis(Correction):
    """w per token, at most ``cap`` if set, in rollouts with low <= exp(mean log w) <= high; 0 in the others.

    From "When speed kills stability" (2025), with its bounds as default. Dropped tokens still count in the denominators of the loss.
    Logs ``sequence_mask_tis_weight``, ``sequence_mask_tis_cut``, the share of tokens in dropped rollouts, ``sequence_mask_tis_ratio``,
    the geometric means, and with a cap ``sequence_mask_tis_capped``, the share of tokens above it.
    """

    low: float = 0.999
    high: float = 1.002
    cap: float | None = None

    def __post_init__(self) -> None:
        check_ratio_range(self.low, self.high, "the geometric mean of w")
        if self.cap is not None and self.cap <= 0:
            raise ValueError(f"cap is {self.cap}: every weight would be 0 or negative; set it above 0, or to null for no cap")

    def weights(self, mismatch: Mismatch) -> tuple[Tensor, dict[str, Tensor]]:
        dtype = mismatch.log_ratio.dtype
        ratios, means = bounded_exp(log_ratios(mismatch)), geometric_mean_weights(mismatch)
        kept = (means >= self.low) & (means <= self.high)
        bounded = ratios if self.cap is None else ratios.clamp(max=self.cap)
        weights = torch.where(kept, bounded, 0.0).to(dtype)
        logged = {"weight": weights, "cut": (~kept).to(dtype), "ratio": means.to(dtype)}
        if self.cap is not None:
            logged["capped"] = (kept & (ratios > self.cap)).to(dtype)
        return weights, {f"sequence_mask_tis_{name}": column for name, column in logged.items()}


# Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556): drops failed rollouts that the policy would no longer sample.


@dataclass(frozen=True, kw_only=True)
class Opsm(Rejection):
    """Drops a rollout if A < 0 and the mean of log mu - log pi exceeds ``delta`` nats per token. Rollouts with A >= 0 are always kept.

    A is the sum of the credit over the rollout's counted tokens, and pi the current policy, after the updates made so far from this batch.
    The paper gives no value for ``delta``. Logs ``opsm_cut`` and ``opsm_divergence``.
    """

    name: ClassVar[str] = "opsm"
    measure_name: ClassVar[str] = "divergence"
    delta: float = 0.1

    def __post_init__(self) -> None:
        if self.delta < 0:
            raise ValueError(
                f"delta is {self.delta}: rollouts on which sampler and learner agree would be dropped; set 0 or more, for example 0.1"
            )

    def measure(self, mismatch: Mismatch) -> Tensor:
        current = mismatch if mismatch.current_log_ratio is None else replace(mismatch, log_ratio=mismatch.current_log_ratio)
        return -sequence_mean(log_ratios(current), mismatch.batch)[mismatch.batch.sequence]

    def accepts(self, measured: Tensor, mismatch: Mismatch) -> Tensor:
        credit = sequence_sum(mismatch.advantages.double(), mismatch.batch)[mismatch.batch.sequence]
        return (credit >= 0) | (measured <= self.delta)


# KPop (Guo, Sun et al., "Taming training-inference mismatch with adaptive masking regions", 2026): masking of tokens by a binary KL.

MIN_REST = 2.0**-24  # a probability closer to 1 than this is 1 in float32, so the remaining probability is at least this


@dataclass(frozen=True, kw_only=True)
class Kpop(Correction):
    """1 where max(D(pi_o, mu), D(mu, pi_o)) <= phi nats, else 0; D(p, q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q)).

    The vocabulary is reduced to two events, the sampled token and all others, so the ratio of a likely token may differ less than that of
    an unlikely one. Tokens are only kept or dropped: add ``importance`` or ``tis`` to weight by the ratio. Dropped tokens still count in
    the denominators of the loss. The authors tried phi from 0.1 to 2. Logs ``kpop_cut``, the share of dropped tokens, and
    ``kpop_divergence``.
    """

    reweights: ClassVar[bool] = False
    phi: float = 0.1

    def __post_init__(self) -> None:
        if self.phi <= 0:
            raise ValueError(
                f"phi is {self.phi}: it bounds a divergence, which is 0 only where sampler and learner agree to the last bit; "
                "set for example 0.1"
            )

    def weights(self, mismatch: Mismatch) -> tuple[Tensor, dict[str, Tensor]]:
        sampler = mismatch.batch.rollout_logprobs.double().clamp(min=-MAX_LOG_RATIO, max=0.0)
        learner = (sampler + log_ratios(mismatch)).clamp(max=0.0)
        divergence = torch.maximum(_binary_kl(learner, sampler), _binary_kl(sampler, learner))
        dtype = mismatch.log_ratio.dtype
        kept = (divergence <= self.phi).to(dtype)
        return kept, {"kpop_cut": 1 - kept, "kpop_divergence": divergence.to(dtype)}


def _binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the KL divergence of two Bernoulli variables from the logarithms of their probabilities, [N] float64."""
    rest_p, rest_q = (-torch.expm1(log).clamp(max=-MIN_REST) for log in (log_p, log_q))
    return log_p.exp() * (log_p - log_q) + rest_p * (rest_p.log() - rest_q.log())
