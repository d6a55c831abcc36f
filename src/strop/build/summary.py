"""Summarize what a configuration runs, and where, in a few lines. Printed at the end of ``--dry-run`` and at the start of every run."""

from __future__ import annotations

from dataclasses import dataclass

from strop.algorithm_factory import format_algorithm
from strop.algorithms.base import Algorithm
from strop.build.cluster.device_plan import format_placement
from strop.build.models import resolve_device
from strop.build.recorded_run import make_recorded_algorithm
from strop.build.rollout_run import make_rollout_algorithm
from strop.config import EvalRunConfig, RecordedRunConfig, RolloutRunConfig, TrainingRunConfig
from strop.config.checks.device_counts import count_devices
from strop.config.checks.run_checks import check_engine_device
from strop.config.schema.distillation_config import TeacherConfig
from strop.config.schema.run_config import DistillationRunConfig, PpoRunConfig
from strop.data.data_config import DataEntryConfig
from strop.generation.generation_config import GenerationConfig
from strop.learner.model_config import ModelConfig
from strop.problems import raise_problems
from strop.trainer.training_config import AsyncConfig


def summarize(
    config: TrainingRunConfig | EvalRunConfig, algorithm: Algorithm | None = None, *, on_cpu: bool | None = None
) -> str:
    """Return the summary of a run.

    ``algorithm``: the configuration's, if it has been made.
    ``on_cpu``: whether devices are processes on CPUs, as the cluster reports it; None: decided by the devices of this machine.

    Raises ValueError for settings that do not go together, PlacementError for a layout that does not fit the devices."""
    if isinstance(config, EvalRunConfig):
        return _summarize_evaluation(config)
    devices = _find_devices(config, on_cpu)
    if isinstance(config, RolloutRunConfig):
        return _summarize_rollouts(config, algorithm or make_rollout_algorithm(config), devices)
    if isinstance(config, RecordedRunConfig):
        return _summarize_recorded(config, algorithm or make_recorded_algorithm(config), devices)
    raise TypeError(f"{type(config).__name__} is not the configuration of a run")


@dataclass(frozen=True)
class RunDevices:
    """The devices of a run: those of this process, or of the nodes of a cluster."""

    lines: tuple[str, ...] = ()  # the layout on the cluster; empty for one process
    on_cpu: bool = True

    @property
    def is_distributed(self) -> bool:
        return bool(self.lines)

    def format_device(self, model: ModelConfig) -> str:
        if not self.is_distributed:
            return _format_device(model.device, model.num_threads)
        return "the CPUs of the learner's ranks" if self.on_cpu else "the GPUs of the learner's ranks"


def _find_devices(config: TrainingRunConfig, on_cpu: bool | None) -> RunDevices:
    if not count_devices(config).uses_ray:
        return RunDevices()
    if on_cpu is None:
        import torch

        device = config.policy.device
        on_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    return RunDevices(tuple(format_placement(config, on_cpu=on_cpu)), on_cpu)


def _summarize_recorded(config: RecordedRunConfig, algorithm: Algorithm, devices: RunDevices) -> str:
    policy = config.policy
    examples = policy.train_global_batch_size or "at most 32"
    lines = [
        f"policy      {_format_model(policy, devices)}",
        f"algorithm   {format_algorithm(config.algorithm.name, algorithm)}",
        f"step        {examples} examples, micro-batches of at most {policy.batching.train_mb_tokens} tokens",
        f"data        {', '.join(str(entry.data_name) for entry in config.data.train) or 'none'}",
        *devices.lines,
        _format_folders(config),
    ]
    return "\n".join(lines)


def _format_folders(config: TrainingRunConfig) -> str:
    saving = config.checkpointing
    where = f"in {saving.checkpoint_dir}" if saving.enabled and saving.save_period else "off"
    return f"folders     logs in {config.logger.log_dir}, checkpoints {where}"


def _summarize_rollouts(config: RolloutRunConfig, algorithm: Algorithm, devices: RunDevices) -> str:
    training, policy = config.rollout_training, config.policy
    if not devices.is_distributed:
        raise_problems(check_engine_device(config, resolve_device(policy.device).type))
    global_batch = policy.train_global_batch_size or training.rollouts_per_step
    steps_per_batch = training.rollouts_per_step // global_batch * training.epochs_per_batch
    ahead = _format_staleness(training.async_config) if training.max_staleness else "synchronous"
    lines = [
        f"algorithm   {format_algorithm(config.algorithm.name, algorithm)}",
        f"policy      {_format_model(policy, devices)}",
        *_format_other_models(config, devices),
        f"generation  {_format_engine(policy.generation, devices)}, {ahead}",
        f"step        {training.num_prompts_per_step} prompts x {training.num_generations_per_prompt} rollouts of at most "
        f"{policy.generation.max_new_tokens} new tokens, {steps_per_batch} optimizer step{'s' if steps_per_batch > 1 else ''}",
        f"tasks       {', '.join(_format_entry(entry) for entry in config.data.train) or 'none'}",
        *devices.lines,
        _format_folders(config),
    ]
    return "\n".join(lines)


def _format_staleness(section: AsyncConfig) -> str:
    updates = "weights change in flight" if section.in_flight_weight_updates else "drained before weights change"
    order = "" if section.order == "fifo" else f", {section.order}"
    return f"asynchronous, at most {section.max_trajectory_age_steps} steps old, {updates}{order}"


def _format_engine(generation: GenerationConfig, devices: RunDevices) -> str:
    if generation.backend != "vllm":
        cache = f"{generation.torch_cfg.kv_cache_memory_gb:g} GiB of cache"
        return f"torch engines, {cache} each" if devices.is_distributed else f"embedded torch engine in this process, {cache}"
    options = generation.vllm_cfg
    draft = f", drafts by {options.speculation.method}" if options.speculation.method else ""
    if devices.is_distributed:
        return f"vLLM engines, {options.precision}{draft}"
    engines = f"{options.num_local_engines} vLLM engines" if options.num_local_engines > 1 else "a vLLM engine"
    where = "processes of their own" if options.num_local_engines > 1 else "a process of its own"
    ranks = f" of {options.tensor_parallel_size} ranks" if options.tensor_parallel_size > 1 else ""
    return f"{engines}{ranks} in {where}, {options.precision}{draft}"


def _format_model(model: ModelConfig, devices: RunDevices) -> str:
    """Format a trained model with its device and precision."""
    lora = model.dtensor_cfg.lora_cfg
    adapters = f", adapters of rank {lora.dim}" if lora.enabled else ""
    precision = "bfloat16, float32 masters" if model.weights_dtype == "bfloat16" else _format_precision(model.precision)
    return f"{model.model_name} on {devices.format_device(model)}, {precision}{adapters}"


def _format_other_models(config: RolloutRunConfig, devices: RunDevices) -> list[str]:
    """Format the critic and the teachers of a run, one line each."""
    if isinstance(config, PpoRunConfig):
        return [f"critic      {'a head on the policy' if config.value.head_only else _format_model(config.value, devices)}"]
    if isinstance(config, DistillationRunConfig):
        return [f"teacher     {_format_teacher(teacher)}" for teacher in (config.teacher, *config.teachers.values())]
    return []


def _format_teacher(teacher: TeacherConfig) -> str:
    name = f"the policy ({teacher.self_weights}), given a demonstration" if teacher.model_name == "self" else teacher.model_name
    where = f", in {teacher.hosts} {'process' if teacher.hosts == 1 else 'processes'} of its own" if teacher.hosts else ""
    return f"{name}{where}, for {', '.join(teacher.environments)}" if teacher.environments else name + where


def _summarize_evaluation(config: EvalRunConfig) -> str:
    generation = config.generation
    lines = [
        (
            f"model       {generation.model_name} on {_format_device(generation.device, generation.num_threads)}, "
            f"{_format_precision(generation.precision)}"
        ),
        f"sampling    {config.eval.num_tests_per_prompt} a task, temperature {generation.temperature:g}, "
        f"at most {generation.max_new_tokens} new tokens",
        f"tasks       {_format_entry(config.data)}",
    ]
    return "\n".join([*lines, *_warn_unused_gpus(config)])


def _format_device(device: str, threads: int | None) -> str:
    import torch

    chosen = resolve_device(device)
    if chosen.type == "cpu":
        return f"the CPU ({threads or torch.get_num_threads()} threads)"
    return f"{chosen} ({torch.cuda.get_device_name(chosen)})"


def _format_precision(precision: str) -> str:
    return "bfloat16 autocast over float32 weights" if precision == "bfloat16" else precision


def _format_entry(entry: DataEntryConfig) -> str:
    name, environment = entry.data_name, entry.env_name
    return f"{name} ({environment})" if name and environment else str(name or environment or "the only environment")


def _warn_unused_gpus(config: EvalRunConfig) -> list[str]:
    import torch

    requested, available = config.cluster.gpus_per_node, torch.cuda.device_count()
    if requested > 1:
        return [
            f"warning     cluster.gpus_per_node is {requested} ({available} GPUs found here), "
            "but an evaluation runs in one process on one device"
        ]
    return []
