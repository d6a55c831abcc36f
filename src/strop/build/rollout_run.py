"""Build a run that learns from its own rollouts: GRPO and its family, PPO, distillation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.algorithms.base import Algorithm
from strop.algorithms.policy_gradient.advantages.gdpo import DecoupledRewards
from strop.build.algorithm.run_algorithm import count_steps_per_batch
from strop.build.backend import Backend, LocalBackend, make_backend
from strop.build.cluster.ray_backend import make_remote_environments
from strop.build.contents.model_check import check_model, note_empty_answers
from strop.build.dry_run.examined_templates import find_conversation_problems
from strop.build.engines import GeneratorSpec
from strop.build.jobs.episode_rules import make_episode_rules
from strop.build.jobs.evaluation_identity import identify_entries
from strop.build.jobs.evaluation_job import make_validation_job
from strop.build.lifecycle import make_checkpoints, make_early_stop, make_hacking_monitor, make_health, make_saver
from strop.build.monitors.instruments import HackingWatch, RolloutRecorder
from strop.build.resume.restore import restore_checkpoint, resume_run
from strop.build.resume.token_budgets import make_token_budgets, settle_token_budgets
from strop.build.scorers import count_optimizer_steps, make_scorers
from strop.build.tasks import count_slots, list_reward_marks, make_training_tasks, make_validation_tasks
from strop.checkpointing.base import Restorable
from strop.checkpointing.saved_model import SavedModel
from strop.config import RolloutRunConfig
from strop.config.checks.device_counts import count_devices
from strop.data.data_state import DataState
from strop.distributed.base import Cluster
from strop.environments.base import Environment
from strop.environments.mixture import Mixture
from strop.generation.base import Generator, PastSelves
from strop.generation.torch.torch_engine import TorchEngine
from strop.generation.torch.torch_past_selves import TorchPastSelves
from strop.models.chat_template import ChatTemplate
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.monitoring.trackers.base import Tracker
from strop.problems import raise_problems
from strop.rollouts.episode import make_failed_group, run_group
from strop.rollouts.order import DropTooOld, Fifo, GroupOrder, Windowed
from strop.rollouts.prompts_ahead import PromptsAhead
from strop.rollouts.stream import RolloutStream, StreamState, requeue_stale
from strop.rollouts.tool_turns import describe_tool_calls
from strop.safety.exits import contain_exits
from strop.sampling import Sampling
from strop.sandbox.sandbox_pool import try_sandbox
from strop.trainer.column_sources import ColumnSources
from strop.trainer.evaluation import Evaluator
from strop.trainer.health.health_rules import HealthFinding
from strop.trainer.health.start_checks import check_epochs, check_reward_weights, check_turns, check_validation
from strop.trainer.listeners import Listeners
from strop.trainer.mismatch import MismatchGuard
from strop.trainer.run import DATA, PAST_SELVES, DrainBefore, TrainingRun, TrainOptions
from strop.types import Group
from strop.weight_sync.snapshots import SnapshottedWeights

log = logging.getLogger(__name__)

UNFILTERED = 1 << 60  # groups generated for a step, of an algorithm that drops none


async def build_rollout_run(
    config: RolloutRunConfig, algorithm: Algorithm, tracker: Tracker, cluster: Cluster | None = None
) -> tuple[TrainingRun, Generator]:
    """Build a run on rollouts and its generator, restored from the newest checkpoint if there is one."""
    training = config.rollout_training
    remote_environments = {} if cluster is None else make_remote_environments(config, cluster)
    monitor = make_hacking_monitor(config)
    tracker.progress("reading tasks")
    train_source = make_training_tasks(config, remote_environments)
    validation_source = make_validation_tasks(config, remote_environments)
    held_out = "" if validation_source is None else f", {len(validation_source)} to validate on"
    tracker.note(f"{describe_count(train_source.epoch_size, 'tasks')} to train on{held_out}{describe_order(config)}")
    note_empty_answers(train_source, tracker.note)
    environments = [
        each.environment for source in (train_source, validation_source) if source is not None for each in source.components
    ]
    if any(each.needs_sandbox for each in environments):
        tracker.progress("trying the sandbox")
        tracker.note(await try_sandbox())
    raise_problems(find_conversation_problems(config, environments))
    backend = await make_backend(config, cluster, tracker)
    check_model(config, backend.bundle, tracker.note)
    sampling = Sampling(**config.policy.generation.sampling_options())
    options = make_train_options(
        config,
        share_prefixes=config.policy.sequence_packing.prefix_sharing and backend.packed,
        filters=getattr(algorithm, "drop_constant_groups", type(algorithm).keep is not Algorithm.keep),
        tasks=train_source.epoch_size,
    )
    if said := describe_tool_calls(environments, backend.bundle.template, config.policy.tokenizer.tool_call_format):
        tracker.note(said)
    if options.max_groups_per_step < UNFILTERED and any(entry.prompts_per_step for entry in config.data.train):
        tracker.note("prompts_per_step is of the groups begun: those that the algorithm drops are replaced by the next in turn")
    learners = await backend.build_learners(algorithm, sampling, count_optimizer_steps(options, train_source.size))
    scorers = await make_scorers(config, backend, algorithm, learners, tracker, last_metrics=lambda: run.last_metrics)

    bundle = backend.bundle
    selves = make_past_selves(backend, environments)
    checkpoints = make_checkpoints(config, bundle.save)
    store = RolloutStore(Path(config.logger.log_dir), config.logger.rollouts, decode=bundle.tokenizer.decode)
    parts: dict[str, Restorable] = {**make_token_budgets(config), **({} if selves is None else {PAST_SELVES: selves.pool})}
    if train_source.resumable:
        parts[DATA] = DataState(train_source)
    state = restore_checkpoint(config, checkpoints, {**learners, **parts}, tracker, store)
    await settle_token_budgets(config, learners, parts, tracker)
    tracker.progress(describe_engine_start(config))
    synced = await backend.build_generator(
        GeneratorSpec(
            sampling=sampling,
            learner=learners["policy"],
            max_staleness=options.max_staleness,
            in_flight=training.async_config.in_flight_weight_updates,
            recompute=training.async_config.recompute_kv_cache_after_weight_updates,
            share_prefixes=options.share_prefixes,
            seed=training.seed,
            note=tracker.note,
            output_folder=Path(config.logger.log_dir) / "engines",
        )
    )
    generator = synced.generator
    stream_state = None
    if state is not None:
        stream_state = requeue_stale(
            state.stream,
            step=state.step,
            groups_per_step=options.groups_per_step,
            max_staleness=options.max_staleness,
            order=make_order(config, options),
        )
    prefetch = options.groups_per_step if config.data.prefetch is None else config.data.prefetch
    ahead = PromptsAhead(train_source.peek_messages, bundle.template, ahead=prefetch) if prefetch else None
    run = TrainingRun(
        options=options,
        algorithm=algorithm,
        stream=make_rollout_stream(
            config,
            train_source,
            generator,
            bundle.template,
            sampling,
            options,
            stream_state,
            greedy=algorithm.greedy_baseline,
            past=selves,
            ahead=ahead,
        ),
        learners=learners,
        parts=parts,
        columns=ColumnSources(algorithm.requires, scorers),
        weights=synced.weights if selves is None else SnapshottedWeights(synced.weights, selves.pool),
        tracker=tracker,
        evaluator=make_evaluator(config, validation_source, generator, bundle.template, tracker, past=selves),
        early_stop=make_early_stop(config),
        checkpoints=make_saver(config, checkpoints),
        listeners=Listeners(
            [
                make_mismatch_guard(config),
                make_recorder(config, algorithm, store, bundle.tokenizer.decode),
                make_health(config, find_at_start(config, options, train_source, algorithm)),
                *([] if monitor is None else [HackingWatch(monitor=monitor, store=store)]),
            ]
        ),
    )
    run.on_close += [each.close for each in (selves, ahead) if each is not None]
    return resume_run(run, state), generator


def make_recorder(
    config: RolloutRunConfig, algorithm: Algorithm, store: RolloutStore, decode: Callable[[list[int]], str]
) -> RolloutRecorder:
    logger = config.logger
    return RolloutRecorder(
        store=store,
        algorithm=algorithm,
        decode=decode,
        stored_routes=logger.routes,
        token_columns=logger.rollouts != "none" and logger.token_columns != "none",
        tracked_samples=logger.shown_samples,
        tracked_samples_period=logger.tracked_samples_period,
    )


def make_mismatch_guard(config: RolloutRunConfig) -> MismatchGuard:
    policy = config.policy
    return MismatchGuard(policy.generation.mismatch, exact=policy.exact_on_policy and not policy.generation.uses_engines)


def describe_count(count: int | None, what: str) -> str:
    return f"{what} of a stream" if count is None else f"{count} {what}"


def describe_order(config: RolloutRunConfig) -> str:
    """Say what a curriculum changes; empty without one."""
    name, limit = config.data.curriculum.name, config.training.max_num_epochs
    if not config.data.curriculum.enabled:
        return ""
    epochs = "" if limit is None else f", {limit} (max_num_epochs) in all"
    return f"; the curriculum {name} draws them with replacement, and an epoch is as many draws as there are tasks{epochs}"


def make_past_selves(backend: Backend, environments: Sequence[Environment[Any]]) -> TorchPastSelves | None:
    """Make the earlier selves of the policy that environments play against, None if none does. Raises ValueError if they do not agree."""
    rules = {environment.past_selves for environment in environments} - {None}
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


def describe_engine_start(config: RolloutRunConfig) -> str:
    return f"starting the {config.policy.generation.engine_name} engine"


def find_at_start(
    config: RolloutRunConfig, options: TrainOptions, source: Mixture, algorithm: Algorithm
) -> Iterator[HealthFinding]:
    """Find what most likely is not as intended, before the first step."""
    environments = {component.name: component.environment for component in source.components}
    yield from check_turns(environments, config.rollout_training.max_rollout_turns, config.section)
    advantage = getattr(algorithm, "advantage", None)
    if isinstance(advantage, DecoupledRewards):
        weights = advantage.weights if isinstance(advantage.weights, Mapping) else {}
        yield from check_reward_weights(list_reward_marks(config), weights, "algorithm.kwargs.advantage.weights")
    yield from check_validation(options, source.size, held_out=bool(config.data.validation_entries))
    yield from check_epochs(options, source.size, config.training.max_num_epochs)


def make_rollout_stream(
    config: RolloutRunConfig,
    source: Mixture,
    generator: Generator,
    template: ChatTemplate,
    sampling: Sampling,
    options: TrainOptions,
    state: StreamState | None,
    *,
    greedy: bool = False,
    past: PastSelves | None = None,
    ahead: PromptsAhead | None = None,
) -> RolloutStream:
    rules = make_episode_rules(config)

    async def run(index: int) -> Group:
        if ahead is not None:
            ahead.advance(index)
        try:
            with contain_exits():
                name, environment, task = source.at(index)
        except Exception as error:
            group = make_failed_group(index, generator.version, error)
            source.observe(group)
            return group
        group = await run_group(
            index,
            name,
            environment,
            task,
            samples=config.rollout_training.num_generations_per_prompt,
            generator=generator,
            template=template,
            sampling=sampling,
            rules=rules,
            seed=config.rollout_training.seed,
            greedy_baseline=greedy,
            past=past,
        )
        source.observe(group)
        return group

    return RolloutStream(
        run,
        slots=count_slots(config),
        size=source.size,
        has=source.has,
        state=state,
        refill_on_release=options.max_staleness > 0,
        order=make_order(config, options),
        version=lambda: generator.version,
    )


def make_order(config: RolloutRunConfig, options: TrainOptions) -> GroupOrder:
    """Return the order in which finished groups are trained on. A synchronous run is always FIFO: all groups have the newest version."""
    section = config.rollout_training.async_config
    if options.drop_stale:
        return DropTooOld()
    if options.max_staleness and section.order == "windowed":
        window = options.groups_per_step if section.window is None else section.window
        return Windowed(window=window, groups_per_step=options.groups_per_step, max_staleness=options.max_staleness)
    return Fifo()


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
