"""Read a learner from a model's section: the inputs of its memory estimate, and its division over ranks."""

from __future__ import annotations

from strop.extensions.megatron.megatron_config import MegatronConfig
from strop.extensions.megatron.megatron_dims import MegatronDims
from strop.extensions.planning.learner_memory import BFLOAT16, FLOAT32, LearnerSetup
from strop.extensions.planning.plan_inputs import PlannedDevice
from strop.extensions.planning.sharding import ParallelSizes, Sharding
from strop.learner.model_config import ModelConfig
from strop.learner.parallel.dtensor_config import DtensorConfig
from strop.learner.parallel.parallel_dims import ParallelDims

OPTIMIZER_NUMBERS = {"SGD": 0, "Adafactor": 0, "AdamW8bit": 0.5, "Adam8bit": 0.5, "Lion": 1, "Muon": 1}
ADAPTER_SHARE = 0.01  # share of the weights trained by adapters


def read_learner(policy: ModelConfig, device: PlannedDevice, dims: ParallelDims | MegatronDims | None) -> LearnerSetup:
    """Return the learner of a model, the policy or a critic."""
    own = policy.dtensor_cfg
    moves, tokens = not policy.megatron_cfg.enabled, _read_tokens(policy)
    checkpointed = own.activation_checkpointing if moves else policy.megatron_cfg.activation_checkpointing
    return LearnerSetup(
        tokens=tokens,
        longest=policy.max_total_sequence_length,
        on_cpu=device.on_cpu,
        compute_bytes=2 if policy.precision == "bfloat16" else 4,
        weight_bytes=2 if policy.weights_dtype == "bfloat16" or policy.megatron_cfg.enabled else 4,
        gradient_bytes=BFLOAT16 if _keeps_short_gradients(policy) else FLOAT32,
        optimizer_numbers=_count_optimizer_numbers(policy),
        trained_share=1.0 if policy.adapter_rank is None else ADAPTER_SHARE,
        checkpointed_share=float(checkpointed),
        offloads_activations=moves and own.activation_offload,
        offloads_weights=moves and own.cpu_offload,
        logit_rows=policy.logprob_chunk_size or tokens,
        micro_batches=2,
        sharding=_read_sharding(policy, dims),
    )


def _keeps_short_gradients(policy: ModelConfig) -> bool:
    return policy.megatron_cfg.enabled and not policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32


def _read_sharding(policy: ModelConfig, dims: ParallelDims | MegatronDims | None) -> Sharding:
    if dims is None:
        return Sharding()
    megatron = policy.megatron_cfg.enabled
    sizes = read_megatron_sizes(policy.megatron_cfg) if megatron else read_torch_sizes(policy.dtensor_cfg)
    return sizes.shard(dims.world_size, megatron=megatron)


def _read_tokens(policy: ModelConfig) -> int:
    """Return the tokens of a micro-batch."""
    budget = policy.batching.train_mb_tokens
    return policy.train_micro_batch_size * policy.max_total_sequence_length if budget == "auto" else budget


def read_megatron_sizes(sizes: MegatronConfig) -> ParallelSizes:
    """Return the sizes in ``megatron_cfg``."""
    return ParallelSizes(
        tensor=sizes.tensor_model_parallel_size,
        context=sizes.context_parallel_size,
        stages=sizes.pipeline_model_parallel_size,
        expert=sizes.expert_model_parallel_size,
        expert_tensor=sizes.expert_tensor_parallel_size,
        sequence=sizes.sequence_parallel and sizes.tensor_model_parallel_size > 1,
    )


def read_torch_sizes(own: DtensorConfig) -> ParallelSizes:
    """Return the sizes in ``dtensor_cfg``."""
    return ParallelSizes(
        tensor=own.tensor_parallel_size,
        context=own.context_parallel_size,
        stages=own.pipeline_parallel_size,
        expert=own.expert_parallel_size,
        replicate=own.dp_replicate_size,
        sequence=own.sequence_parallel and own.tensor_parallel_size > 1,
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
