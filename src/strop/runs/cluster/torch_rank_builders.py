"""Functions that build a rank's PyTorch models. The driver binds their configuration with ``functools.partial`` and sends them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from strop.algorithms.base import Algorithm
from strop.config import TrainingRunConfig
from strop.config.schema.policy_config import PolicyConfig
from strop.config.schema.run_config import PpoRunConfig
from strop.device_copies import is_gpu
from strop.distributed.workers.learner_worker import RankModels
from strop.learner.model_config import ModelConfig, ScoringModelConfig
from strop.learner.parallel.export.sharded_export import ShardedWeights
from strop.learner.parallel.parallel_dims import DeviceMeshes, ParallelDims
from strop.learner.parallel.pipeline.pipelined import parallelize_stages
from strop.learner.parallel.rank_zero_loading import RankZeroLoader
from strop.learner.parallel.sharded import Sharded, parallelize_head, parallelize_network
from strop.learner.parallel.tensor_plan import load_tensor_plan
from strop.learner.torch.scorer import NetworkScorer, copy_frozen, without_adapters
from strop.models.adapters import lora_layers
from strop.models.network import Network
from strop.models.value_network import ValueHead
from strop.runs.backend import keeps_reference
from strop.runs.lifecycle import seed_everything
from strop.runs.models import (
    LoadedPolicy,
    load_training_policy,
    make_learners,
    make_offload,
    make_trained_networks,
)
from strop.runs.rollout_run import find_source
from strop.sampling import Sampling


def load_rank_policy(config: TrainingRunConfig) -> LoadedPolicy:
    """Load the policy, on rank 0. Raises ModelNotFound, ValueError."""
    seed_everything(config.training.seed)
    return load_training_policy(config, RankZeroLoader())


def build_rank_models(
    config: TrainingRunConfig,
    algorithm: Algorithm,
    sampling: Sampling,
    total_steps: int | None,
    policy: LoadedPolicy,
    device: str,
    world: int,
) -> RankModels:
    """Load the other models of a run and shard all of them over ``world`` ranks. Raises ValueError for incompatible settings."""
    network = policy.network
    networks = make_trained_networks(config, policy, RankZeroLoader())
    reference = copy_frozen(network) if keeps_reference(config, algorithm) and not lora_layers(network.model) else None
    trunk = parallelize(network, config.policy, device, world)
    parallelism = {"policy": trunk}
    if isinstance(critic := networks.get("value"), ValueHead):
        parallelism["value"] = parallelize_head(critic, trunk)
    elif isinstance(config, PpoRunConfig):
        assert isinstance(critic, Network)
        parallelism["value"] = parallelize(critic, config.value, device, world)
    learners = make_learners(config, networks, algorithm, sampling, total_steps, parallelism)
    scorers = _make_rank_scorers(config.policy, network, reference, sampling, trunk, device, world)
    columns = find_source(config).make_rank_columns(config, policy, algorithm, sampling, device, world)
    scoring = [*scorers.values(), *(scorer for _, scorer in columns.values())]
    offload = make_offload(
        learners,
        [scorer.network for scorer in scoring],
        {id(scorer.network): scorer.parallelism for scorer in scoring if scorer.parallelism is not None},
    )
    return RankModels(
        weights=ShardedWeights(trunk),
        learners=learners,
        scorers=scorers,
        columns={name: source for name, (source, _) in columns.items()},
        offload=offload,
    )


def parallelize(
    network: Network, model: ModelConfig | ScoringModelConfig, device: str, world: int, *, cpu_offload: bool = False
) -> Sharded:
    """Shard a network over all ranks according to its section, on separate meshes."""
    config = model.dtensor_cfg
    meshes = DeviceMeshes(ParallelDims.from_config(config, world), device)
    plan: Mapping[str, str] | None = None
    if (name := config.custom_parallel_plan) is not None and meshes.dims.tensor > 1:
        plan = load_tensor_plan(name)
    shard = parallelize_stages if meshes.dims.pipeline > 1 else parallelize_network
    return shard(
        network,
        meshes,
        weights_dtype=torch.bfloat16 if model.weights_dtype == "bfloat16" else None,
        gather_dtype=choose_gather_dtype(model.precision, meshes.dense.device_type),
        cpu_offload=cpu_offload or config.cpu_offload,
        tensor_plan=plan,
        reshard_after_forward=config.reshard_after_forward,
    )


def choose_gather_dtype(precision: str, device: str) -> torch.dtype | None:
    """Return the dtype in which ranks gather weights, if it is not that of the shards: on GPUs, that of the computation.

    Gathered in float32 they would be twice the bytes, and autocast would round each of them in every micro-batch. CPUs compute in
    bfloat16 at no higher speed than they convert it.
    """
    return torch.bfloat16 if precision == "bfloat16" and is_gpu(torch.device(device)) else None


def _make_rank_scorers(
    config: PolicyConfig,
    network: Network,
    reference: Network | None,
    sampling: Sampling,
    parallelism: Sharded,
    device: str,
    world: int,
) -> dict[str, NetworkScorer]:
    tokens = config.score_tokens
    scorers: dict[str, NetworkScorer] = {"untrained": NetworkScorer(network, sampling, tokens, parallelism)}
    if lora_layers(network.model):
        scorers["reference"] = NetworkScorer(network, sampling, tokens, parallelism, context=without_adapters(network))
    elif reference is not None:
        reference_parallelism = parallelize(reference, config, device, world, cpu_offload=config.reference.offload)
        scorers["reference"] = NetworkScorer(reference, sampling, tokens, reference_parallelism)
    return scorers
