"""vLLM engine arguments built from Strop's options and checked against the installed version."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESERVED_ARGS = {  # vLLM arguments that Strop sets itself -> what to set instead
    "model": "policy.model_name",
    "tokenizer": "policy.tokenizer.name",
    "skip_tokenizer_init": "nothing: stop strings need the tokenizer",
    "dtype": "policy.generation.vllm_cfg.precision",
    "logprobs_mode": "nothing: log-probabilities are those of the sampling distribution",
    "worker_extension_cls": "nothing: Strop's worker extension loads the weights",
    "seed": "grpo.seed: every request has its own seed",
    "max_model_len": "policy.generation.vllm_cfg.max_model_len",
    "tensor_parallel_size": "policy.generation.vllm_cfg.tensor_parallel_size",
    "pipeline_parallel_size": "policy.generation.vllm_cfg.pipeline_parallel_size",
    "enable_prefix_caching": "policy.generation.vllm_cfg.enable_prefix_caching",
    "speculative_config": "policy.generation.vllm_cfg.speculation",
    "enable_lora": "policy.dtensor_cfg.lora_cfg.enabled",
    "quantization": "nothing: rollouts use the trained weights unquantized",
    "data_parallel_size": "policy.generation.vllm_cfg.num_engines",
}
CPU_BLOCK_SIZE = 32  # tokens: with vLLM's CPU default of 128, shorter prompts would never be in the prefix cache
CPU_CACHE_GB = 2.0
SUPPORTED_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # LoRA ranks that vLLM has kernels for


@dataclass(frozen=True, kw_only=True)
class VllmOptions:
    """Options of one vLLM engine."""

    model: str  # a folder with config.json and tokenizer files; weights are read from it only with ``load_weights``
    dtype: str
    max_model_len: int
    on_cpu: bool
    load_weights: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    expert_parallel: bool = False
    gpu_memory_utilization: float = 0.6
    kv_cache_memory_gb: float | None = None
    kv_cache_dtype: str = "auto"
    max_num_seqs: int | None = None
    prefix_caching: bool = True
    enforce_eager: bool = False
    max_logprobs: int = 20
    max_lora_rank: int | None = None  # LoRA adapters of at most this rank are loaded over the base weights
    speculative_config: Mapping[str, Any] | None = None  # vLLM's speculative_config
    sleep_level: int = 0
    startup_seconds: float = 600.0
    extra_args: Mapping[str, Any] = field(default_factory=dict)  # further engine arguments, by vLLM's names
    environment: Mapping[str, str] = field(default_factory=dict)  # environment variables of the engine's processes
    worker_extension: str = "strop.generation.vllm.worker.StropWorker"  # vLLM's worker_extension_cls
    output_file: Path | None = None  # file for the output of the engine's processes; None: that of this process


def make_engine_args(options: VllmOptions) -> Any:
    """Return vLLM's ``AsyncEngineArgs``. Raises ValueError for arguments that vLLM does not have or that Strop sets itself."""
    from vllm import AsyncEngineArgs

    check_extra_args(options.extra_args, [field.name for field in dataclasses.fields(AsyncEngineArgs)])
    args: dict[str, Any] = {
        "model": options.model,
        "tokenizer": options.model,
        "dtype": options.dtype,
        "load_format": "auto" if options.load_weights else "dummy",
        "max_model_len": options.max_model_len,
        "tensor_parallel_size": options.tensor_parallel_size,
        "pipeline_parallel_size": options.pipeline_parallel_size,
        "enable_expert_parallel": options.expert_parallel,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "kv_cache_dtype": options.kv_cache_dtype,
        "enable_prefix_caching": options.prefix_caching,
        "enforce_eager": options.enforce_eager or options.on_cpu,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": options.max_logprobs,
        "worker_extension_cls": options.worker_extension,
        "generation_config": "vllm",  # ignore the model's own sampling defaults
        "disable_log_stats": False,
        "seed": 0,
    }
    if options.max_num_seqs is not None:
        args["max_num_seqs"] = options.max_num_seqs
    if options.on_cpu:
        args["block_size"] = CPU_BLOCK_SIZE
    memory = options.kv_cache_memory_gb or (CPU_CACHE_GB if options.on_cpu else None)
    if memory is not None:
        args["kv_cache_memory_bytes"] = int(memory * 2**30)
    if options.max_lora_rank is not None:
        args |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": _round_up_rank(options.max_lora_rank)}
    if options.speculative_config is not None:
        args["speculative_config"] = _speculative_config(options)
    if options.sleep_level and not options.on_cpu:
        args["enable_sleep_mode"] = True
    return AsyncEngineArgs(**{**args, **options.extra_args})


def _speculative_config(options: VllmOptions) -> dict[str, Any]:
    """Return vLLM's speculative_config. A draft model reads its weights from its own folder or hub name; the learner sends it none."""
    config = dict(options.speculative_config or {})
    if "model" not in config:
        return config
    return {"draft_load_config": {"load_format": "auto"}, "draft_tensor_parallel_size": options.tensor_parallel_size, **config}


def check_extra_args(extra_args: Mapping[str, Any], known: list[str]) -> None:
    """Raises ValueError for the first name that is not allowed under ``vllm_kwargs``."""
    for name in extra_args:
        key = f"policy.generation.vllm_kwargs.{name}"
        if name in RESERVED_ARGS:
            raise ValueError(f"{key}: Strop sets this vLLM argument itself; set {RESERVED_ARGS[name]}")
        if name not in known:
            from vllm import __version__

            matches = difflib.get_close_matches(name, known, n=1)
            raise ValueError(
                f"{key}: the installed vLLM ({__version__}) has no such engine argument"
                + (f"; did you mean {matches[0]}?" if matches else "")
            )


def _round_up_rank(rank: int) -> int:
    """Round a LoRA rank up to the next one that vLLM has kernels for."""
    if rank > SUPPORTED_LORA_RANKS[-1]:
        raise ValueError(
            f"policy.dtensor_cfg.lora_cfg.dim is {rank}, but vLLM supports adapters up to rank "
            f"{SUPPORTED_LORA_RANKS[-1]}: lower it, or set "
            "policy.generation.weight_sync.adapters_alone=false to send merged weights"
        )
    return next(size for size in SUPPORTED_LORA_RANKS if size >= rank)
