"""Models whose layers differ in heads, or attend to keys and values of earlier layers (Gemma 3n and 4)."""

from __future__ import annotations

import pytest

from strop.generation.torch.model_runner import infer_cache_shape
from strop.learner.parallel.parallel_dims import ParallelDims
from strop.learner.parallel.pipeline.pipeline_stages import PipelineStages
from strop.learner.parallel.tensor_plan import check_tensor_plan
from strop.models.loading import apply_overrides
from strop.models.network import Network, freeze_routers
from support.every_family import build
from support.vision_models import make_vision_config


def test_layers_that_share_keys_have_one_place_in_the_cache_and_smaller_heads_the_beginning_of_their_room() -> None:
    network = Network(build("gemma4"))
    shape = infer_cache_shape(network)
    assert network.packed and (shape.layers, shape.heads, shape.head_size) == (2, 2, 16)
    assert shape.shared == {2: 0, 3: 1} and [shape.place(layer) for layer in range(4)] == [0, 1, 0, 1]


def test_the_heads_of_each_layer_are_divided_by_tensor_ranks() -> None:
    check_tensor_plan(build("gemma4_moe"), ParallelDims(tensor=2))
    with pytest.raises(ValueError, match="does not divide the 1 key-value heads"):
        check_tensor_plan(build("gemma4_moe", num_global_key_value_heads=1), ParallelDims(tensor=2))


def test_a_layer_that_needs_the_keys_of_an_earlier_one_is_not_cut_from_it() -> None:
    PipelineStages(Network(build("gemma4_moe"), packed=True), ParallelDims(pipeline=2))
    network = Network(build("gemma4", hidden_size_per_layer_input=0), packed=True)
    with pytest.raises(
        ValueError, match=r"layers\.2\.self_attn of Gemma4ForCausalLM attends to the keys and values of an earlier"
    ):
        PipelineStages(network, ParallelDims(pipeline=2))


def test_all_weights_of_a_router_are_frozen() -> None:
    names = freeze_routers(build("gemma4_moe"))
    assert {name.partition("router.")[2] for name in names} == {"proj.weight", "scale", "per_expert_scale"}


def test_a_field_of_a_part_of_a_configuration_can_be_changed_alone() -> None:
    config = make_vision_config("gemma4")
    changed = apply_overrides(config, {"text_config": {"sliding_window": 5}})
    assert changed.text_config.sliding_window == 5 and changed.text_config.hidden_size == 64
    with pytest.raises(ValueError, match=r"policy\.hf_config_overrides\.text_config\.window: Gemma4TextConfig has no such field"):
        apply_overrides(config, {"text_config": {"window": 5}})
