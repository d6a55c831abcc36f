"""What preference losses share: how log-probabilities of tokens become those of completions, the SFT term, metrics, totals."""

from __future__ import annotations

import math

import pytest
import torch

from strop.algorithm_factory import all_algorithms
from strop.algorithms.base import Plan, TokenOutputs
from strop.data.splitting import select_rollouts
from strop.extensions.recorded.preference.base import PairwisePreference
from strop.extensions.recorded.preference.online_dpo import OnlineDPO
from strop.extensions.recorded.preference.reference_free import ORPO, SimPO, log_odds
from strop.extensions.recorded.preference.referenced import DPO, IPO
from strop.extensions.recorded.supervised import SFT
from strop.runs.run_algorithm import find_section
from strop.types import Batch, Group
from support.recorded import recorded_group
from support.rollouts import make_group, make_rollout, pack_for, sampled_turn

GROUPS = [recorded_group([4, 5], [6, 7], [8]), recorded_group([9], [10], [11, 12, 13], index=1)]


LOGPROBS = [-1.0, -0.5, -2.0, -0.25, -1.0, -2.0, -3.0]  # (-1.5, -2) and (-0.25, -6)


REFERENCE = [-1.5, -1.0, -1.5, -0.5, -1.0, -2.0, -2.0]  # h: (1.0, -0.5) and (0.25, -1.0)


def batch_of(algorithm: PairwisePreference, groups: list[Group] = GROUPS) -> Batch:
    batch = pack_for(groups, algorithm)
    batch = batch.with_column("reference_logprobs", torch.tensor(REFERENCE[: len(batch.target)]))
    return algorithm.prepare_step(algorithm.token_credit(batch), None)


def loss_of(
    algorithm: PairwisePreference, batch: Batch | None = None, logprobs: torch.Tensor | None = None
) -> tuple[torch.Tensor, dict[str, float]]:
    found = torch.tensor(LOGPROBS, dtype=torch.float64) if logprobs is None else logprobs
    value, logged = algorithm.loss(TokenOutputs(found, torch.zeros_like(found)), batch or batch_of(algorithm))
    return value, {name: metric.value for name, metric in logged.items()}


def nll(value: float) -> float:
    return math.log(1 + math.exp(-value))


def test_completions_are_compared_by_sums_over_their_tokens() -> None:
    value, logged = loss_of(DPO(beta=0.5))
    assert float(value) == pytest.approx((nll(0.5 * 1.5) + nll(0.5 * 1.25)) / 2, rel=1e-12)
    assert logged == pytest.approx(
        {
            "loss": float(value),
            "preference_loss": float(value),
            "accuracy": 1.0,
            "rewards_chosen_mean": 0.5 * (1.0 + 0.25) / 2,
            "rewards_rejected_mean": 0.5 * (-0.5 - 1.0) / 2,
            "margin": 0.5 * (1.5 + 1.25) / 2,
            "logprobs_chosen": (-1.5 - 0.25) / 2,
            "logprobs_rejected": (-2.0 - 6.0) / 2,
        }
    )


def test_completions_are_compared_by_means_where_that_is_asked_for() -> None:
    deltas = (0.5 + 0.5, 0.25 + 1 / 3)
    value, logged = loss_of(DPO(beta=0.5, average_log_probs=True))
    assert float(value) == pytest.approx(sum(nll(0.5 * delta) for delta in deltas) / 2, rel=1e-12)
    assert logged["logprobs_rejected"] == pytest.approx((-2.0 - 2.0) / 2)
    assert float(loss_of(IPO(beta=2.0))[0]) == pytest.approx(sum((delta - 0.25) ** 2 for delta in deltas) / 2, rel=1e-12)
    paper = float(loss_of(IPO(beta=2.0, average_log_probs=False))[0])
    assert paper == pytest.approx(((1.5 - 0.25) ** 2 + (1.25 - 0.25) ** 2) / 2, rel=1e-12)


def test_losses_without_a_reference_do_not_look_at_one() -> None:
    algorithm = SimPO(beta=2.0, gamma=0.5)
    batch = pack_for(GROUPS, algorithm)
    value, logged = loss_of(algorithm, algorithm.prepare_step(batch, None))
    deltas = (-0.75 + 2.0, -0.25 + 2.0)
    assert float(value) == pytest.approx(sum(nll(2 * delta - 0.5) for delta in deltas) / 2, rel=1e-12)
    assert logged["rewards_chosen_mean"] == pytest.approx(2 * (-0.75 - 0.25) / 2)
    with pytest.raises(KeyError, match="reference_logprobs"):
        loss_of(DPO(), pack_for(GROUPS, DPO()))


def test_a_pair_that_was_cut_is_refused() -> None:
    batch = batch_of(DPO())
    for sequences in ([0], [0, 2], [1, 2, 3]):
        part = select_rollouts(batch, sequences)
        with pytest.raises(ValueError, match="a learner must not split a group"):
            loss_of(DPO(), part.batch, torch.zeros(len(part.index)))


@pytest.mark.parametrize("count", [1, 3, 4])
def test_a_group_that_is_no_pair_is_refused(count: int) -> None:
    group = make_group(*(make_rollout([4], reward=0.0) for _ in range(count)))
    with pytest.raises(ValueError, match=f"a group of {count} rollouts"):
        pack_for([group], DPO())


def test_two_groups_of_four_are_not_four_pairs() -> None:
    """A batch packed for another algorithm: its rollouts are even in number, its groups are no pairs."""
    batch = pack_for([recorded_group([4], [5], [6], [7], [8], rewards=(0.0,) * 4)], SFT())
    with pytest.raises(ValueError, match="does not have two rollouts"):
        loss_of(SimPO(), batch, torch.zeros(4))


@pytest.mark.parametrize("algorithm", [DPO(sft_weight=1.0), SimPO(), ORPO(), IPO()])
def test_an_empty_completion_is_harmless(algorithm: PairwisePreference) -> None:
    """Its log-probability is that of nothing: 0. A pair of two empty ones counts in no total."""
    groups = [recorded_group([4, 5], [6, 7], []), recorded_group([9], [], [], index=1)]
    batch = batch_of(algorithm, groups)
    assert (batch.totals.groups, batch.totals.sequences, batch.totals.tokens) == (1, 1, 2)
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    value, logged = loss_of(algorithm, batch, logprobs)
    value.backward()
    assert all(math.isfinite(number) for number in logged.values())
    assert logprobs.grad is not None
    assert bool(torch.isfinite(logprobs.grad).all())
    alone = batch_of(algorithm, groups[:1])
    assert float(value.detach()) == pytest.approx(float(loss_of(algorithm, alone, logprobs.detach())[0]), rel=1e-12)


def test_long_float32_completions_keep_their_digits() -> None:
    """A float32 sum of -40,000 nats is known to 0.004: differences to the reference are taken token by token, sums in float64."""
    groups = [recorded_group([4], [5] * 4000, [6] * 3000)]
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.randint(1, 20 * 1024, (7000,), generator=generator) / 1024
    steps = torch.randint(0, 2, (7000,), generator=generator) / 1024
    delta = float(steps[:4000].double().sum() - steps[4000:].double().sum())
    value, _ = loss_of(DPO(beta=1.0), pack_for(groups, DPO()).with_column("reference_logprobs", logprobs - steps), logprobs)
    assert float(value) == pytest.approx(nll(delta), rel=1e-12)
    value, logged = loss_of(DPO(beta=1.0), pack_for(groups, DPO()).with_column("reference_logprobs", logprobs), logprobs)
    assert float(value) == pytest.approx(math.log(2), abs=1e-15)
    assert logged["accuracy"] == 0.0


def test_a_margin_of_rounding_is_no_hit() -> None:
    """At the reference a batch that is read in another cut has margins of 1e-7 of its log-probabilities, of either sign."""
    groups = [recorded_group([4], [5] * 40, [6] * 30, index=index) for index in range(8)]
    batch = pack_for(groups, DPO())
    logprobs = torch.full((len(batch.target),), -1.7)
    noise = 2e-7 * torch.randn(len(logprobs), generator=torch.Generator().manual_seed(1))
    for shift, expected in ((0.0, 0.0), (1e-3, 1.0), (-1e-3, 0.0)):
        reference = logprobs + noise - shift * (batch.sequence % 2 == 0)
        assert loss_of(DPO(beta=0.1), batch.with_column("reference_logprobs", reference), logprobs)[1]["accuracy"] == expected


def test_the_log_odds_keep_their_digits_near_certainty_and_near_impossibility() -> None:
    assert float(log_odds(torch.tensor(-1e-6, dtype=torch.float64))) == pytest.approx(math.log(1e6) - 5e-7, rel=1e-9)
    assert float(log_odds(torch.tensor(-800.0, dtype=torch.float64))) == pytest.approx(-800.0)
    assert float(log_odds(torch.tensor(math.log(0.5), dtype=torch.float64))) == pytest.approx(0.0, abs=1e-15)
    certain = torch.tensor([0.0, -800.0, -0.6, -0.8], dtype=torch.float64, requires_grad=True)
    log_odds(certain).sum().backward()
    assert certain.grad is not None
    assert bool(torch.isfinite(certain.grad).all())
    assert certain.grad[2:].tolist() == pytest.approx([1 / (1 - math.exp(-0.6)), 1 / (1 - math.exp(-0.8))], rel=1e-12)


def group(*rewards: float) -> Group:
    return make_group(*(make_rollout([1, 2], sampled_turn([3, 4]), reward=reward) for reward in rewards))


@pytest.mark.parametrize(
    ("rewards", "sides"),
    [
        ((0.0, 1.0), [-1, 1]),
        ((0.5, 1.0, 0.0, 0.7), [0, 1, -1, 0]),
        ((1.0, 0.0, 1.0, 0.0), [1, -1, 0, 0]),  # the first of equal ones
        ((1.0, 1.0, 1.0), [0, 0, 0]),
        ((0.1 + 0.2, 0.3), [0, 0]),  # a rounding error is no preference
    ],
)
def test_the_best_rollout_of_a_group_is_chosen_and_the_worst_rejected(rewards: tuple[float, ...], sides: list[int]) -> None:
    algorithm = OnlineDPO()
    assert algorithm.advantages(group(*rewards)).tolist() == sides
    assert algorithm.rollout_mask(group(*rewards)).tolist() == [side != 0 for side in sides]


def test_a_group_without_a_difference_does_not_count_and_is_replaced_on_request() -> None:
    algorithm = OnlineDPO()
    batch = pack_for([group(1.0, 0.0), group(1.0, 1.0), group(0.0, 2.0)], algorithm)
    assert batch.totals.groups == 2 and algorithm.report(batch) == {"train/pairs": 2.0}
    assert algorithm.zero_gradient(batch).tolist() == [False, False, True, True, False, False]
    assert algorithm.keep(group(1.0, 1.0))
    dynamic = OnlineDPO(drop_constant_groups=True)
    assert not dynamic.keep(group(1.0, 1.0)) and dynamic.keep(group(1.0, 0.0))


def test_it_learns_from_rollouts_and_needs_two_of_a_group() -> None:
    assert find_section("online_dpo") == "grpo" and all_algorithms()["online_dpo"] is OnlineDPO
    assert list(OnlineDPO().validate(Plan(group_size=2))) == []
    (problem,) = OnlineDPO().validate(Plan(group_size=1))
    assert "raise num_generations_per_prompt to 2 or more" in problem


def test_a_step_without_any_pair_has_a_loss_of_zero() -> None:
    from strop.algorithms.base import TokenOutputs

    algorithm = OnlineDPO()
    batch = pack_for([group(1.0, 1.0)], algorithm)
    logprobs = torch.full((4,), -0.5, requires_grad=True)
    loss, logged = algorithm.loss(TokenOutputs(logprobs, logprobs), batch.with_column("reference_logprobs", torch.zeros(4)))
    assert loss.item() == 0 and logged["accuracy"].value == 0
