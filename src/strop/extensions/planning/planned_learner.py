"""Read a learner from a model's section: the inputs of its memory estimate, and its division over ranks."""

from __future__ import annotations

from strop.extensions.megatron.megatron_config import MegatronConfig
from strop.extensions.planning.learner_memory import BFLOAT16, FLOAT32, GPU_LOGIT_ROWS, LOGIT_ROWS, LearnerSetup
from strop.extensions.planning.plan_inputs import PlannedDevice
from strop.extensions.planning.sharding import ParallelSizes, Sharding
from strop.learner.learner_config import LearnerSection
from strop.learner.model_config import ModelConfig
from strop.learner.parallel.dtensor_config import DtensorConfig
from strop.runs.learner_backend import LearnerDims

OPTIMIZER_NUMBERS = {"SGD": 0, "Adafactor": 0, "AdamW8bit": 0.5, "Adam8bit": 0.5, "Lion": 1, "Muon": 1}
ADAPTER_SHARE = 0.01  # share of the weights trained by adapters


def read_learner(policy: ModelConfig, device: PlannedDevice, dims: LearnerDims | None) -> LearnerSetup:
    """Return the learner of a model, the policy or a critic."""
    own, moves, tokens = policy.dtensor_cfg, policy.uses_torch, _read_tokens(policy, device)
    learner = policy.learner
    checkpointed = (learner if isinstance(learner, MegatronConfig) else own).activation_checkpointing
    return LearnerSetup(
        tokens=tokens,
        longest=policy.max_total_sequence_length,
        on_cpu=device.on_cpu,
        compute_bytes=2 if policy.precision == "bfloat16" else 4,
        weight_bytes=2 if policy.weights_dtype == "bfloat16" or learner.weights_follow_precision else 4,
        gradient_bytes=BFLOAT16 if _keeps_short_gradients(learner) else FLOAT32,
        optimizer_numbers=_count_optimizer_numbers(policy),
        trained_share=1.0 if policy.adapter_rank is None else ADAPTER_SHARE,
        checkpointed_share=float(checkpointed),
        offloads_activations=moves and own.activation_offload,
        offloads_weights=moves and own.cpu_offload,
        logit_rows=policy.logprob_chunk_size or (LOGIT_ROWS if device.on_cpu else GPU_LOGIT_ROWS),
        micro_batches=2,
        sharding=Sharding() if dims is None else read_sharding(learner, dims.world_size),
    )


def _keeps_short_gradients(learner: LearnerSection) -> bool:
    return isinstance(learner, MegatronConfig) and not learner.distributed_data_parallel_config.grad_reduce_in_fp32


def read_sharding(learner: LearnerSection, world: int) -> Sharding:
    """Return how a learner divides a model over ``world`` ranks. Raises ValueError for one that plans know nothing of."""
    if isinstance(learner, MegatronConfig):
        return _read_megatron_sizes(learner).shard(world, megatron=True)
    if isinstance(learner, DtensorConfig):
        return _read_torch_sizes(learner).shard(world, megatron=False)
    raise ValueError(f"the memory of {learner.title} is not known: nothing is planned for this learner")


def _read_tokens(policy: ModelConfig, device: PlannedDevice) -> int:
    """Return the tokens of a micro-batch; of a measured one, the least that it may have."""
    budget = policy.train_tokens
    measured = policy.batching.train_mb_tokens is None and policy.train_micro_batch_size is None and not device.on_cpu
    if budget == "auto" or measured:
        return (policy.train_micro_batch_size or 1) * policy.max_total_sequence_length
    return budget


def _read_megatron_sizes(sizes: MegatronConfig) -> ParallelSizes:
    return ParallelSizes(
        tensor=sizes.tensor_model_parallel_size,
        context=sizes.context_parallel_size,
        stages=sizes.pipeline_model_parallel_size,
        expert=sizes.expert_model_parallel_size,
        expert_tensor=sizes.expert_tensor_parallel_size,
        sequence=sizes.sequence_parallel and sizes.tensor_model_parallel_size > 1,
    )


def _read_torch_sizes(own: DtensorConfig) -> ParallelSizes:
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
