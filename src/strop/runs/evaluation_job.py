"""How a run validates, or an evaluation samples and scores: the inputs, and the settings that identify the results."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from strop.base_config import BaseConfig, to_tree, validate_section
from strop.checkpointing.saved_model import RUN_CONFIG, SavedModel
from strop.config import RolloutRunConfig
from strop.config.schema.evaluation_config import EvalConfig
from strop.config.schema.run_config import GrpoRunConfig
from strop.data.builtin_dataset import Purpose
from strop.data.data_config import DataEntryConfig
from strop.data.sources.local_copies import find_copy
from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource
from strop.distributed.cluster_config import ClusterConfig
from strop.environments.environment_config import EnvironmentConfig
from strop.environments.resources import ResourceSections, read_sections
from strop.generation.generation_config import GenerationConfig
from strop.learner.model_config import ModelConfig
from strop.models.loading import find_commit
from strop.models.lora_config import LoraConfig
from strop.rollouts.episode import EpisodeRules
from strop.runs.tasks import name_data, resolve_alias
from strop.safety.printable import redact_secrets
from strop.sampling import Sampling

# keys of an entry that do not affect its samples, or are listed separately
WITHOUT_INFLUENCE = ("weight", "dataset_name", "name", "num_tests_per_prompt", "sets", "max_input_seq_length")
NOT_SAMPLED = ("entropy", "record_sampling_mask")  # of Sampling: what an engine reports in addition to the samples

Settings = Mapping[str, Any]


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


@dataclass(frozen=True)
class EvaluationIdentity:
    """The settings that affect an evaluation's samples: common ones, and those of each set by its name."""

    settings: Settings
    sets: Mapping[str, Settings]

    def to_json(self) -> dict[str, Any]:
        """Return the value as JSON would read it back."""
        read: dict[str, Any] = json.loads(json.dumps({"settings": self.settings, "sets": self.sets}, default=_name))
        return read


def identify(job: EvaluationJob) -> EvaluationIdentity:
    """Return the settings that affect an evaluation's samples, excluding the number of engines and the order of sampling."""
    generation, policy = job.generation, job.policy
    rules = {key: value for key, value in asdict(job.rules).items() if key != "max_turns"}
    settings = {
        "model": job.model.weights,
        "model files": _describe_model(job.model.weights),
        "step": job.model.step,
        "tokenizer": to_tree(policy.tokenizer),
        "hf_config_overrides": policy.hf_config_overrides,
        "engine": generation.launched or "torch",
        "precision": generation.engine_options.dtype if generation.uses_engines else [policy.precision, policy.weights_dtype],
        "vllm_kwargs": generation.vllm_kwargs,
        **({f"{generation.launched}_kwargs": generation.engine_kwargs} if generation.uses_engines else {}),
        "rules": {**rules, "max_turns": job.max_turns},
        **{name: _drop_unrelated(section) for name, section in job.resources.items()},
        "seeds": [job.seed, job.task_seed],
        "purpose": job.purpose,
        "save_logprobs": job.scoring.save_logprobs,
    }
    return EvaluationIdentity(redact_secrets(settings), {each.name: _identify_set(job, each) for each in job.sets})


def _drop_unrelated(section: BaseConfig) -> dict[str, Any]:
    return {key: value for key, value in to_tree(section).items() if key not in section.unrelated_keys}


def identify_entries(job: EvaluationJob) -> EvaluationIdentity:
    """Return the identity stored with the results, separately for each entry, under the name in its tasks' ``set``."""
    sets: dict[str, Settings] = {}
    for each in job.sets:
        for entry in each.entries:
            name = each.name if len(each.entries) == 1 else name_data(entry) or resolve_alias(entry, job.env)
            sets.setdefault(name, _identify_set(job, replace(each, entries=[entry])))
    return replace(identify(job), sets=sets)


def _identify_set(job: EvaluationJob, each: EvaluationSet) -> dict[str, Any]:
    sampling = {key: value for key, value in asdict(each.sampling).items() if key not in NOT_SAMPLED}
    found: dict[str, Any] = {"samples": each.samples, **sampling}
    for number, entry in enumerate(each.entries):
        where = "" if len(each.entries) == 1 else f"{number}."
        found |= {f"{where}{key}": value for key, value in _identify_entry(entry).items() if f"{where}{key}" not in sampling}
    aliases = {entry.env_name for entry in each.entries}
    for alias, section in job.env.items():
        if alias in aliases or None in aliases:
            found |= {f"env.{alias}": to_tree(section), f"env.{alias} code": _describe_code(section.options)}
    return {key: redact_secrets(value) for key, value in found.items()}


def _identify_entry(entry: DataEntryConfig) -> dict[str, Any]:
    found = {key: value for key, value in to_tree(entry).items() if key not in WITHOUT_INFLUENCE}
    with suppress(DataError):  # which the evaluation reports
        template = DataSource.from_entry(entry, seed=0, part="validation").load_template()
        found |= {"prompt": f"{template.prefix}{{question}}{template.suffix}", "system prompt": template.system}
    found["data"] = entry.data_name if entry.rows is None else _identify_rows(entry.rows)
    found["data file"] = _describe_data(entry)
    return found


def _describe_data(entry: DataEntryConfig) -> list[Any]:
    name = entry.dataset_name
    if name is None:
        return []
    if entry.is_file:
        return _describe_files(Path(name))
    with suppress(DataError):
        copy = find_copy(name)
        return [] if copy is None else _describe_files(copy, "**/*")
    return []


def _identify_rows(rows: Any) -> Any:
    fingerprint = getattr(rows, "_fingerprint", None)  # of a datasets.Dataset
    return f"{len(rows)} rows, {fingerprint or _hash(list(rows))}"


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str, sort_keys=True).encode(errors="replace")).hexdigest()[:16]


def _name(value: Any) -> str:
    """Return a name for a value that JSON cannot hold; for a user's function, the same in every process."""
    return f"{value.__module__}.{value.__qualname__}" if inspect.isroutine(value) or inspect.isclass(value) else str(value)


def _describe_model(name: str) -> list[Any]:
    """Return the files of a folder, or the commit of a hub model; nothing for a run, whose weights change from step to step."""
    if (Path(name) / RUN_CONFIG).is_file():
        return []
    return _describe_files(Path(name)) if Path(name).exists() else [find_commit(name)]


def _describe_files(path: Path, pattern: str = "*") -> list[Any]:
    """Return name, size and time of a file, or of the files in a folder; empty if it is not on this machine."""
    files: Sequence[Path] = [path] if path.is_file() else sorted(each for each in path.glob(pattern) if each.is_file())
    return [[each.name, each.stat().st_size, each.stat().st_mtime_ns] for each in files if not each.name.startswith(".")]


def _describe_code(options: Any) -> list[Any]:
    """Return the user's code named by an environment: files, and the source of functions."""
    if isinstance(options, Mapping):
        return [found for value in options.values() for found in _describe_code(value)]
    if isinstance(options, list | tuple):
        return [found for value in options for found in _describe_code(value)]
    if callable(options):
        with suppress(OSError, TypeError):
            return [_hash(inspect.getsource(options))]
        return []
    if isinstance(options, str) and ".py:" in options:
        file = Path(options.rpartition(":")[0])
        with suppress(OSError):
            return [[file.name, _hash(file.read_text(encoding="utf-8", errors="replace"))]]
    return []
