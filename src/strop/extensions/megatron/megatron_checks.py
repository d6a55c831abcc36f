"""Rules about the Megatron Core learner that need more than its section."""

from __future__ import annotations

from collections.abc import Iterator

from strop import packages
from strop.base_config import changed_keys
from strop.config.schema.run_config import DistillationRunConfig, PpoRunConfig, TrainingRunConfig, list_trained_models
from strop.packages import install_command
from strop.problems import Problem

Problems = Iterator[Problem]


def check_megatron_installed(config: TrainingRunConfig) -> Problems:
    if config.policy.megatron_cfg.enabled and not packages.is_installed("megatron.core"):
        yield Problem(
            "policy.megatron_cfg.enabled",
            "found true, but the package megatron-core is not installed",
            f"Run {install_command('megatron')}. Set policy.backend=torch to train it with the torch learner, which takes over what "
            "megatron_cfg says.",
        )


def check_one_learner(config: TrainingRunConfig) -> Problems:
    """Policy and critic have one learner; a teacher beside it may be a torch one."""
    enabled = config.policy.megatron_cfg.enabled
    models = {key: model.megatron_cfg.enabled for key, model in list_trained_models(config)}
    if isinstance(config, DistillationRunConfig) and not enabled:
        models |= {key: teacher.megatron_cfg.enabled for key, teacher in config.all_teachers.items()}
    for key, own in models.items():
        if own != enabled:
            yield Problem(
                f"{key}.megatron_cfg.enabled",
                f"found {str(own).lower()}, but policy.megatron_cfg.enabled is {str(enabled).lower()}, and both are on the same ranks",
                f"Set it to {str(enabled).lower()}. Set policy.backend=torch to train all models with the torch learner, or megatron.",
            )


def check_megatron_models(config: TrainingRunConfig) -> Problems:
    for key, model in list_trained_models(config):
        if model.megatron_cfg.enabled and model.ema.enabled:
            yield Problem(
                f"{key}.ema.enabled",
                "found true, but the Megatron Core learner keeps no moving average in this version",
                "Set it to false, or policy.backend=torch.",
            )


def check_megatron_ranks(config: TrainingRunConfig) -> Problems:
    if config.policy.megatron_cfg.enabled and config.cluster.backend == "local":
        yield Problem(
            "cluster.backend",
            "found local, but Megatron Core runs on ranks, which are processes of Ray, also with one device",
            "Set it to auto or ray, or policy.backend=torch.",
        )


def check_critic_network(config: TrainingRunConfig) -> Problems:
    if isinstance(config, PpoRunConfig) and config.value.megatron_cfg.enabled and config.value.head_only:
        yield Problem(
            "value.head_only",
            "found true, but a critic that Megatron Core trains is a network of its own: the policy's last stage has no value head",
            "Set it to false, or policy.backend=torch.",
        )


def warn_torch_keys(config: TrainingRunConfig) -> Problems:
    """What the torch learner would read, set in Python."""
    for key, model in list_trained_models(config):
        if not model.megatron_cfg.enabled:
            continue
        unused = changed_keys(f"{key}.optimizer", model.optimizer)
        unused += changed_keys(f"{key}.dtensor_cfg", model.dtensor_cfg, ignore=("enabled",))
        unused += [f"{key}.scheduler"] if model.scheduler is not None else []
        for name in unused:
            yield Problem(name, f"it has no effect: {key}.megatron_cfg says it where Megatron Core trains")
        if model.attention_kernel != "auto":
            yield Problem(
                f"{key}.attention_kernel", "it has no effect: Megatron Core's layers attend with the kernel that auto chooses"
            )
        if model.compile is True:
            yield Problem(f"{key}.compile", "it has no effect: Megatron Core has fused layers of its own")


ERROR_CHECKS = (check_megatron_installed, check_one_learner, check_megatron_models, check_megatron_ranks, check_critic_network)
