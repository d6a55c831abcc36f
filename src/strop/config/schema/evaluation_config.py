"""Sections ``eval``, ``generation`` and ``tokenizer`` of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from strop.base_config import BaseConfig, Device, PathText, Precision, changed_keys, follows
from strop.distributed.cluster_config import ClusterConfig
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
