"""Checks about the policy, its engines and its budgets that need more than one section."""

from __future__ import annotations

from collections.abc import Iterator

from strop.config.cluster_checks import count_devices, plan_gpus
from strop.config.schema.run_config import (
    EvalRunConfig,
    PpoRunConfig,
    RolloutRunConfig,
    TrainingRunConfig,
    generation_section,
    list_trained_models,
)
from strop.learner.learner_config import fixes_order
from strop.learner.model_config import ModelConfig
from strop.problems import Problem

Problems = Iterator[Problem]


def check_global_batch(config: RolloutRunConfig) -> Problems:
    size, training = config.policy.train_global_batch_size, config.rollout_training
    prompts, per_step, group = training.num_prompts_per_step, training.rollouts_per_step, training.num_generations_per_prompt
    if size is None or (per_step % size == 0 and size % group == 0):
        return
    fitting = [steps for steps in range(1, min(prompts, 10_000) + 1) if prompts % steps == 0]
    sizes = ", ".join(str(per_step // steps) for steps in fitting[:6])
    yield Problem(
        "policy.train_global_batch_size",
        f"found {size}, but a step has {prompts} prompts x {group} generations = {per_step} rollouts, which must split into equal "
        "optimizer steps of whole groups",
        f"Set it to null (one optimizer step), or to one of {sizes}.",
    )


def check_critic_batch(config: PpoRunConfig) -> Problems:
    """The critic trains on the policy's batches, with one optimizer step per policy step."""
    policy, value = config.policy, config.value
    if value.train_global_batch_size not in (None, policy.train_global_batch_size):
        yield Problem(
            "value.train_global_batch_size",
            f"found {value.train_global_batch_size}, but the critic takes its optimizer steps with the policy, and "
            f"policy.train_global_batch_size is {policy.train_global_batch_size}",
            "Set it to null.",
        )


def check_token_budget(config: TrainingRunConfig) -> Problems:
    total = config.policy.max_total_sequence_length
    for key, model in list_trained_models(config):
        packing = model.sequence_packing
        for name in ("train_mb_tokens", "logprob_mb_tokens"):
            if packing.enabled and (budget := getattr(packing, name)) not in (None, "auto") and budget < total:
                yield Problem(
                    f"{key}.sequence_packing.{name}",
                    f"found {budget}, but a single rollout may have policy.max_total_sequence_length = {total} tokens",
                    f"Set it to {total} or more.",
                )


def check_lengths(config: RolloutRunConfig | EvalRunConfig) -> Problems:
    key, generation = generation_section(config)
    if isinstance(config, EvalRunConfig):
        other, limit = "generation.vllm_cfg.max_model_len", config.generation.max_total_sequence_length
    else:
        other, limit = "policy.max_total_sequence_length", config.policy.max_total_sequence_length
    lengths = {f"{key}.max_new_tokens": generation.max_new_tokens, "data.max_input_seq_length": config.data.max_input_seq_length}
    for name, value in lengths.items():
        if value > limit:
            yield Problem(
                name,
                f"found {value}, more than {other} = {limit}, which limits prompt and completion together",
                f"Lower it, or raise {other}.",
            )


def check_engine_device(config: RolloutRunConfig, device: str | None = None) -> Problems:
    """Check vLLM engines with the learner's ``device``: by default the configured one, which may be ``auto``."""
    generation, key, device = config.policy.generation, "policy.generation", device or config.policy.device
    if generation.uses_vllm:
        yield from generation.quantization_errors(key, device)
    if generation.uses_engines:
        plan = plan_gpus(config)
        yield from generation.weight_sync.transport_errors(
            key,
            device,
            engines=generation.engine_options.num_local_engines if plan is None else len(plan.generation),
            colocated=generation.colocated.enabled,
            same_machine=plan is None or plan.on_one_machine,
        )
        if config.rollout_training.max_staleness > 0:
            yield from generation.async_errors(key, device)


def check_chosen_device(config: TrainingRunConfig, device: str) -> Problems:
    """Run the checks that depend on the device type, once ``policy.device`` = auto is resolved."""
    for key, model in list_trained_models(config):
        yield from model.fp8.float8_errors(f"{key}.fp8", device)
    if isinstance(config, RolloutRunConfig):
        yield from check_engine_device(config, device)


def check_order_of_events(config: TrainingRunConfig) -> Problems:
    """``policy.deterministic`` concerns kernels; the order of events still depends on the speed of rollouts."""
    if not isinstance(config, RolloutRunConfig) or not config.policy.deterministic:
        return
    training = config.rollout_training
    key = f"{config.section}.async_{config.section}"
    if training.max_staleness:
        yield Problem(
            "policy.deterministic",
            f"found true, but with {key}.enabled the rollouts of a step depend on their speed",
            f"Train synchronously ({key}.enabled=false), or set policy.deterministic=false.",
        )


def warn_order_of_turns(config: TrainingRunConfig) -> Problems:
    """The torch engine's batches on a GPU depend on when environments answer."""
    if not isinstance(config, RolloutRunConfig) or not config.policy.deterministic:
        return
    policy, training = config.policy, config.rollout_training
    if policy.generation.uses_engines or policy.device == "cpu" or fixes_order(policy):
        return
    if training.max_rollout_turns > 1:
        yield Problem(
            "policy.deterministic",
            "on a GPU the last bits of a token depend on its batch in the torch engine, and so on when environments answer between "
            "turns: two runs are equal only if their environments answer in the same order",
            "An order of additions that does not depend on the batch is in the docs on performance (Bit for bit).",
        )


def check_measured_budget(config: TrainingRunConfig) -> Problems:
    """The torch learner measures memory with its engines asleep, so it must be what a micro-batch finds later too."""
    for key, model in list_trained_models(config):
        if model.batching.train_mb_tokens != "auto" or not model.uses_torch:
            continue
        if (obstacle := find_budget_obstacle(config, model)) is not None:
            yield Problem(
                f"{key}.{model.batching_key}.train_mb_tokens", f"found auto, but {obstacle}", "Set it to a number of tokens."
            )


def find_budget_obstacle(config: TrainingRunConfig, model: ModelConfig) -> str | None:
    """Return why a run cannot measure the memory of a micro-batch; None if it can."""
    if model.dtensor_cfg.pipeline_parallel_size > 1:
        return "with pipeline stages several micro-batches are in memory at once, and their number depends on the batch"
    if shares_device(config) and isinstance(config, RolloutRunConfig) and config.rollout_training.max_staleness > 0:
        return (
            "an engine in another process shares the learner's device (policy.generation.colocated.enabled) and never sleeps, since it "
            "samples while the learner trains"
        )
    return None


def shares_device(config: TrainingRunConfig) -> bool:
    """Return whether an engine in another process shares the learner's device."""
    if not isinstance(config, RolloutRunConfig) or not config.policy.generation.colocated.enabled:
        return False
    return config.policy.generation.uses_engines or count_devices(config).uses_ray


def warn_unused_offload(config: RolloutRunConfig) -> Problems:
    alternates = config.rollout_training.max_staleness == 0 or not config.policy.generation.uses_engines
    if config.policy.offload is True and config.policy.generation.colocated.enabled and not alternates:
        yield Problem("policy.offload", "it has no effect: asynchronous training samples while the learner trains")
