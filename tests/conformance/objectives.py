"""Which formula belongs to which objective of Strop, with its options. An entry that is missing here fails ``test_coverage``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from conformance import formulas_policy as formulas
from conformance.formulas_common import Row, Terms

Chosen = Callable[[list[Row]], dict[tuple[int, int], bool]]
Over = Callable[[list[Row]], Terms]  # all rollouts of the step -> what each contributes


@dataclass(frozen=True)
class ObjectiveCase:
    part: str
    terms: Over
    options: dict[str, Any] = field(default_factory=dict)
    aggregation: str = "token_mean"

    def __str__(self) -> str:
        options = " ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.part} {options}".strip()


def token(name: str, terms: Callable[..., Any], aggregation: str = "token_mean", /, **options: Any) -> ObjectiveCase:
    """An objective about single tokens or rollouts, whose formula takes the same options."""
    return ObjectiveCase(name, lambda _: partial(terms, **options), options, aggregation)


def where(chosen: Chosen, terms: Callable[[Row], list[Any]], *, inside: bool) -> Over:
    """The terms of the tokens that were chosen over the whole step, or of the others; 0 elsewhere."""

    def over(rows: list[Row]) -> Terms:
        picked = chosen(rows)
        places = {id(row): i for i, row in enumerate(rows)}
        return lambda row: [term if picked[places[id(row)], t] == inside else 0.0 * term for t, term in enumerate(terms(row))]

    return over


def two_sided(low: float, high: float, delta: float) -> ObjectiveCase:
    terms = partial(formulas.two_sided_clip, low=low, high=high, delta=delta)
    return ObjectiveCase("clip", lambda _: terms, {"low": low, "high": high, "two_sided": delta})


def second_moment(limit: float, outward_only: bool) -> ObjectiveCase:
    chosen = partial(formulas.m2po, limit=limit, outward_only=outward_only)
    over = where(
        chosen, lambda row: [r * a for r, a in zip(formulas.sampler_ratios(row), row.advantage, strict=True)], inside=True
    )
    return ObjectiveCase("second_moment_mask", over, {"limit": limit, "outward_only": outward_only})


def covariance_clip(**band: float) -> ObjectiveCase:
    over = where(partial(formulas.clip_cov, **band), formulas.ppo_clip, inside=False)
    return ObjectiveCase("covariance_clip", over, {**band, "choose": "largest"})


def covariance_kl(share: float, weight: float) -> ObjectiveCase:
    options = {"share": share, "weight": weight}
    return ObjectiveCase("covariance_kl", lambda rows: partial(formulas.kl_cov, rows, **options), options)


def gamma_weight(positive: tuple[float, float], negative: tuple[float, float]) -> ObjectiveCase:
    options = {
        "k_positive": positive[0],
        "lambda_positive": positive[1],
        "k_negative": negative[0],
        "lambda_negative": negative[1],
    }
    return ObjectiveCase("gamma_weight", lambda _: partial(formulas.vespo, positive=positive, negative=negative), options)


OBJECTIVES = [
    ObjectiveCase("clip", lambda _: formulas.ppo_clip),
    token("clip", formulas.ppo_clip, low=0.1, high=0.28),
    token("clip", formulas.ppo_clip, low=1.0, high=3.0),
    token("clip", formulas.dual_clip, low=0.2, high=0.28, dual=3.0),
    token("clip", formulas.dual_clip, dual=1.5),
    two_sided(low=0.2, high=0.2, delta=4.0),
    two_sided(low=0.1, high=0.28, delta=1.5),
    ObjectiveCase("sequence_clip", lambda _: partial(formulas.gspo, low=3e-4, high=4e-4), aggregation="sequence_mean"),
    token("sequence_clip", formulas.gspo, "sequence_mean", low=0.2, high=0.28),
    ObjectiveCase("geometric_mean", lambda _: formulas.gmpo, aggregation="sequence_mean"),
    token("geometric_mean", formulas.gmpo, "sequence_mean", low=0.1, high=0.2),
    token("cispo", formulas.cispo, low=0.2, high=0.28),
    token("cispo", formulas.cispo, low=1.0, high=4.0),
    token("reinforce", formulas.reinforce),
    token("reinforce", formulas.reinforce, "sequence_sum"),
    token("tapered", formulas.topr, "sequence_sum", cap=1.0),
    token("tapered", formulas.topr, "sequence_sum", cap=0.7),
    ObjectiveCase("soft_gate", lambda _: formulas.sapo, aggregation="sequence_mean"),
    ObjectiveCase(
        "soft_gate", lambda _: partial(formulas.sapo, positive=0.5, negative=3.0), {"tau_positive": 0.5, "tau_negative": 3.0}
    ),
    token("divergence_mask", formulas.dppo, low=0.15, high=0.15, cap=20.0),
    token("divergence_mask", formulas.dppo, low=0.05, high=0.1, cap=1.2),
    ObjectiveCase("gamma_weight", lambda _: formulas.vespo),
    gamma_weight((1.0, 2.0), (4.0, 1.5)),
    second_moment(0.04, outward_only=True),
    second_moment(0.04, outward_only=False),
    second_moment(1e-3, outward_only=True),
    covariance_clip(share=0.3, lowest=0.05, highest=1.0),
    covariance_clip(share=2e-4, lowest=0.0, highest=5.0),
    covariance_kl(0.3, 1.0),
    covariance_kl(2e-3, 0.5),
]
