"""Which formula belongs to which preference algorithm, with its options. ``at_start`` is the loss of a policy that is the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from conformance import formulas_preferences as formulas
from conformance.formulas_common import Scalar


@dataclass(frozen=True)
class PairCase:
    algorithm: str
    loss: Callable[[formulas.Pair], Scalar]
    options: dict[str, Any] = field(default_factory=dict)
    at_start: float | None = None

    def __str__(self) -> str:
        return " ".join([self.algorithm, *(f"{name}={value}" for name, value in self.options.items())])


def case(name: str, loss: Callable[..., Scalar], at_start: float | None = None, /, **options: Any) -> PairCase:
    return PairCase(name, partial(loss, **options), options, at_start)


def smoothed(name: str, loss: Callable[..., Scalar], at_start: float, beta: float, smoothing: float) -> PairCase:
    options = {"beta": beta, "label_smoothing": smoothing}
    return PairCase(name, partial(loss, beta=beta, smoothing=smoothing), options, at_start)


PAIR_LOSSES = [
    case("dpo", formulas.dpo, math.log(2), beta=0.1),
    case("dpo", formulas.dpo, math.log(2), beta=5.0),
    PairCase("dpo", partial(formulas.dpo_averaged, beta=2.0), {"beta": 2.0, "average_log_probs": True}, math.log(2)),
    smoothed("cdpo", formulas.cdpo, math.log(2), 0.1, 0.1),
    smoothed("cdpo", formulas.cdpo, math.log(2), 2.0, 0.3),
    smoothed("robust_dpo", formulas.robust_dpo, math.log(2), 0.1, 0.1),
    smoothed("robust_dpo", formulas.robust_dpo, math.log(2), 2.0, 0.3),
    PairCase("ipo", partial(formulas.ipo, beta=0.1), {"beta": 0.1, "average_log_probs": False}, 25.0),
    PairCase("ipo", partial(formulas.ipo_averaged, beta=0.1), {"beta": 0.1, "average_log_probs": True}, 25.0),
    case("simpo", formulas.simpo, beta=2.0, gamma=1.0),
    case("simpo", formulas.simpo, beta=2.5, gamma=0.0),
    PairCase("orpo", partial(formulas.orpo, weight=0.1), {"preference_weight": 0.1}),
    PairCase("orpo", partial(formulas.orpo, weight=1.0), {"preference_weight": 1.0}),
    case("apo_zero", formulas.apo_zero, 1.0, beta=0.1),
    case("apo_zero", formulas.apo_zero, 1.0, beta=2.0),
    case("apo_down", formulas.apo_down, 1.0, beta=0.1),
    case("apo_down", formulas.apo_down, 1.0, beta=2.0),
    case("slic", formulas.hinge, 1.0, beta=0.1),
    case("slic", formulas.hinge, 1.0, beta=2.0),
    smoothed("exo_pair", formulas.exo, 0.5 * math.log(0.25 / 0.999e-3), 0.1, 1e-3),
    smoothed("exo_pair", formulas.exo, 0.5 * math.log(0.25 / 0.21), 2.0, 0.3),
    case("nca_pair", formulas.nca, 2 * math.log(2), beta=0.1),
    case("nca_pair", formulas.nca, 2 * math.log(2), beta=2.0),
    case("bco_pair", formulas.bco, 2 * math.log(2), beta=0.1),
    case("bco_pair", formulas.bco, 2 * math.log(2), beta=2.0),
    case("sppo_hard", formulas.sppo, 50.0, beta=0.1),
    case("sppo_hard", formulas.sppo, 0.125, beta=2.0),
    case("discopop", formulas.discopop, (math.log(2) + 1) / 2, beta=0.05),
    case("discopop", formulas.discopop, (math.log(2) + 1) / 2, beta=1.0, tau=0.5),
    *(
        PairCase(
            "dpo",
            partial(formulas.dpo_of_divergence, beta=0.3, averaged=averaged, **options),
            {
                "beta": 0.3,
                "average_log_probs": averaged,
                "f_divergence_type": options["divergence"],
                "f_alpha_divergence_coef": options.get("a", 0.5),
            },
            math.log(2),
        )
        for options in (
            {"divergence": "forward_kl"},
            {"divergence": "js_divergence"},
            {"divergence": "alpha_divergence", "a": 0.7},
            {"divergence": "alpha_divergence", "a": 1.0},
        )
        for averaged in (False, True)
    ),
    PairCase("dpo", partial(formulas.ld_dpo, beta=0.1, alpha=0.3), {"beta": 0.1, "ld_alpha": 0.3}, math.log(2)),
    PairCase("dpo", partial(formulas.ld_dpo, beta=2.0, alpha=0.0), {"beta": 2.0, "ld_alpha": 0.0}, math.log(2)),
    PairCase(
        "alphapo",
        partial(formulas.alphapo, beta=2.0, gamma=0.5, alpha=0.25, smoothing=0.1),
        {"beta": 2.0, "gamma": 0.5, "label_smoothing": 0.1},
    ),
    PairCase("alphapo", partial(formulas.alphapo, beta=2.0, gamma=1.0, alpha=-0.5), {"alpha": -0.5}),
    *(
        PairCase(
            "cpo",
            partial(formulas.cpo, beta=0.1, kind=kind, averaged=averaged, smoothing=smoothing),
            {"loss_type": kind, "average_log_probs": averaged, "label_smoothing": smoothing, "sft_weight": 0.0},
        )
        for kind, averaged, smoothing in (
            ("sigmoid", False, 0.0),
            ("sigmoid", False, 0.2),
            ("hinge", False, 0.0),
            ("ipo", True, 0.0),
        )
    ),
]
