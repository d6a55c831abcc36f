"""The loss on held-out data: the algorithm's own, exact over all of it, whatever the micro-batches."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from strop.algorithms.base import Algorithm, Outputs
from strop.algorithms.kl import REFERENCE_LOGPROBS
from strop.extensions.recorded.preference.referenced import DPO
from strop.extensions.recorded.preference.unpaired import KTO
from strop.extensions.recorded.recorded_scores import LossValidator
from strop.extensions.recorded.supervised import SFT, RewardModel
from strop.learner.client import ColumnSources, LogprobColumn
from strop.learner.torch.learner import TorchLearner
from strop.learner.torch.scorer import NetworkScorer
from strop.models.network import Network
from strop.models.value_network import ValueNetwork
from strop.sampling import Sampling
from strop.types import Batch, Ending, Group
from support.clients import learner_client, scorer_client
from support.models import build, copy_gradients
from support.recorded import build_classifier, make_learner, random_groups, train_steps
from support.rollouts import make_group, make_rollout, pack_for

GROUPS = random_groups(7)


def learner_for(algorithm: Algorithm, tokens: int = 30) -> TorchLearner:
    ends = algorithm.predict == "last_token"
    network = ValueNetwork(build_classifier("llama")) if ends else Network(build("llama"))
    return make_learner(network, algorithm, score_tokens=tokens)


def reference() -> NetworkScorer:
    return NetworkScorer(Network(build("llama", seed=1)), Sampling(), score_tokens=50)


def validation(algorithm: Algorithm, learner: TorchLearner, groups: Sequence[Group] = GROUPS) -> LossValidator:
    return LossValidator(
        groups=groups,
        algorithm=algorithm,
        learner=learner_client(learner),
        columns=ColumnSources(
            algorithm.requires, {REFERENCE_LOGPROBS: LogprobColumn(REFERENCE_LOGPROBS, scorer_client(reference()))}
        ),
    )


def measured(validation: LossValidator, step: int = 0) -> dict[str, float]:
    found = asyncio.run(validation.evaluate(step))
    assert all(name.startswith("validation/") for name in found)
    assert found.pop("validation/seconds") > 0
    return found


def test_the_loss_is_the_mean_over_every_token_of_the_validation_data() -> None:
    learner = learner_for(SFT())
    found = measured(validation(SFT(), learner))
    learner.network.use_native_attention()  # type: ignore[attr-defined]
    total, count = 0.0, 0
    for group in GROUPS:
        for rollout in group.rollouts:
            with torch.no_grad():
                logs = learner.network.model(input_ids=rollout.tokens()[None]).logits[0].log_softmax(-1)
            for place in range(len(rollout.prompt), rollout.length):
                total -= float(logs[place - 1, rollout.tokens()[place]])
                count += 1
    assert found == {
        "validation/loss": pytest.approx(total / count, rel=1e-5),
        "validation/nll": pytest.approx(total / count, rel=1e-5),
        "validation/examples": 7.0,
        "validation/examples_left_out": 0.0,
    }


@pytest.mark.parametrize("algorithm", [SFT(), DPO(sft_weight=0.1), KTO(), RewardModel()], ids=lambda kind: type(kind).__name__)
def test_it_does_not_depend_on_the_micro_batches_and_leaves_no_gradient(algorithm: Algorithm) -> None:
    wanted = measured(validation(algorithm, learner_for(algorithm, tokens=10**6)))
    for tokens in (1, 25):
        learner = learner_for(algorithm, tokens)
        assert measured(validation(algorithm, learner)) == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        assert not any(bool(grad.any()) for grad in copy_gradients(learner.model).values())


def test_it_follows_the_policy_and_asks_the_reference_once() -> None:
    class Counting(LogprobColumn):
        calls = 0

        async def columns(self, batch: Batch, groups: Sequence[Group]) -> Mapping[str, Tensor]:
            Counting.calls += 1
            return await super().columns(batch, groups)

    algorithm = DPO()
    learner = learner_for(algorithm)
    frozen = Counting(REFERENCE_LOGPROBS, scorer_client(NetworkScorer(Network(build("llama")), Sampling(), score_tokens=50)))
    held = LossValidator(
        groups=GROUPS,
        algorithm=algorithm,
        learner=learner_client(learner),
        columns=ColumnSources(algorithm.requires, {REFERENCE_LOGPROBS: frozen}),
    )
    before = measured(held)
    assert before["validation/loss"] == pytest.approx(math.log(2), abs=1e-5)
    train_steps(learner, algorithm, GROUPS, 10, [frozen])
    after = measured(held, 10)
    assert after["validation/loss"] < before["validation/loss"] - 0.1
    assert Counting.calls == 2, "once by the validation, once by the training"


def test_the_reference_point_of_kto_is_measured_anew() -> None:
    learner = learner_for(KTO())
    held = validation(KTO(), learner)
    before = measured(held)["validation/reference_point"]
    with torch.no_grad():
        for parameter in learner.parameters:
            parameter.mul_(1.02)
    assert measured(held)["validation/reference_point"] != pytest.approx(before, abs=1e-6)


def failed(index: int) -> Group:
    return make_group(replace(make_rollout([]), ending=Ending.ERROR, error="it has 9 tokens, and at most 8 fit"), index=index)


def test_examples_with_errors_are_left_out_and_counted() -> None:
    learner = learner_for(SFT())
    wanted = measured(validation(SFT(), learner))
    found = measured(validation(SFT(), learner, [failed(0), *GROUPS, failed(9)]))
    assert found == {**wanted, "validation/examples_left_out": 2.0}
    with pytest.raises(ValueError, match="none of the 2 validation examples can be used: it has 9 tokens"):
        validation(SFT(), learner, [failed(0), failed(1)])
    with pytest.raises(ValueError, match="none of the 0 validation examples"):
        validation(SFT(), learner, [])


def test_what_a_learner_says_of_a_whole_batch_is_what_was_measured() -> None:
    """Outputs come back for every place, so that whoever measures may look at them."""
    algorithm = RewardModel()
    learner = learner_for(algorithm)
    batch = pack_for(GROUPS, algorithm)
    result = learner.evaluate_loss(batch, algorithm.loss)
    scored: Outputs = learner.score(batch)
    assert torch.allclose(result.outputs.values, scored.values)  # type: ignore[union-attr]
