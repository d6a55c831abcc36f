"""Which weights are quantised."""

import pytest
import torch

from strop.models.quantization.number_format import FP8_BLOCK, FP8_GROUP_POW2, NUMBER_FORMATS
from strop.models.quantization.quantization_plan import INPUT_FORMATS, make_plan

LINEARS = [f"model.layers.{layer}.{name}.weight" for layer in range(4) for name in ("self_attn.q_proj", "mlp.down_proj")]
OTHERS = [
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.norm.weight",
    "model.layers.1.input_layernorm.weight",
    "model.layers.1.self_attn.q_norm.weight",
    "model.layers.1.self_attn.q_proj.bias",
    "model.layers.1.mlp.gate.weight",
    "model.layers.1.mlp.shared_expert_gate.weight",
    "model.layers.1.block_sparse_moe.gate.weight",
    "model.layers.1.linear_attn.conv1d.weight",
    "draft.layers.0.mlp.up_proj.weight",
]


def test_linear_layers_of_the_decoder_are_quantised_and_nothing_else() -> None:
    experts = ["model.layers.2.mlp.experts.gate_up_proj", "model.layers.2.mlp.experts.3.up_proj.weight"]
    assert make_plan(FP8_BLOCK).select([*LINEARS, *OTHERS, *experts]) == {*LINEARS, *experts}


def test_first_and_last_layers_and_ignored_ones_stay_as_they_are() -> None:
    plan = make_plan(FP8_BLOCK, first_layers=1, last_layers=1, ignored=("down",))
    assert plan.select(LINEARS) == {"model.layers.1.self_attn.q_proj.weight", "model.layers.2.self_attn.q_proj.weight"}


def test_layers_of_a_vision_tower_are_not_counted_as_layers_of_the_decoder() -> None:
    tower = [f"model.visual.blocks.{number}.mlp.fc1.weight" for number in range(9)]
    found = make_plan(FP8_BLOCK, last_layers=1).select([*LINEARS, *tower])
    assert {name for name in found if "visual" not in name} == set(LINEARS[:-2]) and set(tower) < found


@pytest.mark.parametrize("name", INPUT_FORMATS)
def test_each_token_has_scales_of_its_own(name: str) -> None:
    plan = make_plan(NUMBER_FORMATS[name])
    x = torch.randn(6, 70, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(plan.round_input(x)[2:3], plan.round_input(x[2:3]))
    assert (plan.inputs is None) == (name == "nvfp4")


def test_scales_of_inputs_may_be_powers_of_two() -> None:
    assert make_plan(FP8_BLOCK, pow2_inputs=True).inputs is FP8_GROUP_POW2
