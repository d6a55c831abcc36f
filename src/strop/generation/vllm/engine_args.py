"""vLLM engine arguments built from Strop's configuration and checked against the installed version."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.generation.engine_launch import EngineLaunch, NodeRanks
from strop.generation.generation_config import GenerationConfig
from strop.generation.quantized_rollouts import make_rollout_plan
from strop.generation.vllm.vllm_config import VllmConfig
from strop.models.loading import list_weight_names
from strop.models.quantization.quantization_plan import QuantizationPlan
from strop.safety.remote_code import trusts_remote_code

BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MX = {"quant_method": "modelopt", "quant_algo": "MXFP8"}


def kernel_plan(generation: GenerationConfig) -> QuantizationPlan | None:
    """Return the quantisation of vLLM's kernels; None: weights are used as sent, perhaps rounded."""
    return None if generation.quantization.emulate else make_rollout_plan(generation)


def make_fp8_args(generation: GenerationConfig, model: str) -> dict[str, Any]:
    """Return vLLM's arguments for quantised weights; empty if they are not. ``model``: a folder with the model's configuration."""
    plan = kernel_plan(generation)
    if plan is None:
        return {}
    names = list_weight_names(Path(model))
    selected = plan.select(names)
    ignored = sorted(name.removesuffix(".weight") for name in names if name.endswith(".weight") and name not in selected)
    if plan.weights.columns == 32:
        config: dict[str, Any] = {**MX, "ignore": ignored, "exclude_modules": ignored}
    else:
        config = {**BLOCKS, "ignored_layers": ignored}
    return {"hf_overrides": {"quantization_config": config}}


def merge_overrides(args: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the user's ``extra`` arguments into ``args``; ``hf_overrides`` is merged field by field."""
    merged = {**args, **extra}
    if "hf_overrides" in args and isinstance(extra.get("hf_overrides"), Mapping):
        merged["hf_overrides"] = {**args["hf_overrides"], **extra["hf_overrides"]}
    return merged


def fp8_environment(generation: GenerationConfig) -> dict[str, str]:
    """Return environment variables of an engine with quantised weights.

    DeepGEMM is off: it would round block scales to powers of two again, so the engine would not use the published weights.
    """
    plan = kernel_plan(generation)
    if plan is None or plan.weights.columns == 32:
        return {}
    return {"VLLM_USE_DEEP_GEMM_E8M0": "0"} | ({"VLLM_USE_DEEP_GEMM": "1"} if generation.vllm_cfg.use_deep_gemm else {})


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
    "quantization": "policy.generation.vllm_cfg.precision=fp8, or policy.generation.quantization.format",
    "data_parallel_size": "policy.generation.vllm_cfg.num_engines, or expert_parallel_size for a mixture of experts",
    "enable_expert_parallel": "policy.generation.vllm_cfg.expert_parallel_size",
    "enable_return_routed_experts": "policy.router_replay.enabled",
    "mm_device_do_normalize": "nothing: images are normalized by the learner's processor",
}
CPU_BLOCK_SIZE = 32  # tokens: with vLLM's CPU default of 128, shorter prompts would never be in the prefix cache
CPU_CACHE_GB = 2.0
MAX_LOGPROBS = 20  # per token, unless more are recorded
SUPPORTED_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # LoRA ranks that vLLM has kernels for


# JSON settings of a SpanningExecutor, which vLLM creates in a separate process.
SPANNED_VARIABLE = "STROP_ENGINE_NODES"
ENGINE_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout is for results
    "VLLM_NO_USAGE_STATS": "1",
    # On a CPU vLLM would otherwise bind all engines to the same cores, override OMP_NUM_THREADS, and require a NUMA node for each rank.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def select_ranks(nodes: Sequence[NodeRanks], first: int, count: int) -> list[NodeRanks]:
    """Return the placement of ``count`` ranks of an engine, from number ``first`` on."""
    selected: list[NodeRanks] = []
    start = 0
    for node in nodes:
        begin, end = max(first, start), min(first + count, start + node.count)
        if begin < end:
            selected.append(NodeRanks(node.node, end - begin, node.gpus[begin - start : end - start]))
        start += node.count
    return selected


@dataclass(frozen=True, kw_only=True)
class VllmLaunch(EngineLaunch):
    """What one vLLM engine is launched with. Adapters are loaded over the base weights."""

    worker_extension: str = "strop.generation.vllm.worker.StropWorker"  # vLLM's worker_extension_cls

    @property
    def env_vars(self) -> dict[str, str]:
        """Environment variables of the engine's processes."""
        # A fork of a process that has used CUDA cannot use it, and vLLM does not notice every use.
        start = {} if self.on_cpu else {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
        runner = {"VLLM_USE_V2_MODEL_RUNNER": "1"} if self.return_routes else {}  # the other one does not report experts
        invariant = {"VLLM_BATCH_INVARIANT": "1"} if self.batch_invariant else {}
        fp8 = fp8_environment(self.config)
        own = {**start, **runner, **invariant, **fp8, **self.environment, **self.config.vllm_cfg.env_vars}
        if not self.nodes:
            return own
        spanned = {
            "address": self.ray_address,
            "nodes": [dataclasses.asdict(node) for node in self.nodes],
            "variables": [*ENGINE_ENVIRONMENT, *own],
            "output": None if self.output_file is None else str(self.output_file),
        }
        return {**own, SPANNED_VARIABLE: json.dumps(spanned)}

    @property
    def shared_folder(self) -> Path | None:
        """A folder visible to all processes of the engine; None: any, because they are on one machine."""
        return self.output_file.parent if self.nodes and self.output_file is not None else None

    @property
    def receivers(self) -> int:
        """The number of the engine's processes that receive weights."""
        return self.config.vllm_cfg.engine_size

    @property
    def sleep_level(self) -> int:
        """What the engine frees when it sleeps. At most level 1 with adapters, because level 2 drops the base weights, which are
        sent only once.
        """
        if self.on_cpu:
            return 0
        level = self.config.vllm_cfg.sleep_level
        return level if self.adapters is None else min(level, 1)


def make_engine_args(launch: VllmLaunch) -> Any:
    """Return vLLM's ``AsyncEngineArgs``. Raises ValueError for arguments that vLLM lacks or that Strop sets itself."""
    from vllm import AsyncEngineArgs

    generation, config = launch.config, launch.config.vllm_cfg
    check_extra_args(generation.vllm_kwargs, [field.name for field in dataclasses.fields(AsyncEngineArgs)])
    args: dict[str, Any] = {
        "model": launch.model,
        "trust_remote_code": trusts_remote_code(),
        "tokenizer": launch.tokenizer or launch.model,
        "dtype": config.dtype,
        "load_format": "auto" if launch.load_weights else "dummy",
        "max_model_len": config.max_model_len,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "data_parallel_size": config.data_parallel_size,
        "enable_expert_parallel": config.expert_parallel_size > 1,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "kv_cache_dtype": config.kv_cache_dtype,
        "enable_prefix_caching": config.enable_prefix_caching,
        "enforce_eager": config.enforce_eager or launch.on_cpu,
        "logprobs_mode": config.logprobs_mode,
        "max_logprobs": max(MAX_LOGPROBS, generation.top_k or 0) if generation.keep_sampling_mask else MAX_LOGPROBS,
        "worker_extension_cls": launch.worker_extension,
        "generation_config": "vllm",  # ignore the model's own sampling defaults
        "disable_log_stats": False,
        "seed": 0,
    }
    if config.max_num_seqs is not None:
        args["max_num_seqs"] = config.max_num_seqs
    if launch.on_cpu:
        args["block_size"] = CPU_BLOCK_SIZE
    memory = config.kv_cache_memory_gb or (CPU_CACHE_GB if launch.on_cpu else None)
    if memory is not None:
        args["kv_cache_memory_bytes"] = int(memory * 2**30)
    if launch.adapters is not None:
        args |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": _round_up_rank(launch.adapters.rank)}
    if config.speculation.method is not None:
        args["speculative_config"] = make_speculative_config(config, launch.draft)
    if launch.sleep_level:
        args["enable_sleep_mode"] = True
    if launch.nodes and config.data_parallel_size > 1:
        args["data_parallel_address"] = _own_address()  # address where ranks on other nodes connect
    if launch.reads_images:
        args |= make_image_args(on_cpu=launch.on_cpu)
    if launch.return_routes:
        if launch.on_cpu:
            raise ValueError(
                "policy.router_replay.enabled is true, but vLLM reports the experts of tokens only with its model runner V2, which needs "
                "Triton and a GPU; set policy.generation.backend=torch, or policy.router_replay.enabled=false"
            )
        args |= {"enable_return_routed_experts": True, "enable_prefix_caching": True}  # stored alongside the prefix cache
    args |= make_fp8_args(generation, launch.model)
    return AsyncEngineArgs(**merge_overrides(args, generation.vllm_kwargs))


def check_cpu_attention(args: Any) -> None:
    """Raises ValueError if vLLM's CPU attention has no kernel for a model's heads, which vLLM would report only at the first
    request.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    model, sizes = args.create_model_config(), CPUAttentionBackend.get_supported_head_sizes()
    if not model.use_mla and (size := model.get_head_size()) not in sizes:
        raise ValueError(
            f"policy.generation.backend is vllm, whose CPU attention supports head sizes {', '.join(map(str, sizes))}, and {args.model} "
            f"has {size}; set policy.generation.backend=torch"
        )


def make_image_args(*, on_cpu: bool) -> dict[str, Any]:
    """Return vLLM's image arguments; ``vllm_kwargs`` override them (``limit_mm_per_prompt``, ``skip_mm_profiling``).

    It receives finished pixels with the learner's normalization, so it must neither normalize them again nor cache them by name.
    """
    args: dict[str, Any] = {"mm_device_do_normalize": False, "mm_processor_cache_gb": 0}
    return {**args, "skip_mm_profiling": True} if on_cpu else args


def _own_address() -> str:
    from vllm.utils.network_utils import get_ip

    return str(get_ip())


def make_speculative_config(config: VllmConfig, draft: str = "") -> dict[str, Any]:
    """Return vLLM's speculative_config. A draft reads its weights from its own folder or hub name; the learner publishes weights
    only for the head it trains, whose folder is ``draft``."""
    drafts = config.speculation
    args: dict[str, Any] = {"method": drafts.method, "num_speculative_tokens": drafts.num_speculative_tokens}
    if drafts.method == "ngram":
        return {**args, "prompt_lookup_min": drafts.prompt_lookup_min, "prompt_lookup_max": drafts.prompt_lookup_max}
    if drafts.method == "suffix":
        return args
    draft_args = {"draft_load_config": {"load_format": "auto"}, "draft_tensor_parallel_size": config.tensor_parallel_size}
    return {**args, "model": draft or drafts.model_name, **draft_args}


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
