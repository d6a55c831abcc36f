"""A run that learns from its own rollouts (GRPO and its family, PPO): its tasks, engine, stream and validation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from strop import plugins
from strop.algorithms.base import Algorithm
from strop.checkpointing.base import Restorable, RunState
from strop.checkpointing.saved_model import SavedModel
from strop.config import RolloutRunConfig, TrainingRunConfig
from strop.config.cluster_checks import count_devices
from strop.data.data_state import DataState
from strop.data.task_order import find_task_orders
from strop.distributed.base import Cluster
from strop.environments.handle import EnvironmentHandle
from strop.environments.mixture import Mixture
from strop.environments.policy_client import BASE
from strop.generation.base import Generator, PastSelves
from strop.generation.pool import SyncedGenerator
from strop.generation.torch.torch_engine import TorchEngine
from strop.generation.torch.torch_past_selves import TorchPastSelves
from strop.learner.client import ColumnSources, LearnerClient
from strop.models.chat_template import ChatTemplate
from strop.monitoring.trackers.base import Tracker
from strop.problems import raise_problems
from strop.rollouts.episode import EpisodeKeeper, EpisodeRules, make_failed_group, run_group
from strop.rollouts.policy_turns import describe_tool_calls
from strop.rollouts.prepared_ahead import PromptsAhead
from strop.rollouts.stream import (
    DropTooOld,
    EpisodeGate,
    Fifo,
    GroupOrder,
    RolloutStream,
    StreamState,
    Windowed,
    is_beyond_training,
    requeue_stale,
)
from strop.runs.backend import Backend, LocalBackend
from strop.runs.dry_run.examined_models import find_conversation_problems
from strop.runs.engines import GeneratorSpec
from strop.runs.evaluation_job import identify_entries, make_episode_rules, make_validation_job
from strop.runs.model_check import note_empty_answers
from strop.runs.run_algorithm import count_steps_per_batch
from strop.runs.run_source import RunSource
from strop.runs.tasks import count_slots, make_training_tasks, make_validation_tasks
from strop.safety.exits import contain_exits
from strop.sampling import Sampling
from strop.trainer.run import DATA, PAST_SELVES, DrainBefore, GroupSupply, TrainOptions
from strop.types import Group, Rollout
from strop.weight_sync.in_process import SnapshottedWeights

if TYPE_CHECKING:
    from strop.trainer.evaluation import Evaluator

UNFILTERED = 1 << 60  # group limit per step for an algorithm that drops none


@dataclass(kw_only=True)
class SampledSource(RunSource):
    """Groups of rollouts that the policy samples in environments."""

    config: RolloutRunConfig
    algorithm: Algorithm
    tracker: Tracker
    train: Mixture
    validation: Mixture | None = None
    options: TrainOptions = field(init=False)  # of the loop, once it is prepared
    selves: TorchPastSelves | None = None  # earlier selves of the policy, opponents in environments
    gates: list[EpisodeGate] = field(default_factory=list)  # that episodes pass, in this order
    keep: Callable[[int], EpisodeKeeper] | None = None  # makes what keeps the episodes of a group; set by a listener

    @classmethod
    def read(cls, config: RolloutRunConfig, algorithm: Algorithm, tracker: Tracker, cluster: Cluster | None) -> Self:
        """Make the environments of a run and read its tasks. Raises ConfigError, EnvironmentConfigError."""
        remote = {}
        if cluster is not None:
            from strop.runs.cluster.ray_backend import make_remote_environments

            remote = make_remote_environments(config, cluster)
        tracker.progress("reading tasks")
        train, validation = make_training_tasks(config, remote), make_validation_tasks(config, remote)
        held_out = "" if validation is None else f", {len(validation)} to validate on"
        counted = "tasks of a stream" if train.epoch_size is None else f"{train.epoch_size} tasks"
        tracker.note(f"{counted} to train on{held_out}{describe_order(config)}")
        note_empty_answers(train, tracker.note)
        source = cls(config=config, algorithm=algorithm, tracker=tracker, train=train, validation=validation)
        raise_problems(find_conversation_problems(config, source.environments))
        return source

    @property
    def environments(self) -> list[EnvironmentHandle[Any]]:
        """The environments of both, listed as often as they are named."""
        mixtures = [self.train] if self.validation is None else [self.train, self.validation]
        return [component.environment for mixture in mixtures for component in mixture.components]

    @property
    def sampling(self) -> Sampling:
        return Sampling(**self.config.policy.generation.sampling_options())

    @property
    def size(self) -> int | None:
        return self.train.size

    def prepare(self, backend: Backend) -> TrainOptions:
        """Return the options of the loop. Notes how tool calls are written, and how a filter changes the shares of the data."""
        config = self.config
        if said := describe_tool_calls(self.environments, backend.bundle.template, config.policy.tokenizer.tool_call_format):
            self.tracker.note(said)
        filters: bool = getattr(self.algorithm, "drop_constant_groups", type(self.algorithm).keep is not Algorithm.keep)
        if filters and any(entry.prompts_per_step for entry in config.data.train):
            self.tracker.note(
                "prompts_per_step counts started groups: those that the algorithm drops are replaced by the next ones in turn"
            )
        prepare_role_policies(backend, self.environments, self.algorithm)
        share_prefixes = config.policy.sequence_packing.prefix_sharing and backend.packed
        self.options = make_train_options(config, share_prefixes=share_prefixes, filters=filters, tasks=self.train.epoch_size)
        return self.options

    def make_parts(self, backend: Backend) -> Mapping[str, Restorable]:
        self.selves = make_past_selves(backend, self.environments)
        return {
            **({} if self.selves is None else {PAST_SELVES: self.selves.pool}),
            **({DATA: DataState(self.train)} if self.train.resumable else {}),
        }

    @asynccontextmanager
    async def open(
        self,
        backend: Backend,
        policy: LearnerClient,
        columns: ColumnSources,
        state: RunState | None,
    ) -> AsyncIterator[GroupSupply]:
        """Start the engine and the stream of groups."""
        config, options, template, selves = self.config, self.options, backend.bundle.template, self.selves
        async with AsyncExitStack() as stack:
            self.tracker.progress(f"starting the {config.policy.generation.engine_name} engine")
            synced = await backend.build_generator(make_generator_spec(config, options, self.sampling, policy, self.tracker))
            for engine in (synced.generator, *synced.policies.values()):
                stack.push_async_callback(engine.close)
            ahead = make_prompts_ahead(config, self.train, template)
            for each in (selves, ahead):
                if each is not None:
                    stack.push_async_callback(each.close)
            episodes = Episodes(
                config,
                self.train,
                synced.generator,
                template,
                self.sampling,
                greedy_baseline=self.algorithm.greedy_baseline,
                past=selves,
                policies=synced.policies,
                gates=self.gates,
                keep=self.keep,
            )
            stream = make_rollout_stream(episodes, options, state, ahead)
            stack.push_async_callback(stream.close)
            yield GroupSupply(
                stream=stream,
                weights=synced.weights if selves is None else SnapshottedWeights(synced.weights, selves.pool),
                evaluator=make_evaluator(config, self.validation, synced, template, self.tracker, past=selves),
            )


def find_source(config: TrainingRunConfig) -> type[RunSource]:
    """Return where a run's groups come from: what its kind declares in ``strop.sources``, or tasks in environments."""
    declared: Mapping[str, object] = plugins.declared("sources")
    source: type[RunSource] = plugins.load("sources", config.section) if config.section in declared else SampledSource
    return source


def describe_order(config: RolloutRunConfig) -> str:
    """Describe the order of the tasks; empty for the shuffled one."""
    limit = config.training.max_num_epochs
    epochs = "" if limit is None else f", {limit} (max_num_epochs) in all"
    return "".join(f"; {order.describe()}{epochs}" for order in find_task_orders(config.data))


@dataclass(frozen=True)
class Episodes:
    """Samples the group of the task at a position of the stream."""

    config: RolloutRunConfig
    source: Mixture
    generator: Generator
    template: ChatTemplate
    sampling: Sampling
    greedy_baseline: bool = False
    past: PastSelves | None = None
    gates: Sequence[EpisodeGate] = ()
    keep: Callable[[int], EpisodeKeeper] | None = None
    policies: Mapping[str, Generator] = field(default_factory=dict)  # of roles

    @cached_property
    def rules(self) -> EpisodeRules:
        return make_episode_rules(self.config)

    async def run(self, index: int) -> Group:
        try:
            with contain_exits():
                name, environment, task = self.source.at(index)
        except Exception as error:
            group = make_failed_group(index, self.generator.version, error)
        else:
            group = await run_group(
                index,
                name,
                environment,
                task,
                samples=self.config.rollout_training.num_generations_per_prompt,
                generator=self.generator,
                template=self.template,
                sampling=self.sampling,
                rules=self.rules,
                seed=self.config.rollout_training.seed,
                greedy_baseline=self.greedy_baseline,
                past=self.past,
                policies=self.policies,
                gates=self.gates,
                is_lost=self._make_lost_check(),
                kept=None if self.keep is None else self.keep(index),
            )
        self.source.observe(group)
        return group

    def _make_lost_check(self) -> Callable[[Sequence[Rollout]], bool]:
        """Return whether a group that starts now can no longer be trained on, given the rollouts that have ended."""
        training, version = self.config.rollout_training, self.generator.version
        drops_stale = training.async_config.order == "drop_too_old" and training.max_staleness > 0

        def is_lost(ended: Sequence[Rollout]) -> bool:
            if drops_stale and self.generator.version - version > training.max_staleness:
                return True
            return is_beyond_training(ended, training.num_generations_per_prompt, training.failures.min_rollouts)

        return is_lost


def make_rollout_stream(
    episodes: Episodes, options: TrainOptions, state: RunState | None, ahead: PromptsAhead | None = None
) -> RolloutStream:
    """Create the stream, starting where a checkpoint left it. ``ahead`` None: a prompt is prepared when its group starts."""
    order = make_order(episodes.config, options)

    async def run(index: int) -> Group:
        if ahead is not None:
            ahead.advance(index)
        return await episodes.run(index)

    return RolloutStream(
        run,
        slots=count_slots(episodes.config),
        size=episodes.source.size,
        has=episodes.source.has,
        state=None if state is None else resume_stream(state, options, order),
        refill_on_release=options.max_staleness > 0,
        order=order,
        version=lambda: episodes.generator.version,
    )


def resume_stream(state: RunState, options: TrainOptions, order: GroupOrder) -> StreamState:
    """Return a checkpoint's stream state, without groups that are too old for this run."""
    return requeue_stale(
        state.stream,
        step=state.step,
        groups_per_step=options.groups_per_step,
        max_staleness=options.max_staleness,
        order=order,
    )


def make_order(config: RolloutRunConfig, options: TrainOptions) -> GroupOrder:
    """Return the order in which finished groups are trained on. A synchronous run is always FIFO, because all groups have the
    newest version.
    """
    section = config.rollout_training.async_config
    if options.drop_stale:
        return DropTooOld()
    if options.max_staleness and section.order == "windowed":
        window = options.groups_per_step if section.window is None else section.window
        return Windowed(window=window, groups_per_step=options.groups_per_step, max_staleness=options.max_staleness)
    return Fifo()


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
    """Create the earlier selves of the policy used by environments, None if none uses them. Raises ValueError if their settings
    differ.
    """
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


def prepare_role_policies(backend: Backend, environments: Sequence[EnvironmentHandle[Any]], algorithm: Algorithm) -> None:
    """Have the backend keep the policies that roles of environments are bound to, besides the run's. Raises ValueError."""
    found = dict.fromkeys(name for environment in environments for name in environment.traits.policies)
    names = tuple(sorted(found, key=BASE.__eq__))  # last, as it is not trained and has no number
    if not names:
        return
    what = f"roles are played by separate policies ({', '.join(names)})"
    if not isinstance(backend, LocalBackend) or backend.config.policy.generation.uses_engines:
        raise ValueError(
            f"{what}, which the torch engine samples in the process of the learner; set policy.generation.backend=torch and "
            "cluster.backend=local, or bind the roles to policy or to an endpoint"
        )
    if set(algorithm.losses(0)) != {"policy"} or backend.config.policy.train_tokens == "auto":
        raise ValueError(
            f"{what}, and a critic, or a token budget that is measured, is there for one policy; choose an algorithm without a critic and "
            "set train_mb_tokens, or bind the roles to policy"
        )
    backend.role_policies = names


def make_evaluator(
    config: RolloutRunConfig,
    source: Mixture | None,
    synced: SyncedGenerator,
    template: ChatTemplate,
    tracker: Tracker,
    past: PastSelves | None = None,
) -> Evaluator | None:
    training = config.rollout_training
    if source is None:
        if training.val_period or training.val_at_start or training.val_at_end:
            tracker.note("no validation: data.validation is not set, and data.train holds out no tasks (split_validation_size)")
        return None
    from strop.trainer.evaluation import Evaluator

    size = len(source) if training.max_val_samples is None else min(len(source), training.max_val_samples)
    job = make_validation_job(config, SavedModel(config.logger.log_dir))
    return Evaluator(
        source=source,
        size=size,
        samples=training.val_num_generations_per_prompt,
        generator=synced.generator,
        template=template,
        sampling=job.sets[0].sampling,
        rules=job.rules,
        seed=training.seed,
        identity=identify_entries(job).to_json(),
        folder=Path(config.logger.log_dir).absolute() / "validation",
        past=past,
        policies=synced.policies,
        name_set=source.name_set,
        samples_to_print=config.logger.num_val_samples_to_print,
        samples_to_track=config.logger.shown_samples,
        on_sampled=choose_forgetting(config, synced.generator),
    )


def choose_forgetting(config: RolloutRunConfig, generator: Generator) -> Callable[[], object]:
    """Return a function that drops the embedded engine's cached prompts after a synchronous run has validated.

    Otherwise a prompt in both sets would come from the cache, where it was computed in another batch and rounded differently in
    the last digits. A run resumed after the validation has no such cache, and would differ from the uninterrupted one.
    """
    if isinstance(generator, TorchEngine) and config.rollout_training.max_staleness == 0:
        return generator.runner.reset_prefix_cache
    return lambda: None


def engine_shares_module(config: RolloutRunConfig) -> bool:
    """Return whether the generator runs the learner's module, so that the two alternate."""
    return not config.policy.generation.uses_engines and not count_devices(config).uses_ray


def choose_drain(config: RolloutRunConfig) -> DrainBefore:
    """Return before which phase the groups in flight must finish."""
    if config.rollout_training.max_staleness == 0 or config.rollout_training.async_config.in_flight_weight_updates:
        return "never"  # a synchronous run has no groups in flight at these points
    return "training" if engine_shares_module(config) else "publishing"


def make_train_options(
    config: RolloutRunConfig, *, share_prefixes: bool, filters: bool = False, tasks: int | None = None
) -> TrainOptions:
    """Create the options of the loop. ``filters``: the algorithm drops groups, so the number generated per step is bounded.
    ``tasks``: number per epoch.
    """
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
        min_rollouts=training.failures.min_rollouts,
        val_period=training.val_period,
        val_start_at=training.val_start_at,
        val_at_start=training.val_at_start,
        val_at_end=training.val_at_end,
        save_period=config.checkpointing.save_period,
        share_prefixes=share_prefixes,
        tasks_per_epoch=tasks,
    )
