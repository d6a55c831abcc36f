"""Whole algorithms with the defaults of their papers: from the rewards of a step to the loss, in one formula each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from conformance import formulas_advantages as credit
from conformance import formulas_corrections, formulas_kl, formulas_policy
from conformance.cases import Step
from conformance.formulas_common import Row, Scalar, Terms, constant_length, sequence_mean, sequence_sum, token_mean

Credit = Callable[[list[Row], Step], list[list[float]]]  # what each token of each rollout has
Loss = Callable[[list[Row]], Scalar]


@dataclass(frozen=True)
class Whole:
    credit: Credit
    loss: Loss
    options: dict[str, Any] = field(default_factory=dict)  # what has no default
    single: bool = False  # credit is a float32 column

    def __call__(self, rows: list[Row], step: Step) -> Scalar:
        credited = self.credit(rows, step)
        return self.loss([replace(row, advantage=tokens) for row, tokens in zip(rows, credited, strict=True)])


def by_group(formula: Callable[..., list[float]]) -> Credit:
    """Credit from the rewards of each group; every rollout counts in the baseline."""

    def credits(rows: list[Row], step: Step) -> list[list[float]]:
        found = [value for group in step.groups for value in formula([sample.reward for sample in group])]
        return spread(rows, found)

    return credits


def spread(rows: Sequence[Row], per_rollout: Sequence[float]) -> list[list[float]]:
    return [[advantage] * row.length for row, advantage in zip(rows, per_rollout, strict=True)]


def rewards(step: Step) -> list[list[float]]:
    return [[sample.reward for sample in group] for group in step.groups]


def remax(rows: list[Row], step: Step) -> list[list[float]]:
    groups = zip(rewards(step), step.greedy, strict=True)
    return spread(rows, [value for group, greedy in groups for value in credit.remax(group, greedy)])


def opo(rows: list[Row], step: Step) -> list[list[float]]:
    found = [
        value
        for group in step.groups
        for value in credit.opo([sample.reward for sample in group], [float(sample.length) for sample in group])
    ]
    return spread(rows, found)


def lite_ppo(rows: list[Row], step: Step) -> list[list[float]]:
    return spread(rows, [value for group in credit.lite_ppo(rewards(step)) for value in group])


def reinforce_pp(rows: list[Row], step: Step, *, baseline: bool, kl: float) -> list[list[float]]:
    base = [value for group in rewards(step) for value in (credit.dr_grpo(group) if baseline else group)]
    penalties = [formulas_kl.to_come(row, "k1", inside=20.0, outside=10.0) for row in rows]
    plain = [[value - kl * penalty for penalty in each] for value, each in zip(base, penalties, strict=True)]
    white = iter(credit.whiten([number for row, tokens in zip(rows, plain, strict=True) if row.counts for number in tokens]))
    return [[next(white) if row.counts else 0.0 for _ in row.tokens] for row in rows]


WEIGHTS = {"correct": 1.0, "format": 0.3}


def gdpo(rows: list[Row], step: Step) -> list[list[float]]:
    parts = [[dict(sample.parts) for sample in group] for group in step.groups]
    return spread(rows, [value for group in credit.gdpo(parts, WEIGHTS) for value in group])


def distillation(rows: list[Row], step: Step) -> list[list[float]]:
    return [[teacher - before for teacher, before in zip(row.teacher, row.before, strict=True)] for row in rows]


def minus(aggregate: Callable[[Sequence[Row], Terms], Scalar], objective: Callable[..., Any], /, **options: Any) -> Loss:
    return lambda rows: -aggregate(rows, partial(objective, **options))


def dr_grpo_loss(rows: list[Row]) -> Scalar:
    return -constant_length(rows, formulas_policy.ppo_clip, 64)


def with_k2(rows: list[Row]) -> Scalar:
    penalty = token_mean(rows, partial(formulas_kl.in_loss, estimator="k2", inside=20.0, outside=10.0))
    return -token_mean(rows, formulas_policy.ppo_clip) + 0.01 * penalty


def decoupled(rows: list[Row]) -> Scalar:
    """w min(rho A, clip(rho) A), w = pi_old / mu  (2505.24298)."""

    def terms(row: Row) -> list[Scalar]:
        logs = [before - sampler for before, sampler in zip(row.before, row.sampler, strict=True)]
        return [w * term for w, term in zip(formulas_corrections.importance(logs), formulas_policy.ppo_clip(row), strict=True)]

    return -token_mean(rows, terms)


def m2po_loss(rows: list[Row]) -> Scalar:
    kept = formulas_policy.m2po(rows, limit=0.04, outward_only=True)
    places = {id(row): i for i, row in enumerate(rows)}

    def terms(row: Row) -> list[Scalar]:
        ratios = formulas_policy.sampler_ratios(row)
        return [ratios[t] * row.advantage[t] * float(kept[places[id(row)], t]) for t in row.tokens]

    return -token_mean(rows, terms)


def clip_cov_loss(rows: list[Row]) -> Scalar:
    held = formulas_policy.clip_cov(rows, share=2e-4, lowest=1.0, highest=5.0)
    places = {id(row): i for i, row in enumerate(rows)}

    def terms(row: Row) -> list[Scalar]:
        return [term * (0.0 if held[places[id(row)], t] else 1.0) for t, term in enumerate(formulas_policy.ppo_clip(row))]

    return -token_mean(rows, terms)


def kl_cov_loss(rows: list[Row]) -> Scalar:
    return -token_mean(rows, partial(formulas_policy.kl_cov, rows, share=2e-3, weight=1.0))


GRPO = by_group(credit.grpo)
CLIP = minus(token_mean, formulas_policy.ppo_clip)

WHOLE: dict[str, Whole] = {
    "grpo": Whole(GRPO, CLIP),  # DAPO's token mean; 2402.03300 has the mean of means
    "dapo": Whole(GRPO, minus(token_mean, formulas_policy.ppo_clip, low=0.2, high=0.28)),
    "dr_grpo": Whole(by_group(credit.dr_grpo), dr_grpo_loss, {"constant_length": 64}),
    "gspo": Whole(GRPO, minus(sequence_mean, formulas_policy.gspo, low=3e-4, high=4e-4)),
    "luspo": Whole(GRPO, minus(sequence_mean, formulas_policy.gspo, low=3e-4, high=4e-4, length_weighted=True)),
    "gmpo": Whole(GRPO, minus(sequence_mean, formulas_policy.gmpo, low=0.4, high=0.4)),
    "cispo": Whole(GRPO, minus(token_mean, formulas_policy.cispo, low=1.0, high=4.0)),
    "topr": Whole(by_group(credit.dr_grpo), minus(sequence_sum, formulas_policy.topr, cap=1.0)),
    "sapo": Whole(GRPO, minus(sequence_mean, formulas_policy.sapo, positive=1.0, negative=1.05)),
    "dppo": Whole(GRPO, minus(token_mean, formulas_policy.dppo, low=0.15, high=0.15, cap=20.0)),
    "vespo": Whole(GRPO, minus(token_mean, formulas_policy.vespo, positive=(2.0, 3.0), negative=(3.0, 2.0))),
    "m2po": Whole(GRPO, m2po_loss),
    "decoupled_ppo": Whole(GRPO, decoupled),
    "clip_cov": Whole(GRPO, clip_cov_loss, {"objective": ("covariance_clip", {"choose": "largest"})}),
    "kl_cov": Whole(GRPO, kl_cov_loss),
    "rloo": Whole(by_group(credit.rloo), minus(sequence_sum, formulas_policy.reinforce)),
    "reinforce": Whole(by_group(credit.plain), minus(sequence_sum, formulas_policy.reinforce)),
    "remax": Whole(remax, minus(sequence_sum, formulas_policy.reinforce)),
    "opo": Whole(opo, minus(sequence_sum, formulas_policy.reinforce)),
    "lite_ppo": Whole(lite_ppo, CLIP),
    "maxrl": Whole(by_group(credit.maxrl), CLIP),
    "pass_at_k": Whole(by_group(credit.pass_at_k), CLIP),
    "gdpo": Whole(gdpo, CLIP, {"advantage": ("decoupled_rewards", {"weights": WEIGHTS})}),
    "reinforce_pp": Whole(partial(reinforce_pp, baseline=False, kl=0.01), CLIP, single=True),
    "reinforce_pp_baseline": Whole(partial(reinforce_pp, baseline=True, kl=0.0), with_k2),
    "distillation": Whole(distillation, CLIP),
}
