"""The sizes of a Megatron Core layout: what a number of ranks and a model allow."""

from __future__ import annotations

from typing import Any

import pytest

from strop.extensions.megatron.megatron_config import Fp8Config, MegatronConfig
from strop.extensions.megatron.megatron_dims import MegatronDims, model_errors
from strop.models.local_files import ModelShape

SHAPE = ModelShape(name="m", layers=8, heads=12, key_value_heads=2)
EXPERTS = ModelShape(name="m", layers=8, heads=8, key_value_heads=4, experts=6)


def make(**sizes: Any) -> MegatronConfig:
    short = {
        "tensor": "tensor_model",
        "pipeline": "pipeline_model",
        "expert": "expert_model",
        "virtual": "virtual_pipeline_model",
    }
    names = {f"{name}_parallel_size" if (name := short.get(key, key)) in ("context", "expert_tensor", *short.values()) else key: key
             for key in sizes}  # fmt: skip
    return MegatronConfig(enabled=True, **{name: sizes[key] for name, key in names.items()})


def test_ranks_that_no_dimension_takes_read_other_data() -> None:
    dims = MegatronDims.from_config(make(tensor=2, pipeline=2, context=2, sequence_parallel=True), 16)
    assert dims == MegatronDims(tensor=2, pipeline=2, context=2, data=2, sequence=True) and dims.world_size == 16
    assert str(dims) == "Megatron Core, 2 data x 2 stages x 2 context x 2 tensor"


def test_experts_are_on_ranks_of_a_stage_whatever_the_others_are() -> None:
    dims = MegatronDims.from_config(make(tensor=2, pipeline=2, virtual=2, expert=4, expert_tensor=1), 16)
    assert (dims.data, dims.expert_data) == (4, 2)
    assert str(dims) == "Megatron Core, 4 data x 2 stages of 2 parts x 1 context x 2 tensor, experts 4 x 1 ways"


@pytest.mark.parametrize(
    ("sizes", "devices", "key"),
    [
        ({"tensor": 3}, 4, "tensor_model_parallel_size"),
        ({"pipeline": 3}, 4, "pipeline_model_parallel_size"),
        ({"tensor": 2, "context": 4}, 4, "tensor_model_parallel_size"),
        ({"expert": 8}, 4, "expert_model_parallel_size"),
        ({"pipeline": 2, "expert": 4}, 4, "expert_model_parallel_size"),
        ({"expert": 2, "expert_tensor": 4}, 4, "expert_model_parallel_size"),
    ],
)
def test_sizes_that_do_not_divide_the_devices_are_refused(sizes: dict[str, int], devices: int, key: str) -> None:
    (problem,) = make(**sizes).size_errors("policy.megatron_cfg", devices, uses_ray=True)
    assert problem.key == f"policy.megatron_cfg.{key}" and f"the {devices} devices that train" in problem.message
    with pytest.raises(ValueError, match=key):
        MegatronDims.from_config(make(**sizes), devices)


@pytest.mark.parametrize(
    ("sizes", "key", "text"),
    [
        ({"tensor": 5}, "tensor_model_parallel_size", "does not divide the 12 attention heads"),
        ({"tensor": 3}, "tensor_model_parallel_size", "cannot share the 2 key-value heads"),
        ({"pipeline": 3}, "pipeline_model_parallel_size", "3 stages cannot share the 8 layers"),
        ({"pipeline": 16}, "pipeline_model_parallel_size", "16 stages cannot share"),
        ({"pipeline": 4, "virtual": 4}, "pipeline_model_parallel_size", "4 stages of 4 parts each"),
        ({"pipeline": 4, "num_layers_in_first_pipeline_stage": 1}, "pipeline_model_parallel_size", "the 7 layers that"),
        (
            {"pipeline": 2, "num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 4},
            "pipeline_model_parallel_size",
            "have 7 of the 8 layers",
        ),
        (
            {"pipeline": 2, "virtual": 2, "num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 5},
            "num_layers_in_first_pipeline_stage",
            "found 3, which virtual_pipeline_model_parallel_size = 2 does not divide",
        ),
        ({"expert": 2}, "expert_model_parallel_size", "has no experts"),
    ],
)
def test_sizes_that_do_not_divide_a_model_are_refused(sizes: dict[str, int], key: str, text: str) -> None:
    problem, *_ = model_errors(make(**sizes), "k", SHAPE)
    assert problem.key == f"k.{key}" and text in problem.message and problem.fix


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor": 2, "context": 3, "pipeline": 4, "virtual": 2},
        {"tensor": 2, "context": 4},  # 6 heads on a rank: keys and values go around a ring
        {"context": 32},
        {"tensor": 4},  # more ranks than key-value heads
        {"pipeline": 3, "num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 3},
        {"pipeline": 2, "num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 5},
    ],
)
def test_sizes_that_divide_a_model_are_accepted(sizes: dict[str, int]) -> None:
    assert not list(model_errors(make(**sizes), "k", SHAPE))


def test_fewer_layers_than_stages_need_fewer_stages() -> None:
    (problem,) = model_errors(make(pipeline=16), "k", SHAPE)
    assert problem.fix == "Lower the number of stages."
    (problem,) = model_errors(make(pipeline=4, virtual=4), "k", SHAPE)
    assert problem.fix == "Lower the number of stages, or set k.virtual_pipeline_model_parallel_size=1."


def test_experts_need_sequence_parallelism_with_tensor_parallelism() -> None:
    (problem,) = model_errors(make(tensor=2, expert=2), "k", EXPERTS)
    assert problem.key == "k.sequence_parallel" and problem.fix == "Set it to true."


def test_experts_whose_gradients_would_not_be_added_are_refused() -> None:
    (problem,) = model_errors(make(tensor=2, sequence_parallel=True), "k", EXPERTS)
    assert problem.key == "k.expert_tensor_parallel_size" and problem.fix == "Set it to 2, or k.expert_model_parallel_size to 2."
    assert not list(model_errors(make(tensor=2, sequence_parallel=True, expert_tensor=2), "k", EXPERTS))
    assert not list(model_errors(make(tensor=2, sequence_parallel=True, expert=2), "k", EXPERTS))
    (problem,) = model_errors(make(expert=4), "k", EXPERTS)
    assert "does not divide the 6 experts of a layer" in problem.message


def test_the_shape_is_read_of_a_hugging_face_configuration() -> None:
    values = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "num_local_experts": 6}
    assert ModelShape.from_hf("m", {"text_config": values}) == ModelShape(
        name="m", layers=4, heads=8, key_value_heads=2, experts=6
    )
    latent = ModelShape.from_hf("m", {**values, "kv_lora_rank": 16})
    assert latent is not None and latent.key_value_heads == 8
    assert ModelShape.from_hf("m", {"hidden_size": 3}) is None


def test_training_in_fp8_says_what_it_needs() -> None:
    config = MegatronConfig(enabled=True, fp8_cfg=Fp8Config(enabled=True, fp8_recipe="mxfp8"))
    (problem,) = config.warnings("policy.megatron_cfg")
    assert "Transformer Engine and a Blackwell GPU" in problem.message
