"""What the driver sends to the ranks of a learner to open the exporter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from strop.config.schema.policy_config import PolicyConfig
from strop.distributed.workers.learner_worker import RankWeights
from strop.generation.quantized_rollouts import make_weight_rounding
from strop.runs.models import PRECISIONS
from strop.weight_sync.exporter import BlockingExporter, SenderRole
from strop.weight_sync.transports.choose import EngineLocations, make_sender_factory


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
