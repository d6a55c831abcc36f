"""Do the sizes of parallelism divide models whose config.json is here: heads, layers, and with Megatron Core experts? Has a model that
replays the choices of its routers any?"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from strop.config import RolloutRunConfig, TrainingRunConfig
from strop.config.schema.run_config import DistillationRunConfig, list_trained_models
from strop.learner.megatron.megatron_dims import MegatronModelShape, model_errors
from strop.learner.model_config import ModelConfig
from strop.learner.parallel.dtensor_config import find_stage_problems
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
    if isinstance(config, RolloutRunConfig):
        yield from _check_router_replay(config)
    if isinstance(config, RolloutRunConfig) and config.policy.generation.uses_vllm:
        yield from _check_engine(config)


def _check_learner(key: str, model: ModelConfig) -> Iterator[Problem]:
    sizes = model.dtensor_cfg
    if sizes.pipeline_parallel_size > 1 and (layers := read_layer_count(model.model_name)) is not None:
        yield from find_stage_problems(
            f"{key}.dtensor_cfg",
            model.model_name,
            layers,
            ranks=sizes.pipeline_parallel_size,
            interleaved=sizes.pipeline_parallel_schedule == "Interleaved1F1B",
            layers_per_stage=sizes.pipeline_parallel_layers_per_stage,
        )
    tensor = sizes.tensor_parallel_size
    counts = read_head_counts(model.model_name) if tensor > 1 else None
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


def _check_megatron(key: str, model: ModelConfig) -> Iterator[Problem]:
    values = _read_text_config(model.model_name)
    if not values:
        return
    from strop.learner.megatron.families.find_family import find_family  # needs torch

    try:
        find_family(SimpleNamespace(model_type=values.get("model_type")))
    except ValueError as error:
        yield Problem(f"{key}.megatron_cfg.enabled", str(error))
    if (shape := MegatronModelShape.from_hf(model.model_name, values)) is not None:
        yield from model_errors(model.megatron_cfg, f"{key}.megatron_cfg", shape)


def _check_router_replay(config: RolloutRunConfig) -> Iterator[Problem]:
    name = config.policy.model_name
    values = _read_text_config(name) if config.policy.router_replay.enabled else {}
    if values and "expert" not in json.dumps(values):
        yield Problem("policy.router_replay.enabled", f"found true, but {name} has no experts", "Set it to false.")


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
    values = _read_text_config(name)
    query = values.get("num_attention_heads")
    if not isinstance(query, int) or query < 1:
        return None
    latent = values.get("kv_lora_rank") is not None  # latent attention has keys of every head
    key_value = query if latent else values.get("num_key_value_heads") or query
    return HeadCounts(query, key_value) if isinstance(key_value, int) and key_value > 0 else None


def read_layer_count(name: str) -> int | None:
    """Return the number of decoder layers of a local model, from its config.json; None where that does not say."""
    layers = _read_text_config(name).get("num_hidden_layers")
    return layers if isinstance(layers, int) and layers > 0 else None


def _read_text_config(name: str) -> Mapping[str, Any]:
    try:
        values = json.loads((Path(name).expanduser() / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    values = values.get("text_config") or values if isinstance(values, Mapping) else {}
    return values if isinstance(values, Mapping) else {}


def _plan_shards_heads(name: str) -> bool:
    from strop.models.loading import shards_attention_heads  # Transformers is asked only where the sizes do not fit

    return shards_attention_heads(name)
