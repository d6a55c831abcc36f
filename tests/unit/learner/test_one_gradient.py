"""Law 1: the gradient does not depend on how a batch is cut.

Everything is float64, so that what is left is the order of additions: measured 5e-15 relative, asserted 1e-9.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from strop.algorithm_factory import all_algorithms
from strop.algorithms.base import TokenOutputs
from strop.algorithms.kl import Kl
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.corrections import DivergenceRejection, GeometricRejection, Importance, Tis
from strop.algorithms.policy_gradient.grpo import GRPO, GroupRelative
from strop.data.splitting import split_mini_batches
from strop.models.network import Network
from strop.sampling import Sampling
from strop.types import Batch, Ending, Group
from support.algorithms import find_part, grpo
from support.drawn import check_draws
from support.learners import make_torch_learner
from support.models import build, copy_gradients, largest_difference, to_float64
from support.rollouts import GroupShape, batch_shapes, make_groups, pack_for, shapes_to_cut, simple_groups, with_columns
from support.sweep import sweep

pytestmark = pytest.mark.slow

EXACT = 1e-9
OPTIONS: dict[str, dict[str, Any]] = {
    "token_mean": {},
    "sequence_mean": {"aggregation": "sequence_mean"},
    "sequence_sum": {"aggregation": "sequence_sum"},
    "constant_length": {"aggregation": "constant_length", "constant_length": 7},
    "kl_in_the_loss": {"kl_penalty": 0.3},
    "kl_in_the_loss_per_sequence": {"kl_penalty": 0.3, "kl_estimator": "k2", "aggregation": "sequence_mean"},
    "kl_in_the_reward": {"kl_penalty": 0.3, "kl_in_reward": True, "kl_estimator": "k1"},
    "sequence_ratio": {"sequence_ratio": True, "aggregation": "sequence_mean"},
    "on_policy_ratio": {"on_policy_ratio": True},
    "clip_higher_and_dual": {"clip_high": 0.28, "dual_clip": 1.5},
    "overlong_filtering": {"overlong_filtering": True},
    "overlong_filtering_per_sequence": {"overlong_filtering": True, "sequence_ratio": True, "aggregation": "sequence_mean"},
    "leave_one_out_unnormalised": {"leave_one_out": True, "normalize": False},
}
# What the catalogue's defaults leave to the user, or what would do nothing on batches as small as these.
NEEDED: dict[str, dict[str, Any]] = {
    "dr_grpo": {"constant_length": 7},
    "gdpo": {"advantage": find_part("decoupled_rewards", weights={"first": 1.0, "second": 0.3})},
    "clip_cov": {"objective": find_part("covariance_clip", share=0.2, lowest=0.1)},
}
CASES: dict[str, PolicyGradient] = {
    **{name: grpo(**options) for name, options in OPTIONS.items()},
    "kl_of_each_token_in_its_reward": GRPO(kl=Kl(weight=0.3, estimator="k1", place="token_reward")),
    "unbiased_kl": GRPO(kl=Kl(weight=0.3, unbiased=True)),
    "ratio_to_the_sampler": GRPO(ratio_to="sampler"),
    "ratio_between_sampler_and_policy": GRPO(ratio_to="between", proximal_weight=0.3, corrections=(Importance(),)),
    "weights_of_whole_rollouts": GRPO(corrections=(Tis(level="sequence"),)),
    "weights_with_a_mean_of_one": GRPO(corrections=(Tis(cap=1.1),), normalize_weights=True),
    "rejected_tokens_in_no_divisor": GRPO(
        corrections=(Tis(cap=1.1), DivergenceRejection(estimator="k2", level="token", high=0.01)), rejected_in_divisor=False
    ),
    "rejected_rollouts_in_no_divisor": GRPO(
        corrections=(GeometricRejection(low=0.9, high=1.1),), rejected_in_divisor=False, aggregation="sequence_mean"
    ),
    "optimal_token_baseline": GRPO(advantage=find_part("optimal_token_baseline") or GroupRelative(), corrections=(Tis(),)),
    "top_entropy": GRPO(selection=find_part("top_entropy", share=0.4)),
    "entropy_bonus_below_a_target": GRPO(entropy_bonus=0.1, entropy_target=100.0),
    "positive_nll": GRPO(positive_nll=0.1),
    **{
        f"algorithm {name}": kind(**NEEDED.get(name, {}))
        for name, kind in all_algorithms().items()
        if issubclass(kind, PolicyGradient)
    },
}


CUTS: dict[str, Any] = {"shapes": batch_shapes, "budget": st.integers(1, 60), "seed": st.integers(0, 5)}
# Each of these is cut into several micro-batches, where a fourth of those above are one rollout, without a gradient, or stay whole.
SURE_CUTS: dict[str, Any] = {"shapes": shapes_to_cut(rollouts=3), "budget": st.integers(8, 48), "seed": st.integers(0, 5)}


class Bench:
    """One float64 model behind a packed and a padded network."""

    def __init__(self, family: str, sampling: Sampling, *, layers: int = 2, chunk: int = 5) -> None:
        self.sampling = sampling
        self.chunk = chunk
        self.model = to_float64(build(family, layers=layers))
        self.packed = Network(self.model, precision=torch.float64, chunk=self.chunk)
        assert self.packed.packed

    def network(self, packed: bool) -> Network:
        return Network(self.model, precision=torch.float64, chunk=self.chunk, packed=packed)

    def gradient(
        self, batch: Batch, algorithm: PolicyGradient, *, budget: int = 10**9, packed: bool = True
    ) -> tuple[dict[str, Tensor], Any]:
        self.model.zero_grad(set_to_none=True)
        learner = make_torch_learner(
            self.network(packed), self.sampling, optimizer="torch.optim.SGD", optimizer_kwargs={"lr": 0.0}, train_tokens=budget
        )
        result = learner.forward_backward(batch, algorithm.loss)
        return copy_gradients(self.model), result

    def batch(self, groups: Sequence[Group], algorithm: PolicyGradient) -> Batch:
        """With shared prefixes, its columns and its credit, surveyed once as a whole."""
        return self.layouts(groups, algorithm)[0]

    def layouts(self, groups: Sequence[Group], algorithm: PolicyGradient) -> tuple[Batch, Batch]:
        """Return the batch with shared prefixes and the one without."""
        shared, alone = (pack_for(groups, algorithm, share_prefixes=share) for share in (True, False))
        assert torch.equal(shared.target, alone.target), "the layouts list predicted tokens in the same order"
        with torch.no_grad():
            outputs = self.packed.outputs(shared, self.sampling)
        return self.complete(shared, outputs, algorithm), self.complete(alone, outputs, algorithm)

    def complete(self, batch: Batch, outputs: Any, algorithm: PolicyGradient) -> Batch:
        batch = with_columns(batch, outputs.logprobs)
        noise = torch.Generator().manual_seed(7)
        for name in sorted(algorithm.requires - set(batch.columns)):
            column = outputs.logprobs.float() + 0.5 * torch.randn(len(batch.target), generator=noise)
            batch = batch.with_column(name, column)
        sampler = outputs.logprobs.float() + 0.2 * torch.randn(len(batch.target), generator=noise)
        batch = algorithm.token_credit(replace(batch, rollout_logprobs=sampler))
        seen = TokenOutputs(outputs.logprobs.float(), outputs.entropy.float())
        return algorithm.prepare_step(batch, seen if algorithm.needs_step_outputs else None)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench("llama", Sampling(temperature=0.8))


@pytest.fixture(scope="module")
def single_layer() -> Bench:
    """What an algorithm makes of its outputs is the same whatever number of layers they come from."""
    return Bench("llama", Sampling(temperature=0.8), layers=1, chunk=16)


def with_what_credit_may_want(group: Group) -> Group:
    """Rewards by name, and a greedy rollout beside the others."""
    rollouts = tuple(
        replace(rollout, rewards={"first": rollout.reward, "second": (7 * rollout.reward) % 1}) for rollout in group.rollouts
    )
    return replace(group, rollouts=rollouts, baseline=replace(rollouts[0], reward=0.4))


def trainable(algorithm: PolicyGradient, shapes: Sequence[GroupShape]) -> bool:
    """Whether this batch has a gradient to compare."""
    return not algorithm.overlong_filtering or any(not member.truncated for shape in shapes for member in shape.rollouts)


def assert_one_gradient(bench: Bench, algorithm: PolicyGradient, shapes: list[GroupShape], budget: int, seed: int) -> None:
    if not trainable(algorithm, shapes):
        return
    groups = [with_what_credit_may_want(group) for group in make_groups(shapes, seed)]
    shared, alone = bench.layouts(groups, algorithm)
    wanted, result = bench.gradient(alone, algorithm, packed=False)  # padded rows through the model's own attention
    layouts = {
        "padded, cut": bench.gradient(alone, algorithm, packed=False, budget=budget),
        "packed": bench.gradient(alone, algorithm),
        "packed, cut": bench.gradient(alone, algorithm, budget=budget),
        "shared prefixes": bench.gradient(shared, algorithm),
        "shared prefixes, cut": bench.gradient(shared, algorithm, budget=budget),
        "shared prefixes read as padded rows, cut": bench.gradient(shared, algorithm, budget=budget, packed=False),
    }
    for layout, (found, other) in layouts.items():
        assert largest_difference(found, wanted) < EXACT, layout
        for name, metric in result.metrics.items():
            # float32 counters (the share of clipped tokens) keep seven digits
            assert other.metrics[name].value == pytest.approx(metric.value, rel=1e-6, abs=1e-7), (layout, name)
        assert torch.allclose(other.outputs.logprobs, result.outputs.logprobs, atol=1e-6), layout
        assert torch.allclose(other.outputs.entropy, result.outputs.entropy, atol=1e-6), layout


OTHERS = [name for name in CASES if name.startswith("algorithm ")][1::2]


@pytest.mark.parametrize("name", sweep(CASES, *(name for name in CASES if name not in OTHERS)))
def test_the_gradient_is_the_same_however_the_batch_is_cut(single_layer: Bench, name: str) -> None:
    check_draws(name, 1, partial(assert_one_gradient, single_layer, CASES[name]), simplest=False, **SURE_CUTS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_the_same_for_many_more_batches(bench: Bench, name: str) -> None:
    check_draws(f"many of {name}", 12, partial(assert_one_gradient, bench, CASES[name]), **CUTS)


@pytest.mark.parametrize("algorithm", CASES.values(), ids=CASES)
def test_there_is_a_gradient_to_compare(single_layer: Bench, algorithm: PolicyGradient) -> None:
    """A loss of zero would be the same under any cut."""
    groups = [with_what_credit_may_want(group) for group in simple_groups((4, (3, 5, 1)), (2, (6, 2)))]
    found, _ = single_layer.gradient(single_layer.batch(groups, algorithm), algorithm)
    assert max(float(tensor.abs().max()) for tensor in found.values()) > 1e-3


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_the_gradient_is_the_same_for_other_families_and_under_filters(family: str) -> None:
    """Mistral's window of 7 is shorter than these sequences; the filters are those of a top-k, top-p request."""
    for sampling in (Sampling(), Sampling(temperature=1.3, top_k=200, top_p=0.99, min_p=1e-4)):
        bench = Bench(family, sampling)
        algorithm = grpo(kl_penalty=0.1)
        groups = simple_groups((9, (6, 1, 11)), (1, (5, 12)), (14, (3,)))
        shared, alone = bench.layouts(groups, algorithm)
        wanted, _ = bench.gradient(alone, algorithm, packed=False)
        for batch in (shared, alone):
            for budget in (10**9, 30, 1):
                found, _ = bench.gradient(batch, algorithm, budget=budget)
                assert largest_difference(found, wanted) < EXACT, (sampling, budget)


def test_the_gradient_is_that_of_the_formula_written_out(bench: Bench) -> None:
    """An oracle that knows no packing, chunks or totals: each rollout through the model alone, the loss token by token."""
    groups = simple_groups((4, (3, 5, 1)), (2, (6, 2)))
    algorithm = grpo(clip_high=0.28, kl_penalty=0.2, kl_input_clamp=None, kl_output_clamp=None)
    batch = bench.batch(groups, algorithm)
    found, result = bench.gradient(batch, algorithm, budget=9)

    bench.model.zero_grad(set_to_none=True)
    bench.model.set_attn_implementation("sdpa")
    total, count = torch.zeros((), dtype=torch.float64), 0
    for group in groups:
        rewards = torch.tensor([rollout.reward for rollout in group.rollouts], dtype=torch.float64)
        spread = ((rewards - rewards.mean()) ** 2).mean().sqrt()
        for rollout, reward in zip(group.rollouts, rewards, strict=True):
            advantage = ((reward - rewards.mean()) / (spread + 1e-6)).float().double()
            logs = (bench.model(input_ids=rollout.tokens()[None]).logits[0] / bench.sampling.temperature).log_softmax(-1)
            for place in range(len(rollout.prompt), rollout.length):
                logprob = logs[place - 1, rollout.tokens()[place]]
                old = batch.columns["policy_logprobs"][count].double()
                reference = batch.columns["reference_logprobs"][count].double()
                ratio = torch.exp(logprob - old)
                surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
                kl = torch.exp(reference - logprob) - 1 - (reference - logprob)
                total = total - surrogate + 0.2 * kl
                count += 1
    loss = total / count
    loss.backward()
    assert count == len(batch.target) == 17
    assert result.metrics["loss"].value == pytest.approx(loss.item(), rel=1e-9)
    assert largest_difference(found, copy_gradients(bench.model)) < EXACT


@pytest.mark.parametrize("options", [{}, {"kl_penalty": 0.2}, {"overlong_filtering": True, "aggregation": "sequence_mean"}])
@pytest.mark.parametrize("budget", [10**9, 25, 1])
def test_reading_idle_rollouts_without_a_backward_pass_changes_nothing(
    bench: Bench, options: dict[str, Any], budget: int
) -> None:
    """Two groups do not vary, one rollout was truncated: with or without the algorithm's word that they have no gradient."""
    groups = simple_groups((4, (3, 5, 1)), (2, (6, 2)), (3, (4, 4)))
    for place in (0, 2):
        groups[place] = replace(groups[place], rollouts=tuple(replace(rollout, reward=1.0) for rollout in groups[place].rollouts))
    first, *others = groups[1].rollouts
    groups[1] = replace(groups[1], rollouts=(replace(first, ending=Ending.LENGTH), *others))
    algorithm = grpo(**options)
    batch = bench.batch(groups, algorithm)
    wanted, result = bench.gradient(batch, algorithm, budget=budget)
    found, other = bench.gradient(replace(batch, zero_gradient=algorithm.zero_gradient(batch)), algorithm, budget=budget)
    assert largest_difference(found, wanted) < EXACT
    assert torch.allclose(other.outputs.logprobs, result.outputs.logprobs, atol=1e-6)
    for name, metric in result.metrics.items():
        assert other.metrics[name].value == pytest.approx(metric.value, rel=1e-6, abs=1e-7), name


@pytest.mark.extensions
@pytest.mark.parametrize("name", sweep(["token_mean", "sequence_mean", "leave_one_out_unnormalised", "kl_in_the_loss",
                                        "overlong_filtering", "weights_with_a_mean_of_one", "optimal_token_baseline", "algorithm gspo",
                                        "algorithm rloo"], "sequence_mean", "weights_with_a_mean_of_one", "algorithm rloo"))  # fmt: skip
def test_the_gradient_with_a_rollout_that_cannot_be_scored_is_that_without_it_however_the_batch_is_cut(
    single_layer: Bench, name: str
) -> None:
    algorithm = CASES[name]
    made = [with_what_credit_may_want(group) for group in simple_groups((4, (3, 5, 1, 2)), (2, (6, 2, 7)), (3, (4, 1)))]
    left_out = {0: {1}, 1: {0, 2}, 2: set()}  # of the first one of four, of the second all but one
    given = [
        replace(group, rollouts=tuple(replace(each, unscored=each.sample in left_out[group.index], reward=0.0)
                                      if each.sample in left_out[group.index] else each for each in group.rollouts)).leave_out_failed()
        for group in made
    ]  # fmt: skip
    alone = [
        replace(group, rollouts=tuple(each for each in group.rollouts if each.sample not in left_out[group.index]))
        for group in made
    ]
    assert [len(group.rollouts) for group in given] == [3, 1, 2] and len(given[1].every_rollout) == 3
    wanted, result = single_layer.gradient(single_layer.batch(alone, algorithm), algorithm)
    for share, budget in itertools.product((True, False), (10**9, 20, 9, 1)):
        batch = single_layer.layouts(given, algorithm)[0 if share else 1]
        found, other = single_layer.gradient(batch, algorithm, budget=budget)
        assert largest_difference(found, wanted) < EXACT, (share, budget)
        assert other.metrics["loss"].value == pytest.approx(result.metrics["loss"].value, rel=1e-9), (share, budget)


def test_a_batch_that_is_all_idle_has_a_gradient_of_zero_and_still_steps_the_optimizer(bench: Bench) -> None:
    groups = [
        replace(group, rollouts=tuple(replace(rollout, reward=1.0) for rollout in group.rollouts))
        for group in simple_groups((4, (3, 5)))
    ]
    algorithm = grpo()
    batch = bench.batch(groups, algorithm)
    found, result = bench.gradient(replace(batch, zero_gradient=algorithm.zero_gradient(batch)), algorithm)
    assert all(float(tensor.abs().max()) == 0 for tensor in found.values())
    assert all(parameter.grad is not None for parameter in bench.model.parameters())
    assert result.metrics["loss"].value == 0


def test_a_mini_batch_divides_by_its_own_counts(bench: Bench) -> None:
    """Each optimizer step of a batch is what it would be if its groups were the whole batch."""
    algorithm = grpo()
    groups = simple_groups((4, (3, 5)), (2, (6, 2)))
    whole = bench.batch(groups, algorithm)
    for part, own in zip(split_mini_batches(whole, 2), groups, strict=True):
        alone = algorithm.token_credit(pack_for([own], algorithm))
        alone = alone.with_column("policy_logprobs", part.batch.columns["policy_logprobs"])
        found, _ = bench.gradient(part.batch, algorithm, budget=7)
        wanted, _ = bench.gradient(alone, algorithm)
        assert largest_difference(found, wanted) < EXACT


def test_a_loss_divided_by_what_it_is_handed_would_be_caught(bench: Bench) -> None:
    """The comparison has teeth: dividing by the micro-batch's own count, the mistake of TRL#6024, moves the gradient by half."""
    algorithm = grpo()
    batch = bench.batch(simple_groups((4, (3, 5, 1)), (2, (6, 2))), algorithm)

    class Wrong(GRPO):
        def loss(self, outputs: Any, batch: Batch) -> Any:
            value, logged = super().loss(outputs, batch)
            return value * batch.totals.tokens / len(batch.target), logged

    found, _ = bench.gradient(batch, Wrong(), budget=9)
    wanted, _ = bench.gradient(batch, Wrong())
    assert largest_difference(found, wanted) > 0.1
