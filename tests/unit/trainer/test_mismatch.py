"""How far sampler and learner disagree, where, and when that is too far."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strop.generation.generation_config import MismatchConfig
from strop.trainer.mismatch import (
    MAX_AGE,
    POSITION_BUCKETS,
    MismatchGuard,
    MismatchReport,
    MismatchTooLarge,
    measure_mismatch,
    mismatch_stats,
    positions_in_rollout,
)
from strop.types import Batch
from support.rollouts import batch_shapes, make_group, make_groups, make_rollout, pack_grpo, sampled_turn, simple_groups


def batch_of(*lengths: int, versions: tuple[int, ...] | None = None) -> Batch:
    """One rollout for each length; ``versions`` are by rollout."""
    rollouts = [
        make_rollout([5, 6], sampled_turn([7] * length, [-1.0] * length, version=(versions or (0,) * len(lengths))[place]))
        for place, length in enumerate(lengths)
    ]
    return pack_grpo([make_group(*rollouts)])


def shifted(batch: Batch, shift: torch.Tensor | float, version: int = 0) -> MismatchReport:
    return measure_mismatch(batch, batch.rollout_logprobs + shift, version)


def test_equal_log_probabilities_agree_perfectly() -> None:
    report = shifted(batch_of(2, 4), 0.0)
    assert (report.overall.error, report.overall.max_error, report.overall.above_2) == (1, 1, 0)
    assert report.overall.kl == report.overall.reverse_kl == 0 and report.overall.tokens == 6


def test_disagreement_is_measured_in_both_directions() -> None:
    shift = torch.zeros(6)
    shift[0], shift[1] = 0.3, -0.9
    found = shifted(batch_of(2, 4), shift).metrics()
    assert found["train/token_mult_prob_error"] == pytest.approx((math.exp(0.3) + math.exp(0.9) + 4) / 6)
    assert found["train/token_mult_prob_error_max"] == pytest.approx(math.exp(0.9))
    k3 = [math.expm1(d) - d for d in (0.3, -0.9)]
    assert found["train/gen_kl_error"] == pytest.approx(sum(k3) / 6)
    reverse = [math.exp(d) * d - math.expm1(d) for d in (0.3, -0.9)]
    assert found["train/gen_kl_error_reverse"] == pytest.approx(sum(reverse) / 6)
    assert found["train/token_ratio_above_2"] == pytest.approx(1 / 6)


def test_the_estimates_of_the_two_kl_divergences_are_those() -> None:
    """On every token of a small vocabulary, weighed by the sampler, they are the divergences themselves."""
    sampler, learner = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.3, 0.5]).double()
    parts = [mismatch_stats((learner / sampler).log()[place : place + 1]) for place in range(3)]
    weights = sampler.tolist()
    kl = float((sampler * (sampler / learner).log()).sum())
    assert sum(weight * part.kl for weight, part in zip(weights, parts, strict=True)) == pytest.approx(kl)
    assert sum(weight * part.reverse_kl for weight, part in zip(weights, parts, strict=True)) == pytest.approx(kl)


def test_a_token_that_the_learner_finds_impossible_is_an_infinite_mismatch_and_no_nan() -> None:
    found = mismatch_stats(torch.tensor([0.0, -math.inf]).double())
    assert (found.error, found.max_error, found.kl, found.above_2) == (math.inf, math.inf, math.inf, 0.5)
    assert found.reverse_kl == 0.5


def test_tokens_that_do_not_count_are_left_out() -> None:
    batch = batch_of(3, 5)
    batch = replace(batch, mask=(batch.sequence == 0).float())
    report = shifted(batch, torch.where(batch.sequence == 0, 0.0, 5.0))
    assert report.overall.error == 1 and report.overall.tokens == 3
    nothing = shifted(replace(batch, mask=torch.zeros(8)), 5.0)
    assert nothing.overall.error == nothing.checked.error == 1 and nothing.by_position == {} and nothing.by_age == {}
    assert "train/token_mult_prob_error" in nothing.metrics()


@given(batch_shapes)
def test_positions_count_the_sampled_tokens_of_each_rollout(shapes) -> None:  # type: ignore[no-untyped-def]
    groups = make_groups(shapes, seed=3)
    places = positions_in_rollout(pack_grpo(groups)).tolist()
    lengths = [rollout.sampled_tokens for group in groups for rollout in group.rollouts]
    assert places == [place for length in lengths for place in range(1, length + 1)]


def test_positions_are_reported_in_buckets() -> None:
    batch = batch_of(5000, 3)
    wrong = torch.zeros(5003)
    wrong[0] = wrong[5000] = math.log(2)  # the first tokens
    wrong[64:256] = math.log(3)
    found = shifted(batch, wrong).metrics()
    named = ["1", "2_16", "17_64", "65_256", "257_1024", "1025_4096", "4097_on"]
    errors = [found[f"train/mismatch/position_{name}/token_mult_prob_error"] for name in named]
    assert errors == pytest.approx([2, 1, 1, 3, 1, 1, 1], rel=1e-5)
    assert found["train/mismatch/position_65_256/gen_kl_error"] == pytest.approx(2 - math.log(3), rel=1e-5)
    assert not [name for name in shifted(batch_of(1, 1), 0.1).metrics() if "/mismatch/" in name], "one bucket is the whole"


def test_ages_are_reported_where_there_are_several() -> None:
    batch = batch_of(2, 4, 2, versions=(5, 3, 5))
    found = shifted(batch, torch.where(batch.versions == 3, math.log(1.5), 0.0), version=5).metrics()
    assert found["train/mismatch/age_0/token_mult_prob_error"] == 1
    assert found["train/mismatch/age_2/token_mult_prob_error"] == pytest.approx(1.5)
    assert found["train/token_mult_prob_error"] == pytest.approx(1.25)
    assert not [name for name in shifted(batch_of(2, 4), 0.1, version=2).metrics() if "/age" in name]


def test_the_number_of_tags_is_bounded() -> None:
    batch = batch_of(*[5000] + [1] * 40, versions=tuple(range(41)))
    names = shifted(batch, 0.0, version=60).metrics()
    assert len(names) == 5 + 2 * (len(POSITION_BUCKETS) + 1)
    names = shifted(batch, 0.0, version=41).metrics()
    assert f"train/mismatch/age_{MAX_AGE}_on/gen_kl_error" in names
    assert len(names) <= 5 + 2 * (len(POSITION_BUCKETS) + 1) + 2 * (MAX_AGE + 1)


def test_the_youngest_tokens_are_judged_so_that_staleness_alone_is_no_mismatch() -> None:
    batch = batch_of(50, 50, versions=(7, 6))
    report = shifted(batch, torch.where(batch.versions == 6, 1.0, 0.01), version=7)
    assert report.checked_age == 0 and report.checked.error == pytest.approx(math.exp(0.01), rel=1e-5)
    assert MismatchGuard(MismatchConfig(warn=1.2, stop=1.2, stop_after=1)).check(8, report) is None


def test_an_age_of_a_handful_of_tokens_is_not_what_is_judged() -> None:
    batch = batch_of(1, 999, versions=(7, 6))
    report = shifted(batch, torch.where(batch.versions == 7, 3.0, 0.0), version=7)
    assert report.checked_age == 1 and report.checked.error == 1


def test_a_warning_names_metric_value_causes_and_the_age_of_what_was_judged() -> None:
    guard = MismatchGuard(MismatchConfig(warn=1.1))
    text = guard.check(4, shifted(batch_of(3, 5), 0.5))
    assert text is not None
    for part in (
        "step 4",
        "factor of 1.649",
        "train/token_mult_prob_error",
        "current weights",
        "did not receive the weights",
        "_ratios.jsonl",
    ):
        assert part in text, part
    stale = MismatchGuard(MismatchConfig(warn=1.1)).check(4, shifted(batch_of(3, 5), 0.5, version=2))
    assert stale is not None and "2 steps old" in stale and "the policy's own change" in stale


def test_warnings_do_not_flood() -> None:
    guard, report = MismatchGuard(MismatchConfig(warn=1.1, warn_every=10, stop=None)), shifted(batch_of(3), 1.0)
    assert [step for step in range(1, 26) if guard.check(step, report)] == [1, 11, 21]
    assert MismatchGuard(MismatchConfig(warn=None)).check(1, report) is None


def test_the_run_ends_after_so_many_steps_in_a_row_and_says_why() -> None:
    good, bad = shifted(batch_of(3), 0.0), shifted(batch_of(3), math.nan)
    guard = MismatchGuard(MismatchConfig(warn=None, stop=2.0, stop_after=3))
    for step, report in enumerate([bad, bad, good, bad, bad]):
        guard.check(step, report)
    with pytest.raises(MismatchTooLarge, match=r"mismatch\.stop = 2 for 3 steps in a row[\s\S]*meaningless[\s\S]*Likely causes"):
        guard.check(5, bad)


@given(st.lists(st.floats(-20, 20), min_size=1, max_size=30))
def test_no_estimate_is_negative_and_the_error_is_at_least_one(values: list[float]) -> None:
    found = mismatch_stats(torch.tensor(values).double())
    assert found.error >= 1 and found.max_error >= found.error * (1 - 1e-12) and 0 <= found.above_2 <= 1
    assert found.kl >= -1e-12 and found.reverse_kl >= -1e-9


def test_every_shape_of_batch_is_measured() -> None:
    groups = simple_groups((3, [2, 5]), (4, [1, 7]))
    report = measure_mismatch(pack_grpo(groups), pack_grpo(groups).rollout_logprobs, 0)
    assert sum(part.tokens for part in report.by_position.values()) == report.overall.tokens == 15
