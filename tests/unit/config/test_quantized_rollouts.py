"""Rollouts in FP8: NeMo-RL's keys, what they mean, and what cannot work."""

from __future__ import annotations

import pytest

from strop import packages
from strop.config import ConfigError, EvalRunConfig, GrpoRunConfig, load_config
from strop.config.policy_checks import check_engine_device
from strop.generation.quantized_rollouts import make_emulation, make_rollout_plan, make_weight_rounding
from strop.runs.run_algorithm import make_run_algorithm
from support.overrides import RUN

VLLM, TORCH = "policy.generation.backend=vllm", "policy.generation.backend=torch"
G, C, Q = "policy.generation.", "policy.generation.vllm_cfg.", "policy.generation.quantization."
FP8 = f"{C}precision=fp8"
CORRECTED = "loss_fn.use_importance_sampling_correction=true"


@pytest.fixture(autouse=True)
def everything_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda package: True)


def load(*overrides: str) -> GrpoRunConfig:
    config = load_config(None, [*RUN, CORRECTED, *overrides], root=GrpoRunConfig).config
    assert isinstance(config, GrpoRunConfig)
    return config


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    (problem,) = caught.value.problems
    return str(problem)


@pytest.mark.parametrize(
    ("overrides", "weights", "inputs"),
    [
        ([FP8], "fp8_block", "fp8_group"),
        ([FP8, f"{C}pow2_weight_scaling_factors=true"], "fp8_block_pow2", "fp8_group"),
        ([FP8, f"{C}pow2_activation_scaling_factors=true"], "fp8_block", "fp8_group_pow2"),
        ([FP8, f"{C}is_mx=true"], "mxfp8", "mxfp8"),
        ([f"{Q}format=mxfp8"], "mxfp8", "mxfp8"),
        ([f"{Q}format=nvfp4", f"{Q}emulate=true"], "nvfp4", None),
    ],
)
def test_nemo_rls_keys_say_the_format(overrides: list[str], weights: str, inputs: str | None) -> None:
    plan = make_rollout_plan(load(VLLM, *overrides).policy.generation)
    assert plan is not None and plan.weights.name == weights
    assert (plan.inputs.name if plan.inputs is not None else None) == inputs


def test_layers_and_the_cache_are_chosen_by_nemo_rls_keys() -> None:
    keys = [f"{C}num_first_layers_in_bf16=1", f"{C}num_last_layers_in_bf16=2", f"{C}quantization_ignored_layer_kws=[q_proj]"]
    generation = load(VLLM, FP8, f"{C}kv_cache_dtype=fp8", *keys).policy.generation
    plan = make_rollout_plan(generation)
    assert plan is not None
    assert (plan.first_layers, plan.last_layers, plan.ignored, plan.fp8_cache) == (1, 2, ("q_proj",), True)
    rounding = make_weight_rounding(generation, "float32")
    assert rounding is not None and rounding.by_engine and str(rounding.dtype) == "torch.bfloat16"


def test_without_a_format_nothing_is_rounded() -> None:
    generation = load(VLLM).policy.generation
    assert make_rollout_plan(generation) is make_weight_rounding(generation, "float32") is None
    assert make_emulation(generation, rounds_weights=True) is None


def test_an_emulating_run_rounds_what_it_sends_and_the_torch_engine_reads_the_same_keys() -> None:
    emulated = load(VLLM, FP8, f"{Q}emulate=true").policy.generation
    rounding = make_weight_rounding(emulated, "float32")
    assert rounding is not None and not rounding.by_engine
    loaded = load_config(None, [*RUN, CORRECTED, TORCH, FP8, f"{Q}emulate=true"], root=GrpoRunConfig)
    assert not [problem for problem in loaded.warnings if "does not read" in problem.message]
    assert isinstance(loaded.config, GrpoRunConfig)
    emulation = make_emulation(loaded.config.policy.generation, rounds_weights=True)
    assert emulation is not None and emulation.rounds_weights and emulation.plan.weights.name == "fp8_block"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([TORCH, FP8], "the torch engine has no kernels for it"),
        ([VLLM, f"{Q}format=nvfp4"], "which Strop does not publish to vLLM"),
        ([VLLM, FP8, f"{C}is_mx=true", f"{C}pow2_weight_scaling_factors=false"], "the scales of MXFP8 are powers of two"),
        ([VLLM, f"{C}is_mx=true"], "precision is"),
        ([VLLM, f"{Q}emulate=true"], "no format is set"),
        ([TORCH, FP8, f"{Q}emulate=true", f"{C}kv_cache_dtype=fp8_e5m2"], "rounds keys and values to E4M3"),
        ([VLLM, FP8, "policy.device=cpu"], "on a CPU, for which vLLM has no kernels of FP8"),
    ],
)
def test_what_cannot_be_quantised_is_refused(overrides: list[str], said: str) -> None:
    assert said in refusal(*overrides)


def test_a_cpu_is_refused_when_the_run_starts_and_not_before() -> None:
    config = load(VLLM, FP8)
    assert list(check_engine_device(config)) == [] == list(check_engine_device(config, "cuda"))
    (problem,) = check_engine_device(config, "cpu")
    assert "emulate=true" in problem.fix
    assert not list(check_engine_device(load(VLLM, FP8, f"{Q}emulate=true"), "cpu"))


def test_a_loss_without_a_correction_is_refused() -> None:
    config = load(VLLM, FP8, "loss_fn.use_importance_sampling_correction=false")
    with pytest.raises(ValueError, match=r"sampled with weights in fp8_block.*use_importance_sampling_correction=true"):
        make_run_algorithm(config)
    make_run_algorithm(load(VLLM, FP8))
    make_run_algorithm(load(VLLM, FP8, "loss_fn.use_importance_sampling_correction=false", "algorithm.ratio_to=sampler"))


def test_an_evaluation_measures_the_weights_as_they_are_trained() -> None:
    with pytest.raises(ConfigError, match="an evaluation measures the weights as they are trained"):
        load_config(
            None,
            ["generation.model_name=m", "env.arithmetic={}", "data.env_name=arithmetic", "generation.vllm_cfg.precision=fp8"],
            root=EvalRunConfig,
        )
