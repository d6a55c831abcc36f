"""Section ``sglang_cfg``: the SGLang engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from strop import packages
from strop.base_config import BaseConfig, PathText, Precision, follows, subsection
from strop.generation.engine_config import EngineConfig
from strop.models.local_files import read_local_config
from strop.packages import install_command
from strop.problems import Problem
from strop.sampling import MAX_RECORDED_TOP_K

if TYPE_CHECKING:
    from strop.config.schema.policy_config import PolicyConfig
    from strop.config.schema.run_config import RolloutRunConfig
    from strop.generation.generation_config import GenerationConfig

# The one that make setup-sglang installs. Strop changes and reads what is not part of SGLang's public interface.
CHECKED_SGLANG = "0.5.23"
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


class SglangKeys(BaseConfig):
    """Arguments of SGLang that have no key of their own here."""

    sglang_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Further arguments of SGLang's server (ServerArgs), passed through; unknown ones are errors.",
    )


class SglangConfig(EngineConfig):
    """The SGLang engine."""

    title: ClassVar[str] = "SGLang"
    article: ClassVar[str] = "an"
    length_key: ClassVar[str] = "context_length"
    size_key: ClassVar[str] = "tp_size"

    python: str | None = Field(
        None,
        description="Interpreter of the engine's processes, of an environment with SGLang; null is STROP_SGLANG_PYTHON, else this run's.",
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
        """The number of ranks of one engine, each on its own device."""
        return self.tp_size

    @property
    def takes_adapters(self) -> bool:
        """Whether the engine can be sent only LoRA adapters: they are written in place, and SGLang's drafts know none."""
        return self.speculative_algorithm is None

    @property
    def draft_method(self) -> str | None:
        return self.speculative_algorithm

    @property
    def memory_share(self) -> float | None:
        return self.mem_fraction_static

    @property
    def uses_node_packages(self) -> bool:
        return self.python is None

    def require_library(self) -> None:
        require_sglang(self.interpreter)

    def errors_of_run(self, key: str, config: Any) -> Iterator[Problem]:
        generation, section = key.rpartition(".")[0], self._sampled_by(config)
        if section is None:
            return
        yield from self._check_http_client(generation)
        yield from self._check_sampling(generation, section)
        yield from self._check_options(key)
        if hasattr(config, "policy"):  # it is not an evaluation
            yield from self._check_deterministic(key, config.policy)
            yield from self._check_size(key, config)
            if config.policy.device == "cpu":
                yield from find_cpu_problems(read_local_config(config.policy.model_name), generation)

    def warnings_of_run(self, key: str, config: Any) -> Iterator[Problem]:
        if self._sampled_by(config) is None:
            return
        yield from self._warn_options(key)
        if hasattr(config, "policy"):
            yield from self._warn_merged_adapters(key, config.policy)

    def _sampled_by(self, config: Any) -> GenerationConfig | None:
        """Return the section of a run that samples with this engine; None for any other run."""
        from strop.config.schema.run_config import EvalRunConfig, RolloutRunConfig, generation_section

        samples = isinstance(config, RolloutRunConfig | EvalRunConfig)
        generation = generation_section(config)[1] if samples else None
        return generation if generation is not None and generation.engine_options is self else None

    def _check_http_client(self, key: str) -> Iterator[Problem]:
        if not packages.is_installed("aiohttp"):
            yield Problem(
                f"{key}.backend",
                "found sglang, whose server is accessed over HTTP with aiohttp, which is not installed",
                f"{install_command('serve')}.",
            )

    def _check_sampling(self, key: str, sampling: GenerationConfig) -> Iterator[Problem]:
        """Yield options with which SGLang would sample from another distribution than the learner computes."""
        for prefix in ("", "val_"):
            top_k, top_p = getattr(sampling, f"{prefix}top_k"), getattr(sampling, f"{prefix}top_p")
            filtered = top_p < 1 or sampling.min_p > 0
            if top_k == 1 and getattr(sampling, f"{prefix}temperature") > 0:
                yield Problem(
                    f"{key}.{prefix}top_k",
                    "found 1, which SGLang treats as greedy sampling and reports log-probabilities for",
                    f"Set {key}.{prefix}temperature=0 for greedy sampling, or it to 2 or more.",
                )
            if self.sampler == "sglang" and filtered and (top_k in (None, -1) or top_k > MAX_RECORDED_TOP_K):
                yield Problem(
                    f"{key}.sglang_cfg.sampler",
                    f"found sglang, which reports the tokens kept by {prefix}top_p and min_p only with a {prefix}top_k of at most "
                    f"{MAX_RECORDED_TOP_K}, and its log-probabilities are from before these filters",
                    f"Set {key}.sglang_cfg.sampler=strop, or {key}.{prefix}top_k.",
                )
        if self.sampler == "sglang" and sampling.top_p < 1 and not sampling.keep_sampling_mask:
            yield Problem(
                f"{key}.sglang_cfg.sampler",
                "found sglang, which applies top_p to the whole distribution, while the learner applies it to the tokens kept by top_k "
                "and min_p",
                f"Set {key}.sglang_cfg.sampler=strop, or {key}.keep_sampling_mask=true.",
            )
        if self.speculative_algorithm is not None and (
            sampling.top_p < 1 or sampling.min_p > 0 or sampling.top_k not in (None, -1)
        ):
            yield Problem(
                f"{key}.sglang_cfg.speculative_algorithm",
                f"found {self.speculative_algorithm}, whose accepted tokens have log-probabilities from before top_k, top_p and min_p",
                f"Set it to null, or turn these three keys of {key} off.",
            )

    def _check_options(self, key: str) -> Iterator[Problem]:
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

    def _check_deterministic(self, key: str, policy: PolicyConfig) -> Iterator[Problem]:
        if policy.deterministic and not self.enable_deterministic_inference:
            yield Problem(
                f"{key}.enable_deterministic_inference",
                "found false, but policy.deterministic is true, and a token of SGLang depends on the batch without it",
                "Set it to true, which needs a GPU, or policy.deterministic=false.",
            )

    def _check_size(self, key: str, config: RolloutRunConfig) -> Iterator[Problem]:
        from strop.config.cluster_checks import count_devices

        room = count_devices(config).generating_per_node
        if count_devices(config).uses_ray and self.tp_size > room:
            yield Problem(
                f"{key}.tp_size",
                f"found {self.tp_size}, but {room} GPU{'s' if room > 1 else ''} of a node generate, and an SGLang engine is on one node",
                f"Set it to {room} or less, raise cluster.gpus_per_node, or set policy.generation.backend=vllm, whose engines span nodes.",
            )

    def _warn_merged_adapters(self, key: str, policy: PolicyConfig) -> Iterator[Problem]:
        if policy.adapter_rank is not None and policy.generation.weight_sync.adapters_alone and not self.takes_adapters:
            yield Problem(
                "policy.generation.weight_sync.adapters_alone",
                "it has no effect: SGLang's engines get merged weights, as large as the model, at every publish, because "
                f"{key}.speculative_algorithm is {self.speculative_algorithm}",
                "Set it to false.",
            )

    def _warn_options(self, key: str) -> Iterator[Problem]:
        if (version := unchecked_sglang()) and self.python is None:
            yield Problem(
                f"{key.rpartition('.')[0]}.backend",
                f"SGLang {version} is installed, and Strop, which patches and reads internal parts of it, was tested with {CHECKED_SGLANG}",
                "An incompatibility ends the engine when it starts.",
            )
        if self.speculative_algorithm is not None:
            yield Problem(
                f"{key}.speculative_algorithm",
                f"found {self.speculative_algorithm}: drafts are accepted with random numbers that follow no seed, so equal "
                "requests give other tokens every time",
            )
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


RECURRENT_KEYS = ("linear_", "mamba_", "conv_L_cache", "ssm_", "state_size")  # how fields of recurrent layers begin


def find_cpu_problems(values: Mapping[str, Any], key: str) -> Iterator[Problem]:
    """Yield why SGLang cannot sample from a model on a CPU. ``values``: its config.json; ``key``: the section ``generation``."""
    text = values.get("text_config") or values
    kinds = text.get("layer_types") or ()
    attends = kinds and all(kind.endswith("attention") and kind != "linear_attention" for kind in kinds)
    if not attends and any(name.startswith(RECURRENT_KEYS) for name in text):
        layers = "recurrent layers and short convolutions are"
    elif text.get("index_topk"):
        layers = "sparse attention is"
    elif text.get("model_type") == "gpt_oss":
        layers = "attention sinks are"
    else:
        return
    yield Problem(
        f"{key}.backend",
        f"found sglang, whose {layers} computed on a CPU by kernels that its wheel does not have, and {text.get('model_type')} has such",
        "Set it to torch.",
    )


def require_sglang(python: str) -> None:
    """Raises ValueError unless an interpreter has SGLang, or is assumed to have it."""
    try:
        found, why = packages.is_in(python, "sglang"), "No module named 'sglang'"
    except OSError as error:
        found, why = False, str(error)
    if not found and not packages.assume("sglang"):
        raise ValueError(
            f"policy.generation.backend is sglang, and {python} has no SGLang ({why}): `make setup-sglang` makes one that has it; "
            "set policy.generation.sglang_cfg.python, or STROP_SGLANG_PYTHON, to its interpreter, or "
            "policy.generation.backend=torch"
        )


def unchecked_sglang() -> str | None:
    """Return the version in this interpreter's environment if Strop was not checked with it; None for another, or where there is none."""
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None
    return None if version == CHECKED_SGLANG else version
