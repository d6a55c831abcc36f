"""Describe a run on GPUs that this machine lacks (``--dry-run --assume-gpus 8 --assume-nodes 2``)."""

from __future__ import annotations

from collections.abc import Iterator

from strop.config import RecordedRunConfig, RolloutRunConfig, TrainingRunConfig
from strop.config.checks.device_counts import count_devices
from strop.config.schema.recorded_config import MOST_EXAMPLES
from strop.distributed.placement import DevicePlan, plan_devices
from strop.runs.algorithm.run_algorithm import count_steps_per_batch
from strop.runs.cluster.device_plan import format_device_rows
from strop.runs.learner_backend import choose_dims
from strop.weight_sync.weight_sync_config import choose_auto_transport


def describe_assumed(config: TrainingRunConfig) -> Iterator[str]:
    """Yield where ranks and engines are, the share of each rank, how weights travel, and the engine's defaults. Raises PlacementError,
    ValueError for a layout that does not fit."""
    counts = count_devices(config)
    plan = plan_devices(counts, on_cpu=False)
    if counts.uses_ray:
        for node, trains, generates in format_device_rows(plan, counts.nodes):
            yield f"node {node:<6} trains on GPU {trains}" + (f"; generates on {generates}" if plan.generation else "")
    yield f"batch       {_format_shares(config, plan)}"
    if isinstance(config, RolloutRunConfig):
        yield f"weights     {_format_transport(config, plan)}"
        if config.policy.generation.uses_engines:
            yield f"{config.policy.generation.launched:<12}{config.policy.generation.engine_options.describe()}"


def _format_shares(config: TrainingRunConfig, plan: DevicePlan) -> str:
    """Format the number of rollouts or examples per optimizer step for each rank that reads its own micro-batches."""
    counts = count_devices(config)
    ranks = choose_dims(config.policy, len(plan.training)).data if counts.uses_ray else 1
    noun, total = "rollouts", config.policy.train_global_batch_size
    if isinstance(config, RolloutRunConfig):
        total = config.rollout_training.rollouts_per_step // count_steps_per_batch(config)
    elif isinstance(config, RecordedRunConfig):
        noun = "examples"
    if total is None:
        return f"at most {MOST_EXAMPLES} {noun} an optimizer step over {_count(ranks, 'data rank')}"
    shares = f"{total // ranks} each" if total % ranks == 0 else f"{total / ranks:.1f} each on average, balanced by tokens"
    idle = f"; {ranks - total} ranks get none: raise the batch, or shard less" if total < ranks else ""
    return f"{total} {noun} an optimizer step over {_count(ranks, 'data rank')}: {shares}{idle}"


def _format_transport(config: RolloutRunConfig, plan: DevicePlan) -> str:
    sync, uses_ray = config.policy.generation.weight_sync, count_devices(config).uses_ray
    if not config.policy.generation.uses_engines and not uses_ray:
        return "none: the engine runs the learner's own module"
    if sync.transport != "auto":
        return f"{sync.transport}, as configured (policy.generation.weight_sync.transport)"
    engines = len(plan.generation) if uses_ray else config.policy.generation.engine_options.num_local_engines
    chosen = choose_auto_transport(
        "cuda",
        engines=engines,
        colocated=config.policy.generation.colocated.enabled,
        same_machine=plan.on_one_machine or not uses_ray,
    )
    return f"{chosen}, which auto stands for here (policy.generation.weight_sync.transport)"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
