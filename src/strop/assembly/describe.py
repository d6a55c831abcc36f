"""What a configuration would run, and where, in a few lines: the end of ``--dry-run`` and the beginning of every run."""

from __future__ import annotations

from strop.assembly.roles import choose_device
from strop.config import EvalRunConfig, GrpoRunConfig


def describe(config: GrpoRunConfig | EvalRunConfig) -> str:
    return _describe_training(config) if isinstance(config, GrpoRunConfig) else _describe_evaluation(config)


def _describe_training(config: GrpoRunConfig) -> str:
    grpo, policy = config.grpo, config.policy
    steps_per_batch = grpo.rollouts_per_step // (policy.train_global_batch_size or grpo.rollouts_per_step) * grpo.update_epochs
    ahead = f"asynchronous, at most {grpo.max_staleness} steps old" if grpo.max_staleness else "synchronous"
    lines = [
        f"policy      {policy.model_name} on {_where(policy.device, policy.num_threads)}, {_precision(policy.precision)}",
        f"generation  embedded torch engine in this process, {policy.generation.torch_cfg.kv_cache_memory_gb:g} GiB of cache, {ahead}",
        f"step        {grpo.num_prompts_per_step} prompts x {grpo.num_generations_per_prompt} rollouts of at most "
        f"{policy.generation.max_new_tokens} new tokens, {steps_per_batch} optimizer step{'s' if steps_per_batch > 1 else ''}",
        f"reference   {_reference(config)}",
        f"tasks       {', '.join(_entry(entry) for entry in config.data.train) or 'none'}",
        f"folders     logs in {config.logger.log_dir}, checkpoints "
        + (
            f"in {config.checkpointing.checkpoint_dir}"
            if config.checkpointing.enabled and config.checkpointing.save_period
            else "off"
        ),
    ]
    return "\n".join([*lines, *_unused_gpus(config)])


def _describe_evaluation(config: EvalRunConfig) -> str:
    generation = config.generation
    lines = [
        f"model       {generation.model_name} on {_where(generation.device, generation.num_threads)}, {_precision(generation.precision)}",
        f"sampling    {config.eval.num_tests_per_prompt} a task, temperature {generation.temperature:g}, "
        f"at most {generation.max_new_tokens} new tokens",
        f"tasks       {_entry(config.data)}",
    ]
    return "\n".join([*lines, *_unused_gpus(config)])


def _where(device: str, threads: int | None) -> str:
    import torch

    chosen = choose_device(device)
    if chosen.type == "cpu":
        return f"the CPU ({threads or torch.get_num_threads()} threads)"
    return f"{chosen} ({torch.cuda.get_device_name(chosen)})"


def _precision(precision: str) -> str:
    return "bfloat16 autocast over float32 weights" if precision == "bfloat16" else precision


def _reference(config: GrpoRunConfig) -> str:
    if not config.loss_fn.reference_policy_kl_penalty:
        return "none (loss_fn.reference_policy_kl_penalty is 0)"
    where = "reward" if config.loss_fn.use_kl_in_reward else "loss"
    return f"a frozen copy, KL {config.loss_fn.reference_policy_kl_type} x {config.loss_fn.reference_policy_kl_penalty:g} in the {where}"


def _entry(entry: object) -> str:
    name = getattr(entry, "dataset_name", None)
    environment = getattr(entry, "env_name", None)
    return f"{name} ({environment})" if name and environment else str(name or environment or "the only environment")


def _unused_gpus(config: GrpoRunConfig | EvalRunConfig) -> list[str]:
    import torch

    wanted, found = config.cluster.gpus_per_node, torch.cuda.device_count()
    if wanted > 1:
        return [
            f"warning     cluster.gpus_per_node is {wanted}; {found} found here, and this version trains in one process on one device"
        ]
    return []
