"""Functions that build engines, and the exporter of a rank, in worker processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from strop.config.schema.policy_config import PolicyConfig
from strop.distributed.workers.learner_worker import RankWeights
from strop.generation.quantized_rollouts import make_emulation, make_weight_rounding
from strop.generation.torch.standalone import StandaloneTorchEngine
from strop.generation.torch.torch_config import TorchGenerationConfig
from strop.generation.torch.torch_engine import TorchEngine, make_torch_engine
from strop.learner.learner_config import policy_extensions
from strop.learner.model_config import ModelConfig
from strop.models.loading import cast_weights, model_from_config
from strop.models.network import Network, disable_dropout
from strop.models.quantization.float8_training import convert_to_float8
from strop.models.vision.vision_processor import VisionProcessor
from strop.runs.models import PRECISIONS, load_policy, prepare_device
from strop.weight_sync.exporter import BlockingExporter, SenderRole
from strop.weight_sync.transports.choose import EngineLocations, make_sender_factory


def build_torch_engine(
    name: str,
    config: PolicyConfig,
    folder: Path,
    tokenizer: Any,
    stop_ids: tuple[int, ...],
    packed: bool,
    vision: VisionProcessor | None = None,
) -> StandaloneTorchEngine:
    """Build a torch engine on an empty model, whose weights the learner will send. ``vision``: the image processor of a model
    that reads images.
    """

    def make() -> TorchEngine:
        device = prepare_device(config.device, None)
        model = model_from_config(folder).to(device)
        disable_dropout(model)
        network = Network(model, precision=PRECISIONS[config.precision], packed=packed)
        cast_weights(model, PRECISIONS[config.weights_dtype])
        for extension in policy_extensions(config):
            extension.change_engine_model(model, folder)
        convert_to_float8(model, config.fp8, device, "policy.fp8")
        if config.router_replay.enabled:
            network.enable_router_replay()
        if config.router_replay.indexers:
            network.enable_indexer_replay(config.max_total_sequence_length)
        if vision is not None:
            network.enable_vision(vision)
        length = config.max_total_sequence_length
        return make_torch_engine(
            network,
            tokenizer,
            config.generation.torch_cfg,
            length=length,
            stop_ids=stop_ids,
            quantization=make_emulation(config.generation, rounds_weights=False),
        )

    return StandaloneTorchEngine(name, make, PRECISIONS[config.weights_dtype])


def build_serving_torch_engine(
    name: str, config: ModelConfig, options: TorchGenerationConfig, length: int, stop_ids: tuple[int, ...]
) -> StandaloneTorchEngine:
    """Build a torch engine that loads the model and its weights itself."""

    def make() -> TorchEngine:
        policy = load_policy(config)
        return make_torch_engine(policy.network, policy.tokenizer, options, length=length, stop_ids=stop_ids)

    return StandaloneTorchEngine(name, make, PRECISIONS[config.weights_dtype])


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
