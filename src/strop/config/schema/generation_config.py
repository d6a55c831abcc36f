"""Section ``generation`` (under ``policy``, or at the top of an evaluation): the inference engine and how it samples."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator

from strop.base_config import BaseConfig, follows, subsection


def _reject_float16(value: object) -> object:
    if value in ("float16", "fp16", "half"):
        raise ValueError("float16 needs loss scaling, which is not in this version; set bfloat16 or float32")
    return value


Precision = Annotated[Literal["bfloat16", "float32"], BeforeValidator(_reject_float16)]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]


def _check_top_k(value: int | None) -> int | None:
    if value is not None and value != -1 and value < 1:
        raise ValueError("top_k must be at least 1; null or -1 keeps every token")
    return value


TopK = Annotated[int | None, AfterValidator(_check_top_k)]
TopP = Annotated[float, Field(gt=0, le=1)]
Temperature = Annotated[float, Field(ge=0)]
TokenIds = Annotated[tuple[int, ...], Field(strict=False)]
Strings = Annotated[tuple[str, ...], Field(strict=False)]


class TorchGenerationConfig(BaseConfig):
    """The built-in torch engine: continuous batching on the learner's module, or with Ray in processes with their own weights."""

    num_engines: int | None = Field(
        None, ge=1, description="Engines in separate processes, with Ray; null is as many as fit the GPUs, else 1 (engines)."
    )
    kv_cache_memory_gb: float = Field(2.0, gt=0, description="Memory of the KV cache (GiB).")
    max_num_seqs: int = Field(64, ge=1, description="Sequences decoded together (sequences).")
    prefill_tokens: int = Field(4096, ge=1, description="Prompt tokens in one forward pass (tokens).")
    prepack_weights: bool | None = Field(
        None,
        description="Keep a copy of the weights in the CPU's matmul layout: faster decoding, more memory; null decides by "
        "device.",
    )
    cuda_graphs: bool = Field(True, description="Capture decoding steps as CUDA graphs on a GPU.")


class SpeculationConfig(BaseConfig):
    """Speculative decoding (arXiv 2211.17192): a draft proposes tokens that the policy accepts or resamples; the distribution stays."""

    method: Literal["ngram", "draft_model"] | None = Field(
        None,
        description="ngram proposes what followed the same tokens earlier in the conversation; draft_model runs a small "
        "model; null is off.",
    )
    num_speculative_tokens: int = Field(4, ge=1, description="Tokens proposed at a time (tokens).")
    prompt_lookup_min: int = Field(2, ge=1, description="Shortest match of ngram (tokens).")
    prompt_lookup_max: int = Field(4, ge=1, description="Longest match of ngram (tokens).")
    model_name: str | None = Field(
        None, description="Draft model: a hub name or folder, with the policy's vocabulary. It is not trained."
    )

    @field_validator("model_name")
    @classmethod
    def _require_draft_model(cls, value: str | None, info: ValidationInfo) -> str | None:
        if info.data.get("method") == "draft_model" and value is None:
            raise ValueError("method draft_model needs a draft: set model_name to a small model with the policy's vocabulary")
        return value


class VllmConfig(BaseConfig):
    """The vLLM engine."""

    async_engine: bool = Field(
        True, description="Accepted for NeMo-RL recipes, without effect: requests always reach the engine one by one."
    )
    num_engines: int | None = Field(
        None,
        ge=1,
        description="Engines, each with all weights; null is as many as fit the GPUs of a Ray cluster, else 1 (engines).",
    )
    precision: Precision = follows("...precision", standalone="bfloat16", description="Data type of the engine's weights.")
    kv_cache_dtype: str = Field("auto", description="Data type of the KV cache.")
    logprobs_mode: Literal["processed_logprobs"] = Field(
        "processed_logprobs",
        description="Reported log-probabilities: those of the sampling distribution, after temperature and filters, as the "
        "learner computes them.",
    )
    tensor_parallel_size: int = Field(1, ge=1, description="Tensor-parallel ranks of one engine (GPUs; processes on a CPU).")
    pipeline_parallel_size: int = Field(1, ge=1, description="Pipeline-parallel ranks of one engine (GPUs).")
    expert_parallel_size: int = Field(1, ge=1, description="Expert-parallel ranks of one engine (GPUs).")
    gpu_memory_utilization: float = Field(
        0.6, gt=0, le=1, description="Share of a GPU's memory that the engine may use (fraction)."
    )
    kv_cache_memory_gb: float | None = Field(
        None, gt=0, description="Memory of the KV cache; null is what gpu_memory_utilization leaves, and 2 on a CPU (GiB)."
    )
    max_model_len: int = follows(
        "...max_total_sequence_length", standalone=2048, ge=1, description="Longest prompt and completion together (tokens)."
    )
    max_num_seqs: int | None = Field(None, ge=1, description="Sequences decoded together; null is vLLM's choice (sequences).")
    enable_prefix_caching: bool = Field(
        True, description="Cache the keys and values of prompts for other samples and later turns."
    )
    enforce_eager: bool = Field(False, description="Do not capture CUDA graphs. A CPU never does.")
    num_threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads of each engine process; null is the learner's number (threads).",
    )
    speculation: SpeculationConfig = subsection(SpeculationConfig)
    sleep_level: Literal[0, 1, 2] = Field(
        2,
        description="What a colocated engine frees on its GPU while the learner works. 0: nothing; 1: the KV cache, and "
        "weights move to host memory; 2: both, and weights are sent again.",
    )
    max_restarts: int = Field(
        3, ge=0, description="Restarts in a row of an engine whose process died, before the run stops (restarts)."
    )
    startup_seconds: float = Field(600.0, gt=0, description="How long an engine may take to become ready (seconds).")
    env_vars: dict[str, str] = Field(default_factory=dict, description="Environment variables of the engine processes only.")

    @property
    def num_local_engines(self) -> int:
        """The number of engines of a run in one process, where null is 1."""
        return self.num_engines or 1


class WeightSyncConfig(BaseConfig):
    """How new weights reach engines with their own copy, and how the transfer is verified."""

    transport: Literal["auto", "memory", "cuda_ipc", "broadcast", "folder"] = Field(
        "auto",
        description="memory: shared memory of one machine; cuda_ipc: device memory of one GPU; broadcast: gloo, or NCCL "
        "between GPUs; folder: files; auto chooses by where learner and engines are.",
    )
    folder: str | None = Field(
        None, description="Folder of transport folder, which every engine must see; null is engines/weights in logger.log_dir."
    )
    bucket_mb: float | None = Field(
        None, gt=0, description="Size of the buckets that weights are sent in; null is the transport's choice (MiB)."
    )
    timeout_seconds: float = Field(600.0, gt=0, description="How long a publish may take (seconds).")
    adapters_alone: bool = Field(
        True, description="With LoRA, send only the adapters, to base weights that the engine keeps; false sends merged weights."
    )
    proof: Literal["always", "first", "every_n"] = Field(
        "every_n",
        description="When to read weights back from the engine, compare fingerprints with the learner's, tensor by tensor, "
        "and sample the canary: after every publish, after the first of a run, or also after every "
        "proof_every-th. Versions and received weights are compared every time.",
    )
    proof_every: int = Field(10, ge=1, description="Period of every_n (publishes).")
    canary_tolerance: float | None = Field(
        None,
        gt=0,
        description="Largest mean difference between the engine's and the learner's log-probabilities of the canary's "
        "tokens; null is 0.002 in float32 and 0.1 in bfloat16 (nats).",
    )


class ColocatedResourcesConfig(BaseConfig):
    """Devices of generation when it is not colocated."""

    gpus_per_node: int | None = Field(None, ge=1, description="GPUs of each node that generate (GPUs).")
    num_nodes: int | None = Field(None, ge=1, description="Nodes that only generate (nodes).")


class ColocatedConfig(BaseConfig):
    """Whether generation and training share devices."""

    enabled: bool = Field(True, description="Generate on the devices that train.")
    resources: ColocatedResourcesConfig = subsection(ColocatedResourcesConfig)


class MismatchConfig(BaseConfig):
    """Limits on the mismatch of engine and learner: token_mult_prob_error of the newest tokens of a training step."""

    warn: float | None = Field(1.2, gt=1, description="Warn above this; null never warns (factor).")
    warn_every: int = Field(20, ge=1, description="Warn at most once in this many steps (steps).")
    stop: float | None = Field(None, gt=1, description="End the run above this; null never does (factor).")
    stop_after: int = Field(3, ge=1, description="Steps in a row above stop that end the run (steps).")

    @field_validator("stop")
    @classmethod
    def _check_stop_above_warn(cls, value: float | None, info: ValidationInfo) -> float | None:
        warn = info.data.get("warn")
        if value is not None and warn is not None and value < warn:
            raise ValueError(f"it is below warn = {warn:g}, so the run would end without a warning; raise stop, or lower warn")
        return value


class GenerationConfig(BaseConfig):
    """The inference engine and how it samples."""

    backend: Literal["auto", "torch", "vllm", "sglang", "megatron"] = Field(
        "auto",
        description="Inference engine: vllm, in separate processes, or torch, built into Strop; auto is torch in this version.",
    )
    max_new_tokens: int = follows(
        "..max_total_sequence_length", standalone=512, ge=1, description="Longest completion of one turn (tokens)."
    )
    temperature: Temperature = Field(1.0, description="Sampling temperature; 0 is greedy.")
    top_p: TopP = Field(1.0, description="Sample from the smallest set of tokens with this probability; 1 turns it off.")
    top_k: TopK = Field(None, description="Sample from this many most likely tokens; null or -1 turns it off (tokens).")
    min_p: float = Field(
        0.0, ge=0, le=1, description="Sample from tokens at least this times as likely as the most likely one; 0 turns it off."
    )
    keep_sampling_mask: bool = Field(
        False,
        description="Record which tokens top_k, top_p and min_p kept, and renormalise over them in the learner (arXiv "
        "2512.02556), so that ratios do not jump where the learner would keep others. Needs a top_k of at most "
        "4096, and up to 4 x top_k bytes for each sampled token.",
    )
    val_temperature: Temperature = follows(".temperature", standalone=1.0, description="temperature in validation.")
    val_top_p: TopP = follows(".top_p", standalone=1.0, description="top_p in validation.")
    val_top_k: TopK = follows(
        ".top_k", standalone=None, description="top_k in validation; -1 turns it off whatever top_k is (tokens)."
    )
    stop_token_ids: TokenIds | None = Field(None, description="Token ids that end a completion, besides the model's own.")
    stop_strings: Strings | None = Field(None, description="Texts that end a completion.")
    mismatch: MismatchConfig = subsection(MismatchConfig)
    torch_cfg: TorchGenerationConfig = subsection(TorchGenerationConfig)
    vllm_cfg: VllmConfig = subsection(VllmConfig)
    vllm_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Further arguments of vLLM's engine, passed through; unknown ones are errors.",
    )
    weight_sync: WeightSyncConfig = subsection(WeightSyncConfig)
    colocated: ColocatedConfig = subsection(ColocatedConfig)

    @field_validator("keep_sampling_mask")
    @classmethod
    def _require_top_k(cls, value: bool, info: ValidationInfo) -> bool:
        filters = info.data.get("top_p", 1.0) < 1 or info.data.get("min_p", 0.0) > 0
        if value and filters and info.data.get("top_k") in (None, -1):
            raise ValueError(
                "it needs a top_k: top_p and min_p alone may keep most of the vocabulary, which would be recorded for every token; "
                "set top_k, for instance to 512"
            )
        return value

    def sampling_options(self, *, validation: bool = False) -> dict[str, Any]:
        """Return keyword arguments of ``strop.sampling.Sampling``."""
        top_k = self.val_top_k if validation else self.top_k
        return {
            "temperature": self.val_temperature if validation else self.temperature,
            "top_p": self.val_top_p if validation else self.top_p,
            "top_k": None if top_k == -1 else top_k,
            "min_p": self.min_p,
            "record_sampling_mask": self.keep_sampling_mask and not validation,
            "max_new_tokens": self.max_new_tokens,
            "stop_token_ids": self.stop_token_ids or (),
            "stop_strings": self.stop_strings or (),
        }
