"""What a configuration leaves to the device: the engine of ``generation.backend: auto``, and the size of micro-batches on GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from strop import gpus, packages
from strop.base_config import BaseConfig
from strop.config.policy_checks import check_engine_device, find_budget_obstacle, shares_device
from strop.config.run_checks import find_errors
from strop.config.schema.run_config import (
    EvalRunConfig,
    RolloutRunConfig,
    TrainingRunConfig,
    generation_section,
    list_trained_models,
)
from strop.data.packing_config import GPU_TOKENS, LARGEST_TOKENS
from strop.generation.engine_config import AutoEngine
from strop.learner.model_config import ModelConfig
from strop.problems import Problem

ConfigT = TypeVar("ConfigT", bound=BaseConfig)


def resolve_auto_backend(config: ConfigT, *, has_gpus: bool | None = None) -> ConfigT:
    """Return the configuration with ``backend: auto`` resolved, for a run that samples. Others are returned unchanged.

    ``has_gpus``: whether the machines of the run have GPUs; None: same as this machine.
    """
    if not isinstance(config, RolloutRunConfig | EvalRunConfig):
        return config
    _, generation = generation_section(config)
    return config if generation.backend != "auto" else _with_engine(config, _choose(config, has_gpus))


def _choose(config: TrainingRunConfig | EvalRunConfig, has_gpus: bool | None) -> AutoEngine | None:
    if _device(config) == "cpu" or not (gpus.has_gpu() if has_gpus is None else has_gpus):
        return None
    if not packages.is_installed("vllm"):
        return AutoEngine(reason="vLLM is not installed")
    if has_gpus is None and gpus.sees_mig_slices():
        return AutoEngine(reason=f"{gpus.VISIBLE} names MIG slices, on which vLLM has not been tried", lacking=True)
    from strop.generation.vllm.supported_models import find_missing_model, read_architectures

    model = config.policy.model_name if isinstance(config, TrainingRunConfig) else config.generation.model_name
    if missing := find_missing_model(read_architectures(model)):
        return AutoEngine(reason=f"the installed vLLM has no model of the class {missing}", lacking=True)
    vllm = AutoEngine(name="vllm", reason="a GPU and vLLM are here" if has_gpus is None else "there are GPUs and vLLM")
    known = _find_errors(_with_engine(config, None))
    refused = [problem for problem in _find_errors(_with_engine(config, vllm)) if problem not in known]
    if refused:
        return AutoEngine(reason=f"vLLM refuses {refused[0].key}", detail=f": {refused[0].message}", lacking=True)
    return vllm


def _find_errors(config: TrainingRunConfig | EvalRunConfig) -> list[Problem]:
    device = list(check_engine_device(config, "cuda")) if isinstance(config, RolloutRunConfig) else []
    return [*find_errors(config), *device]


def _device(config: TrainingRunConfig | EvalRunConfig) -> str:
    return config.policy.device if isinstance(config, TrainingRunConfig) else config.generation.device


def _with_engine(config: ConfigT, engine: AutoEngine | None) -> ConfigT:
    if isinstance(config, EvalRunConfig):
        return replace(config, generation=replace(config.generation, auto_engine=engine))
    assert isinstance(config, TrainingRunConfig)
    generation = replace(config.policy.generation, auto_engine=engine)
    return replace(config, policy=replace(config.policy, generation=generation))


def with_gpu_budgets(config: TrainingRunConfig) -> TrainingRunConfig:
    """Return the configuration of a run that trains on GPUs with the token budgets that it leaves to them."""
    models: dict[str, Any] = {name: _fill(config, model) for name, model in list_trained_models(config)}
    return replace(config, **models)


def _fill(config: TrainingRunConfig, model: ModelConfig) -> ModelConfig:
    budgets, default = model.batching, max(GPU_TOKENS, model.max_total_sequence_length)
    if budgets.train_mb_tokens is None and model.train_micro_batch_size is None:
        budgets = replace(budgets, train_mb_tokens="auto" if _explain_default(config, model) is None else default)
    if budgets.logprob_mb_tokens is None and model.logprob_batch_size is None:
        budgets = replace(budgets, logprob_mb_tokens=default)
    section: dict[str, Any] = {model.batching_key: budgets}
    return replace(model, **section)


def _explain_default(config: TrainingRunConfig, model: ModelConfig) -> str | None:
    """Return why the memory of a micro-batch is not measured on a GPU; None if it is."""
    if not model.uses_torch:
        return f"{model.learner.title} measures no memory"
    if isinstance(config, RolloutRunConfig) and config.policy.deterministic:
        return "policy.deterministic cuts every run alike"
    return find_budget_obstacle(config, model)


def describe_micro_batches(config: TrainingRunConfig, *, on_gpu: bool) -> str:
    """Describe the policy's micro-batches, and why they have that size; on a CPU, also those that a GPU would read."""
    model = config.policy
    budget, rollouts, length = model.batching.train_mb_tokens, model.train_micro_batch_size, model.max_total_sequence_length
    when = "when the engine first sleeps" if shares_device(config) else "at the start"
    measured = f"as many tokens as fit into memory, at most {max(LARGEST_TOKENS, length)}, measured {when}"
    if budget == "auto":
        return f"{measured} (policy.{model.batching_key}.train_mb_tokens=auto)"
    if budget is not None:
        return f"at most {budget} tokens (policy.{model.batching_key}.train_mb_tokens)"
    if rollouts is not None:
        return f"at most {model.train_tokens} tokens: policy.train_micro_batch_size = {rollouts} x {length}"
    reason = _explain_default(config, model)
    gpu = measured if reason is None else f"at most {max(GPU_TOKENS, length)} tokens, as {reason}"
    if on_gpu:
        return f"{gpu} (default on a GPU)"
    return f"at most {model.train_tokens} tokens (default on a CPU; on a GPU {gpu})"
