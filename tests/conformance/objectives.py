"""Which formula belongs to which objective of Strop, with its options. An entry that is missing here fails ``test_coverage``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from conformance import formulas_policy as formulas
from conformance.formulas_common import Row, Terms

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


OBJECTIVES = [
    ObjectiveCase("clip", lambda _: formulas.ppo_clip),
    token("clip", formulas.ppo_clip, low=0.1, high=0.28),
    token("clip", formulas.ppo_clip, low=1.0, high=3.0),
    token("clip", formulas.dual_clip, low=0.2, high=0.28, dual=3.0),
    token("clip", formulas.dual_clip, dual=1.5),
    ObjectiveCase(
        "clip",
        lambda _: partial(formulas.two_sided_clip, low=0.2, high=0.2, delta=4.0),
        {"low": 0.2, "high": 0.2, "two_sided": 4.0},
    ),
    ObjectiveCase(
        "sequence_clip", lambda _: partial(formulas.gspo, low=3e-4, high=4e-4), aggregation="sequence_mean"
    ),  # section 5.1
    token("sequence_clip", formulas.gspo, "sequence_mean", low=0.2, high=0.28),
]
