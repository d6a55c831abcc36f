"""Section ``sglang_cfg``: the SGLang engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from strop import packages
from strop.base_config import BaseConfig, EnvironmentVariables, PathText, Precision, follows, subsection
from strop.problems import Problem

PYTHON_VARIABLE = "STROP_SGLANG_PYTHON"  # the interpreter with SGLang, where sglang_cfg.python does not say it


class SglangServerConfig(BaseConfig):
    """How one server of SGLang behaves between steps."""

    needs_offload: bool = Field(
        True, description="A colocated engine gives its GPU memory up while the learner works (SGLang's memory saver)."
    )
    cpu_weight_backup: bool = Field(
        False, description="Keep the weights of a sleeping engine in host memory; they are sent again after it wakes in any case."
    )
    pause_generation_mode: Literal["retract", "in_place"] = Field(
        "in_place",
        description="What running requests do while weights change in flight: in_place keeps their keys and values, retract computes "
        "them again with the new weights.",
    )


class SglangConfig(BaseConfig):
    """The SGLang engine."""

    python: str | None = Field(
        None,
        description="Interpreter of the engine's processes, of an environment with SGLang; null is STROP_SGLANG_PYTHON, else this run's.",
    )
    num_engines: int | None = Field(
        None,
        ge=1,
        description="Engines, each with all weights; null is as many as fit the GPUs of a Ray cluster, else 1 (engines).",
    )
    dtype: Precision = follows("...precision", standalone="bfloat16", description="Data type of the engine's weights.")
    context_length: int = follows(
        "...max_total_sequence_length", standalone=2048, ge=1, description="Longest prompt and completion together (tokens)."
    )
    tp_size: int = Field(1, ge=1, description="Tensor-parallel ranks of one engine (GPUs).")
    pp_size: Literal[1] = Field(1, description="Pipeline stages of one engine: one, as weights are sent to one stage.")
    dp_size: Literal[1] = Field(1, description="Data-parallel replicas inside one engine: one; num_engines are whole engines.")
    ep_size: int = Field(1, ge=1, description="Expert-parallel ranks of one engine, among its tensor-parallel ones (GPUs).")
    sampler: Literal["strop", "sglang"] = Field(
        "strop",
        description="strop: Strop's filters and the seed of each request; sglang: its own kernels, without seeds, and with the log-"
        "probabilities over the tokens that its filters kept.",
    )
    weight_loading: Literal["direct", "distributed", "tensors", "disk"] = Field(
        "direct",
        description="direct: the model's processes receive weights over weight_sync.transport; the others hand them over by SGLang's "
        "update_weights_from_distributed, _from_tensor or _from_disk.",
    )
    mem_fraction_static: float | None = Field(
        None, gt=0, lt=1, description="Share of a GPU's memory for weights and KV cache; null is SGLang's choice (fraction)."
    )
    max_running_requests: int | None = Field(
        None, ge=1, description="Sequences decoded together; null is SGLang's choice (sequences)."
    )
    max_total_tokens: int | None = Field(
        None, ge=1, description="Size of the KV cache; null is what mem_fraction_static leaves, and 32768 on a CPU (tokens)."
    )
    kv_cache_dtype: str = Field("auto", description="Data type of the KV cache.")
    disable_radix_cache: bool = Field(
        False, description="Do not cache keys and values of prompts for other samples and later turns."
    )
    disable_cuda_graph: bool = Field(False, description="Do not capture CUDA graphs. A CPU never does.")
    attention_backend: str | None = Field(
        None, description="Attention kernels; null is SGLang's choice, and torch_native on a CPU."
    )
    chunked_prefill_size: int | None = Field(None, description="Tokens of a prompt that are read at a time; -1 is all (tokens).")
    enable_deterministic_inference: bool = Field(
        False, description="SGLang's batch-invariant kernels, on GPUs: a token does not depend on the batch."
    )
    speculative_algorithm: str | None = Field(
        None, description="Speculative decoding: EAGLE, EAGLE3, NEXTN, NGRAM or STANDALONE; null is off."
    )
    speculative_draft_model_path: PathText | None = Field(
        None, description="Draft model: a hub name or folder. It is not trained."
    )
    speculative_num_steps: int | None = Field(None, ge=1, description="Steps of the draft at a time (steps).")
    speculative_eagle_topk: int | None = Field(None, ge=1, description="Branches of the draft in each step (branches).")
    speculative_num_draft_tokens: int | None = Field(None, ge=1, description="Tokens verified at a time (tokens).")
    num_threads: int | None = Field(
        None, ge=1, description="CPU threads of each engine process; null is the learner's number (threads)."
    )
    max_restarts: int = Field(
        3, ge=0, description="Restarts in a row of an engine whose process died, before the run stops (restarts)."
    )
    startup_seconds: float = Field(600.0, gt=0, description="How long an engine may take to become ready (seconds).")
    env_vars: EnvironmentVariables = Field(
        default_factory=dict, description="Environment variables of the engine processes only."
    )
    sglang_server_config: SglangServerConfig = subsection(SglangServerConfig)

    @property
    def interpreter(self) -> str:
        """The interpreter of the engine's processes."""
        return self.python or os.environ.get(PYTHON_VARIABLE) or sys.executable

    @property
    def server_arguments(self) -> dict[str, Any]:
        """SGLang's own arguments of the same names, of those that are set."""
        given = {
            "mem_fraction_static": self.mem_fraction_static,
            "max_running_requests": self.max_running_requests,
            "max_total_tokens": self.max_total_tokens,
            "attention_backend": self.attention_backend,
            "chunked_prefill_size": self.chunked_prefill_size,
            "enable_deterministic_inference": self.enable_deterministic_inference or None,
            "speculative_algorithm": self.speculative_algorithm,
            "speculative_draft_model_path": self.speculative_draft_model_path,
            "speculative_num_steps": self.speculative_num_steps,
            "speculative_eagle_topk": self.speculative_eagle_topk,
            "speculative_num_draft_tokens": self.speculative_num_draft_tokens,
        }
        return {name: value for name, value in given.items() if value is not None}

    @property
    def max_model_len(self) -> int:
        return self.context_length

    @property
    def engine_size(self) -> int:
        """The number of ranks of one engine, each on a device of its own."""
        return self.tp_size

    @property
    def num_local_engines(self) -> int:
        """The number of engines of a run in one process, where null is 1."""
        return self.num_engines or 1

    @property
    def takes_adapters(self) -> bool:
        """Whether the engine can be sent LoRA adapters alone: they are written in place, and SGLang's drafts know none."""
        return self.weight_loading == "direct" and self.speculative_algorithm is None

    def sglang_errors(self, key: str) -> Iterator[Problem]:
        """Yield what cannot work where SGLang is the engine."""
        if self.ep_size not in (1, self.tp_size):
            yield Problem(
                f"{key}.ep_size",
                f"found {self.ep_size}, but an engine shards its experts over its tensor-parallel ranks, and {key}.tp_size is "
                f"{self.tp_size}",
                f"Set it to 1, or both to {self.ep_size}.",
            )
        if self.python is not None and not Path(self.python).is_file() and not packages.assume("sglang"):
            yield Problem(
                f"{key}.python",
                f"found {self.python}, which is not a file",
                "Set it to the interpreter of an environment with SGLang.",
            )
        if self.weight_loading != "direct" and self.speculative_algorithm is not None:
            yield Problem(
                f"{key}.weight_loading",
                f"found {self.weight_loading}, but with {key}.speculative_algorithm={self.speculative_algorithm} the draft shares weights, "
                "which only direct loads",
                "Set it to direct.",
            )

    def sglang_warnings(self, key: str) -> Iterator[Problem]:
        """Yield what works where SGLang is the engine, but perhaps not as intended."""
        if self.kv_cache_dtype not in ("auto", self.dtype):
            yield Problem(
                f"{key}.kv_cache_dtype",
                f"found {self.kv_cache_dtype}: rounded keys and values change the sampling distribution, and the learner computes another "
                "one",
                "Watch train/token_mult_prob_error and choose a correction (docs/algorithms/corrections.md), or set auto.",
            )
        if self.sampler == "sglang":
            yield Problem(
                f"{key}.sampler",
                "found sglang, whose random numbers follow no seed: equal requests give other tokens every time",
                f"Set {key}.sampler=strop for runs that repeat up to rounding.",
            )
