"""Builds models with a local config.json without weights (on the meta device), and runs the same checks as after loading.

Checks that need weights or a forward pass are left to the run: whether a model reads packed rows, and whether stages pass hidden
states on unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from strop.config import RolloutRunConfig, TrainingRunConfig
from strop.config.checks.device_counts import count_devices
from strop.config.schema.distillation_config import TeacherConfig
from strop.config.schema.run_config import DistillationRunConfig, RmRunConfig, list_trained_models
from strop.learner.model_config import ModelConfig
from strop.learner.parallel.dtensor_config import DtensorConfig
from strop.learner.policy_extension import policy_extensions
from strop.models.local_files import ModelShape, list_divisors, read_local_config
from strop.problems import Problem
from strop.runs.learner_backend import load_backend
from strop.user_code import describe_error

Check = Callable[[Any], object]  # takes a Network, and raises ValueError


def find_network_problems(config: TrainingRunConfig) -> Iterator[Problem]:
    """Yield why models cannot be divided, adapted or rounded as configured."""
    models: dict[str, ModelConfig | TeacherConfig] = dict(list_trained_models(config))
    if isinstance(config, DistillationRunConfig):
        models |= {key: each for key, each in config.all_teachers.items() if each.model_name != "self" and not each.hosts}
    for key, model in models.items():
        if values := read_local_config(model.model_name):
            yield from load_backend(model.learner).examine(config, key, model, values)
    if isinstance(config, RolloutRunConfig):
        yield from _check_router_replay(config)
    if isinstance(config, RolloutRunConfig) and config.policy.generation.uses_vllm:
        yield from _check_vllm(config)


def examine_torch_model(
    config: TrainingRunConfig, key: str, model: ModelConfig | TeacherConfig, values: Mapping[str, Any]
) -> Iterator[Problem]:
    """Yield why the torch learner cannot divide, adapt or round a model as configured."""
    scores = key == "value" or isinstance(config, RmRunConfig)
    checks = _list_checks(model, count_devices(config).learner_devices)
    if checks or scores or getattr(model, "hf_config_overrides", None) or "quantization_config" in values:
        yield from _ask(key, model, checks, scores=scores, trusted=config.policy.trust_remote_code)


def _check_router_replay(config: RolloutRunConfig) -> Iterator[Problem]:
    name = config.policy.model_name
    values = read_local_config(name) if config.policy.router_replay.enabled else {}
    if values and "expert" not in json.dumps(values):
        yield Problem("policy.router_replay.enabled", f"found true, but {name} has no experts", "Set it to false.")


def _check_vllm(config: RolloutRunConfig) -> Iterator[Problem]:
    """vLLM divides the attention heads; there may be fewer key and value heads than ranks, which then hold copies."""
    size, name = config.policy.generation.vllm_cfg.tensor_parallel_size, config.policy.model_name
    shape = ModelShape.from_hf(name, read_local_config(name)) if size > 1 else None
    if shape is not None and (shape.heads % size or (shape.key_value_heads % size and size % shape.key_value_heads)):
        heads = f"{shape.heads} attention heads ({shape.key_value_heads} key-value heads)"
        message = f"found {size}, by which vLLM cannot divide the {heads} of {name}"
        yield Problem("policy.generation.vllm_cfg.tensor_parallel_size", message, list_divisors(shape.heads))


def _list_checks(model: ModelConfig | TeacherConfig, ranks: int) -> dict[str, Check]:
    """Return the checks of a network, by their key; none for one that is trained whole on one device."""
    checks: dict[str, Check] = {}
    if isinstance(model, ModelConfig) and model.dtensor_cfg.lora_cfg.enabled:
        from strop.models.lora import find_target_layers

        checks["dtensor_cfg.lora_cfg.target_modules"] = lambda network: find_target_layers(
            network.model, model.dtensor_cfg.lora_cfg
        )
    for extension in policy_extensions(model):
        checks |= extension.network_checks()
    return checks | {f"dtensor_cfg.{name}": check for name, check in _list_divisions(model.dtensor_cfg, ranks)}


def _list_divisions(sizes: DtensorConfig, ranks: int) -> Iterator[tuple[str, Check]]:
    """Yield the checks of a network that ranks share, by key."""
    if max(sizes.tensor_parallel_size, sizes.expert_parallel_size, sizes.pipeline_parallel_size) == 1:
        return
    from strop.learner.parallel.expert_parallel import check_experts
    from strop.learner.parallel.parallel_dims import ParallelDims
    from strop.learner.parallel.pipeline.pipeline_stages import PipelineStages
    from strop.learner.parallel.tensor_plan import find_regions, load_tensor_plan

    dims, plan = ParallelDims.from_config(sizes, ranks), sizes.custom_parallel_plan
    if dims.tensor > 1:
        load = partial(load_tensor_plan, plan) if plan is not None else lambda: None
        yield "tensor_parallel_size", lambda network: find_regions(network.model, dims, load())
    yield "expert_parallel_size", lambda network: check_experts(network.model, dims)
    if dims.pipeline > 1:
        yield "pipeline_parallel_size", lambda network: PipelineStages(network, dims)


def _ask(
    key: str, model: ModelConfig | TeacherConfig, checks: Mapping[str, Check], *, scores: bool, trusted: bool
) -> Iterator[Problem]:
    """``scores``: the model is a classifier, a reward model or critic. ``trusted``: a run may execute the model's own code; this
    function does not.
    """
    from strop.models.classifiers import to_classifier_config
    from strop.models.loading import build_on_meta
    from strop.models.network import Network

    options: dict[str, Any] = {"to_classifier": to_classifier_config if scores else None}
    if isinstance(model, ModelConfig):
        options |= {"overrides": model.hf_config_overrides, "dequantize": model.dequantize_base_checkpoint}
    try:
        network = Network(build_on_meta(model.model_name, **options), packed=True)
    except ValueError as error:
        if not (trusted and "trust_remote_code" in str(error)):
            yield Problem(f"{key}.model_name", str(error).removeprefix("policy.model_name: "))
        return
    except Exception as error:  # errors of the model's class, also raised by loading it
        yield Problem(f"{key}.model_name", f"its config.json makes no model here: {describe_error(error)}")
        return
    for name, check in checks.items():
        try:
            check(network)
        except ValueError as error:
            yield Problem(f"{key}.{name}", str(error).removeprefix(f"{key}.{name}: ").removeprefix(f"{name}: "))
