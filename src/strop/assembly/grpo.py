"""``strop grpo``: build a run from its configuration, train, and leave the folders behind."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch

from strop.algorithms.base import Algorithm, Plan
from strop.algorithms.kl import REFERENCE
from strop.assembly.algorithms import make_algorithm, refuse_nonsense
from strop.assembly.describe import describe
from strop.assembly.mistakes import run_to_end
from strop.assembly.roles import load_training_policy, make_engine, make_learner, make_reference, tokenizer_saver
from strop.assembly.settings import policy_gradient_settings
from strop.assembly.tasks import training_tasks, validation_tasks
from strop.checkpointing.base import RunState
from strop.checkpointing.folders import CheckpointFolders
from strop.config import ConfigError, GrpoRunConfig, dump_config, load_config
from strop.environments.mixture import Mixture
from strop.evaluation import Evaluator
from strop.generation.base import Generator
from strop.loop import LoopOptions, Run, train
from strop.rollouts.episode import EpisodeRules, RewardScaling, group_without_task, run_group
from strop.rollouts.stream import RolloutStream, StreamState, renewed
from strop.rollouts.template import ChatTemplate
from strop.sampling import Sampling
from strop.stopping import EarlyStop
from strop.tracking.base import Tracker, Trackers
from strop.tracking.console import open_console
from strop.tracking.jsonl import FILE_NAME, JsonlTracker
from strop.tracking.rollouts import RolloutStore
from strop.training.base import LogprobColumn
from strop.types import Group
from strop.weights.shared import SharedWeights

log = logging.getLogger(__name__)


def run_grpo(config: GrpoRunConfig, command: str) -> int:
    """Train as configured; 0 on success, 1 after an error that was printed. ``command`` is what the user typed."""
    return run_to_end(_run(config, command))


async def _run(config: GrpoRunConfig, command: str) -> None:
    tracker = make_tracker(config)
    try:
        run, generator = build_run(config, tracker)
        try:
            await train(run)
        finally:
            await run.stream.close()
            await generator.close()
        run.tracker.note(f"done after step {run.step}; metrics in {config.logger.log_dir}")
    finally:
        tracker.close()


def build_run(config: GrpoRunConfig, tracker: Tracker) -> tuple[Run, Generator]:
    """Everything of a run, restored from its newest checkpoint if there is one."""
    _seed(config.grpo.seed)
    for line in describe(config).splitlines():
        tracker.note(line)
    algorithm = algorithm_of(config)
    train_source = training_tasks(
        config.data.train, config.env, seed=config.grpo.seed, shuffle=config.data.shuffle, max_epochs=config.grpo.max_num_epochs
    )
    validation_source = validation_tasks(config.data.validation, config.data.train, config.env, seed=config.grpo.seed)
    policy = load_training_policy(config.policy)
    sampling = Sampling(**config.policy.generation.sampling_options())
    engine = make_engine(policy, config.policy.generation, config.policy.max_total_sequence_length)
    reference = make_reference(policy, config.policy, sampling) if REFERENCE in algorithm.requires else None
    learner = make_learner(policy, config.policy, sampling)
    unknown = algorithm.requires - {REFERENCE}
    if unknown:
        raise ValueError(
            f"algorithm.name: {config.algorithm.name} requires the columns {sorted(unknown)}, which nothing here scores"
        )

    checkpoints = make_checkpoints(config, tokenizer_saver(policy.tokenizer))
    store = RolloutStore(Path(config.logger.log_dir), config.logger.rollouts)
    state = _restore(config, checkpoints, learner, tracker, store)
    rules = episode_rules(config)
    options = loop_options(
        config,
        share_prefixes=config.policy.sequence_packing.prefix_sharing and policy.network.packed,
        filters=type(algorithm).keep is not Algorithm.keep and getattr(algorithm, "drop_constant_groups", True),
    )
    stream_state = None
    if state is not None:
        stream_state = renewed(
            state.stream, step=state.step, groups_per_step=options.groups_per_step, max_staleness=options.max_staleness
        )
    stream = make_stream(config, train_source, engine, policy.template, sampling, rules, options, stream_state)
    evaluator = make_evaluator(config, validation_source, engine, policy.template, rules, tracker)
    run = Run(
        options=options,
        algorithm=algorithm,
        stream=stream,
        learners={"policy": learner},
        scorers={REFERENCE: LogprobColumn(REFERENCE, reference)} if reference else {},
        weights=SharedWeights([engine]),
        tracker=tracker,
        rollouts=store,
        decode=policy.tokenizer.decode,
        evaluator=evaluator,
        early_stop=early_stop(config),
        checkpoints=checkpoints if config.checkpointing.enabled else None,
    )
    if state is not None:
        run.step, run.saved, run.logged = state.step, state.step, state.logged
        run.early_stop = state.early_stop or run.early_stop
        run.done = run.early_stop is not None and run.early_stop.reason is not None
    return run, engine


def algorithm_of(config: GrpoRunConfig) -> Algorithm:
    """The algorithm of a run. Raises ValueError where it, its parts and the run do not go together."""
    settings = policy_gradient_settings("grpo", config.grpo, config.loss_fn)
    algorithm = make_algorithm(config.algorithm.name, config.algorithm.kwargs, settings)
    options = loop_options(config, share_prefixes=True)
    plan = Plan(
        group_size=config.grpo.num_generations_per_prompt,
        optimizer_steps=options.steps_per_batch * options.update_epochs,
        max_staleness=options.max_staleness,
    )
    refuse_nonsense(algorithm, plan)
    return algorithm


def make_stream(
    config: GrpoRunConfig,
    source: Mixture,
    generator: Generator,
    template: ChatTemplate,
    sampling: Sampling,
    rules: EpisodeRules,
    options: LoopOptions,
    state: StreamState | None,
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
            samples=config.grpo.num_generations_per_prompt,
            generator=generator,
            template=template,
            sampling=sampling,
            rules=rules,
            seed=config.grpo.seed,
        )

    slots = (options.max_staleness + 1) * options.groups_per_step
    size = None if source.max_epochs is None else source.max_epochs * len(source)
    return RolloutStream(run, slots=slots, size=size, state=state, ahead=options.max_staleness > 0)


def make_evaluator(
    config: GrpoRunConfig,
    source: Mixture | None,
    generator: Generator,
    template: ChatTemplate,
    rules: EpisodeRules,
    tracker: Tracker,
) -> Evaluator | None:
    grpo = config.grpo
    if source is None:
        if grpo.val_period or grpo.val_at_start or grpo.val_at_end:
            tracker.note("no validation: data.validation is not set and data.train holds nothing out (split_validation_size)")
        return None
    size = len(source) if grpo.max_val_samples is None else min(len(source), grpo.max_val_samples)
    return Evaluator(
        source=source,
        size=size,
        samples=grpo.val_num_generations_per_prompt,
        generator=generator,
        template=template,
        sampling=Sampling(**config.policy.generation.sampling_options(validation=True)),
        rules=replace(rules, scaling=None),
        seed=grpo.seed,
        folder=Path(config.logger.log_dir) / "validation",
        show=config.logger.num_val_samples_to_print,
    )


def episode_rules(config: GrpoRunConfig) -> EpisodeRules:
    scaling = config.grpo.reward_scaling
    return EpisodeRules(
        max_turns=config.grpo.max_rollout_turns,
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


def loop_options(config: GrpoRunConfig, *, share_prefixes: bool, filters: bool = False) -> LoopOptions:
    grpo = config.grpo
    global_batch = config.policy.train_global_batch_size or grpo.rollouts_per_step
    return LoopOptions(
        max_steps=grpo.max_num_steps,
        groups_per_step=grpo.num_prompts_per_step,
        steps_per_batch=grpo.rollouts_per_step // global_batch,
        update_epochs=grpo.update_epochs,
        max_staleness=grpo.max_staleness,
        max_groups_per_step=grpo.num_prompts_per_step * grpo.dynamic_sampling_max_gen_batches if filters else 1 << 60,
        max_errors_in_a_row=grpo.max_errors_in_a_row,
        val_period=grpo.val_period,
        val_start_at=grpo.val_start_at,
        val_at_start=grpo.val_at_start,
        val_at_end=grpo.val_at_end,
        save_period=config.checkpointing.save_period,
        share_prefixes=share_prefixes,
    )


def early_stop(config: GrpoRunConfig) -> EarlyStop | None:
    grpo = config.grpo
    if grpo.stop_at_validation_metric is None:
        return None
    return EarlyStop(
        metric=metric_tag(grpo.stop_at_validation_metric, "validation"),
        higher_is_better=grpo.stop_at_validation_higher_is_better,
        threshold=grpo.stop_at_validation_threshold,
        patience=grpo.stop_at_validation_patience,
    )


def metric_tag(name: str, default: str = "train") -> str:
    """``val:accuracy`` as it is logged: ``validation/accuracy``."""
    kind, found, rest = name.partition(":")
    if not found:
        return name if "/" in name else f"{default}/{name}"
    return f"{ {'val': 'validation'}.get(kind, kind) }/{rest}"


def make_tracker(config: GrpoRunConfig) -> Trackers:
    """The trackers that are on. Weights & Biases and TensorBoard are imported only then."""
    logger, folder = config.logger, Path(config.logger.log_dir)
    steps = config.grpo.max_num_steps if config.grpo.max_num_steps < 1_000_000 else None
    trackers: list[Tracker] = [
        open_console(logger.console, max_steps=steps, title=config.policy.model_name),
        JsonlTracker(folder),
    ]
    if logger.tensorboard_enabled:
        from strop.tracking.tensorboard import TensorBoardTracker

        trackers.append(
            TensorBoardTracker(Path(logger.tensorboard.log_dir) if logger.tensorboard.log_dir else folder / "tensorboard")
        )
    if logger.wandb_enabled:
        from strop.tracking.wandb import WandbTracker

        trackers.append(
            WandbTracker(folder, project=logger.wandb.project, name=logger.wandb.name, config=config.model_dump(mode="json"))
        )
    return Trackers(trackers)


def make_checkpoints(config: GrpoRunConfig, save_tokenizer: Callable[[Path], object]) -> CheckpointFolders:
    saving = config.checkpointing
    return CheckpointFolders(
        folder=Path(saving.checkpoint_dir),
        config_text=dump_config(config),
        save_tokenizer=save_tokenizer,
        keep_top_k=saving.keep_top_k,
        metric=metric_tag(saving.metric_name) if saving.metric_name else None,
        higher_is_better=saving.higher_is_better,
        save_optimizer=saving.save_optimizer,
    )


def _restore(
    config: GrpoRunConfig, checkpoints: CheckpointFolders, learner: object, tracker: Tracker, store: RolloutStore
) -> RunState | None:
    """Continue from the newest checkpoint: learner in place, later records dropped. Else begin with an empty log folder."""
    folder = Path(config.logger.log_dir)
    newest = checkpoints.newest() if config.checkpointing.enabled and config.checkpointing.resume else None
    if newest is None:
        if config.checkpointing.enabled and (aside := checkpoints.set_aside()):
            tracker.note(f"checkpointing.resume is false; the checkpoints of an earlier run are now in {aside}")
        _set_aside(folder, tracker)
        state, last = None, -1
    else:
        state = checkpoints.load(newest, {"policy": learner})  # type: ignore[dict-item]
        last = state.step
    tracker.resume(last)
    store.resume(last)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump_config(config))
    if state is not None:
        tracker.log(state.step, state.logged)
        assert newest is not None
        tracker.note(f"continuing after step {state.step}, from {newest}")
        if changed := _changed_settings(newest / "config.yaml", config):
            tracker.note(f"other settings than those of the checkpoint: {', '.join(changed)}")
    return state


def _changed_settings(path: Path, config: GrpoRunConfig) -> list[str]:
    """``key: before -> now`` for every key in which a checkpoint's configuration differs from the one in force."""
    try:
        before = _flat(load_config(path, root=GrpoRunConfig, check=False).config.model_dump(mode="json"))
    except ConfigError:
        return [f"{path} cannot be compared"]
    now = _flat(config.model_dump(mode="json"))
    keys = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    return [f"{key}: {before.get(key)} -> {now.get(key)}" for key in keys]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def _set_aside(folder: Path, tracker: Tracker) -> None:
    """A run that begins anew does not write over the records of another one."""
    if not (folder / FILE_NAME).exists() or not (folder / FILE_NAME).stat().st_size:
        return
    taken = [int(path.name.removeprefix("previous_")) for path in folder.glob("previous_*") if path.name[9:].isdigit()]
    target = folder / f"previous_{max(taken, default=0) + 1}"
    target.mkdir()
    for name in (FILE_NAME, "rollouts", "validation", "config.yaml", "curves.png"):
        if (folder / name).exists():
            (folder / name).rename(target / name)
    tracker.note(f"there is no checkpoint to continue from; what an earlier run recorded is now in {target}")


def _seed(seed: int) -> None:
    """For whatever an environment or a model draws from the global generators; Strop's own draws follow identity."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
