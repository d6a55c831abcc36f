"""Options that save memory or time change no number: recomputation, experts' kernels, uneven stages; and what an installation lacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tests.support.ranks import run_on_ranks

from strop.extensions.megatron.megatron_config import RECOMPUTED, Fp8Config, MegatronConfig, MegatronPeftConfig
from support.megatron_parity import MegatronCase, case, train_with_megatron
from support.needs import needs_megatron
from support.parity import Differences, TrainingResult, compare, make_batch, train
from support.sweep import sweep

needs_megatron()
pytestmark = pytest.mark.slow

FLOAT64 = Differences(loss=3e-7, norm=3e-7, outputs=3e-7, weights=3e-8, metrics=3e-7)  # as without the option
FLOAT32 = Differences(loss=2e-6, norm=2e-6, outputs=2e-6, weights=1e-6, metrics=1e-5)
LATENT: dict[str, Any] = {"family": "deepseek_v3", "dtype": torch.float32, "steps": 1}
EXPERTS: dict[str, Any] = {"family": "qwen3_moe"}
FULL = {"activation_checkpointing": True}


def recompute(*modules: str) -> dict[str, Any]:
    return FULL | {"recompute_granularity": "selective", "recompute_modules": modules}


def made(trained: dict[str, Any], options: dict[str, Any], world: int = 2, **sizes: Any) -> MegatronCase:
    return MegatronCase(case=case(**trained), world=world, sizes=sizes, options=options)


MODULES = [name for name in RECOMPUTED if name != "moe_act"]  # which needs Transformer Engine
KEPT: dict[str, MegatronCase] = {
    "all of latent attention recomputed, stages 2": made(LATENT, recompute(*MODULES), pp=2),
    "shared experts overlapped, experts 2": made(LATENT, {"moe_shared_expert_overlap": True}, ep=2),
    "rows padded for FP8, tensor 2": made(EXPERTS, {}, tp=2, sp=True, ep=2),
    "block, uneven stages": made(
        EXPERTS | {"family": "qwen3_moe_deep"},
        FULL
        | {"model_overrides": {"recompute_method": "block", "recompute_num_layers": 1}}
        | {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 3},
        pp=2,
    ),
}
CASES: dict[str, MegatronCase] = {
    **KEPT,
    **{
        f"{name} recomputed, {trained['family']}": made(trained, recompute(name), pp=2)
        for name in MODULES
        for trained in (LATENT, EXPERTS)
        if name not in ("mla_up_proj", "shared_experts") or trained is LATENT
    },
    "norms recomputed, stages 2 x 2": made(EXPERTS | {"family": "qwen3_moe_deep"}, recompute("layernorm"), pp=2, vp=2),
    "latent attention recomputed, tensor 2": made(LATENT, recompute("mla_up_proj", "layernorm"), tp=2, sp=True, ep=2),
    "two layers at a time": made(EXPERTS, FULL | {"model_overrides": {"recompute_num_layers": 2}}, ep=2),
    **{f"router in {dtype}": made(EXPERTS, {"moe_router_dtype": dtype}, ep=2) for dtype in ("fp32", "fp64", None)},
    **{f"router in {dtype}, latent": made(LATENT, {"moe_router_dtype": dtype}, ep=2) for dtype in ("fp32", "fp64", None)},
    "kernels that are not installed": made(EXPERTS, {"moe_grouped_gemm": True, "moe_permute_fusion": True}, ep=2),
    "experts 2 x 2, tensor 2": made(EXPERTS, {}, 4, tp=2, sp=True, ep=2, etp=2),
    "experts 2 x 2, tensor 4": made(LATENT, {}, 4, tp=4, sp=True, ep=2, etp=2),
    "experts 2 x 2": made(EXPERTS, {}, 4, ep=2, etp=2),
    "experts 4, tensor 2": made(EXPERTS, {}, 4, tp=2, sp=True, ep=4),
    "experts 2, tensor 2, context 2": made(EXPERTS, {}, 4, tp=2, cp=2, sp=True, ep=2),
}


def train_on_rank(rank: int, cases: dict[str, Any]) -> dict[str, TrainingResult]:
    from strop.extensions.megatron import schedule

    found, make_row = {}, schedule.RowSharding.make_row
    for name, (trained, batch) in cases.items():

        def make_padded_row(sharding: Any, *arguments: Any) -> Any:
            sharding.multiple = 16
            return make_row(sharding, *arguments)

        schedule.RowSharding.make_row = make_padded_row if "padded" in name else make_row  # type: ignore[method-assign]
        found[name] = train_with_megatron(trained, batch)
    return found


@cache
def train_together(world: int, kept: bool) -> Callable[[str], Differences]:
    cases = {
        name: (each, make_batch(each.case)) for name, each in CASES.items() if each.world == world and (name in KEPT) == kept
    }
    ranks = run_on_ranks(world, train_on_rank, cases)

    def differences(name: str) -> Differences:
        trained, batch = cases[name]
        single = replace(train(trained.case, batch), tied=[], adapters={})
        return compare([rank[name] for rank in ranks], single, len(batch.target))

    return differences


@pytest.mark.parametrize("name", sweep(CASES))
def test_an_option_leaves_the_numbers_of_the_torch_learner(name: str) -> None:
    found = train_together(CASES[name].world, name in KEPT)(name)
    bound = FLOAT64 if CASES[name].case.dtype == torch.float64 and "fp32" not in name else FLOAT32
    for part in ("loss", "norm", "outputs", "weights", "metrics"):
        assert getattr(found, part) <= getattr(bound, part), (part, found)


def check(family: str, **options: Any) -> Any:
    """Check options for a family's model, as the stages are built, and return Megatron Core's configuration of it."""
    from strop.extensions.megatron.cpu_shim import prepare_megatron

    prepare_megatron("cpu")
    from strop.extensions.megatron.families.find_family import find_family
    from strop.extensions.megatron.models.build_stages import transformer_config
    from support.models import CONFIGS

    hf_config = CONFIGS[family]()
    architecture = find_family(hf_config).architecture(hf_config)
    return transformer_config(architecture, MegatronConfig(enabled=True, **options), torch.float32)


def refuse_on_rank(rank: int, cases: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, str]:
    found = {}
    for name, (family, options) in cases.items():
        with pytest.raises((ValueError, RuntimeError)) as raised:
            check(family, **options)
        found[name] = str(raised.value)
    from strop.extensions.megatron.models.build_stages import check_fp8

    for recipe, capability in (("blockwise", (8, 9)), ("mxfp8", (9, 0)), ("tensorwise", (8, 0))):
        check_fp8(Fp8Config(fp8_recipe=recipe), (10, 0))  # type: ignore[arg-type]
        with pytest.raises(RuntimeError) as raised:
            check_fp8(Fp8Config(fp8_recipe=recipe), capability)  # type: ignore[arg-type]
        found[recipe] = str(raised.value)
    return found


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "moe_act": ("qwen3_moe", recompute("moe_act")),
    "mla_up_proj": ("qwen3_moe", recompute("mla_up_proj")),
    "moe_router_enable_expert_bias: found true": ("qwen3_moe", {"moe_router_enable_expert_bias": True}),
    "moe_router_enable_expert_bias: found false": ("deepseek_v3", {"moe_router_enable_expert_bias": False}),
    "moe_router_bias_update_rate": (
        "deepseek_v3",
        {"moe_router_bias_update_rate": 0.001, "peft": MegatronPeftConfig(enabled=True)},
    ),
    "DeepEP": ("qwen3_moe", {"moe_token_dispatcher_type": "flex"}),
    "moe_enable_deepep": ("qwen3_moe", {"moe_enable_deepep": True}),
    "fp8_cfg.enabled": ("qwen3", {"fp8_cfg": Fp8Config(enabled=True)}),
}
TOO_OLD = {
    "blockwise": "needs Hopper or newer, and this GPU has compute capability 8.9; set it to tensorwise or delayed",
    "mxfp8": "needs Blackwell or newer, and this GPU has compute capability 9.0; set it to tensorwise or delayed or blockwise",
    "tensorwise": "needs Ada, Hopper or newer, and this GPU has compute capability 8.0; set policy.megatron_cfg.fp8_cfg.enabled=false",
}


def test_what_is_not_installed_or_not_in_a_model_is_refused_with_its_key() -> None:
    found = run_on_ranks(1, refuse_on_rank, REFUSED)[0]
    for name in REFUSED:
        assert name in found[name]
    for name, message in TOO_OLD.items():
        assert message in found[name]


def read_deterministic_mode(rank: int) -> list[bool]:
    found = []
    for enabled in (False, True):
        torch.use_deterministic_algorithms(enabled)
        found.append(check("qwen3").deterministic_mode)
    return found


def test_a_deterministic_run_has_megatron_s_deterministic_mode() -> None:
    assert run_on_ranks(1, read_deterministic_mode)[0] == [False, True]


def test_options_that_cannot_work_anywhere_are_errors() -> None:
    for options, key in (
        ({"moe_router_load_balancing_type": "sinkhorn"}, "moe_router_load_balancing_type"),
        (recompute("core_attn", "attention"), "recompute_modules"),
        ({"fp8_cfg": Fp8Config(enabled=True, fp8_param=True)}, "fp8_cfg.fp8_param"),
    ):
        problems = list(MegatronConfig(enabled=True, **options).errors("policy.megatron_cfg"))
        assert [problem.key for problem in problems] == [f"policy.megatron_cfg.{key}"]
