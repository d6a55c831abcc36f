"""Relations between objectives: where one is a limit of another, both must agree in value and gradient."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from conformance.cases import PAIRS, STEPS, Step, on_policy
from conformance.compose import algorithm, part, policy_gradient
from conformance.harness import EXACT, Outcome, assert_same, column, packed, through_strop
from strop.algorithms.policy_gradient.parts import GroupRewards
from support.each import each

NEAR = {name: step for name, step in STEPS.items() if name != "log ratios of 50"}
EVERY = each("step", NEAR.values(), ids=NEAR)
FRESH = on_policy(STEPS["random"])
SINGLE_TOKENS = STEPS["single tokens"]


def loss(step: Step, **options: Any) -> Outcome:
    return through_strop(policy_gradient(**options), step, given=True)


def gradients_agree(one: Outcome, other: Outcome, factor: float = 1.0) -> None:
    torch.testing.assert_close(one.gradients["logprobs"], factor * other.gradients["logprobs"], rtol=EXACT, atol=1e-12)


def test_gspo_at_length_one_is_ppo() -> None:
    sequence = loss(SINGLE_TOKENS, objective=part("sequence_clip", low=0.2, high=0.2), aggregation="sequence_mean")
    assert_same(sequence, loss(SINGLE_TOKENS, objective=part("clip")))


def test_gmpo_at_length_one_is_ppo_with_its_range() -> None:
    low, high = 1 - math.exp(-0.4), math.exp(0.4) - 1
    geometric = loss(SINGLE_TOKENS, objective=part("geometric_mean"), aggregation="sequence_mean")
    assert_same(geometric, loss(SINGLE_TOKENS, objective=part("clip", low=low, high=high)))


def test_luspo_at_length_one_is_gspo() -> None:
    objective = part("sequence_clip")
    sums = loss(SINGLE_TOKENS, objective=objective, aggregation="sequence_sum")
    assert_same(sums, loss(SINGLE_TOKENS, objective=objective, aggregation="sequence_mean"))


def test_at_length_one_all_means_agree() -> None:
    one, *others = (loss(SINGLE_TOKENS, aggregation=how) for how in ("token_mean", "sequence_mean", "sequence_sum"))
    for other in others:
        assert_same(other, one)


def test_where_all_rollouts_are_equally_long_a_constant_length_is_a_mean_of_means() -> None:
    step = STEPS["a lone success in 16"]
    constant = loss(step, aggregation="constant_length", constant_length=2)
    assert_same(constant, loss(step, aggregation="sequence_mean"))
    assert_same(constant, loss(step, aggregation="token_mean"))


OBJECTIVES_ON_POLICY = ["clip", "sequence_clip", "geometric_mean", "cispo", "soft_gate", "divergence_mask", "gamma_weight"]


@pytest.mark.parametrize("objective", OBJECTIVES_ON_POLICY)
def test_on_policy_every_objective_has_the_gradient_of_reinforce(objective: str) -> None:
    """With a mean per rollout, which is what those about whole rollouts are made for."""
    found = loss(FRESH, objective=part(objective), aggregation="sequence_mean")
    gradients_agree(found, loss(FRESH, objective=part("reinforce"), aggregation="sequence_mean"))


def test_cispo_on_policy_is_reinforce_in_value_too() -> None:
    assert_same(loss(FRESH, objective=part("cispo")), loss(FRESH, objective=part("reinforce")))


@EVERY
def test_the_on_policy_ratio_is_reinforce(step: Step) -> None:
    gradients_agree(loss(step, on_policy_ratio=True), loss(step, objective=part("reinforce")))


@EVERY
def test_a_clip_that_is_never_reached_is_the_plain_ratio(step: Step) -> None:
    """Also M2PO with an infinite limit and KL-Cov without weight."""
    wide = loss(step, objective=part("clip", low=1.0, high=1e30))
    assert_same(loss(step, objective=part("covariance_kl", weight=0.0, share=0.5)), wide)
    to_sampler = loss(step, objective=part("clip", low=1.0, high=1e30), ratio_to="sampler")
    assert_same(loss(step, objective=part("second_moment_mask", limit=1e30)), to_sampler)


@EVERY
def test_bounds_that_are_never_reached_change_nothing(step: Step) -> None:
    plain = loss(step)
    assert_same(loss(step, objective=part("clip", dual=1e30)), plain)
    assert_same(loss(step, objective=part("clip", two_sided=1e30)), plain)
    assert_same(loss(step, selection=part("top_entropy", share=1.0)), plain)


@EVERY
def test_dapo_with_a_symmetric_clip_is_grpo_with_a_token_mean(step: Step) -> None:
    dapo = through_strop(algorithm("dapo", objective=part("clip"), overlong_filtering=True), step)
    assert_same(dapo, through_strop(algorithm("grpo", overlong_filtering=True), step))


@EVERY
def test_dr_grpo_is_grpo_without_its_deviation_over_a_constant_length(step: Step) -> None:
    dr = through_strop(algorithm("dr_grpo", constant_length=9), step)
    parts = {"advantage": part("group_relative", normalize=False), "aggregation": "constant_length", "constant_length": 9}
    assert_same(dr, through_strop(algorithm("grpo", **parts), step))


# Advantages


def credit(name: str, rewards: list[float], **options: Any) -> torch.Tensor:
    group = GroupRewards(rewards=torch.tensor(rewards), lengths=torch.full((len(rewards),), 7.0), greedy_reward=0.5)
    found = part(name, **options).rollout_advantages(group)
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize("rewards", [[1.0, 0.0, 0.0, 0.5], [3.0, -1.0], [1.0] + [0.0] * 15], ids=str)
def test_leave_one_out_is_a_scaled_mean_baseline(rewards: list[float]) -> None:
    """R_i - mean of the others = G / (G - 1) x (R_i - mean)."""
    size = len(rewards)
    plain = credit("group_relative", rewards, normalize=False)
    torch.testing.assert_close(credit("leave_one_out", rewards), size / (size - 1) * plain, rtol=EXACT, atol=1e-12)
    both = credit("group_relative", rewards, leave_one_out=True, normalize=False)
    torch.testing.assert_close(both, credit("leave_one_out", rewards), rtol=EXACT, atol=1e-12)


def test_opo_with_equal_lengths_is_the_mean_baseline() -> None:
    rewards = [1.0, 0.0, 0.0, 0.5]
    torch.testing.assert_close(credit("length_weighted", rewards), credit("group_relative", rewards, normalize=False))


def test_maxrl_is_the_mean_baseline_over_the_success_rate() -> None:
    rewards = [1.0, 0.0, 0.0, 0.0]
    torch.testing.assert_close(credit("success_rate", rewards), credit("group_relative", rewards, normalize=False) / 0.25)


def test_remax_whose_greedy_rollout_has_the_mean_reward_is_the_mean_baseline() -> None:
    rewards = [1.0, 0.0]
    torch.testing.assert_close(credit("greedy_baseline", rewards), credit("group_relative", rewards, normalize=False))


def test_pass_at_k_of_pairs_is_the_leave_one_out_of_their_best() -> None:
    """In a group of two the best has the difference, and the other nothing; for k = G both forms agree."""
    assert credit("best_of_k", [3.0, 1.0]).tolist() == [2.0, 0.0]
    rewards = [0.2, 0.9, 0.5, 0.1]
    torch.testing.assert_close(credit("best_of_k", rewards, k=4), credit("best_of_k", rewards))


def test_the_pass_at_k_estimator_is_unbiased() -> None:
    """For G = k its expected credit is the gradient of the expected maximum: over all outcomes of two Bernoulli rollouts."""
    p = torch.tensor(0.3, requires_grad=True)
    (exact,) = torch.autograd.grad(1 - (1 - p) ** 2, p)
    expected = torch.zeros(())
    for first in (0.0, 1.0):
        for second in (0.0, 1.0):
            chance = math.prod(0.3 if outcome else 0.7 for outcome in (first, second))
            scores = torch.tensor([1 / 0.3 if outcome else -1 / 0.7 for outcome in (first, second)])  # d log p(outcome) / dp
            expected = expected + chance * (credit("best_of_k", [first, second]) * scores).sum()
    torch.testing.assert_close(expected, exact)


# Corrections


@EVERY
def test_truncation_without_a_cap_is_importance_sampling(step: Step) -> None:
    assert_same(loss(step, corrections=(part("tis", cap=1e30),)), loss(step, corrections=(part("importance"),)))
    sequence = loss(step, corrections=(part("tis", cap=1e30, level="sequence"),))
    assert_same(sequence, loss(step, corrections=(part("importance", level="sequence"),)))


@EVERY
def test_icepop_with_a_band_that_holds_everything_is_truncation_without_a_cap(step: Step) -> None:
    wide = loss(step, corrections=(part("icepop", low=0.0, high=1e30),))
    assert_same(wide, loss(step, corrections=(part("tis", cap=1e30),)))
    assert_same(wide, loss(step, corrections=(part("mis", low=0.0, high=1e30),)))


@EVERY
def test_rejection_that_rejects_nothing_is_no_correction(step: Step) -> None:
    plain = loss(step)
    for correction in (
        part("geometric_rejection", low=0.0, high=1e30),
        part("k3_rejection", cap=1e30),
        part("opsm", delta=1e5),
        part("kpop", phi=1e5),
    ):
        assert_same(loss(step, corrections=(correction,)), plain)
    kept = loss(step, corrections=(part("sequence_mask_tis", low=0.0, high=1e30),))
    assert_same(kept, loss(step, corrections=(part("importance"),)))


def test_at_length_one_sequence_weights_are_token_weights() -> None:
    for name, options in (("tis", {"cap": 1.3}), ("mis", {"low": 0.8, "high": 1.4}), ("importance", {})):
        sequence = loss(SINGLE_TOKENS, corrections=(part(name, level="sequence", **options),))
        assert_same(sequence, loss(SINGLE_TOKENS, corrections=(part(name, **options),)))


@EVERY
def test_decoupled_ppo_whose_learner_is_its_sampler_is_ppo(step: Step) -> None:
    same = step.map(lambda one: replace(one, sampler=one.before))
    decoupled = through_strop(algorithm("decoupled_ppo", overlong_filtering=True), same)
    assert_same(decoupled, through_strop(algorithm("grpo", overlong_filtering=True), same))


@EVERY
def test_importance_times_an_unclipped_ratio_is_the_ratio_to_the_sampler(step: Step) -> None:
    """pi_o / mu x pi / pi_o = pi / mu: correction and objective compose to one ratio."""
    wide = part("clip", low=1.0, high=1e30)
    composed = loss(step, objective=wide, corrections=(part("importance"),))
    assert_same(composed, loss(step, objective=wide, ratio_to="sampler"), rtol=1e-8)


# Preferences


def pair_loss(name: str, step: Step, **options: Any) -> Outcome:
    return through_strop(algorithm(name, **options), step)


PAIRED = pytest.mark.parametrize("step", PAIRS.values(), ids=PAIRS)


@PAIRED
def test_dpo_without_label_noise_is_what_its_noisy_forms_are(step: Step) -> None:
    plain = pair_loss("dpo", step, beta=0.3)
    assert_same(pair_loss("cdpo", step, beta=0.3, label_smoothing=0.0), plain)
    assert_same(pair_loss("robust_dpo", step, beta=0.3, label_smoothing=0.0), plain)


@PAIRED
def test_noisy_dpo_is_made_of_dpo_on_both_orders(step: Step) -> None:
    """cDPO is their expectation under flipped labels, robust DPO is what has plain DPO as its expectation."""
    turned = replace(step, groups=tuple((other, one) for one, other in step.groups))
    plain, flipped = (pair_loss("dpo", each, beta=0.3).value for each in (step, turned))
    noisy = {name: pair_loss(name, step, beta=0.3, label_smoothing=0.2).value for name in ("cdpo", "robust_dpo")}
    other = {name: pair_loss(name, turned, beta=0.3, label_smoothing=0.2).value for name in ("cdpo", "robust_dpo")}
    assert noisy["cdpo"] == pytest.approx(0.8 * plain + 0.2 * flipped, rel=1e-12)
    assert 0.8 * noisy["robust_dpo"] + 0.2 * other["robust_dpo"] == pytest.approx(plain, rel=1e-9, abs=1e-12)


@PAIRED
def test_orpo_without_odds_is_sft_on_the_chosen(step: Step) -> None:
    chosen = replace(step, groups=tuple((one,) for one, _ in step.groups))
    orpo, sft = pair_loss("orpo", step, preference_weight=0.0), pair_loss("sft", chosen, aggregation="sequence_mean")
    assert orpo.value == pytest.approx(sft.value, rel=1e-12)
    parts = orpo.gradients["logprobs"].split([sample.length for sample in step.samples])
    torch.testing.assert_close(torch.cat(parts[::2]), sft.gradients["logprobs"])
    assert not torch.cat(parts[1::2]).any()


@PAIRED
def test_simpo_without_a_margin_is_length_averaged_dpo_without_a_reference(step: Step) -> None:
    flat = step.map(lambda one: replace(one, reference=[0.0] * one.length))
    averaged = pair_loss("dpo", flat, beta=2.0, average_log_probs=True)
    assert_same(pair_loss("simpo", step, beta=2.0, gamma=0.0), averaged)


def test_simpo_at_equal_log_probabilities_is_the_loss_of_its_margin() -> None:
    even = PAIRS["random pairs"].map(lambda one: replace(one, now=[-0.5] * one.length))
    assert pair_loss("simpo", even, beta=2.0, gamma=1.0).value == pytest.approx(math.log1p(math.exp(1.0)), rel=1e-12)


def test_for_completions_of_one_token_sums_are_means() -> None:
    step = PAIRS["single tokens"]
    for name in ("dpo", "ipo", "cdpo", "robust_dpo", "apo_zero", "apo_down", "slic"):
        assert_same(pair_loss(name, step, average_log_probs=True), pair_loss(name, step, average_log_probs=False))


def test_near_the_reference_dpo_ipo_and_slic_pull_the_same_way() -> None:
    """All are functions of Delta with a negative slope at 0: -beta/2, -1/beta, -beta."""
    step = PAIRS["at the start"]
    dpo, slic = (pair_loss(name, step, beta=0.2) for name in ("dpo", "slic"))
    ipo = pair_loss("ipo", step, beta=0.2, average_log_probs=False)
    gradients_agree(slic, dpo, 2.0)
    gradients_agree(ipo, dpo, (1 / 0.2) / (0.2 / 2))


def test_apo_zero_near_the_reference_has_half_the_slope_of_dpo() -> None:
    """sigmoid'(0) = 1/4 for each completion, against 1/2 for the pair."""
    step = PAIRS["at the start"]
    gradients_agree(pair_loss("apo_zero", step, beta=0.2), pair_loss("dpo", step, beta=0.2), 0.5)


def test_kto_at_the_reference_pulls_each_completion_by_a_quarter_of_beta() -> None:
    step = PAIRS["at the start"]
    found = pair_loss("kto", step, beta=0.2).gradients["logprobs"].split([sample.length for sample in step.samples])
    judged = len(step.groups)
    for place, gradient in enumerate(found):
        wanted = -0.25 * 0.2 / judged if place % 2 == 0 else 0.0
        assert gradient.tolist() == pytest.approx([wanted] * len(gradient), abs=1e-12)


# Supervised fine-tuning as a policy gradient


def test_sft_is_reinforce_with_a_reward_of_one() -> None:
    step = STEPS["random"].map(lambda one: replace(one, advantage=1.0))
    gradients_agree(through_strop(algorithm("sft"), step), loss(step, objective=part("reinforce")))


def test_dynamic_fine_tuning_is_the_gradient_of_minus_the_probability() -> None:
    step = STEPS["random"]
    found = through_strop(algorithm("sft", dft=True), step)
    now = column(step, "now").requires_grad_()
    (wanted,) = torch.autograd.grad(-now.exp().mean(), now)
    torch.testing.assert_close(found.gradients["logprobs"], wanted)


# A reference in the reward and in the loss


def test_k1_in_the_token_reward_is_distillation_from_the_reference() -> None:
    """With no reward and weight 1, A_t = sum over s >= t of (log ref - log mu): distillation's own term plus those to come."""
    from strop.algorithms.kl import Kl

    step = STEPS["single tokens"].map(lambda one: replace(one, reward=0.0, teacher=one.reference))
    penalty = policy_gradient(kl=Kl(weight=1.0, estimator="k1", place="token_reward", input_clamp=None, output_clamp=None))
    taught = algorithm("distillation")
    first, second = (subject.token_credit(packed(step, subject)).advantages.double() for subject in (penalty, taught))
    torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-6)
