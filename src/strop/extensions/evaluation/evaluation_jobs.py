"""The inputs of an evaluation, from its own configuration or from that of a run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from strop.base_config import validate_section
from strop.checkpointing.saved_model import SavedModel
from strop.config import EvalRunConfig, RolloutRunConfig
from strop.data.data_config import DataEntryConfig, EvalSetConfig
from strop.environments.environment_config import EnvironmentConfig
from strop.environments.resources import read_sections
from strop.extensions.evaluation.evaluated_run import EvaluatedRun
from strop.learner.model_config import ModelConfig
from strop.rollouts.episode import EpisodeRules
from strop.runs.evaluation_job import EvaluationJob, EvaluationSet, make_validation_job
from strop.runs.tasks import name_data, resolve_alias
from strop.sampling import Sampling

PYTHON_REWARD = "python:reward"  # in the configuration of a run with a Python function as reward (strop.train)


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


def _is_of_run(model: SavedModel, config: RolloutRunConfig) -> bool:
    """Whether the run trained the model: a comparison evaluates other models on the run's validation data."""
    return bool(model.run_values.get("logger", {}).get("log_dir") == config.logger.log_dir)


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
