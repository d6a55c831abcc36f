"""Algorithms and parts are found by the names of their classes; nothing is registered."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from strop.algorithm_factory import all_algorithms, all_parts
from strop.algorithms.base import Plan
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.parts import Advantage, Objective, Selection, Shaping

FAMILY = (
    "cispo", "clip_cov", "dapo", "decoupled_ppo", "dppo", "dr_grpo", "gdpo", "gmpo", "grpo", "gspo", "kl_cov", "lite_ppo", "luspo", "m2po",
    "maxrl", "opo", "pass_at_k", "reinforce", "reinforce_pp", "reinforce_pp_baseline", "remax", "rloo", "sapo", "topr", "vespo",
)  # fmt: skip
PARTS = {
    Advantage: (
        "batch_scaled", "batch_whitened", "best_of_k", "decoupled_rewards", "greedy_baseline", "group_relative", "leave_one_out",
        "length_weighted", "optimal_token_baseline", "plain_reward", "success_rate",
    ),
    Objective: (
        "cispo", "clip", "covariance_clip", "covariance_kl", "divergence_mask", "gamma_weight", "geometric_mean", "reinforce",
        "second_moment_mask", "sequence_clip", "soft_gate",
    ),
    Selection: ("top_entropy",),
    Shaping: ("soft_overlong",),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILY)
def test_each_has_defaults_that_fit_a_run_in_both_modes(name: str) -> None:
    """What cannot have a default is said by ``problems``: a length for Dr. GRPO, GDPO's rewards."""
    DecoupledRewards = pytest.importorskip("strop.extensions.policy_gradients.group_credit").DecoupledRewards
    algorithm = all_algorithms()[name]()
    assert isinstance(algorithm, PolicyGradient)
    if name == "dr_grpo":
        algorithm = replace(algorithm, constant_length=512)
    if name == "gdpo":
        algorithm = replace(algorithm, advantage=DecoupledRewards(weights={"correct": 1.0, "format": 1.0}))
    for plan in (Plan(group_size=8, optimizer_steps=2), Plan(group_size=8, optimizer_steps=2, max_staleness=4)):
        assert list(algorithm.validate(plan)) == []


@pytest.mark.parametrize("name", FAMILY)
def test_each_says_what_it_logs_and_where_it_was_published(name: str) -> None:
    documented = all_algorithms()[name].__doc__
    assert documented is not None
    assert "Metrics:" in documented
    assert "arXiv" in documented or name == "reinforce"


@pytest.mark.parametrize("name", sorted({name for names in PARTS.values() for name in names}))
def test_every_part_can_be_made_from_its_defaults(name: str) -> None:
    part = all_parts()[name]()
    assert part == replace(part, **{item.name: getattr(part, item.name) for item in fields(part)})
