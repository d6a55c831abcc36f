"""Build a run that learns from its own rollouts: GRPO and its family, PPO, distillation."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from strop.algorithms.base import Algorithm, Plan
from strop.assembly.algorithms import make_algorithm, refuse_nonsense, refuse_other_run
from strop.assembly.engines import GenerationNeeds
from strop.assembly.home import make_home
from strop.assembly.remote import hosted_environments
from strop.assembly.roles import tokenizer_saver
from strop.assembly.scorers import optimizer_steps
from strop.assembly.settings import settings_of
from strop.assembly.tasks import reward_names, training_tasks, validation_tasks
from strop.assembly.training import continued, early_stop, make_checkpoints, restore, saving_with
from strop.cluster.base import Cluster
from strop.config import RolloutRunConfig
from strop.config.devices import devices_of
from strop.environments.mixture import Mixture
from strop.evaluation import Evaluator
from strop.generation.base import Generator
from strop.loop import Drain, LoopOptions, Run
from strop.mismatch import MismatchGuard, MismatchLimits
from strop.rollouts.episode import EpisodeRules, RewardScaling, group_without_task, run_group
from strop.rollouts.order import DropTooOld, Fifo, Order, Windowed
from strop.rollouts.stream import RolloutStream, StreamState, renewed
from strop.rollouts.template import ChatTemplate
from strop.sampling import Sampling
from strop.tracking.base import Tracker
from strop.tracking.rollouts import RolloutStore
from strop.training.base import ColumnSource, Learner
from strop.training.threaded import LearnerThread, ThreadedColumns, in_thread
from strop.types import Group

log = logging.getLogger(__name__)


async def build_rollout_run(config: RolloutRunConfig, tracker: Tracker, cluster: Cluster | None = None) -> tuple[Run, Generator]:
    """Build a run on rollouts and its generator, restored from the newest checkpoint if there is one."""
    training = config.rollouts
    algorithm = algorithm_of(config)
    hosted = {} if cluster is None else hosted_environments(config, cluster)
    train_source = training_tasks(
        config.data.train,
        config.env,
        seed=training.seed,
        shuffle=config.data.shuffle,
        max_epochs=training.max_num_epochs,
        hosted=hosted,
    )
    validation_source = validation_tasks(config.data.validation, config.data.train, config.env, seed=training.seed, hosted=hosted)
    home = await make_home(config, cluster, tracker)
    sampling = Sampling(**config.policy.generation.sampling_options())
    options = loop_options(
        config,
        share_prefixes=config.policy.sequence_packing.prefix_sharing and home.packed,
        filters=getattr(algorithm, "drop_constant_groups", type(algorithm).keep is not Algorithm.keep),
    )
    learners = await home.learners(algorithm, sampling, optimizer_steps(options, train_source.size))
    scorers = await home.scorers()

    speech = home.speech
    checkpoints = make_checkpoints(config, tokenizer_saver(speech.tokenizer))
    store = RolloutStore(Path(config.logger.log_dir), config.logger.rollouts, decode=speech.tokenizer.decode)
    state = restore(config, checkpoints, learners, tracker, store)
    if options.max_staleness > 0 and home.blocks and not home.shares_module:
        learners, scorers = beside_the_loop(learners, scorers)
    generation = await home.generation(
        GenerationNeeds(
            sampling=sampling,
            learner=learners["policy"],
            max_staleness=options.max_staleness,
            in_flight=training.asynchronous.in_flight_weight_updates,
            recompute=training.asynchronous.recompute_kv_cache_after_weight_updates,
            share_prefixes=options.share_prefixes,
            seed=training.seed,
            note=tracker.note,
            outputs=Path(config.logger.log_dir) / "engines",
        )
    )
    engine = generation.generator
    rules = episode_rules(config)
    stream_state = None
    if state is not None:
        stream_state = renewed(
            state.stream,
            step=state.step,
            groups_per_step=options.groups_per_step,
            max_staleness=options.max_staleness,
            order=order_of(config, options),
        )
    run = Run(
        options=options,
        algorithm=algorithm,
        stream=make_stream(
            config,
            train_source,
            engine,
            speech.template,
            sampling,
            rules,
            options,
            stream_state,
            greedy=algorithm.greedy_baseline,
        ),
        learners=learners,
        scorers=scorers,
        weights=generation.weights,
        tracker=tracker,
        rollouts=store,
        decode=speech.tokenizer.decode,
        evaluator=make_evaluator(config, validation_source, engine, speech.template, rules, tracker),
        early_stop=early_stop(config),
        mismatch=MismatchGuard(MismatchLimits(**config.policy.generation.mismatch.model_dump())),
        checkpoints=saving_with(config, checkpoints),
    )
    return continued(run, state), engine


def algorithm_of(config: RolloutRunConfig) -> Algorithm:
    """Make the algorithm of a run. Raises ValueError if the algorithm, its parts and the run do not go together."""
    algorithm = make_algorithm(config.algorithm.name, config.algorithm.kwargs, settings_of(config))
    refuse_other_run(config.algorithm.name, algorithm, config.section)
    options = loop_options(config, share_prefixes=True)
    plan = Plan(
        group_size=config.rollouts.num_generations_per_prompt,
        optimizer_steps=options.steps_per_batch * options.update_epochs,
        max_staleness=options.max_staleness,
        environment_rewards=reward_names(config.data.train, config.env),
    )
    refuse_nonsense(algorithm, plan)
    return algorithm


def make_stream(
    config: RolloutRunConfig,
    source: Mixture,
    generator: Generator,
    template: ChatTemplate,
    sampling: Sampling,
    rules: EpisodeRules,
    options: LoopOptions,
    state: StreamState | None,
    *,
    greedy: bool = False,
) -> RolloutStream:
    async def run(index: int) -> Group:
        try:
            name, environment, task = source.at(index)
        except Exception as error:
            return group_without_task(index, generator.version, error)
        return await run_group(
            index,
            name,
            environment,
            task,
            samples=config.rollouts.num_generations_per_prompt,
            generator=generator,
            template=template,
            sampling=sampling,
            rules=rules,
            seed=config.rollouts.seed,
            greedy_baseline=greedy,
        )

    return RolloutStream(
        run,
        slots=slots_of(config, options),
        size=source.size,
        state=state,
        ahead=options.max_staleness > 0,
        order=order_of(config, options),
        version=lambda: generator.version,
    )


def slots_of(config: RolloutRunConfig, options: LoopOptions) -> int:
    """Return how many groups may be started and not yet trained on."""
    full = (options.max_staleness + 1) * options.groups_per_step
    asked = config.rollouts.asynchronous.slots if options.max_staleness else None
    return full if asked is None else asked


def order_of(config: RolloutRunConfig, options: LoopOptions) -> Order:
    """Return the order in which finished groups are trained on. A synchronous run is always FIFO: all groups have the newest version."""
    section = config.rollouts.asynchronous
    if options.drops_stale:
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
    rules: EpisodeRules,
    tracker: Tracker,
) -> Evaluator | None:
    training = config.rollouts
    if source is None:
        if training.val_period or training.val_at_start or training.val_at_end:
            tracker.note("no validation: data.validation is not set, and data.train holds out no tasks (split_validation_size)")
        return None
    size = len(source) if training.max_val_samples is None else min(len(source), training.max_val_samples)
    return Evaluator(
        source=source,
        size=size,
        samples=training.val_num_generations_per_prompt,
        generator=generator,
        template=template,
        sampling=Sampling(**config.policy.generation.sampling_options(validation=True)),
        rules=replace(rules, scaling=None),
        seed=training.seed,
        folder=Path(config.logger.log_dir) / "validation",
        show=config.logger.num_val_samples_to_print,
    )


def episode_rules(config: RolloutRunConfig) -> EpisodeRules:
    scaling = config.rollouts.reward_scaling
    return EpisodeRules(
        max_turns=config.rollouts.max_rollout_turns,
        max_length=config.policy.max_total_sequence_length,
        max_prompt_length=config.data.max_input_seq_length,
        scaling=RewardScaling(
            source_min=scaling.source_min,
            source_max=scaling.source_max,
            target_min=scaling.target_min,
            target_max=scaling.target_max,
        )
        if scaling.enabled
        else None,
    )


def shares_module(config: RolloutRunConfig) -> bool:
    """Return whether the generator runs the learner's module, so that the two take turns."""
    return config.policy.generation.backend in ("auto", "torch") and not devices_of(config).ray


def beside_the_loop(
    learners: Mapping[str, Learner], scorers: Mapping[str, ColumnSource]
) -> tuple[dict[str, Learner], dict[str, ColumnSource]]:
    """Run learners and column sources in one other thread, so that generation and environments continue while they compute."""
    thread = LearnerThread()
    return (
        {name: in_thread(learner, thread) for name, learner in learners.items()},
        {name: ThreadedColumns(source, thread) for name, source in scorers.items()},
    )


def drain_before(config: RolloutRunConfig) -> Drain:
    """Return before which phase the groups in flight must finish."""
    if config.rollouts.max_staleness == 0 or config.rollouts.asynchronous.in_flight_weight_updates:
        return "never"  # a synchronous run has no groups in flight at these points
    return "training" if shares_module(config) else "publishing"


def loop_options(config: RolloutRunConfig, *, share_prefixes: bool, filters: bool = False) -> LoopOptions:
    """Make the options of the loop. ``filters``: the algorithm drops groups, so the number generated for a step is bounded."""
    training = config.rollouts
    global_batch = config.policy.train_global_batch_size or training.rollouts_per_step
    return LoopOptions(
        section=config.section,
        batch_key=f"{config.section}.num_prompts_per_step",
        max_steps=training.last_step,
        groups_per_step=training.num_prompts_per_step,
        steps_per_batch=training.rollouts_per_step // global_batch,
        update_epochs=training.epochs_per_batch,
        max_staleness=training.max_staleness,
        drops_stale=training.max_staleness > 0 and training.asynchronous.order == "drop_too_old",
        drain_before=drain_before(config),
        max_groups_per_step=training.num_prompts_per_step * training.dynamic_sampling_max_gen_batches if filters else 1 << 60,
        max_errors_in_a_row=training.max_errors_in_a_row,
        val_period=training.val_period,
        val_start_at=training.val_start_at,
        val_at_start=training.val_at_start,
        val_at_end=training.val_at_end,
        save_period=config.checkpointing.save_period,
        share_prefixes=share_prefixes,
    )
