"""Do the sizes of parallelism divide models whose config.json is here: attention heads, and with Megatron Core layers and experts?"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.config import RolloutRunConfig, TrainingRunConfig
from strop.config.schema.run_config import DistillationRunConfig, list_trained_models
from strop.learner.megatron.megatron_dims import MegatronModelShape, model_errors
from strop.learner.model_config import ModelConfig
from strop.problems import Problem


@dataclass(frozen=True)
class HeadCounts:
    """Attention heads of a model, and those of them that have keys and values of their own."""

    query: int
    key_value: int


def find_head_problems(config: TrainingRunConfig) -> Iterator[Problem]:
    """Yield a problem for each number of ranks that cannot share a model's attention heads evenly."""
    models: dict[str, Any] = dict(list_trained_models(config))
    if isinstance(config, DistillationRunConfig):
        models |= {key: teacher for key, teacher in config.all_teachers.items() if teacher.model_name != "self"}
    for key, model in models.items():
        yield from _check_megatron(key, model) if model.megatron_cfg.enabled else _check_learner(key, model)
    if isinstance(config, RolloutRunConfig) and config.policy.generation.uses_vllm:
        yield from _check_engine(config)


def _check_learner(key: str, model: ModelConfig) -> Iterator[Problem]:
    sizes = model.dtensor_cfg
    tensor, context = sizes.tensor_parallel_size, sizes.context_parallel_size
    counts = read_head_counts(model.model_name) if tensor * context > 1 else None
    if counts is None:
        return
    name = f"{key}.dtensor_cfg.tensor_parallel_size"
    shards_heads = tensor > 1 and sizes.custom_parallel_plan is None
    for what, count in (("attention heads", counts.query), ("key-value heads", counts.key_value)):
        if shards_heads and count % tensor and _plan_shards_heads(model.model_name):
            yield Problem(
                name, f"found {tensor}, which does not divide the {count} {what} of {model.model_name}", _divisors(count)
            )
            return
    if counts.query % tensor == 0 and (own := counts.query // tensor) % context:
        message = f"found {context}, which does not divide the {own} attention heads that a rank has of {model.model_name}"
        yield Problem(f"{key}.dtensor_cfg.context_parallel_size", message, _divisors(own))


def _check_megatron(key: str, model: ModelConfig) -> Iterator[Problem]:
    values = read_model_config(model.model_name)
    shape = MegatronModelShape.from_hf(model.model_name, values) if values is not None else None
    if shape is not None:
        yield from model_errors(model.megatron_cfg, f"{key}.megatron_cfg", shape)


def _check_engine(config: RolloutRunConfig) -> Iterator[Problem]:
    """vLLM divides the attention heads; the heads of keys and values may be fewer than its ranks, which then hold copies."""
    size, name = config.policy.generation.vllm_cfg.tensor_parallel_size, config.policy.model_name
    counts = read_head_counts(name) if size > 1 else None
    if counts is not None and (counts.query % size or (counts.key_value % size and size % counts.key_value)):
        heads = f"{counts.query} attention heads ({counts.key_value} key-value heads)"
        message = f"found {size}, by which vLLM cannot divide the {heads} of {name}"
        yield Problem("policy.generation.vllm_cfg.tensor_parallel_size", message, _divisors(counts.query))


def _divisors(count: int) -> str:
    return f"Set it to one of {', '.join(str(number) for number in range(1, count + 1) if count % number == 0)}."


def read_head_counts(name: str) -> HeadCounts | None:
    """Return the heads of a local model that has attention everywhere, from its config.json; None where that does not say."""
    values = read_model_config(name)
    query = values.get("num_attention_heads") if values is not None else None
    if values is None or not isinstance(query, int) or query < 1:
        return None
    latent = values.get("kv_lora_rank") is not None  # latent attention has keys of every head
    key_value = query if latent else values.get("num_key_value_heads") or query
    return HeadCounts(query, key_value) if isinstance(key_value, int) and key_value > 0 else None


def read_model_config(name: str) -> Mapping[str, Any] | None:
    """Return the config.json of a local model, of its language model where it has several; None where there is none."""
    try:
        values = json.loads((Path(name).expanduser() / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    values = values.get("text_config") or values if isinstance(values, Mapping) else None
    return values if isinstance(values, Mapping) else None


def _plan_shards_heads(name: str) -> bool:
    from strop.models.loading import shards_attention_heads  # Transformers is asked only where the sizes do not fit

    return shards_attention_heads(name)
