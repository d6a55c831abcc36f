"""The inputs of an evaluation, from the configuration of an evaluation or of a run."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from strop.base_config import validate_section
from strop.checkpointing.convert import convert_model
from strop.checkpointing.saved_model import SavedModel
from strop.config import EvalRunConfig, RolloutRunConfig
from strop.config.load.evaluated_run import EvaluatedRun
from strop.config.schema.evaluation_config import EvalConfig
from strop.config.schema.run_config import GrpoRunConfig
from strop.data.builtin_dataset import Purpose
from strop.data.data_config import DataEntryConfig, EvalSetConfig
from strop.distributed.cluster_config import ClusterConfig
from strop.environments.environment_config import EnvironmentConfig
from strop.environments.resources import ResourceSections, read_sections
from strop.generation.generation_config import GenerationConfig
from strop.learner.model_config import ModelConfig
from strop.models.lora_config import LoraConfig
from strop.rollouts.episode import EpisodeRules
from strop.runs.tasks import name_data, resolve_alias
from strop.sampling import Sampling

PYTHON_REWARD = "python:reward"  # in the configuration of a run with a Python function as reward (strop.train)


@dataclass(frozen=True, kw_only=True)
class EvaluationSet:
    """Tasks whose metrics are computed together, and how to sample them."""

    name: str
    entries: Sequence[DataEntryConfig]
    samples: int  # of each task
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class EvaluationJob:
    """A model, sets of tasks, and how to sample and score them."""

    model: SavedModel
    policy: ModelConfig
    generation: GenerationConfig
    cluster: ClusterConfig
    rules: EpisodeRules
    max_turns: int | None  # policy turns of a conversation; None: as the environment needs
    sets: Sequence[EvaluationSet]
    env: Mapping[str, EnvironmentConfig]
    resources: ResourceSections
    task_seed: int  # for generated tasks and splits
    seed: int  # of sampling
    max_tasks: int | None  # of each set
    scoring: EvalConfig
    concurrent_tasks: int | None
    purpose: Purpose = "evaluation"
    trained_on: Sequence[DataEntryConfig] = ()  # training data of the model's run

    def with_model(self, folder: str) -> EvaluationJob:
        """Return the same job with the model in a folder, and its tokenizer if present."""
        tokenizer = self.policy.tokenizer
        if (Path(folder) / "tokenizer_config.json").exists():
            tokenizer = replace(tokenizer, name=folder)
        return replace(self, policy=replace(self.policy, model_name=folder, tokenizer=tokenizer))


def make_evaluation_job(config: EvalRunConfig) -> EvaluationJob:
    config = config.with_graders()
    generation = config.generation
    model = {name: getattr(generation, name) for name in ("model_name", "device", "num_threads", "precision")}
    length = generation.max_total_sequence_length
    return EvaluationJob(
        model=SavedModel(generation.model_name),
        policy=validate_section(
            ModelConfig,
            {**model, "tokenizer": config.tokenizer, "max_total_sequence_length": length, "dequantize_base_checkpoint": True},
        ),
        generation=generation,
        cluster=config.cluster,
        rules=EpisodeRules(
            max_length=length,
            max_prompt_length=config.data.max_input_seq_length,
            tool_call_format=config.tokenizer.tool_call_format,
        ),
        max_turns=config.eval.max_rollout_turns,
        sets=_name_apart([_make_set(config, entry) for entry in config.data.entries]),
        env=config.env,
        resources=read_sections(config),
        task_seed=config.eval.seed,
        seed=config.eval.seed,
        max_tasks=config.eval.max_val_samples,
        scoring=config.eval,
        concurrent_tasks=_count_concurrent(config),
    )


def _make_set(config: EvalRunConfig, entry: DataEntryConfig) -> EvaluationSet:
    own = entry if isinstance(entry, EvalSetConfig) else None
    sampling = Sampling(**config.generation.sampling_options())
    if own is not None and own.temperature is not None:
        sampling = replace(sampling, temperature=own.temperature)
    return EvaluationSet(
        name=(own and own.name) or name_data(entry) or resolve_alias(entry, config.env),
        entries=[entry],
        samples=(own and own.num_tests_per_prompt) or config.eval.num_tests_per_prompt,
        sampling=sampling,
    )


def _name_apart(sets: Sequence[EvaluationSet]) -> list[EvaluationSet]:
    """Return the sets with distinct names: sets of one dataset are named by their subsets, otherwise by numbers."""
    names: list[str] = []
    for each in sets:
        name, subset = each.name, each.entries[0].subset
        if subset is not None and [other.name for other in sets].count(name) > 1:
            name = f"{name}-{subset}"
        number = next(number for number in itertools.count(1) if (name if number == 1 else f"{name}-{number}") not in names)
        names.append(name if number == 1 else f"{name}-{number}")
    return [replace(each, name=name) for each, name in zip(sets, names, strict=True)]


def make_run_evaluation_job(run: EvaluatedRun, model: SavedModel) -> EvaluationJob:
    """Create the evaluation of a checkpoint on its run's validation data. Raises ValueError."""
    config = run.config
    assert isinstance(config, RolloutRunConfig)
    _check_rewards(config.env)
    job = make_validation_job(config, model)
    (together,) = job.sets
    several = [replace(together, name=name_data(entry), entries=[entry]) for entry in together.entries]
    return replace(
        job,
        sets=_name_apart(several) if run.several_sets else job.sets,
        seed=run.seed,
        scoring=run.evaluation.eval,
        purpose=run.purpose,
        trained_on=config.data.train if _is_of_run(model, config) else (),
        concurrent_tasks=_count_concurrent(run.evaluation),
    ).with_model(model.weights)


def make_validation_job(config: RolloutRunConfig, model: SavedModel) -> EvaluationJob:
    """Create an evaluation equal to a run's validation."""
    training, generation = config.rollout_training, config.policy.generation
    entries = config.data.validation_entries
    together = EvaluationSet(
        name=name_data(entries[0]) or resolve_alias(entries[0], config.env),
        entries=entries,
        samples=training.val_num_generations_per_prompt,
        sampling=Sampling(**generation.sampling_options(validation=True)),
    )
    return EvaluationJob(
        model=model,
        policy=replace(config.policy, dtensor_cfg=replace(config.policy.dtensor_cfg, lora_cfg=validate_section(LoraConfig, {}))),
        generation=generation,
        cluster=config.cluster,
        rules=replace(make_episode_rules(config), scaling=None),
        max_turns=training.max_rollout_turns,
        sets=[together],
        env=config.env,
        resources=read_sections(config),
        task_seed=training.seed,
        seed=training.seed,
        max_tasks=training.max_val_samples,
        scoring=validate_section(EvalConfig, {}),
        concurrent_tasks=None,
        purpose="validation",
    )


def _is_of_run(model: SavedModel, config: RolloutRunConfig) -> bool:
    """Whether the run trained the model: a comparison evaluates other models on the run's validation data."""
    return bool(model.run_values.get("logger", {}).get("log_dir") == config.logger.log_dir)


@contextmanager
def loadable_folder(
    model: SavedModel, note: Callable[[str], object], *, merge: bool = False, shared: Path | None = None
) -> Iterator[str]:
    """Yield a folder from which models can be loaded: the model's own, or a temporary one for shards of several ranks and for
    adapters to merge. ``shared``: its parent folder, visible to several nodes.
    """
    if not model.needs_conversion and not (merge and model.layout == "adapters"):
        yield model.weights
        return
    folder = Path(tempfile.mkdtemp(prefix="strop-model-", dir=shared)).resolve()
    try:
        work = "merging the adapters" if merge else "the checkpoint has shards of several ranks; converting them"
        note(f"{work} to a temporary folder, {folder}")
        base = model.run_values.get("policy", {}).get("model_name")
        convert_model(model, folder / "model", merge=merge, model_name=base)
        yield str(folder / "model")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _count_concurrent(config: EvalRunConfig) -> int | None:
    count = config.generation.num_prompts_per_step
    return count if count > 0 else None


def _check_rewards(env: Mapping[str, EnvironmentConfig]) -> None:
    for alias, options in env.items():
        if options.options.get("reward") == PYTHON_REWARD:
            raise ValueError(
                f"env.{alias}: the reward of this run was a function given in Python, which its configuration cannot hold; give it again: "
                f"strop.evaluate(run, reward=...), or on the command line env.{alias}.reward=FILE.py:FUNCTION"
            )


def make_episode_rules(config: RolloutRunConfig) -> EpisodeRules:
    """Create the rules of a run's episodes."""
    scaling = config.rollout_training.reward_scaling
    penalties = config.reward_penalties if isinstance(config, GrpoRunConfig) else None
    return EpisodeRules(
        max_turns=config.rollout_training.max_rollout_turns,
        max_length=config.policy.max_total_sequence_length,
        max_prompt_length=config.data.max_input_seq_length,
        scaling=scaling if scaling.enabled else None,
        failed_reward=config.rollout_training.failures.reward,
        retries=config.rollout_training.failures.retries,
        penalties=penalties if penalties is not None and penalties.enabled else None,
        tool_call_format=config.policy.tokenizer.tool_call_format,
    )
