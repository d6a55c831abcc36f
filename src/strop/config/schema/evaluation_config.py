"""Sections ``eval``, ``generation`` and ``tokenizer`` of an evaluation, and the environment that grades its tasks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Literal, TypeVar

from pydantic import Field

from strop.base_config import BaseConfig, Device, PathText, Precision, changed_keys, follows
from strop.data.builtin_dataset import Grader
from strop.data.data_config import DataEntryConfig
from strop.distributed.cluster_config import ClusterConfig
from strop.environments.environment_config import EnvironmentConfig
from strop.generation.generation_config import GenerationConfig, Temperature, TopK
from strop.models.tokenizer_config import TokenizerConfig
from strop.problems import Problem


class EvalConfig(BaseConfig):
    """The metric and the number of samples."""

    metric: Literal["pass@k", "avg@n", "cons@k", "maj@k"] = Field(
        "pass@k",
        description="Headline metric: pass@k (unbiased), avg@n (mean over samples), cons@k (majority vote of the first k samples) or maj@k "
        "(the same, expected of any k). All are stored.",
    )
    num_tests_per_prompt: int = Field(1, ge=1, description="Samples per task: n (samples).")
    k_value: int = Field(1, ge=1, description="k of pass@k, cons@k and maj@k (samples).")
    max_val_samples: int | None = Field(
        None, ge=1, description="Evaluate only this many first tasks of each set; null is all (tasks)."
    )
    max_rollout_turns: int | None = Field(
        None,
        ge=1,
        description="Maximum number of policy turns in a conversation; null is 1 if the environment does not answer, otherwise as many "
        "as fit (turns).",
    )
    seed: int = Field(42, ge=0, description="Seed of all randomness of the evaluation.")
    save_path: PathText | None = Field(
        "auto",
        description="Folder for all samples, from which the same command continues; auto creates one, in evaluations in the run's log "
        "folder or in results/evals; null does not save.",
    )
    save_logprobs: bool = Field(False, description="Store the ids and log-probabilities of the sampled tokens with each sample.")

    def errors(self, key: str) -> Iterator[Problem]:
        if self.k_value > self.num_tests_per_prompt:
            yield Problem(
                f"{key}.k_value",
                f"found {self.k_value}, but there are only eval.num_tests_per_prompt = {self.num_tests_per_prompt} samples of a task",
                "Lower it, or raise eval.num_tests_per_prompt.",
            )


class EvalTokenizerConfig(TokenizerConfig):
    """The tokenizer and its chat template."""

    name: str = follows("..generation.model_name", standalone=..., min_length=1, description="A hub name or a folder.")


class EvalGenerationConfig(GenerationConfig):
    """The model, the inference engine and how it samples."""

    model_name: PathText = Field(..., min_length=1, description="A hub name or a folder with a Hugging Face model.")
    max_new_tokens: int = follows(
        ".vllm_cfg.max_model_len", standalone=2048, ge=1, description="Longest completion of one turn (tokens)."
    )
    temperature: Temperature = Field(0.0, description="Sampling temperature; 0 is greedy.")
    top_k: TopK = Field(-1, description="Sample from only the most likely tokens, this many; null or -1 turns it off (tokens).")
    num_prompts_per_step: int = Field(-1, ge=-1, description="Tasks sampled at a time; -1 is all (tasks).")
    precision: Precision | Literal["fp8"] = follows(
        ".vllm_cfg.precision", standalone="bfloat16", description="Data type of the weights."
    )
    device: Device = Field("auto", description="cpu, cuda or cuda:N; auto is the first GPU if there is one.")
    num_threads: int | None = Field(None, ge=1, description="CPU threads; null is torch's own choice (threads).")

    @property
    def max_total_sequence_length(self) -> int:
        """Longest prompt and completion together, for any backend (tokens)."""
        return self.engine_options.max_model_len

    def _check_quantization(self, key: str) -> Iterator[Problem]:
        if self.weight_format is not None:
            yield Problem(
                f"{key}.quantization.format" if self.quantization.format else f"{key}.vllm_cfg.precision",
                f"found {self.quantization.format or self.vllm_cfg.precision}, but an evaluation measures the weights as they are trained",
                f"Set {key}.vllm_cfg.precision to bfloat16 or float32, and remove {key}.quantization.",
            )
        else:
            yield from self._check_unquantized(key)

    def _warn_weight_sync(self, key: str) -> Iterator[Problem]:
        if unused := changed_keys(f"{key}.weight_sync", self.weight_sync):
            yield Problem(
                unused[0], f"it has no effect: an evaluation reads its weights from {self.model_name}, and no weights are sent"
            )


class EvalClusterConfig(ClusterConfig):
    """The machines of an evaluation, whose engines share its tasks."""

    def errors(self, key: str) -> Iterator[Problem]:
        yield from self._check_backend(key)
        yield from self._check_segments(key)


DEFAULT_TYPE = "math"  # default type of an environment that was not configured for the set

Entry = TypeVar("Entry", bound=DataEntryConfig)


def assign_graders(
    entries: Iterable[Entry], env: Mapping[str, EnvironmentConfig]
) -> tuple[tuple[Entry, ...], dict[str, EnvironmentConfig]]:
    """Return the entries, each entry of a built-in set with the alias of its grading environment, and ``env`` with these
    environments.

    An entry's ``env_name`` takes precedence, and so does a single environment in ``env`` unless it has the default type or the
    grader's type. Otherwise a built-in set is graded as usually reported, with its grader's options overridden by those of an
    alias of the same type.
    """
    from strop.data.builtin_sets import BUILTIN_DATASETS  # several hundred sets, of which a run rarely names one

    graded: list[Entry] = []
    known = dict(env)
    for entry in entries:
        builtin = BUILTIN_DATASETS.get(entry.dataset_name or "")
        grader = None if builtin is None else builtin.grader
        if grader is None or entry.env_name is not None or _is_chosen(env, grader):
            graded.append(entry)
            continue
        alias, section = _find_section(str(entry.dataset_name), grader, env)
        known[alias] = section
        graded.append(replace(entry, env_name=alias))
    return tuple(graded), known


def _is_chosen(env: Mapping[str, EnvironmentConfig], grader: Grader) -> bool:
    """Whether the only environment differs from the grader's and is not the default one."""
    others = (DEFAULT_TYPE, grader.environment)
    return len(env) == 1 and all(section.type_of(alias) not in others for alias, section in env.items())


def _find_section(name: str, grader: Grader, env: Mapping[str, EnvironmentConfig]) -> tuple[str, EnvironmentConfig]:
    """Return the alias and section of a set's grader: a configured one if its options match the grader's."""
    same = [(alias, section) for alias, section in env.items() if section.type_of(alias) == grader.environment]
    alias, section = same[0] if same else ("", EnvironmentConfig(type=None))
    options = {**grader.options, **section.options}
    if same and options == section.options:
        return alias, section
    free = name if name not in env else f"{name}_as_reported"
    return free, EnvironmentConfig(type=grader.environment, options=options)
