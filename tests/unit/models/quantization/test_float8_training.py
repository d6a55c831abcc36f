"""Training in FP8 with torchao, emulated: which layers compute in it, and that the gradient does not depend on the cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from strop import packages
from strop.models.network import Network
from strop.models.quantization.float8_config import Float8Config
from strop.models.quantization.float8_training import convert_to_float8, is_float8
from strop.sampling import Sampling
from support.algorithms import grpo
from support.learners import make_torch_learner
from support.lora import build_with_adapters
from support.models import build, copy_gradients, largest_difference
from support.rollouts import pack_for, simple_groups, with_columns

needs_torchao = pytest.mark.skipif(
    not packages.is_installed("torchao"), reason="torchao is not installed (pip install -e '.[fp8]')"
)
CPU = torch.device("cpu")
TOKENS = torch.arange(1, 40)[None]


def converted(recipe: str = "rowwise_with_gw_hp", family: str = "llama", **options: Any) -> Any:
    model = build(family)
    convert_to_float8(model, Float8Config(enabled=True, recipe_name=recipe, emulate=True, **options), CPU, "policy.fp8")
    return model


def gradient(model: Any, budget: int) -> dict[str, torch.Tensor]:
    """Of a GRPO step in micro-batches of up to ``budget`` tokens."""
    model.zero_grad(set_to_none=True)
    network = Network(model, chunk=5, packed=True)
    algorithm = grpo()
    batch = pack_for(simple_groups((5, (3, 6, 1)), (2, (6, 2)), (9, (4, 4, 4))), algorithm)
    with torch.no_grad():
        batch = with_columns(batch, build_logprobs(network, batch))
    learner = make_torch_learner(
        network, Sampling(), optimizer="torch.optim.SGD", optimizer_kwargs={"lr": 0.0}, train_tokens=budget
    )
    learner.forward_backward(batch, algorithm.loss)
    return copy_gradients(model)


def build_logprobs(network: Network, batch: Any) -> torch.Tensor:
    return network.outputs(batch, Sampling()).logprobs


@needs_torchao
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_a_model_in_fp8_computes_nearly_the_same(recipe: str) -> None:
    model, plain = converted(recipe), build("llama")
    left, right = model(TOKENS).logits, plain(TOKENS).logits
    assert 1e-3 < float((left - right).norm().detach() / right.norm().detach()) < 0.25
    left.square().mean().backward()
    right.square().mean().backward()
    for name, parameter in plain.named_parameters():
        found, expected = dict(model.named_parameters())[name].grad, parameter.grad
        assert found is not None and expected is not None
        assert float((found - expected).norm() / expected.norm()) < 0.5, name


@needs_torchao
def test_the_gradient_of_the_default_recipe_does_not_depend_on_how_groups_are_divided() -> None:
    """Where a group itself is cut, the gradient of its prompt is rounded in each part: a sum of rounded numbers is not a rounded sum."""
    model, wise = converted(), converted("tensorwise")
    assert largest_difference(gradient(model, 30), gradient(model, 10**9)) < 1e-5
    assert largest_difference(gradient(model, 12), gradient(model, 10**9)) > 1e-4
    assert largest_difference(gradient(wise, 30), gradient(wise, 10**9)) > 1e-4  # scales of a micro-batch


@needs_torchao
def test_names_and_weights_stay_those_of_the_plain_model() -> None:
    model, plain = converted(), build("llama")
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(weight, plain.state_dict()[name]) for name, weight in model.state_dict().items())
    assert not is_float8(model.lm_head) and is_float8(model.model.layers[0].mlp.up_proj)


@needs_torchao
def test_layers_named_in_the_filter_stay_in_high_precision() -> None:
    model = converted(filter_fqns=("lm_head", "layers.0.", "o_proj"))
    assert not any(is_float8(module) for module in model.model.layers[0].modules())
    assert is_float8(model.model.layers[1].mlp.up_proj) and not is_float8(model.model.layers[1].self_attn.o_proj)


@needs_torchao
def test_adapters_stay_in_high_precision_and_their_base_does_not() -> None:
    model = build_with_adapters("llama", dim=2, alpha=4)
    convert_to_float8(model, Float8Config(enabled=True, emulate=True), CPU, "policy.fp8")
    kinds = {name: is_float8(module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert not any(found for name, found in kinds.items() if ".lora_" in name)
    assert all(found for name, found in kinds.items() if name.endswith("base_layer"))


@needs_torchao
def test_a_model_without_a_layer_for_fp8_is_refused() -> None:
    with pytest.raises(ValueError, match="no linear layer of LlamaForCausalLM computes in FP8"):
        converted(filter_fqns=("model",))


def test_a_device_without_fp8_is_refused_with_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Float8Config(enabled=True)
    with pytest.raises(ValueError, match=r"not known for cpu; set policy.fp8.emulate=true"):
        convert_to_float8(build("llama"), config, CPU, "policy.fp8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.raises(ValueError, match=r"needs Hopper or newer .* this GPU has 8.9"):
        convert_to_float8(build("llama"), config, torch.device("cuda"), "policy.fp8")


def test_a_configuration_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda name: False)
    problems = list(Float8Config(enabled=True).float8_errors("policy.fp8", "cpu"))
    assert [problem.key for problem in problems] == ["policy.fp8.enabled", "policy.fp8.enabled"]
    assert "pip install -e '.[fp8]'" in problems[0].fix and "emulate=true" in problems[1].fix
    assert not list(Float8Config().float8_errors("policy.fp8", "cpu"))
    assert [problem.key for problem in Float8Config(enabled=True, recipe_name="rowwise").float8_warnings("policy.fp8")] == [
        "policy.fp8.recipe_name"
    ]
