"""Build a run that learns from its own rollouts: GRPO and its family, PPO, distillation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from strop.algorithms.base import Algorithm
from strop.checkpointing.base import Restorable
from strop.checkpointing.saved_model import SavedModel
from strop.config import RolloutRunConfig
from strop.config.checks.device_counts import count_devices
from strop.data.data_state import DataState
from strop.distributed.base import Cluster
from strop.environments.handle import EnvironmentHandle
from strop.environments.mixture import Mixture
from strop.generation.base import Generator, PastSelves
from strop.generation.torch.torch_engine import TorchEngine
from strop.generation.torch.torch_past_selves import TorchPastSelves
from strop.learner.client import LearnerClient
from strop.models.chat_template import ChatTemplate
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.monitoring.trackers.base import Tracker
from strop.rollouts.prompts_ahead import PromptsAhead
from strop.rollouts.tool_turns import describe_tool_calls
from strop.runs.algorithm.run_algorithm import count_steps_per_batch
from strop.runs.backend import Backend, LocalBackend, make_backend
from strop.runs.contents.model_check import check_model
from strop.runs.engines import GeneratorSpec
from strop.runs.jobs.evaluation_identity import identify_entries
from strop.runs.jobs.evaluation_job import make_validation_job
from strop.runs.lifecycle import make_checkpoints, make_early_stop, make_saver
from strop.runs.monitors.run_listeners import make_hacking_monitor, make_rollout_listeners
from strop.runs.resume.restore import restore_checkpoint, resume_run
from strop.runs.resume.token_budgets import make_token_budgets, settle_token_budgets
from strop.runs.rollout_stream import Episodes, make_rollout_stream
from strop.runs.run_tasks import RunTasks, read_tasks
from strop.runs.scorers import count_optimizer_steps, make_scorers
from strop.sampling import Sampling
from strop.trainer.column_sources import ColumnSources
from strop.trainer.evaluation import Evaluator
from strop.trainer.run import DATA, PAST_SELVES, DrainBefore, TrainingRun, TrainOptions
from strop.weight_sync.snapshots import SnapshottedWeights

UNFILTERED = 1 << 60  # groups generated for a step, of an algorithm that drops none


async def build_rollout_run(
    config: RolloutRunConfig, algorithm: Algorithm, tracker: Tracker, cluster: Cluster | None = None
) -> tuple[TrainingRun, Generator]:
    """Build a run on rollouts and its generator, restored from the newest checkpoint if there is one."""
    tasks = await read_tasks(config, cluster, tracker)
    monitor = make_hacking_monitor(config)
    backend = await make_backend(config, cluster, tracker)
    bundle = backend.bundle
    check_model(config, bundle, tracker.note)
    sampling = Sampling(**config.policy.generation.sampling_options())
    options = make_train_options(
        config,
        share_prefixes=config.policy.sequence_packing.prefix_sharing and backend.packed,
        filters=getattr(algorithm, "drop_constant_groups", type(algorithm).keep is not Algorithm.keep),
        tasks=tasks.train.epoch_size,
    )
    note_choices(config, options, tasks, bundle.template, tracker)
    learners = await backend.build_learners(algorithm, sampling, count_optimizer_steps(options, tasks.train.size))
    scorers = await make_scorers(config, backend, algorithm, learners, tracker, last_metrics=lambda: run.last_metrics)
    selves = make_past_selves(backend, tasks.environments)
    parts = make_saved_parts(config, tasks, selves)
    checkpoints = make_checkpoints(config, bundle.save)
    store = RolloutStore(Path(config.logger.log_dir), config.logger.rollouts, decode=bundle.tokenizer.decode)
    state = restore_checkpoint(config, checkpoints, {**learners, **parts}, tracker, store)
    await settle_token_budgets(config, learners, parts, tracker)
    tracker.progress(f"starting the {config.policy.generation.engine_name} engine")
    synced = await backend.build_generator(make_generator_spec(config, options, sampling, learners["policy"], tracker))
    episodes = Episodes(config, tasks.train, synced.generator, bundle.template, sampling, algorithm.greedy_baseline, selves)
    ahead = make_prompts_ahead(config, tasks.train, bundle.template)
    run = TrainingRun(
        options=options,
        algorithm=algorithm,
        stream=make_rollout_stream(episodes, options, state, ahead),
        learners=learners,
        parts=parts,
        columns=ColumnSources(algorithm.requires, scorers),
        weights=synced.weights if selves is None else SnapshottedWeights(synced.weights, selves.pool),
        tracker=tracker,
        evaluator=make_evaluator(config, tasks.validation, synced.generator, bundle.template, tracker, past=selves),
        early_stop=make_early_stop(config),
        checkpoints=make_saver(config, checkpoints),
        listeners=make_rollout_listeners(config, options, tasks, algorithm, store, bundle.tokenizer.decode, monitor),
    )
    run.on_close += [each.close for each in (selves, ahead) if each is not None]
    return resume_run(run, state), synced.generator


def note_choices(
    config: RolloutRunConfig, options: TrainOptions, tasks: RunTasks, template: ChatTemplate, tracker: Tracker
) -> None:
    """Note how tool calls are written, and what a filter changes about the shares of the data."""
    if said := describe_tool_calls(tasks.environments, template, config.policy.tokenizer.tool_call_format):
        tracker.note(said)
    if options.max_groups_per_step < UNFILTERED and any(entry.prompts_per_step for entry in config.data.train):
        tracker.note("prompts_per_step is of the groups begun: those that the algorithm drops are replaced by the next in turn")


def make_saved_parts(config: RolloutRunConfig, tasks: RunTasks, selves: TorchPastSelves | None) -> dict[str, Restorable]:
    """Return what a checkpoint holds besides the learners and the state of the loop, by name."""
    return {
        **make_token_budgets(config),
        **({} if selves is None else {PAST_SELVES: selves.pool}),
        **({DATA: DataState(tasks.train)} if tasks.train.resumable else {}),
    }


def make_generator_spec(
    config: RolloutRunConfig, options: TrainOptions, sampling: Sampling, policy: LearnerClient, tracker: Tracker
) -> GeneratorSpec:
    training = config.rollout_training
    return GeneratorSpec(
        sampling=sampling,
        learner=policy,
        max_staleness=options.max_staleness,
        in_flight=training.async_config.in_flight_weight_updates,
        recompute=training.async_config.recompute_kv_cache_after_weight_updates,
        share_prefixes=options.share_prefixes,
        seed=training.seed,
        note=tracker.note,
        output_folder=Path(config.logger.log_dir) / "engines",
    )


def make_prompts_ahead(config: RolloutRunConfig, source: Mixture, template: ChatTemplate) -> PromptsAhead | None:
    prefetch = config.rollout_training.num_prompts_per_step if config.data.prefetch is None else config.data.prefetch
    return PromptsAhead(source.peek_messages, template, ahead=prefetch) if prefetch else None


def make_past_selves(backend: Backend, environments: Sequence[EnvironmentHandle[Any]]) -> TorchPastSelves | None:
    """Make the earlier selves of the policy that environments play against, None if none does. Raises ValueError if they do not agree."""
    rules = {environment.traits.past_selves for environment in environments} - {None}
    if len(rules) > 1:
        raise ValueError(
            f"environments play against earlier selves of the policy and keep different ones: {', '.join(sorted(map(str, rules)))}; set "
            "snapshot_every and pool_size of all to the same"
        )
    if (rule := next(iter(rules), None)) is None:
        return None
    if not isinstance(backend, LocalBackend) or backend.config.policy.generation.uses_engines:
        raise ValueError(
            "an environment plays against earlier selves of the policy, which the torch engine samples in the process of the learner; set "
            "policy.generation.backend=torch and cluster.backend=local, or let it play against a served model"
        )
    return backend.build_past_selves(rule)


def make_evaluator(
    config: RolloutRunConfig,
    source: Mixture | None,
    generator: Generator,
    template: ChatTemplate,
    tracker: Tracker,
    past: PastSelves | None = None,
) -> Evaluator | None:
    training = config.rollout_training
    if source is None:
        if training.val_period or training.val_at_start or training.val_at_end:
            tracker.note("no validation: data.validation is not set, and data.train holds out no tasks (split_validation_size)")
        return None
    size = len(source) if training.max_val_samples is None else min(len(source), training.max_val_samples)
    job = make_validation_job(config, SavedModel(config.logger.log_dir))
    return Evaluator(
        source=source,
        size=size,
        samples=training.val_num_generations_per_prompt,
        generator=generator,
        template=template,
        sampling=job.sets[0].sampling,
        rules=job.rules,
        seed=training.seed,
        identity=identify_entries(job).to_json(),
        folder=Path(config.logger.log_dir).absolute() / "validation",
        past=past,
        name_set=source.name_set,
        samples_to_print=config.logger.num_val_samples_to_print,
        samples_to_track=config.logger.shown_samples,
        on_sampled=choose_forgetting(config, generator),
    )


def choose_forgetting(config: RolloutRunConfig, generator: Generator) -> Callable[[], object]:
    """Return what drops the prompts that the embedded engine has cached, for when a synchronous run has validated.

    A prompt of both sets would be taken from the cache, where it was read beside other prompts and rounded differently in the last digits.
    A run that is resumed behind the validation has no such cache, and would not equal the uninterrupted one.
    """
    if isinstance(generator, TorchEngine) and config.rollout_training.max_staleness == 0:
        return generator.runner.reset_prefix_cache
    return lambda: None


def engine_shares_module(config: RolloutRunConfig) -> bool:
    """Return whether the generator runs the learner's module, so that the two take turns."""
    return not config.policy.generation.uses_engines and not count_devices(config).uses_ray


def choose_drain(config: RolloutRunConfig) -> DrainBefore:
    """Return before which phase the groups in flight must finish."""
    if config.rollout_training.max_staleness == 0 or config.rollout_training.async_config.in_flight_weight_updates:
        return "never"  # a synchronous run has no groups in flight at these points
    return "training" if engine_shares_module(config) else "publishing"


def make_train_options(
    config: RolloutRunConfig, *, share_prefixes: bool, filters: bool = False, tasks: int | None = None
) -> TrainOptions:
    """Make the options of the loop. ``filters``: the algorithm drops groups, so the number generated for a step is bounded.
    ``tasks``: those of an epoch."""
    training = config.rollout_training
    return TrainOptions(
        section=config.section,
        batch_key=f"{config.section}.num_prompts_per_step",
        max_steps=training.last_step,
        groups_per_step=training.num_prompts_per_step,
        steps_per_batch=count_steps_per_batch(config),
        update_epochs=training.epochs_per_batch,
        max_staleness=training.max_staleness,
        drop_stale=training.max_staleness > 0 and training.async_config.order == "drop_too_old",
        drain_before=choose_drain(config),
        max_groups_per_step=training.num_prompts_per_step * training.dynamic_sampling_max_gen_batches if filters else UNFILTERED,
        max_errors_in_a_row=training.max_errors_in_a_row,
        val_period=training.val_period,
        val_start_at=training.val_start_at,
        val_at_start=training.val_at_start,
        val_at_end=training.val_at_end,
        save_period=config.checkpointing.save_period,
        share_prefixes=share_prefixes,
        tasks_per_epoch=tasks,
    )
