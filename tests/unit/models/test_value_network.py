"""Networks with a scalar head: their scores are the classifier's own, packed or padded, shared or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.algorithms.supervised import SFT, RewardModel
from strop.models.value_network import ValueNetwork, apply_score_layer, get_score_layer
from strop.sampling import Sampling
from strop.types import Batch, Group
from support.models import build, to_float64
from support.recorded import build_classifier, recorded_group
from support.rollouts import pack_for

GROUPS = [
    recorded_group([5, 6, 7], [8, 9, 10], [8, 9]),
    recorded_group([11], [12] * 9, [13, 14], index=1),
    recorded_group([15, 16], [], [17], index=2),
]


def scores(network: ValueNetwork, batch: Batch) -> Tensor:
    with torch.no_grad():
        return network.outputs(batch, Sampling()).values


def by_the_model(model: Any, groups: Sequence[Group], attention: str) -> Tensor:
    """The logits of each rollout alone, through the classifier's own forward pass."""
    model.set_attn_implementation(attention)
    rows = [rollout.tokens()[None] for group in groups for rollout in group.rollouts]
    with torch.no_grad():
        return torch.cat([model(input_ids=row, use_cache=False).logits[:, 0] for row in rows])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt2"])
def test_scores_are_those_of_the_classifier_itself(family: str) -> None:
    model = build_classifier(family)
    network = ValueNetwork(model)
    assert network.packed, "the probe finds that the family reads packed rows"
    found = {
        "shared": scores(network, pack_for(GROUPS, RewardModel())),
        "alone": scores(network, pack_for(GROUPS, RewardModel(), share_prefixes=False)),
        "padded": scores(ValueNetwork(model, packed=False), pack_for(GROUPS, RewardModel())),
    }
    wanted = by_the_model(model, GROUPS, "eager" if family == "gemma2" else "sdpa")  # Gemma 2's softcap is left out by sdpa
    for layout, values in found.items():
        assert values.shape == (6,)
        assert torch.allclose(values, wanted, atol=2e-5), layout


def test_a_critic_has_a_value_at_every_sampled_token() -> None:
    model = to_float64(build_classifier("llama", dtype=torch.float64))
    network = ValueNetwork(model, precision=torch.float64)
    batch = pack_for(GROUPS, SFT())
    found = scores(network, batch)
    assert found.dtype == torch.float64
    model.set_attn_implementation("sdpa")
    place = 0
    for group in GROUPS:
        for rollout in group.rollouts:
            hidden = model.base_model(input_ids=rollout.tokens()[None], use_cache=False).last_hidden_state[0]
            wanted = get_score_layer(model)(hidden).squeeze(-1)
            first = len(rollout.prompt) - 1
            count = rollout.sampled_tokens
            assert torch.allclose(found[place : place + count], wanted[first : first + count].detach(), atol=1e-12)
            place += count


def test_the_head_is_applied_in_float32_under_bfloat16() -> None:
    """bfloat16 keeps three digits, and the scores of a pair may differ in the fourth."""
    network = ValueNetwork(build_classifier("llama"), precision=torch.bfloat16)
    assert scores(network, pack_for(GROUPS, RewardModel())).dtype == torch.float32
    layer = torch.nn.Linear(3, 1, bias=True).bfloat16()
    hidden = torch.randn(5, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = apply_score_layer(layer, hidden)
    assert torch.allclose(found, hidden @ layer.weight.float()[0] + layer.bias.float())


def test_a_model_without_one_label_is_refused() -> None:
    with pytest.raises(ValueError, match="has no linear layer for one label; load it as a sequence classifier"):
        get_score_layer(build("llama"))
