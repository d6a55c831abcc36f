"""float32 masters of bfloat16 weights: no update is lost, gradients add up in float32, and a run continues exactly."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from strop.learner.torch.master_weights import MasterWeights
from strop.models.loading import cast_weights
from support.learners import make_named_optimizer
from support.models import build


def layer(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def masters_of(module: nn.Module) -> MasterWeights:
    return MasterWeights([(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad])


def backward(module: nn.Module, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(7, 6, generator=generator).to(next(module.parameters()).dtype)
    (module(rows).float().square().sum() * scale).backward()


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_the_module_holds_bfloat16_and_the_optimizer_steps_float32() -> None:
    module = layer()
    masters = masters_of(module)
    backward(module, 0)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in masters.parameters} == {torch.float32}
    assert {parameter.grad.dtype for parameter in masters.parameters if parameter.grad is not None} == {torch.float32}
    assert [name for name, _ in masters.named_parameters] == [name for name, _ in module.named_parameters()]
    for (_, master), parameter in zip(masters.named_parameters, module.parameters(), strict=True):
        assert torch.equal(master.to(torch.bfloat16), parameter)
        assert parameter.grad is None, "it moved to the master"


@settings(deadline=None, max_examples=25)
@given(seeds=st.lists(st.integers(0, 10**6), min_size=1, max_size=6), scale=st.sampled_from([1e-6, 1.0, 1e4]))
def test_micro_batches_add_up_in_float32(seeds: list[int], scale: float) -> None:
    """The master's gradient is the exact sum of what each backward pass gave, to float32; bfloat16 sums would be off by 1e-2."""
    module, alone = layer(), layer()
    masters = masters_of(module)
    wanted = [torch.zeros(parameter.shape, dtype=torch.float64) for parameter in alone.parameters()]
    largest = [torch.zeros(parameter.shape, dtype=torch.float64) for parameter in alone.parameters()]
    for seed in seeds:
        backward(module, seed, scale)
        alone.zero_grad(set_to_none=True)
        backward(alone, seed, scale)
        for total, size, parameter in zip(wanted, largest, alone.parameters(), strict=True):
            assert parameter.grad is not None
            total += parameter.grad.double()
            size += parameter.grad.double().abs()
    for master, total, size in zip(masters.parameters, wanted, largest, strict=True):
        assert master.grad is not None
        assert bool(((master.grad.double() - total).abs() <= 1e-6 * size).all())


def test_training_follows_float32_where_bfloat16_alone_does_not() -> None:
    """300 steps of AdamW at 1e-4 with the same gradients: masters end where float32 does, bfloat16 alone stays behind."""
    start = layer()
    exact, kept, alone = layer(torch.float32), layer(), layer()
    exact.load_state_dict(start.state_dict())
    masters = masters_of(kept)
    kwargs = {"lr": 1e-4, "weight_decay": 0.0}
    ours = [list(exact.named_parameters()), masters.named_parameters, list(alone.named_parameters())]
    optimizers = [make_named_optimizer("torch.optim.AdamW", named, kwargs) for named in ours]
    for step in range(300):
        for place, rows in enumerate(zip(*ours, strict=True)):
            gradient = torch.randn(rows[0][1].shape, generator=torch.Generator().manual_seed(100 * step + place)) + 0.5
            for _, parameter in rows:
                parameter.grad = gradient.to(parameter.dtype)
        for optimizer in optimizers:
            optimizer.step()
        masters.write_back()
    distance = {
        name: max((value.float() - wanted).abs().max().item() for value, wanted in zip(found, exact.parameters(), strict=True))
        for name, found in (
            ("masters", masters.parameters),
            ("kept", list(kept.parameters())),
            ("alone", list(alone.parameters())),
        )
    }
    assert distance["masters"] == 0
    assert distance["kept"] < 0.002, "half a bfloat16 step, of weights below 0.5"
    assert distance["alone"] > 0.005


def test_loading_restores_the_modules_weights_too_and_in_place() -> None:
    module, other = layer(seed=1), layer(seed=2)
    masters, target = masters_of(module), masters_of(other)
    places = [parameter.data_ptr() for parameter in other.parameters()]
    target.load_state_dict(masters.state_dict())
    assert equal(state_of(module), state_of(other))
    assert [parameter.data_ptr() for parameter in other.parameters()] == places


def test_with_float32_weights_there_is_nothing_to_keep() -> None:
    module = layer(torch.float32)
    masters = masters_of(module)
    assert all(master is parameter for master, parameter in zip(masters.parameters, module.parameters(), strict=True))
    assert masters.state_dict() == {}
    before = state_of(module)
    masters.write_back()
    masters.load_state_dict({})
    assert equal(state_of(module), before)
    backward(module, 0)
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize(("saved", "ours"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_checkpoint_of_the_other_precision_is_refused_with_the_key(saved: torch.dtype, ours: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"set policy\.weights_dtype as it was"):
        masters_of(layer(ours)).load_state_dict(masters_of(layer(saved)).state_dict())


def test_frozen_weights_have_no_master_and_float32_ones_among_them_are_their_own() -> None:
    """An adapter in float32 over a frozen bfloat16 model."""
    module = layer()
    module[0].requires_grad_(False)
    module[2] = nn.Linear(5, 3).float()
    masters = masters_of(module)
    assert [name for name, _ in masters.named_parameters] == ["2.weight", "2.bias"]
    assert all(master is parameter for master, parameter in zip(masters.parameters, module[2].parameters(), strict=True))
    assert masters.state_dict() == {}


def test_the_hooks_go_with_the_masters() -> None:
    module = layer()
    masters = masters_of(module)
    del masters
    gc.collect()
    backward(module, 0)
    assert all(parameter.grad is not None for parameter in module.parameters()), "gradients stay with the module again"


def test_a_second_learner_on_the_same_parameters_is_refused_at_its_first_gradient() -> None:
    module = layer()
    first, second = masters_of(module), masters_of(module)
    with pytest.raises(RuntimeError, match="two learners have master weights of the same parameters"):
        backward(module, 0)
    assert first.named_parameters and second.named_parameters


def test_a_tied_weight_has_one_master_with_both_of_its_gradients() -> None:
    """Qwen2's output layer is its embedding."""
    exact, rounded = build("qwen2"), build("qwen2")
    for model in (exact, rounded):
        cast_weights(model, torch.bfloat16)
    exact.float()
    masters = masters_of(rounded)
    assert "lm_head.weight" not in dict(masters.named_parameters)
    tokens = torch.arange(12)[None]
    for model in (exact, rounded):
        model(input_ids=tokens).logits.float().square().mean().backward()
    rounded_gradient = dict(masters.named_parameters)["model.embed_tokens.weight"].grad
    wanted = exact.get_input_embeddings().weight.grad
    assert rounded_gradient is not None and bool((rounded_gradient[20:] != 0).any()), "the output layer's part"
    assert torch.nn.functional.cosine_similarity(rounded_gradient.flatten(), wanted.flatten(), dim=0) > 0.999
    assert rounded.lm_head.weight is rounded.get_input_embeddings().weight


def test_rounding_leaves_buffers_and_what_the_model_wants_in_float32_alone() -> None:
    model = build("llama")
    model._keep_in_fp32_modules_strict = {"norm"}
    frequencies = model.model.rotary_emb.inv_freq.clone()
    places = {name: parameter for name, parameter in model.named_parameters()}
    cast_weights(model, torch.bfloat16)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)
    assert model.model.norm.weight.dtype == torch.float32
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert all(parameter is places[name] for name, parameter in model.named_parameters()), "in place: sharing and ties stay"


def test_bfloat16_weights_with_float32_computation_are_refused() -> None:
    from pydantic import ValidationError

    from strop.config.schema.policy_config import PolicyConfig
    from strop.models.tokenizer_config import TokenizerConfig

    assert PolicyConfig(model_name="m", tokenizer=TokenizerConfig(name="m"), weights_dtype="bfloat16").precision == "bfloat16"
    with pytest.raises(ValidationError, match="set precision=bfloat16, or weights_dtype=float32"):
        PolicyConfig(model_name="m", tokenizer=TokenizerConfig(name="m"), weights_dtype="bfloat16", precision="float32")
