"""Summarize a configured run and its devices in about ten lines. Printed by ``--dry-run`` and at the start of every run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from strop.algorithm_factory import format_algorithm, format_changes
from strop.algorithms.base import Algorithm
from strop.config import EvalRunConfig, RolloutRunConfig, TrainingRunConfig
from strop.config.cluster_checks import count_devices
from strop.config.load.device_defaults import describe_micro_batches
from strop.config.policy_checks import check_chosen_device
from strop.config.schema.run_config import PpoRunConfig, environment_alias
from strop.data.data_config import DataEntryConfig, EvalSetConfig
from strop.generation.engine_gpus import choose_engine_gpus
from strop.generation.generation_config import GenerationConfig
from strop.generation.torch.torch_config import LEAST_CACHE_GB
from strop.gpus import has_gpu, visible_gpus
from strop.learner.model_config import ModelConfig
from strop.problems import raise_problems
from strop.runs.dry_run.assumed_cluster import format_placement
from strop.runs.local_device import count_threads, resolve_device_name
from strop.runs.run_algorithm import count_steps_per_batch, make_run_algorithm
from strop.trainer.training_config import AsyncConfig, RolloutTrainingConfig, TrainingConfig

UNLIMITED_STEPS = 1_000_000  # default of max_num_steps: the run ends with its epochs


def summarize(
    config: TrainingRunConfig | EvalRunConfig,
    algorithm: Algorithm | None = None,
    *,
    on_cpu: bool | None = None,
    verbose: bool = False,
) -> str:
    """Return the summary of a run.

    ``algorithm``: the configuration's, if already created. ``on_cpu``: whether devices are CPU processes, as reported by the
    cluster; None: decided by this machine's devices. ``verbose``: include every option of the algorithm, not only non-default ones.

    Raises ValueError for incompatible settings, PlacementError for a layout that does not fit the devices."""
    if isinstance(config, EvalRunConfig):
        return "\n".join(_summarize_evaluation(config))
    algorithm = algorithm or make_run_algorithm(config)
    devices = _find_devices(config, on_cpu)
    raise_problems(check_chosen_device(config, devices.kind))
    formatted = (format_algorithm if verbose else format_changes)(config.algorithm.name, algorithm)
    middle = _summarize_rollouts(config, devices) if isinstance(config, RolloutRunConfig) else _summarize_recorded(config)
    lines = [
        f"policy      {_format_model(config.policy, devices)}",
        f"algorithm   {formatted}",
        *middle,
        f"micro-batch {describe_micro_batches(config, on_gpu=devices.has_gpus)}",
        f"training    {_format_training(config.training, validates=bool(config.data.validation or config.data.validation_entries))}",
        *devices.lines,
        *(["repeats     to the last bit, in every process (policy.deterministic)"] if config.policy.deterministic else []),
        _format_folders(config),
    ]
    return "\n".join(lines)


@dataclass(frozen=True)
class RunDevices:
    """The devices of a run: those of this process, or of a cluster's nodes."""

    name: str  # of the policy; auto if only the cluster knows it
    lines: tuple[str, ...] = ()  # the layout on the cluster; empty for one process
    on_cpu: bool | None = None  # None: this process decides

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]

    @property
    def has_gpus(self) -> bool:
        return self.on_cpu is False if self.is_distributed else self.name != "cpu"

    @property
    def is_distributed(self) -> bool:
        return bool(self.lines)

    def format_device(self, model: ModelConfig) -> str:
        if self.is_distributed:
            return "the CPUs of the learner's ranks" if self.on_cpu else "the GPUs of the learner's ranks"
        return _format_device(model.device, model.num_threads) if self.on_cpu is None else "the CPU" if self.on_cpu else "a GPU"


def _find_devices(config: TrainingRunConfig, on_cpu: bool | None) -> RunDevices:
    device = config.policy.device if on_cpu is None else "cpu" if on_cpu else "cuda"
    if not count_devices(config).uses_ray:
        return RunDevices(resolve_device_name(device) if on_cpu is None else device, on_cpu=on_cpu)
    if on_cpu is None:
        on_cpu = device == "cpu" or (device == "auto" and not has_gpu())
    return RunDevices(device, tuple(format_placement(config, on_cpu=on_cpu)), on_cpu)


def _summarize_recorded(config: TrainingRunConfig) -> Iterator[str]:
    yield f"step        {config.groups_per_step or f'at most {config.most_groups}'} examples"
    yield f"data        {', '.join(_format_data(entry) for entry in config.data.train) or 'none'}"
    yield from _format_validation_data(config)


def _summarize_rollouts(config: RolloutRunConfig, devices: RunDevices) -> Iterator[str]:
    training, generation = config.rollout_training, config.policy.generation
    on_gpu = devices.has_gpus
    if not devices.is_distributed and devices.on_cpu is None and on_gpu and generation.uses_engines:
        choose_engine_gpus(generation, int(devices.name.partition(":")[2] or 0))
    steps = count_steps_per_batch(config) * training.epochs_per_batch
    ahead = _format_staleness(training.async_config) if training.max_staleness else "synchronous"
    if isinstance(config, PpoRunConfig):
        yield f"critic      {'a head on the policy' if config.value.head_only else _format_model(config.value, devices)}"
    yield from config.summarize_models()
    yield f"generation  {_format_engine(generation, devices, on_gpu=on_gpu)}, {ahead}"
    yield (
        f"step        {training.num_prompts_per_step} prompts x {training.num_generations_per_prompt} rollouts of at most "
        f"{generation.max_new_tokens} new tokens, {_count(steps, 'optimizer step')}"
    )
    yield f"tasks       {', '.join(_format_tasks(config, entry) for entry in config.data.train) or 'none'}"
    yield from _format_validation_data(config)
    if training.max_rollout_turns > 1:
        yield f"turns       at most {training.max_rollout_turns} of the policy in a rollout (max_rollout_turns)"


def _format_tasks(config: RolloutRunConfig, entry: DataEntryConfig) -> str:
    alias = environment_alias(config, entry)
    name = entry.data_name
    return f"{_format_data(entry)} ({alias})" if name and alias else str(name or alias or "the only environment")


def _format_data(entry: DataEntryConfig) -> str:
    if entry.rows is not None:
        return f"{entry.data_name}, {len(entry.rows):,} rows"
    from strop.data.sources.peek import format_rows

    return ", ".join(part for part in (str(entry.data_name), format_rows(entry.dataset_name)) if part)


def _format_validation_data(config: TrainingRunConfig) -> Iterator[str]:
    data = config.data
    if data.validation:
        yield f"validation  {', '.join(_format_data(entry) if entry.data_name else str(entry.env_name) for entry in data.validation)}"
    elif data.validation_entries:
        held = ", ".join(_format_share(entry.split_validation_size) for entry in data.validation_entries)
        yield f"validation  {held} held out of the training data"


def _format_share(size: float) -> str:
    return f"{size:.0%}" if size < 1 else f"{size:,.0f}"


def _format_training(training: TrainingConfig, *, validates: bool) -> str:
    """Format how long a run trains, and when it validates."""
    epochs = "" if training.max_num_epochs is None else _count(training.max_num_epochs, "epoch")
    steps = "" if training.last_step >= UNLIMITED_STEPS else _count(training.max_num_steps, "step")
    length = f"{epochs}, at most {steps}" if epochs and steps else epochs or steps or "without end"
    times = [f"every {_count(training.val_period, 'step')}"] if training.val_period else []
    times += [when for when, wanted in (("at the start", training.val_at_start), ("at the end", training.val_at_end)) if wanted]
    turned_on = isinstance(training, RolloutTrainingConfig) and training.val_start_at > 0
    after = f" from step {training.val_start_at} on" if turned_on and isinstance(training, RolloutTrainingConfig) else ""
    return f"{length}; validation {' and '.join(times) + after if times and validates else 'off'}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _format_folders(config: TrainingRunConfig) -> str:
    saving = config.checkpointing
    if not saving.saving_enabled:
        return f"folders     logs in {config.logger.log_dir}, checkpoints off"
    kept = "all kept" if saving.keep_top_k is None else f"{saving.keep_top_k} kept besides the newest"
    when = f"every {_count(saving.save_period, 'step')}, {kept}"
    return f"folders     logs in {config.logger.log_dir}, checkpoints in {saving.checkpoint_dir} ({when})"


def _format_staleness(section: AsyncConfig) -> str:
    updates = "weights change in flight" if section.in_flight_weight_updates else "drained before weights change"
    order = "" if section.order == "fifo" else f", {section.order}"
    return f"asynchronous, at most {section.max_trajectory_age_steps} steps old, {updates}{order}"


def _format_engine(generation: GenerationConfig, devices: RunDevices, *, on_gpu: bool) -> str:
    auto = generation.auto_engine if generation.backend == "auto" else None
    why = "" if auto is None else f" (backend auto: {auto.reason})"
    return _format_engines(generation, devices, on_gpu=on_gpu) + why


def _format_engines(generation: GenerationConfig, devices: RunDevices, *, on_gpu: bool) -> str:
    if not generation.uses_engines:
        size = generation.torch_cfg.kv_cache_memory_gb
        cache = "a tenth of the GPU's memory as cache" if size is None and on_gpu else f"{size or LEAST_CACHE_GB:g} GiB of cache"
        return f"torch engines, {cache} each" if devices.is_distributed else f"embedded torch engine in this process, {cache}"
    options, name = generation.engine_options, generation.engine_name
    draft = f", drafts by {options.draft_method}" if options.draft_method else ""
    precision = generation.weight_format or options.dtype
    if devices.is_distributed:
        return f"{name} engines, {precision}{draft}"
    one = f"{options.article} {name} engine"
    engines = f"{options.num_local_engines} {name} engines" if options.num_local_engines > 1 else one
    where = "separate processes" if options.num_local_engines > 1 else "a separate process"
    ranks = f" of {options.engine_size} ranks" if options.engine_size > 1 else ""
    return f"{engines}{ranks} in {where}, {precision}{draft}"


def _format_model(model: ModelConfig, devices: RunDevices) -> str:
    """Format a trained model with its device and precision."""
    adapters = "" if model.adapter_rank is None else f", adapters of rank {model.adapter_rank}"
    masters = model.precision == "bfloat16" and (model.weights_dtype == "bfloat16" or model.learner.weights_follow_precision)
    precision = "bfloat16, float32 masters" if masters else _format_precision(model.precision)
    return f"{model.model_name} on {devices.format_device(model)}, {precision}{adapters}"


def _summarize_evaluation(config: EvalRunConfig) -> list[str]:
    config = config.with_graders()
    generation = config.generation
    device, precision = _format_device(generation.device, generation.num_threads), _format_precision(generation.precision)
    if generation.uses_engines:
        precision = generation.weight_format or generation.engine_options.dtype
    entries = config.data.entries
    return [
        f"model       {generation.model_name} on {device}, {precision}",
        *format_auto_engine(generation),
        f"sampling    {config.eval.num_tests_per_prompt} a task, temperature {generation.temperature:g}, "
        f"at most {generation.max_new_tokens} new tokens",
        *(f"{'' if index else 'tasks':12}{_format_set(config, entry)}" for index, entry in enumerate(entries)),
        *_warn_unused_gpus(config),
    ]


def _format_set(config: EvalRunConfig, entry: DataEntryConfig) -> str:
    alias = environment_alias(config, entry)
    if alias in config.env and alias == entry.data_name:  # the grader of a built-in set is named after it
        alias = config.env[alias].type_of(alias)
    text = f"{_format_data(entry)} ({alias})" if entry.data_name and alias else str(alias)
    if not isinstance(entry, EvalSetConfig):
        return text
    samples = "" if entry.num_tests_per_prompt is None else f", {entry.num_tests_per_prompt} a task"
    return f"{text}{samples}" + ("" if entry.temperature is None else f", temperature {entry.temperature:g}")


def format_auto_engine(generation: GenerationConfig) -> list[str]:
    """Format the engine of an evaluation if ``auto`` chose a GPU engine."""
    auto = generation.auto_engine if generation.backend == "auto" else None
    return [] if auto is None else [f"engine      {'vLLM' if auto.name == 'vllm' else 'torch'} (backend auto: {auto.reason})"]


def _format_device(device: str, threads: int | None) -> str:
    chosen = resolve_device_name(device)
    if chosen == "cpu":
        count = count_threads(threads)
        return "the CPU" if count is None else f"the CPU ({_count(count, 'thread')})"
    import torch

    return f"{chosen} ({torch.get_device_module(chosen).get_device_name(chosen)})"


def _format_precision(precision: str) -> str:
    return "bfloat16 autocast over float32 weights" if precision == "bfloat16" else precision


def _warn_unused_gpus(config: EvalRunConfig) -> list[str]:
    requested, found = config.cluster.gpus_per_node, len(visible_gpus())
    if requested <= max(1, found) or config.cluster.backend == "ray" or config.cluster.num_nodes > 1:
        return []
    return [f"warning     cluster.gpus_per_node is {requested}, and {found} {'GPU is' if found == 1 else 'GPUs are'} found here"]
