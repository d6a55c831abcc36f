"""Which formula belongs to which correction of Strop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from conformance import formulas_corrections as formulas
from conformance.formulas_common import Row, constant

Weights = Callable[[Row], list[float]]


@dataclass(frozen=True)
class CorrectionCase:
    part: str
    weights: Weights
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join([self.part, *(f"{name}={value}" for name, value in self.options.items())])


def logs(row: Row) -> list[float]:
    """log w_t = log pi_old - log mu."""
    return [before - sampler for before, sampler in zip(row.before, row.sampler, strict=True)]


def drift(row: Row) -> list[float]:
    """log pi_theta - log mu, by the policy as it is now."""
    return [constant(now) - sampler for now, sampler in zip(row.now, row.sampler, strict=True)]


def from_logs(name: str, formula: Callable[..., list[float]], level: str | None = None, /, **options: Any) -> CorrectionCase:
    chosen = options if level is None else {**options, "level": level}
    return CorrectionCase(name, lambda row: partial(formula, **options)(logs(row)), chosen)


def default(name: str, formula: Callable[..., list[float]], **options: Any) -> CorrectionCase:
    """Strop's defaults are the ``options`` of the formula."""
    return CorrectionCase(name, lambda row: formula(logs(row), **options))


def divergence_rejection(**options: Any) -> CorrectionCase:
    return CorrectionCase("divergence_rejection", lambda row: formulas.divergence_rejection(logs(row), **options), options)


CORRECTIONS = [
    default("importance", formulas.importance),
    from_logs("importance", formulas.sequence_importance, "sequence"),
    default("tis", formulas.tis, cap=2.0),
    from_logs("tis", formulas.floored_tis, cap=1.1, floor=0.9),
    from_logs("tis", formulas.tis, cap=1.1),
    from_logs("tis", formulas.sequence_tis, "sequence", cap=1.3),
    from_logs("mis", formulas.mis, low=0.8, high=1.5),
    from_logs("mis", formulas.mis, low=0.0, high=1.2),
    from_logs("mis", formulas.sequence_mis, "sequence", low=0.5, high=2.0),
    default("icepop", formulas.mis, low=0.5, high=5.0),  # 2510.18855
    from_logs("icepop", formulas.mis, low=0.7, high=1.4),
    from_logs("geometric_rejection", formulas.geometric_rejection, low=0.9, high=1.1),
    from_logs("sequence_mask_tis", formulas.sequence_mask_tis, low=0.8, high=1.2),
    from_logs("sequence_mask_tis", formulas.sequence_mask_tis, low=0.8, high=1.2, cap=1.05),
    from_logs("k3_rejection", formulas.k3_rejection, cap=0.05),
    *(
        divergence_rejection(estimator=estimator, level=level, high=high)
        for estimator, level, high in [
            ("k2", "token", 0.02),
            ("k2", "sum", 0.3),
            ("k2", "mean", 0.05),
            ("k2", "max", 0.2),
            ("k3", "token", 0.02),
            ("k3", "sum", 0.3),
            ("k3", "mean", 0.05),
            ("k3", "max", 0.2),
        ]
    ),
    *(divergence_rejection(estimator="k1", level=level, low=0.8, high=1.25) for level in ("token", "sum", "mean")),
    CorrectionCase("opsm", lambda row: formulas.opsm(drift(row), sum(row.advantage), delta=0.05), {"delta": 0.05}),
    CorrectionCase("kpop", lambda row: formulas.kpop(row.before, row.sampler, phi=0.02), {"phi": 0.02}),
    CorrectionCase("kpop", lambda row: formulas.kpop(row.before, row.sampler, phi=0.5), {"phi": 0.5}),
]
