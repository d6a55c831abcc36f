"""Rules about the Megatron Core learner that need more than its section: what of a model and of its run does not go with it."""

from __future__ import annotations

from collections.abc import Iterator

from strop import packages
from strop.base_config import changed_keys
from strop.config.schema.policy_config import PolicyConfig
from strop.config.schema.run_config import PpoRunConfig, RolloutRunConfig, TrainingRunConfig, list_trained_models
from strop.learner.learner_config import fixes_order
from strop.learner.model_config import ModelConfig
from strop.problems import Problem

Problems = Iterator[Problem]


def run_errors(section: str, config: TrainingRunConfig) -> Problems:
    """Yield what speaks against ``megatron_cfg``, which is enabled and at the key ``section``, of a policy or a critic."""
    for key, model in list_trained_models(config):
        if section == f"{key}.megatron_cfg":
            yield from _check_model(key, model)
            if isinstance(model, PolicyConfig):
                yield from _check_installed()
                yield from _check_policy(key, model, samples=isinstance(config, RolloutRunConfig))
            elif isinstance(config, PpoRunConfig) and config.value.head_only:
                yield Problem(
                    "value.head_only",
                    "found true, but a critic that Megatron Core trains is a separate network: the policy's last stage has no value head",
                    "Set it to false, or policy.backend=torch.",
                )


def _check_installed() -> Problems:
    if not packages.is_installed("megatron.core"):
        yield Problem(
            "policy.megatron_cfg.enabled",
            "found true, but the package megatron-core is not installed",
            f"Run {packages.install_command('megatron')}. Set policy.backend=torch to train it with the torch learner, which takes over "
            "what megatron_cfg says.",
        )


def _check_model(key: str, model: ModelConfig) -> Problems:
    if model.ema.enabled:
        yield Problem(
            f"{key}.ema.enabled",
            "found true, but the Megatron Core learner keeps no moving average in this version",
            "Set it to false, or policy.backend=torch.",
        )
    if model.dequantize_base_checkpoint:
        yield Problem(
            f"{key}.dequantize_base_checkpoint",
            "found true, but Megatron Core's ranks read their shards directly from the files, where weights and scales are separate",
            f"Set {key}.model_name to a dequantised copy of the model, or policy.backend=torch.",
        )
    if model.fp8.enabled:
        yield Problem(
            f"{key}.fp8.enabled",
            "found true, but it applies to the torch learner, and this run trains with Megatron Core",
            f"Set it to false; {key}.megatron_cfg.fp8_cfg.enabled=true trains in FP8 there.",
        )
    if model.router_losses.observes:
        yield Problem(
            f"{key}.router_losses",
            "router losses are set, but this run trains with Megatron Core, which has its own keys for them",
            f"Set {key}.megatron_cfg.moe_router_load_balancing_type, moe_aux_loss_coeff and moe_z_loss_coeff instead.",
        )
    if model.batching.train_mb_tokens == "auto":
        yield Problem(
            f"{key}.{model.batching_key}.train_mb_tokens",
            "found auto, but the Megatron Core learner measures no memory",
            "Set it to a number of tokens.",
        )


def _check_policy(key: str, policy: PolicyConfig, *, samples: bool) -> Problems:
    if policy.router_replay.indexers:
        yield Problem(
            f"{key}.router_replay.indexers",
            "found true, but indexers of Megatron Core's models choose tokens themselves",
            f"Set it to false, or {key}.backend=torch.",
        )
    if samples and fixes_order(policy):
        yield Problem(
            f"{key}.exact_on_policy",
            "found true, but Megatron Core's layers add in an order that depends on the batch",
            f"Set it to false, or {key}.backend=torch.",
        )


def run_warnings(section: str, config: TrainingRunConfig) -> Problems:
    """Yield what the torch learner would read, set in Python."""
    for key, model in list_trained_models(config):
        if section != f"{key}.megatron_cfg":
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
