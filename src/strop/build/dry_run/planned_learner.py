"""Read a learner out of a model's section: what its memory depends on, and how it is divided over ranks."""

from __future__ import annotations

from dataclasses import replace

from strop.hardware.devices import Device
from strop.learner.megatron.megatron_config import MegatronConfig
from strop.learner.megatron.megatron_dims import MegatronDims
from strop.learner.model_config import ModelConfig
from strop.learner.parallel.dtensor_config import DtensorConfig
from strop.learner.parallel.parallel_dims import ParallelDims
from strop.planning.layouts.layout_choice import LearnerChoice
from strop.planning.learner_memory import BFLOAT16, FLOAT32, LearnerSetup
from strop.planning.sharding import Sharding

OPTIMIZER_NUMBERS = {"SGD": 0, "Adafactor": 0, "AdamW8bit": 0.5, "Adam8bit": 0.5, "Lion": 1, "Muon": 1}
ADAPTER_SHARE = 0.01  # of the weights, that adapters train


def read_learner(policy: ModelConfig, device: Device, dims: ParallelDims | MegatronDims | None) -> LearnerSetup:
    """Return the learner of a model: of the policy, or of a critic."""
    choice = read_learner_choice(policy)
    return LearnerSetup(
        tokens=choice.tokens,
        longest=policy.max_total_sequence_length,
        on_cpu=device.measured,
        compute_bytes=2 if policy.precision == "bfloat16" else 4,
        weight_bytes=2 if policy.weights_dtype == "bfloat16" or policy.megatron_cfg.enabled else 4,
        gradient_bytes=BFLOAT16 if _keeps_short_gradients(policy) else FLOAT32,
        optimizer_numbers=_count_optimizer_numbers(policy),
        trained_share=1.0 if policy.adapter_rank is None else ADAPTER_SHARE,
        checkpointed_share=choice.checkpointed,
        offloads_activations=choice.offloads_activations,
        offloads_weights=choice.offloads_weights,
        logit_rows=policy.logprob_chunk_size or choice.tokens,
        micro_batches=2,
        sharding=_read_sharding(policy, dims),
    )


def _keeps_short_gradients(policy: ModelConfig) -> bool:
    return policy.megatron_cfg.enabled and not policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32


def _read_sharding(policy: ModelConfig, dims: ParallelDims | MegatronDims | None) -> Sharding:
    if dims is None:
        return Sharding()
    return read_learner_choice(policy).shard(dims.world_size, megatron=policy.megatron_cfg.enabled)


def read_learner_choice(policy: ModelConfig) -> LearnerChoice:
    """Return what a configuration says of a learner that may be on several ranks."""
    budget, longest = policy.batching.train_mb_tokens, policy.max_total_sequence_length
    tokens = policy.train_micro_batch_size * longest if budget == "auto" else budget
    megatron = policy.megatron_cfg.enabled
    found = read_megatron_choice(policy.megatron_cfg, tokens) if megatron else read_torch_choice(policy.dtensor_cfg, tokens)
    return replace(found, offloads_reference=offloads_reference(policy))


def read_megatron_choice(sizes: MegatronConfig, tokens: int) -> LearnerChoice:
    """Return what ``megatron_cfg`` says."""
    return LearnerChoice(
        tensor=sizes.tensor_model_parallel_size,
        context=sizes.context_parallel_size,
        stages=sizes.pipeline_model_parallel_size,
        expert=sizes.expert_model_parallel_size,
        expert_tensor=sizes.expert_tensor_parallel_size,
        sequence=sizes.sequence_parallel and sizes.tensor_model_parallel_size > 1,
        tokens=tokens,
        checkpointed=float(sizes.activation_checkpointing),
    )


def read_torch_choice(own: DtensorConfig, tokens: int) -> LearnerChoice:
    """Return what ``dtensor_cfg`` says."""
    return LearnerChoice(
        tensor=own.tensor_parallel_size,
        context=own.context_parallel_size,
        stages=own.pipeline_parallel_size,
        expert=own.expert_parallel_size,
        replicate=own.dp_replicate_size,
        sequence=own.sequence_parallel and own.tensor_parallel_size > 1,
        tokens=tokens,
        checkpointed=float(own.activation_checkpointing),
        offloads_weights=own.cpu_offload,
        offloads_activations=own.activation_offload,
    )


def _count_optimizer_numbers(policy: ModelConfig) -> float:
    name = policy.optimizer.name.rpartition(".")[2]
    if name == "SGD" and policy.optimizer.kwargs.get("momentum"):
        return 1
    return OPTIMIZER_NUMBERS.get(name, 2)


def offloads_reference(policy: ModelConfig) -> bool:
    """Whether a frozen copy is kept in CPU memory between uses."""
    reference = getattr(policy, "reference", None)
    return reference is not None and bool(reference.offload)
