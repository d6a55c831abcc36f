"""Megatron Core stages that take steps with given gradients, the same in every layout, for tests of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from strop.extensions.export.model_folder import save_model_config
from strop.extensions.megatron.checkpoint.megatron_snapshot import MegatronSnapshot, take_megatron_snapshot
from support.megatron_families import make_config
from support.megatron_stages import make_layout, start_layout

COUNTERS = {"schedule": 3}
active = ExitStack()  # the layout of the stages that were built last


@dataclass
class TrainedStages:
    """Stages of a model and their optimizer."""

    hf_config: Any
    stages: list[Any]
    chunks: list[Any]
    optimizer: Any

    def step(self, seed: int) -> None:
        """Take a step with random gradients, those of whole weights."""
        from megatron.core import parallel_state

        from strop.extensions.megatron.weight_map import MemoryWeights, load_weights

        parameters = [parameter for stage in self.stages for parameter in stage.parameters()]
        weights = [parameter.detach().clone() for parameter in parameters]
        load_weights(self.stages, self.hf_config, MemoryWeights(dict(random_weights(self.hf_config, seed, self.stages[0].head))))
        for parameter, weight in zip(parameters, weights, strict=True):
            dense = getattr(parameter, "allreduce", True)
            copies = (
                parallel_state.get_data_parallel_world_size(with_context_parallel=True)
                if dense
                else parallel_state.get_expert_data_parallel_world_size()
            )
            parameter.main_grad.copy_(parameter.detach() / copies)  # ranks add gradients
            parameter.data.copy_(weight)
        for chunk in self.chunks:
            chunk.finish_grad_sync()
        self.optimizer.step()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        from strop.extensions.megatron.weight_map import iter_weights

        return {weight.name: weight.gather().clone() for weight in iter_weights(self.stages, self.hf_config)}

    def snapshot(self) -> MegatronSnapshot:
        dtype, scores = next(self.stages[0].parameters()).dtype, self.stages[0].head == "scalar"
        save_config = partial(save_model_config, self.hf_config, dtype, scores=scores)
        return take_megatron_snapshot(self.stages, self.optimizer, COUNTERS, save_config)


def train_stages(
    case: str, *, steps: int = 0, distributed: bool = False, dtype: torch.dtype = torch.float32, head: Any = "lm", **sizes: Any
) -> TrainedStages:
    """Build a model with random weights in a layout, and take steps."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from strop.extensions.megatron.megatron_config import MegatronDdpConfig
    from strop.extensions.megatron.megatron_optimizer import wrap_stages
    from strop.extensions.megatron.models.build_stages import build_stages
    from strop.extensions.megatron.weight_map import MemoryWeights, load_weights

    config = make_layout(**sizes)
    layout = start_layout(config)
    active.close()
    active.enter_context(layout.activate())
    hf_config = make_config(case)
    stages = build_stages(hf_config, config, layout, dtype=dtype, head=head)
    load_weights(stages, hf_config, MemoryWeights(dict(random_weights(hf_config, 0, head))))
    plain = MegatronDdpConfig(overlap_grad_reduce=False, overlap_param_gather=False)
    chunks = wrap_stages(stages, plain, distributed_optimizer=distributed)
    options = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        weight_decay=0.1,
        clip_grad=0.0,
        use_distributed_optimizer=distributed,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
    )
    trained = TrainedStages(hf_config, stages, chunks, get_megatron_optimizer(options, chunks, use_gloo_process_groups=False))
    for step in range(steps):
        trained.step(step + 1)
    return trained


def random_weights(hf_config: Any, seed: int, head: Any = "lm") -> Iterator[tuple[str, Tensor]]:
    """Yield random weights of the ordinary model, tied ones equal."""
    from strop.extensions.megatron.weight_map import hf_weights

    for weight in hf_weights(hf_config, head):
        generator = torch.Generator().manual_seed(1000 * seed + weight.storage)
        yield weight.name, torch.randn(weight.shape, generator=generator) * 0.1
