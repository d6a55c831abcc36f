"""Where Strop and a peer are not the same by definition: both numbers at one point, and the sentence that says why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from conformance.cases import STEPS
from conformance.compose import part, policy_gradient
from conformance.harness import packed, through_strop
from numerics.sections import Numbers, Row, Section, default_type
from strop.algorithms.kl import Kl, kl_estimate
from strop.algorithms.policy_gradient.parts import GroupRewards
from strop.sampling import Sampling, filtered_logits
from support.beside_trl import through_grpo_trainer

LONE = [1.0] + [0.0] * 15


def credit(rewards: Sequence[float], **options: object) -> float:
    """Strop's credit of the first rollout."""
    group = GroupRewards(
        rewards=torch.tensor(rewards, dtype=torch.float64), lengths=torch.ones(len(rewards), dtype=torch.float64)
    )
    return float(part("group_relative", **options).rollout_advantages(group)[0])


def scaled(rewards: Sequence[float], eps: float) -> float:
    """The credit of the first rollout by the deviation with Bessel's correction."""
    values = torch.tensor(rewards, dtype=torch.float64)
    return float((values[0] - values.mean()) / (values.std() + eps))


def lone_success() -> Numbers:
    return credit(LONE, leave_one_out=True), credit(LONE, leave_one_out=True, deviation="others")


def deviation_of_four() -> Numbers:
    return credit([1.0, 0.0, 0.0, 0.0]), scaled([1.0, 0.0, 0.0, 0.0], 1e-6)


def small_rewards() -> Numbers:
    rewards = [0.001, 0.0, 0.0, 0.0]
    return credit(rewards, deviation="unbiased"), scaled(rewards, 1e-4)


def overlong() -> Numbers:
    shaping = part("soft_overlong", max_length=10, buffer=4, penalty=1.0)
    found = shaping.shape(torch.zeros(1, dtype=torch.float64), torch.tensor([20.0]), torch.tensor([True]))
    return float(found[0]), -(20 - (10 - 4)) / 4


def beside_trl(step: str, theirs: dict[str, Any], *, gradient: bool = False, **ours: Any) -> Numbers:
    """The loss of a step, or its gradient in the first token's log-probability."""
    with default_type(torch.float64):
        found = through_strop(policy_gradient(**ours), STEPS[step], given=True)
        wanted = through_grpo_trainer(STEPS[step], theirs)
    if gradient:
        return float(found.gradients["logprobs"][0]), float(wanted.gradients["logprobs"][0])
    return found.value, wanted.value


def cispo_on_policy() -> Numbers:
    return beside_trl("on policy", {"loss_type": "cispo", "epsilon_high": 0.2}, objective=part("cispo", high=0.2))


def vespo_of_a_sampler() -> Numbers:
    return beside_trl("random", {"loss_type": "vespo"}, objective=part("gamma_weight"))


def gradient_of_kl() -> Numbers:
    free = Kl(weight=0.3, input_clamp=None, output_clamp=None)
    return beside_trl("random", {"beta": 0.3, "use_bias_correction_kl": True}, gradient=True, kl=free)


def micro_batches() -> Numbers:
    """Losses of 1 (two rollouts of one token, together) and of 0 (one rollout of six tokens)."""
    return 2 / 8, (2 / 2 + 0 / 6) / 2


def far_reference() -> Numbers:
    kl = Kl()
    clamps = {"input_clamp": kl.input_clamp, "output_clamp": kl.output_clamp}
    return float(kl_estimate(torch.tensor([-31.0]), torch.tensor([-1.0]), "k3", **clamps)), math.exp(30) - 30 - 1


def kl_to_go() -> Numbers:
    """What the first token's credit loses to a KL term of weight 0.5."""
    found = []
    with default_type(torch.float64):
        for place in ("token_reward", "token_credit"):
            subject = policy_gradient(kl=Kl(weight=0.5, estimator="k2", place=place), advantage=part("batch_whitened"))
            found.append(float(subject.token_credit(packed(STEPS["random"], subject)).advantages[0]))
    return tuple(found)


def filtered() -> Numbers:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    kept = filtered_logits(logits, Sampling(max_new_tokens=1, top_k=2), torch.tensor([0]))
    return float(kept.log_softmax(-1)[0, 0]), math.log(0.4)


ROWS = (
    Row(
        "use_leave_one_out_baseline, credit of a lone success in 16", "NeMo-RL", lone_success,
        "NeMo-RL divides by the deviation of the other rewards, and not at all where they are equal: `deviation: others`",
    ),
    Row(
        "group_relative, credit of one success in four", "NeMo-RL, TRL", deviation_of_four,
        "the deviation of the group as a population; theirs is `deviation: unbiased`",
    ),
    Row("group_relative, unbiased, rewards 0.001 and 0", "TRL", small_rewards, "TRL adds 1e-4 to the deviation, Strop 1e-6"),
    Row(
        "soft_overlong, penalty at twice the limit", "NeMo-RL", overlong,
        "DAPO's penalty ends at the limit; NeMo-RL's line goes on",
    ),
    Row(
        "reinforce_pp, credit of a first token", "NeMo-RL", kl_to_go,
        "a KL term in the reward is part of the return, so of the later tokens too; NeMo-RL's is `place: token_credit`",
    ),
    Row(
        "cispo, range 0.2, loss on policy", "TRL", cispo_on_policy,
        "the weight is at most 1 + 0.2; TRL's is at most epsilon_high, 0.2 itself",
    ),
    Row(
        "vespo, loss where sampler and learner differ", "TRL", vespo_of_a_sampler,
        "the product is relative to the sampler; TRL's to the learner before the update, times a bounded correction",
    ),
    Row(
        "kl in the loss, gradient of a token", "TRL", gradient_of_kl,
        "TRL multiplies the estimate by the ratio unless use_bias_correction_kl is false: `kl.unbiased`",
    ),
    Row(
        "kl in the loss, k3 of a reference 30 nats above", "TRL", far_reference,
        "the log ratio is bounded by 20 nats and the estimate by 10, as NeMo-RL's; null for no bound",
    ),
    Row(
        "token mean over micro-batches of 2 and of 6 tokens", "TRL (bnpo)", micro_batches,
        "a mean over the tokens of the optimizer step, not of the means of its micro-batches",
    ),
    Row(
        "top_k=2, log-probability of a token of 0.4 among 0.4, 0.3, 0.2, 0.1", "TRL", filtered,
        "the learner filters as the sampler did; TRL's does not",
    ),
)  # fmt: skip


def definitions() -> Section:
    return Section(
        "What differs by definition",
        "Inputs for which options of the same name give different numbers. TRL's losses and gradients come from its code, other "
        "numbers of a peer from its formula.",
        ("Strop", "peer"),
        (math.inf, math.inf),
        ROWS,
    )
