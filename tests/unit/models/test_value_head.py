"""A critic that is a head on the policy's trunk: what it says, what it trains, how it is saved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.algorithms.critic import PPO, RETURNS, VALUES
from strop.learner.torch.learner import TorchLearner
from strop.models.network import Network
from strop.models.value_network import ScalarHead, ValueHead, ValueNetwork, apply_score_layer, get_score_layer
from strop.sampling import Sampling
from strop.types import Batch, Group
from support.learners import make_torch_learner
from support.models import build, copy_gradients, to_float64
from support.recorded import build_classifier, recorded_group
from support.rollouts import pack_for, simple_groups


def batch_of(seed: int = 0) -> Batch:
    batch = pack_for(simple_groups((4, (3, 5)), (6, (2, 7)), seed=seed), PPO())
    generator = torch.Generator().manual_seed(seed)
    count = len(batch.target)
    return batch.with_columns({VALUES: torch.zeros(count), RETURNS: torch.randn(count, generator=generator)})


def learner_on(trunk: Network, **options: Any) -> TorchLearner:
    chosen = {"optimizer_kwargs": {"lr": 1e-2, "weight_decay": 0.0}, "train_tokens": 20, "max_grad_norm": None, **options}
    return make_torch_learner(ValueHead(trunk), Sampling(), **chosen)


def train(learner: TorchLearner, steps: int = 1) -> list[float]:
    """Losses of so many optimizer steps."""
    losses = []
    for _ in range(steps):
        losses.append(learner.forward_backward(batch_of(), PPO(value_clip=None).value_loss).metrics["loss"].value)
        learner.step()
    return losses


def test_a_new_head_expects_nothing() -> None:
    found = ValueHead(Network(build("llama"))).outputs(batch_of(), Sampling())
    assert found.values.tolist() == [0.0] * 17


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_its_values_are_the_head_of_the_hidden_state_each_token_is_predicted_from(family: str) -> None:
    trunk = Network(build(family))
    network = ValueHead(trunk)
    torch.nn.init.normal_(network.model.score.weight, generator=torch.Generator().manual_seed(1))
    torch.nn.init.constant_(network.model.score.bias, 0.5)
    batch = batch_of()
    found = network.outputs(batch, Sampling(temperature=0.7)).values
    wanted = trunk.hidden(batch) @ network.model.score.weight[0] + 0.5
    assert torch.allclose(found, wanted, atol=1e-5)


def test_only_the_head_is_trained_and_the_policy_feels_nothing() -> None:
    trunk = Network(build("llama"))
    before = {name: tensor.clone() for name, tensor in trunk.model.state_dict().items()}
    learner = learner_on(trunk)
    assert sorted(name for name, _ in learner.model.named_parameters()) == ["score.bias", "score.weight"]
    losses = train(learner, 30)
    assert losses[-1] < 0.5 * losses[0]
    assert all(torch.equal(tensor, before[name]) for name, tensor in trunk.model.state_dict().items())
    assert not any(tensor.any() for tensor in copy_gradients(trunk.model).values())


def test_it_is_saved_alone_and_continues_bit_for_bit(tmp_path: Path) -> None:
    through = learner_on(Network(build("llama")))
    wanted = train(through, 4)
    first = learner_on(Network(build("llama")))
    found = train(first, 2)
    first.save(tmp_path)
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["model.safetensors", "value_head.json"]
    assert (tmp_path / "weights" / "model.safetensors").stat().st_size < 1000
    second = learner_on(Network(build("llama")))
    second.load(tmp_path)
    assert found + train(second, 2) == wanted
    assert all(torch.equal(ours, theirs) for (_, ours), (_, theirs) in zip(second.weights(), through.weights(), strict=True))


def test_a_saved_head_is_a_head_again(tmp_path: Path) -> None:
    learner = learner_on(Network(build("llama")))
    train(learner, 2)
    learner.save(tmp_path, optimizer=False)
    head = ScalarHead.from_pretrained(tmp_path / "weights")
    assert torch.equal(head.score.weight, learner.model.score.weight)  # type: ignore[union-attr]
    found = ValueHead(Network(build("llama")), head).outputs(batch_of(), Sampling())
    assert torch.equal(found.values, learner.score(batch_of()).values)  # type: ignore[union-attr]


def test_a_head_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="reads 7 features and LlamaForCausalLM has 32"):
        ValueHead(Network(build("llama")), ScalarHead(7))


def test_half_precision_trunks_have_a_head_in_full_precision() -> None:
    trunk = Network(build("llama", dtype=torch.bfloat16), precision=torch.bfloat16)
    network = ValueHead(trunk)
    assert network.model.score.weight.dtype == torch.float32
    assert network.outputs(batch_of(), Sampling()).values.dtype == torch.float32


def test_a_head_on_a_trunk_whose_weights_are_yet_to_arrive_has_its_zeros() -> None:
    """As on every rank but the first, which alone loads the policy."""
    critic = ValueHead(Network(build("llama").to("meta"), packed=True))
    assert all(not parameter.is_meta and not parameter.any() for parameter in critic.model.parameters())


# --- Networks with a scalar head: their scores are the classifier's own, packed or padded, shared or not --------------------------


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
    RewardModel = pytest.importorskip("strop.extensions.recorded.supervised").RewardModel
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
    SFT = pytest.importorskip("strop.extensions.recorded.supervised").SFT
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
    RewardModel = pytest.importorskip("strop.extensions.recorded.supervised").RewardModel
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
