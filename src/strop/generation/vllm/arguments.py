"""vLLM's engine arguments from Strop's options, checked against the installed version."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OWN = {  # arguments that would break what Strop promises -> what to set instead
    "model": "policy.model_name",
    "tokenizer": "policy.tokenizer.name",
    "skip_tokenizer_init": "nothing: stop strings need the tokenizer",
    "dtype": "policy.generation.vllm_cfg.precision",
    "logprobs_mode": "nothing: log-probabilities are of the distribution that sampled",
    "worker_extension_cls": "nothing: Strop's own takes the weights",
    "seed": "grpo.seed: every request has a seed of its own",
    "max_model_len": "policy.generation.vllm_cfg.max_model_len",
    "tensor_parallel_size": "policy.generation.vllm_cfg.tensor_parallel_size",
    "pipeline_parallel_size": "policy.generation.vllm_cfg.pipeline_parallel_size",
    "enable_prefix_caching": "policy.generation.vllm_cfg.enable_prefix_caching",
    "speculative_config": "policy.generation.vllm_cfg.speculation",
    "enable_lora": "policy.dtensor_cfg.lora_cfg.enabled",
    "quantization": "nothing: rollouts use the weights that are trained",
    "data_parallel_size": "policy.generation.vllm_cfg.num_engines",
}
CPU_BLOCK = 32  # tokens: vLLM's choice of 128 on a CPU leaves prompts shorter than that out of the prefix cache
CPU_CACHE_GB = 2.0
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of adapters


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """One vLLM engine."""

    model: str  # a folder with config.json and the tokenizer's files; weights are read from it only with ``load_weights``
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
    adapter_rank: int | None = None  # low-rank adapters of at most this rank are sent beside the base
    speculative: Mapping[str, Any] | None = None  # vLLM's speculative_config
    sleep_level: int = 0
    startup_seconds: float = 600.0
    further: Mapping[str, Any] = field(default_factory=dict)  # vLLM's own names
    environment: Mapping[str, str] = field(default_factory=dict)  # of the engine's processes
    worker: str = "strop.generation.vllm.worker.StropWorker"  # mixed into vLLM's own
    output: Path | None = None  # what they write; None: where this process writes


def engine_arguments(options: EngineOptions) -> Any:
    """An ``AsyncEngineArgs``. Raises ValueError for an argument that the installed version does not have, or that is Strop's to set."""
    from vllm import AsyncEngineArgs

    refuse_unknown(options.further, [field.name for field in dataclasses.fields(AsyncEngineArgs)])
    given: dict[str, Any] = {
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
        "worker_extension_cls": options.worker,
        "generation_config": "vllm",  # the model's own sampling defaults must not change what is asked for
        "disable_log_stats": False,
        "seed": 0,
    }
    if options.max_num_seqs is not None:
        given["max_num_seqs"] = options.max_num_seqs
    if options.on_cpu:
        given["block_size"] = CPU_BLOCK
    memory = options.kv_cache_memory_gb or (CPU_CACHE_GB if options.on_cpu else None)
    if memory is not None:
        given["kv_cache_memory_bytes"] = int(memory * 2**30)
    if options.adapter_rank is not None:
        given |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": _rank(options.adapter_rank)}
    if options.speculative is not None:
        given["speculative_config"] = _speculative(options)
    if options.sleep_level and not options.on_cpu:
        given["enable_sleep_mode"] = True
    return AsyncEngineArgs(**{**given, **options.further})


def _speculative(options: EngineOptions) -> dict[str, Any]:
    """A draft model's weights come from its own folder or hub name: nobody sends it any."""
    given = dict(options.speculative or {})
    if "model" not in given:
        return given
    return {"draft_load_config": {"load_format": "auto"}, "draft_tensor_parallel_size": options.tensor_parallel_size, **given}


def refuse_unknown(further: Mapping[str, Any], known: list[str]) -> None:
    """Raises ValueError for the first name that may not stand under ``vllm_kwargs``."""
    for name in further:
        key = f"policy.generation.vllm_kwargs.{name}"
        if name in OWN:
            raise ValueError(f"{key}: this argument of vLLM's is set by Strop; set {OWN[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ValueError(
                f"{key}: the installed vLLM ({_version()}) has no such engine argument"
                + (f"; did you mean {near[0]}?" if near else "")
            )


def _rank(rank: int) -> int:
    """The next rank that vLLM has kernels for."""
    if rank > RANKS[-1]:
        raise ValueError(
            f"policy.dtensor_cfg.lora_cfg.dim is {rank}, and vLLM runs adapters up to rank {RANKS[-1]}: lower it, or set "
            "policy.generation.weight_sync.adapters_alone=false, which sends merged weights"
        )
    return next(size for size in RANKS if size >= rank)


def _version() -> str:
    import vllm

    return str(vllm.__version__)
