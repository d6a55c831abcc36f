"""Resolve ``generation.backend: auto``: vLLM if there is a GPU and vLLM is installed, unless vLLM does not support the
configuration.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from strop import gpus, packages
from strop.base_config import BaseConfig
from strop.config.policy_checks import check_engine_device
from strop.config.run_checks import find_errors
from strop.config.schema.run_config import (
    EvalRunConfig,
    RolloutRunConfig,
    TrainingRunConfig,
    generation_section,
)
from strop.generation.engine_config import AutoEngine
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
