"""Plans of tensor parallelism: what they divide, how they are named, and what is refused."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.support.lora import with_random_adapters
from tests.support.models import CONFIGS, build

from strop.learner.parallel.parallel_dims import ParallelDims
from strop.learner.parallel.tensor_plan import check_tensor_plan, find_regions, load_tensor_plan

TWO = ParallelDims(tensor=2)
SEQUENCE = ParallelDims(tensor=2, sequence=True)
MLP = {"layers.*.mlp.gate_proj": "colwise", "layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}


def divided(model: Any, plan: Any = None) -> dict[str, list[str]]:
    """Region -> last parts of the names of its divided layers."""
    return {
        region.name: [layer.name.removeprefix(f"{region.name}.") for layer in region.layers]
        for region in find_regions(model, TWO, plan)
    }


def test_a_models_own_plan_divides_attentions_and_mlps_and_leaves_head_and_experts() -> None:
    attention, mlp = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
    layers = [f"model.layers.{place}" for place in (0, 1)]
    expected = {f"{layer}.{part}": names for layer in layers for part, names in (("self_attn", attention), ("mlp", mlp))}
    assert divided(build("llama")) == expected
    assert divided(with_random_adapters(build("llama"), dim=2)) == expected
    assert divided(build("qwen3_moe")) == {f"{layer}.self_attn": attention for layer in layers}
    assert divided(build("deepseek_v3")) == {"model.layers.0.mlp": mlp, "model.layers.1.mlp.shared_experts": mlp}


def test_a_plan_may_name_layers_from_the_model_or_its_decoder_and_one_layer_apart() -> None:
    whole = {f"model.{pattern}": style for pattern, style in MLP.items()}
    assert divided(build("llama"), whole) == divided(build("llama"), MLP)
    apart = whole | {"model.layers.1.mlp.gate_proj": "colwise_gather_output"}
    styles = [layer.style for region in find_regions(build("llama"), TWO, apart) for layer in region.layers]
    assert styles == ["colwise", "colwise", "rowwise", "colwise_gather_output", "colwise", "rowwise"]


def test_a_plan_is_found_by_its_dotted_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("my_plans")
    module.MLP, module.EMPTY, module.ODD = MLP, {}, {"mlp": 3}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_plans", module)
    assert load_tensor_plan("my_plans:MLP") == load_tensor_plan("my_plans.MLP") == MLP
    own = "transformers.models.llama.configuration_llama:LlamaConfig.base_model_tp_plan"
    assert load_tensor_plan(own)["layers.*.self_attn.o_proj"] == "rowwise"
    for name, reason in {
        "MLP": "is not a name of a plan; set it to module:NAME",
        "my_plans:": "is not a name of a plan",
        "no_such_plans:MLP": "no_such_plans of 'no_such_plans:MLP' cannot be imported .* add its folder to PYTHONPATH",
        "my_plans:MLPS": "'my_plans:MLPS' does not exist .*MLPS",
        "my_plans:EMPTY": "is a dict, not a plan",
        "my_plans:ODD": "is a dict, not a plan",
        "math:pi": "is a float, not a plan",
    }.items():
        with pytest.raises(ValueError, match=f"^policy.dtensor_cfg.custom_parallel_plan: .*{reason}"):
            load_tensor_plan(name)


@pytest.mark.parametrize(
    ("family", "sizes", "plan", "reason"),
    [
        (
            "llama",
            ParallelDims(tensor=3),
            None,
            "tensor_parallel_size 3 does not divide the 4 attention heads of LlamaForCausalLM",
        ),
        ("llama", ParallelDims(tensor=4), None, "4 does not divide the 2 key-value heads .* set it to one of 1, 2"),
        ("llama", ParallelDims(tensor=5), MLP, "5 does not divide the 48 outputs of model.layers.0.mlp.gate_proj"),
        ("phi3", ParallelDims(tensor=3), None, "3 does not divide the 32 inputs of model.layers.0.self_attn.o_proj"),
        (
            "gpt2",
            TWO,
            None,
            "GPT2LMHeadModel has no tensor-parallel plan; name one in policy.dtensor_cfg.custom_parallel_plan",
        ),
        (
            "gpt2",
            TWO,
            {"h.*.mlp.c_fc": "colwise"},
            r"transformer.h.0.mlp.c_fc \(by 'h.\*.mlp.c_fc'\), which is a Conv1D: only linear",
        ),
        ("deepseek_v3", SEQUENCE, None, "does not shard the attention of model.layers.0.self_attn"),
        ("llama", SEQUENCE, MLP, "does not shard the attention of model.layers.0.self_attn.* set sequence_parallel=false"),
        ("llama", TWO, MLP | {"layers.*.mlp.up": "colwise"}, "'layers.*.mlp.up' matches nothing in LlamaForCausalLM"),
        ("llama", TWO, MLP | {"norm": "sequence"}, "gives model.norm .* the style 'sequence', .* supported are colwise, "),
        ("llama", TWO, MLP | {"norm": "colwise"}, "which is a LlamaRMSNorm: only linear layers can be sharded"),
        ("llama", TWO, MLP | {"norm.weight": "colwise"}, "shards model.norm.weight .* which is a parameter"),
        ("llama", TWO, {"layers.*.mlp.up_proj": "colwise"}, "shards only up_proj colwise in model.layers.0.mlp"),
        (
            "llama",
            TWO,
            MLP | {"norm": "replicated_with_grad_allreduce"},
            "gives model.norm the style .* remove it from the plan",
        ),
        ("llama", TWO, {"lm_head": "colwise"}, "the plan of LlamaForCausalLM shards no linear layer"),
        (
            "llama",
            ParallelDims(shard=2, expert=2),
            None,
            "expert_parallel_size is 2 and LlamaForCausalLM has no expert layers",
        ),
        ("qwen3_moe", ParallelDims(shard=3, expert=3), None, "expert_parallel_size 3 does not divide the 4 experts"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_what_to_set(
    family: str, sizes: ParallelDims, plan: dict[str, str] | None, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        check_tensor_plan(build(family), sizes, plan)


def test_regions_inside_one_another_are_refused() -> None:
    nested = MLP | {"layers.*.mlp.gate_proj": "colwise", "layers.*.self_attn.q_proj": "colwise"}
    model = build("llama")
    for layer in model.model.layers:
        layer.self_attn.inner = torch.nn.ModuleDict({"up": torch.nn.Linear(32, 32), "down": torch.nn.Linear(32, 32)})
    nested |= {"layers.*.self_attn.o_proj": "rowwise"}
    nested |= {"layers.*.self_attn.inner.up": "colwise", "layers.*.self_attn.inner.down": "rowwise"}
    with pytest.raises(ValueError, match=r"layers of model.layers.0.self_attn and of model.layers.0.self_attn.inner inside it"):
        check_tensor_plan(model, TWO, nested)


def test_checking_needs_shapes_alone() -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS["llama"]())
    check_tensor_plan(model, SEQUENCE)
