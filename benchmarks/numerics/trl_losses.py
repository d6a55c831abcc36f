"""Strop against the loss functions of the installed TRL, on the same log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from conformance.cases import STEPS, Step
from conformance.compose import part, policy_gradient
from conformance.harness import through_strop as step_through_strop
from numerics.sections import (
    FLOAT_BOUNDS,
    FLOATS,
    Numbers,
    Row,
    Section,
    default_type,
    over_steps,
    tensor_difference,
    value_difference,
)
from strop.algorithms.base import Algorithm
from strop.algorithms.kl import Kl
from support.beside_trl import (
    CONTRASTIVE,
    PAIRED,
    Found,
    Tokens,
    draw,
    sft_weight_of,
    through_cpo_trainer,
    through_dpo_trainer,
    through_grpo_trainer,
    through_kto_trainer,
    through_strop,
)

USUAL = [STEPS[name] for name in ("random", "very unequal lengths", "single tokens", "one-sided groups", "on policy")]
FREE = {"input_clamp": None, "output_clamp": None}

# TRL's options; Strop's.
GRPO: list[tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = [
    ({"loss_type": "dapo"}, lambda: {}),
    ({"loss_type": "bnpo"}, lambda: {}),
    ({"loss_type": "grpo"}, lambda: {"aggregation": "sequence_mean"}),
    ({"loss_type": "dr_grpo"}, lambda: {"aggregation": "constant_length", "constant_length": 64}),
    ({"loss_type": "dapo", "epsilon_high": 0.28}, lambda: {"objective": part("clip", high=0.28)}),
    ({"loss_type": "dapo", "delta": 1.5}, lambda: {"objective": part("clip", two_sided=1.5)}),
    (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
        lambda: {"objective": part("sequence_clip"), "aggregation": "sequence_mean"},
    ),
    (
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.2},
        lambda: {"objective": part("sequence_clip", low=0.1, high=0.2), "aggregation": "sequence_sum"},
    ),
    ({"loss_type": "cispo", "epsilon_high": 5.0}, lambda: {"objective": part("cispo")}),
    ({"loss_type": "sapo"}, lambda: {"objective": part("soft_gate"), "aggregation": "sequence_mean"}),
    (
        {"loss_type": "sapo", "sapo_temperature_neg": 3.0},
        lambda: {"objective": part("soft_gate", tau_negative=3.0), "aggregation": "sequence_mean"},
    ),
    ({"loss_type": "vespo"}, lambda: {"objective": part("gamma_weight"), "ratio_to": "learner"}),
    ({"beta": 0.3}, lambda: {"kl": Kl(weight=0.3, **FREE)}),
    ({"beta": 0.3, "use_bias_correction_kl": True}, lambda: {"kl": Kl(weight=0.3, unbiased=True, **FREE)}),
    ({"entropy_coef": 0.07}, lambda: {"entropy_bonus": 0.07}),
    ({"off_policy_mask_threshold": 0.05}, lambda: {"corrections": (part("opsm", delta=0.05),)}),
]


def grpo_rows() -> Iterator[Row]:
    for theirs, ours in GRPO:
        named = " ".join(f"{name}={value}" for name, value in theirs.items())
        yield Row(f"GRPOTrainer {named}", "TRL", partial(beside_grpo, theirs, ours))


def beside_grpo(theirs: dict[str, Any], ours: Callable[[], dict[str, Any]]) -> Numbers:
    def subject() -> Algorithm:
        return policy_gradient(**ours())

    by_learner = theirs.get("loss_type") == "vespo" or "use_bias_correction_kl" in theirs
    steps = [without_sampler(step) for step in USUAL] if by_learner else USUAL
    return over_steps(
        lambda step: step_through_strop(subject(), step, given=True),
        lambda step: through_grpo_trainer(step, theirs),
        steps,
        double_peer=False,
    )


def without_sampler(step: Step) -> Step:
    """The sampler is the learner before the update: Strop's VESPO and unbiased KL are relative to the first, TRL's to the second."""
    return step.map(lambda one: replace(one, sampler=one.before))


def preference_rows() -> Iterator[Row]:
    for loss_type, name, options, own in PAIRED:
        named = " ".join(f"{key}={value}" for key, value in options.items())
        yield Row(
            f"DPOTrainer {loss_type} {named}",
            "TRL",
            partial(beside, partial(through_strop, name, options | own), partial(through_dpo_trainer, loss_type, options)),
        )
    for loss_type in ("kto", "apo_zero_unpaired"):
        options = {"beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.7}
        yield Row(
            f"KTOTrainer {loss_type} beta=0.3 weights=1.3, 0.7",
            "TRL",
            partial(
                beside, partial(through_strop, loss_type, options, judged=True), partial(through_kto_trainer, loss_type, options)
            ),
        )
    for name, options, theirs, averaged in CONTRASTIVE:
        named = " ".join(f"{key}={value}" for key, value in theirs.items())
        ours = {"beta": 0.7, "sft_weight": sft_weight_of(name), **options}
        yield Row(
            f"CPOTrainer {named}",
            "TRL",
            partial(beside, partial(through_strop, name, ours), partial(through_cpo_trainer, name, theirs, averaged)),
        )


def beside(strop: Callable[[Tokens], Found], trl: Callable[[Tokens], Found]) -> Numbers:
    numbers: list[float] = []
    for dtype in (torch.float64, torch.float32):
        with default_type(dtype):
            tokens = draw(dtype)
            found, wanted = strop(tokens), trl(tokens)
        numbers += [value_difference(found[0], wanted[0]), tensor_difference(found[1], wanted[1])]
    return tuple(numbers)


def reward_rows() -> Iterator[Row]:
    yield Row("get_soft_overlong_punishment", "TRL", overlong)


def overlong() -> Numbers:
    from trl.rewards import get_soft_overlong_punishment

    lengths = list(range(0, 15))
    wanted = torch.tensor(get_soft_overlong_punishment(10, 4)([[1] * length for length in lengths]), dtype=torch.float64)
    zeros = torch.zeros(len(lengths), dtype=torch.float64)
    shaping = part("soft_overlong", max_length=10, buffer=4, penalty=1.0)
    return tensor_difference(shaping.shape(zeros, torch.tensor(lengths).double(), zeros > 0), wanted), None, None, None


def trl_losses() -> Section:
    return Section(
        "TRL's losses",
        "The loss methods of TRL's trainers, given the same log-probabilities, advantages and reference as Strop, in the same data type.",
        FLOATS,
        FLOAT_BOUNDS,
        (*grpo_rows(), *preference_rows(), *reward_rows()),
    )
