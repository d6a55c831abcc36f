"""Learners and optimizers of a test, by keywords instead of a whole configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter
from torch.optim import Optimizer

from strop.data.packing_config import SequencePackingConfig
from strop.learner.model_config import ModelConfig
from strop.learner.parallel.dtensor_config import DtensorConfig
from strop.learner.torch.learner import TorchLearner
from strop.learner.torch.optimizer import NamedParameters, make_optimizer
from strop.learner.torch.optimizer_config import EmaConfig, OptimizerConfig, OptimizerGroupConfig, SchedulerConfig
from strop.models.routing.router_config import RouterLossConfig
from strop.models.tokenizer_config import TokenizerConfig
from strop.sampling import Sampling


def make_model_config(
    *,
    kind: type[ModelConfig] = ModelConfig,
    optimizer: str = "torch.optim.AdamW",
    optimizer_kwargs: Mapping[str, Any] | None = None,
    no_decay: Sequence[str] = (),
    parameter_groups: Sequence[OptimizerGroupConfig] = (),
    schedule: SchedulerConfig | None = None,
    average_decay: float | None = None,
    average_start: int = 0,
    max_grad_norm: float | None = 1.0,
    train_tokens: int = 8192,
    score_tokens: int = 8192,
    activation_checkpointing: bool | float = False,
    activation_offload: bool = False,
    compile_layers: bool = False,
    router_losses: RouterLossConfig | None = None,
) -> ModelConfig:
    """``kind``: of a model that an extension has keys of. ``average_decay``: None is without a moving average of the weights."""
    kwargs = {"lr": 5e-6, "weight_decay": 0.01} if optimizer_kwargs is None else dict(optimizer_kwargs)
    return kind(
        model_name="model",
        compile=compile_layers,
        router_losses=router_losses or RouterLossConfig(),
        tokenizer=TokenizerConfig(name="model"),
        optimizer=OptimizerConfig(name=optimizer, kwargs=kwargs, no_decay=tuple(no_decay), groups=tuple(parameter_groups)),
        scheduler=schedule,
        ema=EmaConfig(enabled=average_decay is not None, decay=average_decay or 0.0, start_step=average_start),
        max_grad_norm=max_grad_norm,
        sequence_packing=SequencePackingConfig(train_mb_tokens=train_tokens, logprob_mb_tokens=score_tokens),
        dtensor_cfg=DtensorConfig(activation_checkpointing=activation_checkpointing, activation_offload=activation_offload),
    )


def make_torch_learner(
    network: Any,
    sampling: Sampling,
    parallelism: Any = None,
    *,
    whole_groups: bool = False,
    total_steps: int | None = None,
    **options: Any,
) -> TorchLearner:
    """``options``: keywords of ``make_model_config``."""
    config = make_model_config(**options)
    return TorchLearner(network, config, sampling, whole_groups=whole_groups, total_steps=total_steps, parallelism=parallelism)


def make_named_optimizer(name: str, parameters: NamedParameters, kwargs: Mapping[str, Any], **options: Any) -> Optimizer:
    """``options``: ``groups`` and ``no_decay``."""
    return make_optimizer(OptimizerConfig(name=name, kwargs=dict(kwargs), **options), parameters)


def make_scheduler_config(*entries: Mapping[str, Any]) -> SchedulerConfig:
    """Make the section from its entries as they are written in YAML: ``{name, kwargs}``, and ``{milestones}`` last."""
    config: SchedulerConfig = TypeAdapter(SchedulerConfig).validate_python(entries)
    return config
