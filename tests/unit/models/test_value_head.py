"""A critic that is a head on the policy's trunk: what it says, what it trains, how it is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from strop.algorithms.critic import PPO, RETURNS, VALUES
from strop.learner.torch.learner import TorchLearner
from strop.models.network import Network
from strop.models.value_network import ScalarHead, ValueHead
from strop.sampling import Sampling
from strop.types import Batch
from support.learners import make_torch_learner
from support.models import build, copy_gradients
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
