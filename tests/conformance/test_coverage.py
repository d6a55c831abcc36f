"""Nothing of the catalogue is without a conformance case."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.advantages import GROUP_ADVANTAGES
from conformance.corrections import CORRECTIONS
from conformance.objectives import OBJECTIVES
from conformance.preferences import PAIR_LOSSES
from conformance.whole import WHOLE
from strop import algorithm_factory

# What is not in a table: the test that holds it, which compares it with a formula.
ALGORITHMS = {
    "sft": "test_sft_is_the_negative_log_likelihood",
    "kto": "test_kto_is_its_papers_formula",
    "apo_zero_unpaired": "test_apo_zero_of_judgements_is_its_papers_formula",
    "aot": "test_optimal_transport_is_its_formula_over_the_whole_step",
    "aot_unpaired": "test_optimal_transport_is_its_formula_over_the_whole_step",
    "online_dpo": "test_online_dpo_compares_the_best_with_the_worst_of_each_group",
    "reward_model": "test_a_reward_model_is_bradley_terry",
    "process_supervision": "test_process_supervision_is_the_sum_of_later_steps_normalised_over_their_group",
    "gigpo": "test_gigpo_is_its_papers_formula",
    "turn_returns": "test_returns_of_turns_are_discounted_and_compared_over_the_group",
    "bi_level_gae": "test_bi_level_gae_is_its_papers_recursion",
    "ppo": "test_the_policy_loss_is_ppos",
    "vapo": "test_vapo_adds_the_likelihood_of_correct_rollouts",
    "topk_distillation": "test_a_divergence_on_the_top_k_is_its_formula",
}
PARTS = {
    "optimal_token_baseline": "test_the_optimal_token_baseline_is_its_formula",
    "step_relative": "test_process_supervision_is_the_sum_of_later_steps_normalised_over_their_group",
    "step_grouped": "test_gigpo_is_its_papers_formula",
    "discounted_turns": "test_returns_of_turns_are_discounted_and_compared_over_the_group",
    "bi_level_gae": "test_bi_level_gae_is_its_papers_recursion",
    "gae": "test_advantages_and_returns_are_generalised_advantage_estimation",
    "reverse_kl": "test_the_teachers_advantage_is_its_formula",
    "batch_scaled": "test_lite_ppo_scales_by_the_deviation_of_the_batch",
    "batch_whitened": "test_reinforce_pp_whitens_over_the_tokens_of_the_batch",
    "decoupled_rewards": "test_gdpo_normalises_each_reward_by_itself",
    "soft_overlong": "test_soft_overlong_punishment_is_a_line_down_to_the_limit",
    "top_entropy": "test_only_the_tokens_of_largest_entropy_have_a_gradient",
}


def test_every_algorithm_has_a_case() -> None:
    covered = {*WHOLE, *(case.algorithm for case in PAIR_LOSSES), *ALGORITHMS}
    missing = set(algorithm_factory.all_algorithms()) - covered
    assert not missing, f"write the formula of {sorted(missing)}: in whole.py or preferences.py, or a test named here"


def test_every_part_has_a_case() -> None:
    tables = (OBJECTIVES, CORRECTIONS, GROUP_ADVANTAGES)
    covered = {*PARTS, *(case.part for table in tables for case in table)}
    missing = set(algorithm_factory.all_parts()) - covered
    assert not missing, (
        f"write the formula of {sorted(missing)}: in objectives.py, corrections.py or advantages.py, or a test named here"
    )


@pytest.mark.extensions
def test_no_case_is_about_something_that_is_gone() -> None:
    algorithms = {*WHOLE, *(case.algorithm for case in PAIR_LOSSES), *ALGORITHMS}
    assert algorithms <= set(algorithm_factory.all_algorithms())
    parts = {*PARTS, *(case.part for table in (OBJECTIVES, CORRECTIONS, GROUP_ADVANTAGES) for case in table)}
    assert parts <= set(algorithm_factory.all_parts())


def test_the_tests_that_are_named_exist() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("test_*.py")))
    missing = [test for test in (*ALGORITHMS.values(), *PARTS.values()) if f"def {test}(" not in text]
    assert not missing, missing
