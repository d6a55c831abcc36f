"""Law 1 for PPO's two losses and for distillation: no gradient depends on how a batch is cut.

Everything is float64, so that what is left is the order of additions: measured 4.5e-15 relative, asserted 1e-9.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from strop.algorithms.base import CANDIDATES, Algorithm, LossFn
from strop.algorithms.critic import PPO, VALUES, VAPO, Gae
from strop.algorithms.kl import REFERENCE_LOGPROBS, Kl
from strop.data.splitting import split_micro_batches
from strop.models.network import Network
from strop.models.value_network import ScalarHead, ValueHead, ValueNetwork
from strop.sampling import Sampling
from strop.types import Batch, Group
from support.drawn import check_draws
from support.learners import make_torch_learner
from support.models import VOCABULARY, build, copy_gradients, largest_difference, to_float64
from support.recorded import build_classifier
from support.rollouts import GroupShape, batch_shapes, make_groups, pack_for, shapes_to_cut, simple_groups

EXACT = 1e-9


def distilled() -> dict[str, Algorithm]:
    """Distillation from a teacher, where the extension is there."""
    if find_spec("strop.extensions") is None:
        return {}
    from strop.extensions.distillation.distillation import Distillation, ReverseKl, TopKDistillation

    return {
        "distillation": Distillation(),
        "distillation and rewards": Distillation(advantage=ReverseKl(reward_weight=0.5), advantage_low=-2.0),
        "forward": TopKDistillation(kl_type="forward"),
        "reverse": TopKDistillation(kl_type="reverse", outside="renormalise"),
        "mixed": TopKDistillation(kl_type="mixed", aggregation="sequence_mean"),
        "jsd": TopKDistillation(kl_type="jsd", beta=0.3, aggregation="constant_length", constant_length=7),
    }


POLICY: dict[str, Algorithm] = {
    "ppo": PPO(),
    "ppo, its rewards less a kl": PPO(kl=Kl(weight=0.2, estimator="k1", place="token_reward"), overlong_filtering=True),
    "ppo, a kl in the loss, per sequence": PPO(kl=Kl(weight=0.2), aggregation="sequence_mean", advantage=Gae(whiten=False)),
    "vapo": VAPO(),
    **distilled(),
}
VALUE: dict[str, PPO] = {
    "clipped": PPO(value_clip=0.5, value_scale=0.4),
    "not clipped": PPO(value_clip=None, advantage=Gae(lambda_value=1.0, gamma=0.9)),
    "overlong filtering": PPO(overlong_filtering=True),
}


CUTS: dict[str, Any] = {"shapes": batch_shapes, "budget": st.integers(1, 60), "seed": st.integers(0, 5)}
SURE_CUTS: dict[str, Any] = {"shapes": shapes_to_cut(rollouts=3), "budget": st.integers(8, 48), "seed": st.integers(0, 5)}


def complete(batch: Batch, algorithm: Algorithm, seed: int) -> Batch:
    """With every column, credit and survey, as the loop makes it; the columns follow from the tokens' places alone."""
    generator = torch.Generator().manual_seed(seed)
    count = len(batch.target)
    columns = {
        "policy_logprobs": batch.rollout_logprobs + 0.1 * torch.randn(count, generator=generator),
        REFERENCE_LOGPROBS: batch.rollout_logprobs + torch.randn(count, generator=generator),
        "teacher_logprobs": batch.rollout_logprobs + torch.randn(count, generator=generator),
        VALUES: torch.randn(count, generator=generator),
        CANDIDATES: torch.rand(count, VOCABULARY, generator=generator).topk(4).indices,
        "teacher_candidates": torch.randn(count, VOCABULARY, generator=generator).log_softmax(-1)[:, :4],
    }
    if "teacher_candidates" not in algorithm.requires:
        columns = {name: column for name, column in columns.items() if name not in (CANDIDATES, "teacher_candidates")}
    return algorithm.prepare_step(algorithm.token_credit(batch.with_columns(columns)), None)


class Bench:
    """A float64 network of one kind, made anew for each layout: attention is the model's own or that of packed rows."""

    def __init__(self, model: Any, network: Callable[[bool], Any]) -> None:
        self.model = model
        self.network = network

    def gradient(self, batch: Batch, loss: LossFn, *, packed: bool, budget: int = 10**9) -> tuple[dict[str, Tensor], Any]:
        self.model.zero_grad(set_to_none=True)
        learner = make_torch_learner(
            self.network(packed),
            Sampling(temperature=0.8),
            optimizer="torch.optim.SGD",
            optimizer_kwargs={"lr": 0.0},
            train_tokens=budget,
        )
        result = learner.forward_backward(batch, loss)
        return copy_gradients(self.model), result.metrics

    def compare(self, groups: Sequence[Group], algorithm: Algorithm, loss: LossFn, budget: int, seed: int) -> None:
        """Padded, packed and shared, whole and cut: one gradient, and the same metrics."""
        shared, alone = (complete(pack_for(groups, algorithm, share_prefixes=share), algorithm, seed) for share in (True, False))
        wanted, metrics = self.gradient(alone, loss, packed=False)
        layouts = {
            "padded, cut": self.gradient(alone, loss, packed=False, budget=budget),
            "packed, cut": self.gradient(alone, loss, packed=True, budget=budget),
            "shared prefixes": self.gradient(shared, loss, packed=True),
            "shared prefixes, cut": self.gradient(shared, loss, packed=True, budget=budget),
        }
        for layout, (found, measured) in layouts.items():
            assert largest_difference(found, wanted) < EXACT, layout
            for name, metric in metrics.items():
                assert measured[name].value == pytest.approx(metric.value, rel=1e-6, abs=1e-7), (layout, name)


def language_model() -> Bench:
    model = to_float64(build("llama"))
    return Bench(model, lambda packed: Network(model, precision=torch.float64, chunk=5, packed=packed))


def critic() -> Bench:
    model = to_float64(build_classifier("llama"))
    return Bench(model, lambda packed: ValueNetwork(model, precision=torch.float64, packed=packed))


def value_head() -> Bench:
    trunk, head = to_float64(build("llama")), ScalarHead(32)
    torch.nn.init.normal_(head.score.weight, generator=torch.Generator().manual_seed(0))
    return Bench(head, lambda packed: ValueHead(Network(trunk, precision=torch.float64, packed=packed), head))


@pytest.fixture(scope="module")
def policy() -> Bench:
    return language_model()


@pytest.fixture(scope="module", params=[critic, value_head], ids=["a critic of its own", "a head on the policy"])
def values(request: pytest.FixtureRequest) -> Bench:
    made: Bench = request.param()
    return made


def counts(algorithm: Algorithm, shapes: Sequence[GroupShape]) -> bool:
    filtered = bool(getattr(algorithm, "overlong_filtering", False))
    return not filtered or any(not member.truncated for shape in shapes for member in shape.rollouts)


def compare_cuts(bench: Bench, algorithm: Algorithm, loss: LossFn, shapes: list[GroupShape], budget: int, seed: int) -> None:
    if counts(algorithm, shapes):
        bench.compare(make_groups(shapes, seed), algorithm, loss, budget, seed)


@pytest.mark.parametrize("name", POLICY)
def test_the_policys_gradient_is_the_same_however_the_batch_is_cut(policy: Bench, name: str) -> None:
    check_draws(name, 1, partial(compare_cuts, policy, POLICY[name], POLICY[name].loss), simplest=False, **SURE_CUTS)


@pytest.mark.parametrize("name", VALUE)
def test_the_critics_gradient_is_the_same_however_the_batch_is_cut(values: Bench, name: str) -> None:
    check_draws(name, 1, partial(compare_cuts, values, VALUE[name], VALUE[name].value_loss), simplest=False, **SURE_CUTS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", POLICY)
def test_the_policys_gradient_is_the_same_for_many_more_batches(policy: Bench, name: str) -> None:
    check_draws(name, 12, partial(compare_cuts, policy, POLICY[name], POLICY[name].loss), **CUTS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", VALUE)
def test_the_critics_gradient_is_the_same_for_many_more_batches(values: Bench, name: str) -> None:
    check_draws(name, 12, partial(compare_cuts, values, VALUE[name], VALUE[name].value_loss), **CUTS)


@pytest.mark.parametrize("budget", [10**9, 25, 1])
def test_whitened_credit_is_that_of_the_whole_batch_however_it_is_cut(budget: int) -> None:
    """Credit comes before any cut: no micro-batch whitens by itself."""
    batch = complete(pack_for(simple_groups((4, (3, 5, 1)), (2, (6, 2))), PPO()), PPO(), 0)
    for part in split_micro_batches(batch, budget):
        assert torch.equal(part.batch.advantages, batch.advantages[part.index])
        assert torch.equal(part.batch.column("returns"), batch.column("returns")[part.index])
