"""Micro-batches of a run on GPUs, where their size is left to the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from strop.config.policy_checks import find_budget_obstacle, shares_device
from strop.config.schema.run_config import RolloutRunConfig, TrainingRunConfig, list_trained_models
from strop.data.packing_config import GPU_TOKENS, LARGEST_TOKENS
from strop.learner.model_config import ModelConfig


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
