"""The loss of a user's algorithm is refused before its first optimizer step if its gradient depends on how a batch is cut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop import metrics
from strop.algorithm_factory import all_algorithms
from strop.algorithms.base import Algorithm, TokenOutputs
from strop.algorithms.functional import aggregate
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.corrections import Tis
from strop.algorithms.policy_gradient.grpo import GRPO, Clip
from strop.algorithms.policy_gradient.parts import Correction, Objective
from strop.trainer.loss_check import check_loss
from strop.types import Batch
from support.algorithms import find_part
from support.recorded import random_groups
from support.rollouts import make_groups, pack_for, shapes_to_cut, simple_groups, with_columns
from support.sweep import one_in

NEEDED: dict[str, dict[str, Any]] = {
    "dr_grpo": {"constant_length": 7},
    "clip_cov": {"objective": find_part("covariance_clip", share=0.2, lowest=0.1)},
}
GROUPS = simple_groups((4, (3, 5, 1)), (2, (6, 2)), (3, (2, 2)))


def complete(batch: Batch, algorithm: Algorithm, seed: int = 0) -> tuple[Batch, TokenOutputs]:
    """The batch of an optimizer step and made-up outputs of its tokens."""
    noise = torch.Generator().manual_seed(seed)

    def near(logprobs: torch.Tensor) -> torch.Tensor:
        return logprobs + 0.2 * torch.randn(len(batch.target), generator=noise)

    outputs = TokenOutputs(near(torch.full((len(batch.target),), -2.0)), near(torch.full((len(batch.target),), 1.5)))
    batch = replace(with_columns(batch, outputs.logprobs), rollout_logprobs=near(outputs.logprobs))
    for name in sorted(algorithm.requires - set(batch.columns)):
        batch = batch.with_column(name, near(outputs.logprobs))
    batch = algorithm.prepare_step(algorithm.token_credit(batch), outputs if algorithm.needs_step_outputs else None)
    return replace(batch, zero_gradient=algorithm.zero_gradient(batch)), outputs


def check(algorithm: Algorithm, batch: Batch | None = None, seed: int = 0) -> None:
    batch, outputs = complete(pack_for(GROUPS, algorithm) if batch is None else batch, algorithm, seed)
    check_loss(algorithm, algorithm.losses(10**6)["policy"], batch, outputs)


KINDS = {name: kind for name, kind in all_algorithms().items() if issubclass(kind, PolicyGradient)}
OTHER_ROLLOUTS = {"gdpo", "remax"}  # with named rewards, with a greedy one


@pytest.mark.parametrize("name", one_in(4, sorted(KINDS.keys() - OTHER_ROLLOUTS)))
@given(shapes=shapes_to_cut(rollouts=3), seed=st.integers(0, 50))
@settings(max_examples=12, deadline=None)
def test_an_algorithm_that_keeps_the_rule_is_not_refused(name, shapes, seed):
    mine: Any = type("Mine", (KINDS[name],), {"__module__": "mine"})
    algorithm = mine(**NEEDED.get(name, {}))
    check(algorithm, pack_for(make_groups(shapes, seed), algorithm), seed)


def test_the_loss_of_pairs_is_cut_between_its_groups():
    DPO = pytest.importorskip("strop.extensions.recorded.preference.referenced").DPO
    mine: Any = type("Mine", (DPO,), {"__module__": "mine"})
    check(mine(), pack_for(random_groups(5), mine()))


@dataclass(frozen=True, kw_only=True)
class MeanOfWhatItIsHanded(GRPO):
    def loss(self, outputs: Any, batch: Batch) -> Any:
        value = -(outputs.logprobs * batch.advantages).mean()
        return value, {"loss": metrics.total(value)}


@dataclass(frozen=True, kw_only=True)
class RolloutsOfWhatItIsHanded(GRPO):
    def loss(self, outputs: Any, batch: Batch) -> Any:
        value, logged = super().loss(outputs, batch)
        return value * batch.totals.sequences / batch.num_sequences, logged


@dataclass(frozen=True, kw_only=True)
class CentredInAGroup(GRPO):
    """It compares the rollouts of a group and does not say so."""

    def loss(self, outputs: Any, batch: Batch) -> Any:
        means = torch.zeros(batch.num_groups).index_add(0, batch.group, batch.rewards.float())
        centred = batch.rewards.float() - (means / torch.bincount(batch.group))[batch.group]
        value = -aggregate(outputs.logprobs * centred[batch.sequence], batch)
        return value, {"loss": metrics.total(value)}


@dataclass(frozen=True, kw_only=True)
class WholeGroups(CentredInAGroup):
    whole_groups: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class LargestEntropy(GRPO):
    """The scale of a term depends on the other tokens that are handed over."""

    def loss(self, outputs: Any, batch: Batch) -> Any:
        value, logged = super().loss(outputs, batch)
        return value - aggregate(outputs.entropy / outputs.entropy.max().detach(), batch), logged


@pytest.mark.parametrize("kind", [MeanOfWhatItIsHanded, RolloutsOfWhatItIsHanded, CentredInAGroup, LargestEntropy])
def test_a_loss_that_depends_on_the_cut_is_refused_with_both_norms(kind):
    with pytest.raises(
        ValueError,
        match=rf"the loss of {kind.__name__} depends on how a batch is cut.* norm [\d.e-]+, and in two halves [\d.e-]+\.",
    ) as caught:
        check(kind())
    assert "batch.totals" in str(caught.value) and "whole_groups = True" in str(caught.value)


def test_a_loss_that_compares_a_group_and_says_so_is_not_refused():
    check(WholeGroups(objective=Clip()), pack_for(simple_groups(*[(3, (2, 2, 4))] * 3), WholeGroups()))


# --- parts ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Regularised(Objective):
    """It pulls the policy to the sampler, whatever the credit."""

    def __call__(self, tokens: Any) -> Any:
        return tokens.ratio * tokens.advantages - 0.1 * tokens.sampler_log_ratio.square(), {}


@dataclass(frozen=True, kw_only=True)
class RegularisedClip(Clip):
    """The same, on top of a class that has no gradient without credit."""

    def __call__(self, tokens: Any) -> Any:
        values, columns = super().__call__(tokens)
        return values - 0.1 * tokens.sampler_log_ratio.square(), columns


@dataclass(frozen=True, kw_only=True)
class Promised(RegularisedClip):
    zero_gradient_without_advantage: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Narrow(Clip):
    """Another default and no other formula."""

    low: float = 0.1


@dataclass(frozen=True, kw_only=True)
class WithABonus(GRPO):
    def loss(self, outputs: Any, batch: Batch) -> Any:
        value, logged = super().loss(outputs, batch)
        return value - 0.1 * aggregate(outputs.entropy, batch), logged


def without_credit(algorithm: Algorithm) -> Batch:
    """Two groups, of which the second has equal rewards."""
    first, second = simple_groups((4, (3, 5, 1)), (2, (6, 2)))
    equal = replace(second, rollouts=tuple(replace(rollout, reward=1.0) for rollout in second.rollouts))
    return pack_for([first, equal], algorithm)


@pytest.mark.parametrize("objective", [Regularised(), RegularisedClip()])
def test_an_objective_trains_on_rollouts_without_credit_unless_its_class_says_they_have_no_gradient(objective):
    algorithm = GRPO(objective=objective)
    batch, _ = complete(without_credit(algorithm), algorithm)
    assert batch.zero_gradient is not None and not bool(batch.zero_gradient.any())
    check(algorithm, without_credit(algorithm))


@pytest.mark.parametrize("objective", [Clip(), Narrow()])
def test_the_built_in_objectives_still_leave_them_out(objective):
    batch, _ = complete(without_credit(GRPO(objective=objective)), GRPO(objective=objective))
    assert batch.zero_gradient is not None and batch.zero_gradient.tolist() == [False, False, False, True, True]


@pytest.mark.parametrize("algorithm", [GRPO(objective=Promised()), WithABonus()], ids=["objective", "algorithm"])
def test_a_promise_of_no_gradient_that_does_not_hold_is_refused(algorithm):
    with pytest.raises(ValueError, match=r"has a gradient .* at rollouts that zero_gradient says have none"):
        check(algorithm, without_credit(algorithm))


@dataclass(frozen=True, kw_only=True)
class Returns(Objective):
    what: str

    def __call__(self, tokens: Any) -> Any:
        values = tokens.ratio * tokens.advantages
        return {
            "scalar": (values.mean(), {}),
            "alone": values,
            "columns": (values[:, None], {}),
            "shorter": (values[1:], {}),
            "number": (0.5, {}),
            "no dict": (values, None),
        }[self.what]


@dataclass(frozen=True, kw_only=True)
class OneWeight(Correction):
    def weights(self, mismatch: Any) -> Any:
        return mismatch.log_ratio.exp().mean(), {}


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("scalar", r"a tensor of shape \(\),"),
        ("alone", r"a tensor of shape \(21,\) and no columns"),
        ("columns", r"a tensor of shape \(21, 1\),"),
        ("shorter", r"a tensor of shape \(20,\),"),
        ("number", "float,"),
        ("no dict", r"a tensor of shape \(21,\) and no columns"),
    ],
)
def test_an_objective_that_returns_anything_but_a_value_for_each_token_is_refused(what, found):
    with pytest.raises(
        ValueError, match=rf"Returns.__call__ returned {found}.* there are 21 tokens.*Return one value for each token"
    ):
        check(GRPO(objective=Returns(what=what)))


@pytest.mark.parametrize("normalize", [False, True])
def test_so_is_a_correction(normalize):
    with pytest.raises(ValueError, match=r"OneWeight.weights returned a tensor of shape \(\)"):
        check(GRPO(corrections=(Tis(), OneWeight()), normalize_weights=normalize))
