"""Compare training with Megatron Core on ranks with the torch learner in one process."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from torch import Tensor

from strop import metrics
from strop.extensions.megatron.layout import MegatronLayout
from strop.extensions.megatron.megatron_config import (
    MegatronConfig,
    MegatronDdpConfig,
    MegatronOptimizerConfig,
    MegatronSchedulerConfig,
)
from strop.extensions.megatron.megatron_dims import MegatronDims
from strop.learner.parallel.parallel_dims import ParallelDims
from strop.models.adapters import adapter_weights, base_weights
from strop.types import Batch
from support.learners import make_model_config
from support.models import CONFIGS
from support.parity import ALGORITHMS, Case, TrainingResult, build_network, get_loss

SHORT = {
    "tp": "tensor_model_parallel_size",
    "sp": "sequence_parallel",
    "pp": "pipeline_model_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}


def _deepen(family: str) -> None:
    """Give a family a variant of four layers, for interleaved stages."""

    def make() -> Any:
        config = CONFIGS[family]()
        config.num_hidden_layers = 4
        if getattr(config, "layer_types", None):
            config.layer_types = [config.layer_types[index % 2] for index in range(4)]
        return config

    CONFIGS.setdefault(f"{family}_deep", make)


def _read_padding() -> Any:
    """Tied embeddings, and a padding token that occurs in rows: Transformers does not train its embedding where it is read."""
    config = CONFIGS["qwen2"]()
    config.pad_token_id = 146
    return config


CONFIGS.setdefault("qwen2_padding", _read_padding)

for _family in ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"):
    _deepen(_family)


def _widen(family: str) -> None:
    """Give a family a variant whose sizes FP8 kernels take: multiples of 128."""

    def make() -> Any:
        config = CONFIGS[family]()
        config.hidden_size, config.intermediate_size, config.head_dim = 128, 256, 32
        if hasattr(config, "moe_intermediate_size"):
            config.moe_intermediate_size = 128
        return config

    CONFIGS.setdefault(f"{family}_wide", make)


for _family in ("llama", "qwen3_moe"):
    _widen(_family)


CONSTANT_RATE = MegatronSchedulerConfig(lr_warmup_iters=0, start_weight_decay=0.1, end_weight_decay=0.1)


@dataclass(frozen=True, kw_only=True)
class MegatronCase:
    """A short training run with Megatron Core. ``case`` says what is trained, ``sizes`` how it is laid out (names of SHORT)."""

    case: Case
    world: int
    sizes: Mapping[str, Any] = field(default_factory=dict)
    distributed: bool = False  # the distributed optimizer
    overlap: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)  # of the section megatron_cfg
    schedule: MegatronSchedulerConfig = CONSTANT_RATE
    device: str = "cpu"

    def config(self) -> MegatronConfig:
        return MegatronConfig(
            enabled=True,
            freeze_moe_router=self.case.frozen_routers,
            optimizer=MegatronOptimizerConfig(
                lr=self.case.rate,
                min_lr=0.0,
                weight_decay=0.1,
                adam_eps=1e-3,
                clip_grad=0.3,
                use_distributed_optimizer=self.distributed,
            ),
            scheduler=self.schedule,
            distributed_data_parallel_config=MegatronDdpConfig(
                overlap_grad_reduce=self.overlap, overlap_param_gather=self.overlap
            ),
            **{SHORT[name]: size for name, size in self.sizes.items()},
            **self.options,
        )


def case(**options: Any) -> Case:
    return Case(sizes=ParallelDims(), **options)


def make_megatron_learner(made: MegatronCase, *, draft: Any = None, **options: Any) -> Any:
    """Return a learner on this rank with the weights of the case's network. ``options`` are the learner's; ``draft``: a head."""
    layout = MegatronLayout(MegatronDims.from_config(made.config(), made.world), made.device)
    from strop.extensions.megatron.megatron_learner import MegatronLearner

    config = replace(
        make_model_config(train_tokens=made.case.train_tokens, score_tokens=50, max_grad_norm=0.3), megatron_cfg=made.config()
    )
    network = make_network(made, layout)
    network.draft = draft
    whole_groups = ALGORITHMS[made.case.algorithm].whole_groups
    return MegatronLearner(network, config, made.case.sampling, whole_groups=whole_groups, **options)


@dataclass(frozen=True)
class PlainWeights:
    """Those of the network that one process would train, read only."""

    config: Any
    base: dict[str, Tensor]
    adapters: dict[str, Tensor]


@cache
def make_weights(case: Case) -> PlainWeights:
    """Build the network of a case, whose batches and steps do not matter, once in this process."""
    plain = build_network(case).model
    return PlainWeights(plain.config, dict(base_weights(plain)), dict(adapter_weights(plain)) if case.lora else {})


def weights_of(made: Case) -> PlainWeights:
    kept = ("family", "layers", "dtype", "weights_dtype", "precision", "lora", "fused", "frozen_routers", "replayed", "value")
    found = make_weights(case(**{name: getattr(made, name) for name in kept}))
    return replace(found, config=deepcopy(found.config))


def make_network(made: MegatronCase, layout: MegatronLayout) -> Any:
    """Return the case's network in a layout."""
    from strop.extensions.megatron.megatron_network import MegatronNetwork
    from strop.extensions.megatron.models.build_stages import build_stages
    from strop.extensions.megatron.weight_map import MemoryWeights, load_weights

    plain = weights_of(made.case)
    head: Any = "scalar" if made.case.value else "lm"
    stages = build_stages(plain.config, made.config(), layout, dtype=made.case.dtype, head=head)
    load_weights(stages, plain.config, MemoryWeights(plain.base))
    adapters = None
    if made.case.lora:
        from strop.extensions.megatron.stage_adapters import StageAdapters

        with layout.activate():
            adapters = StageAdapters(stages, plain.config, made.config().peft, base="base")
            adapters.load(MemoryWeights(plain.adapters))
    network = MegatronNetwork(stages, plain.config, layout, chunk=5, adapters=adapters)
    if made.case.replayed:
        network.enable_router_replay()
    return network


def train_with_megatron(made: MegatronCase, batch: Batch) -> TrainingResult:
    """Train on this rank as ``support.parity.train`` does."""
    learner = make_megatron_learner(made)
    from strop.extensions.megatron.weight_map import iter_weights

    steps, stepped = [], []
    for _ in range(made.case.steps):
        steps.append(learner.forward_backward_local(batch, get_loss(made.case)))
        stepped.append(metrics.to_floats(learner.step()))
    measured, scored = learner.evaluate_loss_local(batch, get_loss(made.case)), learner.score_local(batch)
    learner.network.gather_weights()
    network, trained = learner.network, {}
    source = iter_weights(network.stages, network.hf_config)
    if network.adapters is not None:
        source, trained = network.adapters.iter_merged(), network.adapters.gather()
    weights = {weight.name: weight.gather() for weight in source}
    return TrainingResult(steps, stepped, measured, scored, weights, [], trained)


def compared_alone(single: TrainingResult) -> TrainingResult:
    """What one process trained, as Megatron Core has it: no tied weights, and biases of experts in float32."""
    weights = {
        name: weight.float() if name.endswith("e_score_correction_bias") else weight for name, weight in single.weights.items()
    }
    return replace(single, weights=weights, tied=[])


def train_cases_on_rank(rank: int, cases: dict[str, tuple[MegatronCase, Batch]]) -> dict[str, TrainingResult]:
    """Train every case on this rank. Only rank 0 returns weights."""
    found = {}
    for name, (made, batch) in cases.items():
        try:
            trained = train_with_megatron(made, batch)
        except Exception as error:
            raise RuntimeError(f"case {name!r} failed") from error
        found[name] = trained if rank == 0 else replace(trained, weights={}, adapters={})
    return found
