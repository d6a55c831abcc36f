"""Functions that the driver sends to a learner's ranks: they load the policy, build the models and open the exporter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from strop.algorithms.base import Algorithm
from strop.config import TrainingRunConfig
from strop.config.schema.policy_config import PolicyConfig
from strop.distributed.workers.learner_worker import RankModels, RankPolicy, RankWeights
from strop.extensions.megatron.megatron_policy import load_megatron_policy, write_megatron_model_folder
from strop.generation.quantized_rollouts import make_weight_rounding
from strop.runs.cluster.torch_rank_builders import build_rank_models, load_rank_policy
from strop.runs.models import PRECISIONS, write_model_folder
from strop.sampling import Sampling
from strop.weight_sync.exporter import BlockingExporter, SenderRole
from strop.weight_sync.transports.choose import EngineLocations, make_sender_factory


@dataclass(frozen=True)
class RankBuilders:
    """The functions that build a learner backend's models on a rank. They are picklable, and take the run's configuration."""

    load_policy: Callable[[TrainingRunConfig], RankPolicy]
    build_models: Callable[
        [TrainingRunConfig, Algorithm, Sampling, int | None, Any, str, int], RankModels
    ]  # policy, device, world
    write_model_folder: Callable[..., Path]  # (policy, folder): writes the folder from which engines build the model


def choose_rank_builders(config: TrainingRunConfig) -> RankBuilders:
    """Return the functions of the configured learner backend."""
    if config.policy.uses_megatron:
        return RankBuilders(load_megatron_policy, _build_megatron_models, write_megatron_model_folder)
    write = partial(write_model_folder, config=config.policy)
    return RankBuilders(load_rank_policy, build_rank_models, write)


def _build_megatron_models(config: TrainingRunConfig, *arguments: Any) -> RankModels:
    from strop.extensions.megatron.megatron_rank_builders import (
        build_megatron_rank_models,  # imports Megatron Core, only on ranks
    )

    return build_megatron_rank_models(config, *arguments)


def make_rank_exporter(
    config: PolicyConfig,
    weights: RankWeights,
    rank: int,
    *,
    keep_snapshot: bool,
    adapters: bool,
    engines: EngineLocations,
    folder: Path,
    senders: Mapping[int, str],
) -> BlockingExporter:
    """Create this rank's part of the exporter. Raises ValueError for a transport that cannot work.

    ``engines``: as seen from rank 0. ``folder``: for transports that use files. ``senders``: the ranks that send weights, and the
    addresses of their machines.
    """
    engines = replace(engines, host=senders.get(rank, engines.host))
    generation = config.generation
    precision = generation.engine_options.dtype if generation.uses_engines else config.weights_dtype
    return BlockingExporter(
        weights.iter_weights,
        make_sender_factory(generation.weight_sync, weights.device, engines, folder),
        dtype=PRECISIONS[precision],
        quantization=make_weight_rounding(generation, config.precision),
        keep_snapshot=keep_snapshot,
        adapters=weights.adapter_source() if adapters else None,
        role=SenderRole(rank, tuple(senders)),
    )
