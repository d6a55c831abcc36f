"""What is stored of each token sums to the loss that is logged, for every family of objectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from strop import metrics
from strop.algorithm_factory import all_algorithms
from strop.algorithms.base import CANDIDATES, SQUARED_PROBS, Algorithm, Outputs, TokenOutputs, ValueOutputs
from strop.algorithms.critic import PPO
from strop.algorithms.functional import POLICY_LOGPROBS
from strop.algorithms.kl import Kl
from strop.algorithms.policy_gradient.corrections import GeometricRejection, Importance, Tis
from strop.algorithms.policy_gradient.grpo import GRPO, Clip
from strop.data.splitting import split_mini_batches
from strop.metrics import Metrics
from strop.monitoring.rollout_store.token_values import TokenColumns
from strop.runs.monitors.token_trace import TokenTrace
from strop.types import Batch, Ending, Group
from support.algorithms import find_part
from support.each import each
from support.recorded import random_groups
from support.rollouts import pack_for, simple_groups

NEEDED: dict[str, dict[str, Any]] = {
    "dr_grpo": {"constant_length": 7},
    "gdpo": {"advantage": find_part("decoupled_rewards", weights={"first": 1.0, "second": 0.3})},
    "clip_cov": {"objective": find_part("covariance_clip", share=0.2, lowest=0.1)},
    "vapo": {"policy_training_start_step": 0},
}


def recorded() -> dict[str, Algorithm]:
    """Algorithms on recorded data, where the extension is there."""
    if find_spec("strop.extensions") is None:
        return {}
    from strop.extensions.recorded.preference.referenced import DPO
    from strop.extensions.recorded.supervised import SFT, RewardModel

    return {
        "dpo_with_sft": DPO(sft_weight=0.3, sft_aggregation="token_mean"),
        "dpo_weighted": DPO(use_weighting=True, ld_alpha=0.4),
        "sft_per_sequence": SFT(aggregation="sequence_mean", dft=True),
        "scores": RewardModel(kind="regression"),
        "margins": RewardModel(use_margin=True, centering=0.1),
    }


CASES: dict[str, Algorithm] = {
    **{name: kind(**NEEDED.get(name, {})) for name, kind in all_algorithms().items()},
    "kl_in_the_loss": GRPO(kl=Kl(weight=0.3)),
    "unbiased_kl": GRPO(kl=Kl(weight=0.3, unbiased=True)),
    "kl_in_the_reward": GRPO(kl=Kl(weight=0.3, estimator="k1", place="reward")),
    "kl_of_tokens_in_the_reward": GRPO(kl=Kl(weight=0.3, estimator="k1", place="token_reward")),
    "kl_in_the_credit": GRPO(kl=Kl(weight=0.3, estimator="k1", place="token_credit")),
    "per_sequence": GRPO(aggregation="sequence_mean", kl=Kl(weight=0.3)),
    "sums": GRPO(aggregation="sequence_sum", entropy_bonus=0.1),
    "entropy_below_a_target": GRPO(entropy_bonus=0.1, entropy_target=100.0),
    "positive_nll": GRPO(positive_nll=0.1),
    "everything": GRPO(
        kl=Kl(weight=0.3),
        corrections=(Tis(cap=1.1),),
        normalize_weights=True,
        selection=find_part("top_entropy", share=0.5),
        entropy_bonus=0.1,
        positive_nll=0.2,
    ),
    "importance": GRPO(corrections=(Importance(),), ratio_to="between"),
    "rejected": GRPO(
        corrections=(GeometricRejection(low=0.36, high=1.1),), rejected_in_divisor=False, aggregation="sequence_mean"
    ),
    "sequence_errors": GRPO(seq_logprob_error_threshold=2.8),
    "overlong": GRPO(overlong_filtering=True),
    "two_sided": GRPO(objective=Clip(two_sided=1.5)),
    "ppo_with_kl": PPO(kl=Kl(weight=0.3), value_clip=None),
    **recorded(),
}


class Plain(Algorithm):
    """An algorithm of a user, which does not say its terms."""

    def advantages(self, group: Group) -> Tensor:
        return group.rewards

    def loss(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        loss = -(outputs.logprobs * batch.advantages * batch.mask).sum() / batch.totals.tokens
        return loss, {"loss": metrics.total(loss.item())}


@dataclass(frozen=True)
class Traced:
    """A traced update: its columns, and the loss of each learner as it would be logged."""

    columns: TokenColumns
    losses: dict[str, float]
    batch: Batch

    def sum(self, learner: str) -> float:
        terms = self.columns.by_term["loss_terms"].items()
        return float(sum(values.double().sum() for name, values in terms if ("/" in name) == (learner != "policy")))


def groups_for(algorithm: Algorithm) -> list[Group]:
    if algorithm.recorded_data == "conversations":
        return random_groups(4, 1)
    if algorithm.recorded_data:
        return random_groups(4, 2)
    groups = simple_groups((4, (3, 5, 1, 4)), (2, (6, 2, 3, 3)), (3, (2, 2, 7, 1)), (1, (4, 3, 5, 2)))
    return [
        replace(
            group,
            rollouts=tuple(
                replace(
                    rollout,
                    rewards={"first": rollout.reward, "second": (7 * rollout.reward) % 1},
                    ending=Ending.LENGTH if rollout.sample == 2 else Ending.STOP,
                )
                for rollout in group.rollouts
            ),
            baseline=replace(group.rollouts[0], reward=0.4),
        )
        for group in groups
    ]


def noise(size: int, seed: int, scale: float = 0.3) -> Tensor:
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def outputs_for(batch: Batch, algorithm: Algorithm, learner: str, seed: int) -> Outputs:
    count = len(batch.target)
    if learner == "value" or algorithm.predict == "last_token":
        return ValueOutputs(noise(count, seed, 1.0))
    logprobs = (batch.rollout_logprobs - 1 + noise(count, seed)).clamp(max=-0.01)
    candidates = torch.log_softmax(noise(count * 4, seed, 1.0).view(count, 4), -1) - 0.5
    return TokenOutputs(logprobs, noise(count, seed + 1).abs() + 0.5, candidates, -noise(count, seed + 2).abs())


def trace(algorithm: Algorithm, groups: Sequence[Group] = (), *, mini_batches: int = 2, epochs: int = 2) -> Traced:
    batch = pack_for(groups or groups_for(algorithm), algorithm)
    count = len(batch.target)
    old = outputs_for(batch, algorithm, "policy", 0)
    extra = {name: batch.rollout_logprobs - 1 + noise(count, 50 + place) for place, name in enumerate(sorted(algorithm.requires))}
    if "teacher_candidates" in extra:
        extra |= {"teacher_candidates": torch.log_softmax(noise(count * 4, 9, 1.0).view(count, 4), -1) - 0.3}
        extra |= {CANDIDATES: torch.zeros(count, 4, dtype=torch.int64)}
    if isinstance(old, TokenOutputs):
        extra |= {POLICY_LOGPROBS: old.logprobs, SQUARED_PROBS: torch.ones(count)}
    batch = algorithm.token_credit(batch.with_columns(extra))
    steps = mini_batches * epochs
    notes: list[str] = []
    traced = TokenTrace(algorithm=algorithm, batch=batch, optimizer_steps=steps, note=notes.append)
    losses: dict[str, float] = {}
    for step, mini in enumerate(split_mini_batches(batch, mini_batches) * epochs):
        policy = outputs_for(mini.batch, algorithm, "policy", 10 * step + 3)
        prepared = algorithm.prepare_step(mini.batch, policy if isinstance(policy, TokenOutputs) else None)
        for learner, loss in algorithm.losses(0).items():
            outputs = policy if learner == "policy" else outputs_for(mini.batch, algorithm, learner, step)
            losses[learner] = losses.get(learner, 0.0) + loss(outputs, prepared)[0].item() / steps
            traced.observe(learner, mini.index, prepared, outputs, loss)
    columns = traced.columns()
    assert columns is not None, notes
    return Traced(columns, losses, batch)


@each("name", CASES)
def test_the_terms_of_all_tokens_sum_to_the_loss(name: str) -> None:
    traced = trace(CASES[name])
    assert "loss" not in traced.columns.by_term["loss_terms"], "it does not say its terms"
    for learner, loss in traced.losses.items():
        assert traced.sum(learner) == pytest.approx(loss, rel=1e-6, abs=1e-6), learner


def test_the_loss_of_an_algorithm_that_does_not_say_its_terms_is_spread_evenly() -> None:
    traced = trace(Plain())
    assert traced.sum("policy") == pytest.approx(traced.losses["policy"], abs=1e-6)
    assert list(traced.columns.by_term["loss_terms"]) == ["loss"]


@pytest.mark.extensions
def test_the_terms_of_a_policy_gradient_are_told_apart() -> None:
    terms = trace(CASES["everything"]).columns.by_term["loss_terms"]
    assert list(terms) == ["objective", "clip", "correction", "selection", "kl", "entropy", "positive_nll"]
    assert all(bool((values != 0).any()) for values in terms.values())


def test_the_clip_is_what_separates_the_objective_from_the_surrogate_of_ppo() -> None:
    traced = trace(GRPO(), epochs=1, mini_batches=1)
    outputs = outputs_for(traced.batch, GRPO(), "policy", 3)
    assert isinstance(outputs, TokenOutputs)
    ratio = (outputs.logprobs - traced.batch.column(POLICY_LOGPROBS)).exp()
    advantages, terms = traced.batch.advantages, traced.columns.by_term["loss_terms"]
    expected = -ratio * advantages / len(advantages)
    clipped = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) / len(advantages)
    assert torch.allclose(terms["objective"], expected, atol=1e-7)
    assert torch.allclose(terms["clip"], clipped - expected, atol=1e-7)
    assert torch.equal(traced.columns.columns["clipped"], (clipped - expected).abs() > 1e-8)


@pytest.mark.extensions
@each("name", ["everything", "grpo", "gspo", "cispo", "dpo", "sft", "kto", "reinforce"])
def test_the_gradient_is_that_of_the_logit_of_the_sampled_token(name: str) -> None:
    """Against a real softmax over a vocabulary of five."""
    algorithm = CASES[name]
    if isinstance(algorithm, GRPO):
        algorithm = replace(algorithm, corrections=(), selection=None, normalize_weights=False)
    batch = pack_for(groups_for(algorithm), algorithm)
    count = len(batch.target)
    extra = {name: batch.rollout_logprobs - 1 + noise(count, 50) for name in sorted(algorithm.requires)}
    batch = algorithm.token_credit(batch.with_columns(extra))
    logits = noise(count * 5, 1, 1.0).view(count, 5).requires_grad_()
    place = torch.arange(count) % 5
    all_logprobs = logits.log_softmax(-1)
    outputs = TokenOutputs(all_logprobs[torch.arange(count), place], -(all_logprobs.exp() * all_logprobs).sum(-1))
    seen = TokenOutputs(outputs.logprobs.detach(), outputs.entropy.detach())
    prepared = algorithm.prepare_step(batch, seen)
    algorithm.losses(0)["policy"](outputs, prepared)[0].backward()
    traced = TokenTrace(algorithm=algorithm, batch=batch, optimizer_steps=1, note=pytest.fail)
    traced.observe("policy", torch.arange(count), prepared, seen, algorithm.losses(0)["policy"])
    columns = traced.columns()
    assert columns is not None and logits.grad is not None
    found = torch.stack(list(columns.by_term["loss_gradients"].values())).sum(0)
    assert torch.allclose(found, logits.grad[torch.arange(count), place], rtol=1e-3, atol=1e-7)


@pytest.mark.extensions
def test_the_reasons_say_why_a_token_has_no_gradient() -> None:
    def reasons(name: str) -> set[str]:
        traced = trace(CASES[name])
        sampled = [[True] * int(length) for length in torch.bincount(traced.batch.sequence).tolist()]
        return {reason for fields in traced.columns.split(sampled) for reason in fields["mask_reason"]}

    assert reasons("overlong") == {"", "overlong"}
    assert reasons("rejected") == {"", "rejected"}
    assert reasons("sequence_errors") == {"", "sequence_error"}
    assert reasons("kto") == {"", "left_out"}
    assert reasons("everything") == {"", "not_selected"}


def test_a_failure_ends_the_trace_and_is_said_once() -> None:
    class Broken(GRPO):
        def loss_terms(self, outputs: Any, batch: Batch, learner: str = "policy") -> Any:
            raise RuntimeError("broken")

    batch = pack_for(groups_for(GRPO()), GRPO())
    notes: list[str] = []
    traced = TokenTrace(algorithm=Broken(), batch=batch, optimizer_steps=1, note=notes.append)
    outputs = outputs_for(batch, GRPO(), "policy", 0)
    for _ in range(2):
        traced.observe("policy", torch.arange(len(batch.target)), batch, outputs, GRPO().loss)
    assert traced.columns() is None
    assert len(notes) == 1 and "RuntimeError: broken" in notes[0] and "logger.token_columns=none" in notes[0]


def test_the_pairs_of_online_dpo_leave_out_the_others() -> None:
    OnlineDPO = pytest.importorskip("strop.extensions.recorded.preference.online_dpo").OnlineDPO
    traced = trace(OnlineDPO())
    mask = traced.columns.columns["mask"]
    terms = traced.columns.by_term["loss_terms"]["preference"]
    assert bool((terms[~mask] == 0).all()) and bool((terms[mask] != 0).all())
