"""The KL term's gradient through the sampling probability (``score_gradient``), and its place in a token's own credit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from strop.algorithms.base import Plan
from strop.algorithms.critic import PPO
from strop.algorithms.kl import Kl, KlEstimator
from strop.algorithms.policy_gradient.rewards import subtract_kl
from support.rollouts import pack_grpo, simple_groups, with_columns


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_with_the_score_s_gradient_the_expected_gradient_is_that_of_the_kl_divergence(estimator: KlEstimator) -> None:
    """Exactly, over a vocabulary of five tokens that the policy itself samples; without it, it is another one."""
    torch.manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(5, dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    (wanted,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    batch = replace(pack_grpo(simple_groups((1, [5]))), columns={"reference_logprobs": reference})

    def expected(kl: Kl) -> torch.Tensor:
        loss = (logprobs.detach().exp() * kl.estimate(logprobs, batch)).sum()
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    found = expected(Kl(estimator=estimator, score_gradient=True, output_clamp=None))
    assert torch.allclose(found, wanted, atol=1e-14)
    assert float((expected(Kl(estimator=estimator, output_clamp=None)) - wanted).abs().max()) > 0.01


def test_the_value_of_the_term_is_the_same_with_and_without_it() -> None:
    batch = with_columns(pack_grpo(simple_groups((2, [3, 2]))), torch.zeros(5))
    batch = batch.with_column("reference_logprobs", torch.linspace(-30, 0, 5))
    logprobs = torch.full((5,), -1.0)
    assert torch.equal(Kl().estimate(logprobs, batch), Kl(score_gradient=True).estimate(logprobs, batch))


def test_in_a_token_s_credit_the_term_lowers_that_token_alone_before_whitening() -> None:
    baselines = pytest.importorskip("strop.extensions.policy_gradients.baselines")
    BatchWhitened, ReinforcePP = baselines.BatchWhitened, baselines.ReinforcePP
    batch = pack_grpo(simple_groups((2, [3, 2])))
    batch = batch.with_column("reference_logprobs", batch.rollout_logprobs - torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0]))
    kl = Kl(weight=0.5, estimator="k1", place="token_credit")
    found = subtract_kl(kl, batch, BatchWhitened()).advantages - batch.advantages
    assert found.tolist() == pytest.approx([0.0, -0.5, 0.0, 0.0, 0.0], abs=1e-6)
    credit = replace(ReinforcePP(), kl=kl).token_credit(batch).advantages
    assert float(credit.mean()) == pytest.approx(0.0, abs=1e-6) and float(credit[1]) < float(credit[0])


def test_gae_has_no_credit_of_its_own_to_subtract_it_from() -> None:
    said = "\n".join(PPO(kl=Kl(place="token_credit")).validate(Plan()))
    assert "kl.place is token_credit, which GAE would overwrite" in said
