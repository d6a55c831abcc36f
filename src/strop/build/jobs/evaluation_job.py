"""What an evaluation needs, from the configuration of an evaluation or of a run."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from strop.base_config import validate_section
from strop.build.rollout_run import make_episode_rules
from strop.checkpointing.convert import convert_model
from strop.checkpointing.saved_model import SavedModel
from strop.config import EvalRunConfig, RolloutRunConfig
from strop.config.load.evaluated_run import EvaluatedRun
from strop.config.schema.evaluation_config import EvalConfig
from strop.data.builtin.builtin_dataset import Purpose
from strop.data.data_config import DataEntryConfig
from strop.environments.environment_config import EnvironmentConfig
from strop.generation.generation_config import GenerationConfig
from strop.learner.model_config import ModelConfig
from strop.models.lora_config import LoraConfig
from strop.rollouts.episode import EpisodeRules
from strop.sampling import Sampling
from strop.sandbox.sandbox_config import SandboxConfig

PYTHON_REWARD = "python:reward"  # in the configuration of a run whose reward was a function (strop.train)


@dataclass(frozen=True, kw_only=True)
class EvaluationJob:
    """A model, tasks, and how they are sampled and scored."""

    model: SavedModel
    policy: ModelConfig
    generation: GenerationConfig
    sampling: Sampling
    rules: EpisodeRules
    entries: Sequence[DataEntryConfig]
    env: Mapping[str, EnvironmentConfig]
    sandbox: SandboxConfig
    task_seed: int  # of generated tasks and of splits
    seed: int  # of sampling
    samples: int  # of each task
    max_tasks: int | None
    scoring: EvalConfig
    concurrent_tasks: int | None
    folder: Path | None  # of the samples
    purpose: Purpose = "evaluation"

    def with_model(self, folder: str) -> EvaluationJob:
        """Return the same job with the model in a folder, and its tokenizer if it is there."""
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
        policy=validate_section(ModelConfig, {**model, "tokenizer": config.tokenizer, "max_total_sequence_length": length}),
        generation=generation,
        sampling=Sampling(**generation.sampling_options()),
        rules=EpisodeRules(
            max_turns=config.eval.max_rollout_turns,
            max_length=length,
            max_prompt_length=config.data.max_input_seq_length,
            gateway=config.gateway,
            tool_call_format=config.tokenizer.tool_call_format,
        ),
        entries=[config.data],
        env=config.env,
        sandbox=config.sandbox,
        task_seed=config.eval.seed,
        seed=config.eval.seed,
        samples=config.eval.num_tests_per_prompt,
        max_tasks=config.eval.max_val_samples,
        scoring=config.eval,
        concurrent_tasks=_count_concurrent(config),
        folder=Path(config.eval.save_path) if config.eval.save_path else None,
    )


def make_run_evaluation_job(run: EvaluatedRun, model: SavedModel) -> EvaluationJob:
    """Make the evaluation of a checkpoint on what its run validates on. Raises ValueError."""
    config = run.config
    assert isinstance(config, RolloutRunConfig)
    _check_rewards(config.env)
    training = config.rollout_training
    scoring = run.evaluation.eval
    return EvaluationJob(
        model=model,
        policy=replace(config.policy, dtensor_cfg=replace(config.policy.dtensor_cfg, lora_cfg=validate_section(LoraConfig, {}))),
        generation=config.policy.generation,
        sampling=Sampling(**config.policy.generation.sampling_options(validation=True)),
        rules=replace(make_episode_rules(config), scaling=None),
        entries=config.data.validation_entries,
        env=config.env,
        sandbox=config.sandbox,
        task_seed=training.seed,
        seed=run.seed,
        samples=training.val_num_generations_per_prompt,
        max_tasks=training.max_val_samples,
        scoring=scoring,
        purpose=run.purpose,
        concurrent_tasks=_count_concurrent(run.evaluation),
        folder=Path(scoring.save_path) if scoring.save_path else choose_folder(model),
    ).with_model(model.weights)


def choose_folder(model: SavedModel) -> Path | None:
    """Return a new folder for the samples of an evaluation, in the log folder of the run or beside its checkpoints."""
    checkpoints = None if model.checkpoint is None else model.checkpoint.parent
    parent = model.log_folder or checkpoints
    if parent is None:
        return None
    name = time.strftime("%Y%m%d-%H%M%S")
    taken = {path.name for path in (parent / "evaluations").glob("*")}
    number = next(number for number in range(1, len(taken) + 2) if (name if number == 1 else f"{name}-{number}") not in taken)
    return parent / "evaluations" / (name if number == 1 else f"{name}-{number}")


@contextmanager
def loadable_folder(model: SavedModel, note: Callable[[str], object], *, merge: bool = False) -> Iterator[str]:
    """Yield a folder that models are loaded from: the model's own, or a temporary one for shards of several ranks, and for adapters that
    are to be merged."""
    if not model.needs_conversion and not (merge and model.layout == "adapters"):
        yield model.weights
        return
    folder = Path(tempfile.mkdtemp(prefix="strop-model-"))
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
