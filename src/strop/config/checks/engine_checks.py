"""Checks of the inference engines: combinations that cannot work, or that do something else than they seem to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from strop.base_config import changed_keys, default_of
from strop.config.checks.device_counts import count_devices
from strop.config.schema.run_config import EvalRunConfig, RecordedRunConfig, RolloutRunConfig, generation_section
from strop.generation.generation_config import GenerationConfig
from strop.problems import Problem

Problems = Iterator[Problem]
ConfigT = TypeVar("ConfigT", bound="RolloutRunConfig | EvalRunConfig")

MIN_TEMPERATURE = 0.01  # strop.generation.vllm.requests.MIN_TEMPERATURE, which imports vLLM


def uses_vllm(config: RolloutRunConfig | EvalRunConfig) -> bool:
    return generation_section(config)[1].backend == "vllm"


def _only_with_vllm(check: Callable[[ConfigT], Problems]) -> Callable[[ConfigT], Problems]:
    """Restrict a check to runs with vLLM."""

    def checked(config: ConfigT) -> Problems:
        if uses_vllm(config):
            yield from check(config)

    return checked


# --- errors -----------------------------------------------------------------------------------------------------------------


@_only_with_vllm
def check_min_temperature(config: RolloutRunConfig | EvalRunConfig) -> Problems:
    key, generation = generation_section(config)
    for name in ("temperature", "val_temperature"):
        value, is_training = getattr(generation, name), name == "temperature"
        if 0 < value < MIN_TEMPERATURE and (is_training or value != generation.temperature):
            yield Problem(
                f"{key}.{name}",
                f"found {value}, but vLLM raises temperatures between 0 and {MIN_TEMPERATURE} to {MIN_TEMPERATURE}, and reports other "
                "log-probabilities",
                f"Set it to 0 (greedy), or to {MIN_TEMPERATURE} or more.",
            )


@_only_with_vllm
def check_expert_parallelism(config: RolloutRunConfig | EvalRunConfig) -> Problems:
    key, generation = generation_section(config)
    options = generation.vllm_cfg
    if options.expert_parallel_size not in (1, options.tensor_parallel_size):
        yield Problem(
            f"{key}.vllm_cfg.expert_parallel_size",
            f"found {options.expert_parallel_size}, but an engine shards its experts over its tensor-parallel ranks, and "
            f"{key}.vllm_cfg.tensor_parallel_size is {options.tensor_parallel_size}",
            f"Set it to 1, or both to {options.expert_parallel_size}.",
        )


@_only_with_vllm
def check_engine_length(config: RolloutRunConfig) -> Problems:
    length, total = config.policy.generation.vllm_cfg.max_model_len, config.policy.max_total_sequence_length
    if length < total:
        yield Problem(
            "policy.generation.vllm_cfg.max_model_len",
            f"found {length}, but a rollout may have policy.max_total_sequence_length = {total} tokens, and the engine would truncate it "
            "earlier",
            f"Leave it unset, set it to {total} or more, or lower policy.max_total_sequence_length.",
        )


@_only_with_vllm
def check_transport(config: RolloutRunConfig) -> Problems:
    """Check that the transport connects the learner to the engines."""
    generation, device = config.policy.generation, config.policy.device
    transport, key = generation.weight_sync.transport, "policy.generation.weight_sync.transport"
    if transport == "cuda_ipc" and device == "cpu":
        yield Problem(
            key, "found cuda_ipc, but policy.device is cpu, and there is no GPU memory to share", "Set it to auto or memory."
        )
    elif transport == "cuda_ipc" and not generation.colocated.enabled:
        yield Problem(
            key,
            "found cuda_ipc, but policy.generation.colocated.enabled is false: an engine on other GPUs cannot map the learner's memory",
            "Set it to auto, broadcast, memory or folder.",
        )
    elif transport == "cuda_ipc" and generation.vllm_cfg.num_local_engines > 1:
        yield Problem(
            key,
            f"found cuda_ipc, but only the first of {generation.vllm_cfg.num_local_engines} engines is on the learner's GPU; the others "
            "cannot map its memory",
            "Set it to memory or folder, or policy.generation.vllm_cfg.num_engines=1.",
        )
    elif transport == "broadcast" and generation.colocated.enabled and device.startswith("cuda"):
        yield Problem(
            key,
            "found broadcast, but policy.generation.colocated.enabled is true: NCCL does not connect two processes on one GPU",
            "Set it to auto or cuda_ipc, or policy.generation.colocated.enabled=false.",
        )


@_only_with_vllm
def check_async_on_one_gpu(config: RolloutRunConfig) -> Problems:
    if (
        config.rollout_training.max_staleness > 0
        and config.policy.generation.colocated.enabled
        and config.policy.device.startswith("cuda")
    ):
        yield Problem(
            "policy.generation.colocated.enabled",
            f"found true, but {config.section}.async_{config.section} samples while the learner trains, and an engine on the learner's GPU "
            "sleeps meanwhile",
            "Set it to false, with a GPU for each engine, or train synchronously.",
        )


@_only_with_vllm
def check_speculation(config: RolloutRunConfig | EvalRunConfig) -> Problems:
    key, generation = generation_section(config)
    drafts = generation.vllm_cfg.speculation
    if drafts.method is None:
        return
    if generation.min_p > 0:
        yield Problem(
            f"{key}.min_p",
            f"found {generation.min_p}, but vLLM ignores min_p in speculative decoding",
            f"Set it to 0, or {key}.vllm_cfg.speculation.method=null.",
        )
    if drafts.method == "ngram" and drafts.prompt_lookup_min > drafts.prompt_lookup_max:
        yield Problem(
            f"{key}.vllm_cfg.speculation.prompt_lookup_min",
            f"found {drafts.prompt_lookup_min}, above prompt_lookup_max = {drafts.prompt_lookup_max}: no match has such a length",
            f"Set it to {drafts.prompt_lookup_max} or less.",
        )


def check_resources(config: RolloutRunConfig | EvalRunConfig) -> Problems:
    """Check the GPUs of generation, which follow from the number of engines and their size."""
    key, generation = generation_section(config)
    resources, options = generation.colocated.resources, generation.vllm_cfg
    if generation.colocated.enabled or generation.backend != "vllm":
        return
    if isinstance(config, RolloutRunConfig) and count_devices(config).uses_ray:
        return  # devices are planned once the cluster is known (strop.distributed.placement)
    size = options.tensor_parallel_size
    needed = options.num_local_engines * size
    if resources.gpus_per_node not in (None, needed):
        fitting = [f"{key}.vllm_cfg.num_engines={resources.gpus_per_node // size}"] if resources.gpus_per_node % size == 0 else []
        yield Problem(
            f"{key}.colocated.resources.gpus_per_node",
            f"found {resources.gpus_per_node}, but {options.num_local_engines} engines of {size} ranks use {needed} GPUs",
            f"Set {' or '.join([*fitting, f'it to {needed} or null'])}.",
        )
    if (resources.num_nodes or 1) > 1:
        yield Problem(
            f"{key}.colocated.resources.num_nodes",
            f"found {resources.num_nodes}, but this run uses one machine",
            "Set it to 1 or null, or raise cluster.num_nodes.",
        )


# --- warnings --------------------------------------------------------------------------------------------------------------


def warn_unused_engine_options(config: RolloutRunConfig | EvalRunConfig) -> Problems:
    """Warn of options of an engine that the run does not use."""
    key, generation = generation_section(config)
    if generation.backend == "vllm":
        unused, engine, other = changed_keys(f"{key}.torch_cfg", generation.torch_cfg), "vLLM", "torch"
    else:
        unused = changed_keys(
            f"{key}.vllm_cfg", generation.vllm_cfg, ignore=("gpu_memory_utilization", "enforce_eager", "async_engine")
        )
        unused += [f"{key}.vllm_kwargs"] if generation.vllm_kwargs else []
        unused += changed_keys(f"{key}.weight_sync", generation.weight_sync)
        engine, other = "the torch engine", "vllm"
    if unused:
        yield Problem(
            unused[0],
            f"{engine} does not read {', '.join(unused)}",
            f"{'They are' if len(unused) > 1 else 'It is'} for {key}.backend={other}.",
        )


def warn_unused_generation(config: RecordedRunConfig) -> Problems:
    unused = changed_keys("policy.generation", config.policy.generation)
    if unused:
        yield Problem(unused[0], f"a run on recorded data does not sample, and does not read {', '.join(unused)}")


@_only_with_vllm
def warn_unused_weight_sync(config: EvalRunConfig) -> Problems:
    unused = changed_keys("generation.weight_sync", config.generation.weight_sync)
    if unused:
        yield Problem(
            unused[0],
            f"it has no effect: an evaluation reads its weights from {config.generation.model_name}, and no weights are sent",
        )


@_only_with_vllm
def warn_kv_cache_dtype(config: RolloutRunConfig | EvalRunConfig) -> Problems:
    key, generation = generation_section(config)
    dtype = generation.vllm_cfg.kv_cache_dtype
    if dtype not in ("auto", generation.vllm_cfg.precision):
        yield Problem(
            f"{key}.vllm_cfg.kv_cache_dtype",
            f"found {dtype}: rounded keys and values change the sampling distribution, and the learner computes another one",
            "Watch train/token_mult_prob_error and choose a correction (docs/algorithms/corrections.md), or set auto.",
        )


@_only_with_vllm
def warn_unverified_experts(config: RolloutRunConfig) -> Problems:
    if config.policy.generation.vllm_cfg.expert_parallel_size > 1:
        yield Problem(
            "policy.generation.vllm_cfg.expert_parallel_size",
            "the weights of experts are not read back from the engine: only what the engine received and the canary verify them",
            "policy.generation.weight_sync.proof=always samples the canary after every publish.",
        )


@_only_with_vllm
def warn_unused_verification_options(config: RolloutRunConfig) -> Problems:
    sync, key = config.policy.generation.weight_sync, "policy.generation.weight_sync"
    if sync.proof != "every_n" and sync.proof_every != default_of(sync, "proof_every"):
        yield Problem(f"{key}.proof_every", f"it has no effect: {key}.proof is {sync.proof}, and it is the period of every_n")
    if sync.folder is not None and sync.transport != "folder":
        yield Problem(
            f"{key}.folder",
            f"it has no effect: {key}.transport is {sync.transport}, which writes no files",
            f"Set {key}.transport=folder to use it.",
        )
    if sync.transport == "folder" and sync.bucket_mb != default_of(sync, "bucket_mb"):
        yield Problem(f"{key}.bucket_mb", f"it has no effect: {key}.transport=folder chooses the size of its files")


@_only_with_vllm
def warn_unused_sleep(config: RolloutRunConfig) -> Problems:
    generation, key = config.policy.generation, "policy.generation.vllm_cfg.sleep_level"
    if generation.vllm_cfg.sleep_level == 1 and not generation.colocated.enabled:
        yield Problem(key, "it has no effect: an engine with its own device never sleeps")
    elif generation.vllm_cfg.sleep_level == 1 and config.policy.device == "cpu":
        yield Problem(key, "it has no effect: an engine on a CPU frees no memory")


@_only_with_vllm
def warn_unused_speculation(config: RolloutRunConfig | EvalRunConfig) -> Problems:
    key, generation = generation_section(config)
    drafts = generation.vllm_cfg.speculation
    unused: Mapping[str | None, Sequence[str]] = {
        None: ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "model_name"),
        "ngram": ("model_name",),
        "draft_model": ("prompt_lookup_min", "prompt_lookup_max"),
    }
    for name in unused[drafts.method]:
        if getattr(drafts, name) != default_of(drafts, name):
            yield Problem(
                f"{key}.vllm_cfg.speculation.{name}",
                f"it has no effect: {key}.vllm_cfg.speculation.method is {drafts.method or 'null'}",
            )


def warn_unused_resources(config: RolloutRunConfig | EvalRunConfig) -> Problems:
    key, generation = generation_section(config)
    changed = changed_keys(f"{key}.colocated.resources", generation.colocated.resources)
    if changed and generation.colocated.enabled:
        yield Problem(
            changed[0], f"it has no effect: {key}.colocated.enabled is true, so generation shares the devices that train"
        )


def count_gpus(generation: GenerationConfig) -> int:
    """Return the number of GPUs of a run with one learner rank."""
    if generation.backend != "vllm":
        return 1
    engines = generation.vllm_cfg.num_local_engines * generation.vllm_cfg.tensor_parallel_size
    return engines if generation.colocated.enabled else engines + 1


ROLLOUT_ERROR_CHECKS = (check_engine_length, check_transport, check_async_on_one_gpu)
SAMPLING_ERROR_CHECKS = (check_min_temperature, check_expert_parallelism, check_speculation, check_resources)
ROLLOUT_WARNING_CHECKS = (warn_unverified_experts, warn_unused_verification_options, warn_unused_sleep)
SAMPLING_WARNING_CHECKS = (warn_unused_engine_options, warn_kv_cache_dtype, warn_unused_speculation, warn_unused_resources)
