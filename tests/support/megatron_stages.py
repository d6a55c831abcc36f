"""Stages of Megatron Core's models on the ranks of a test, beside the Hugging Face models they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from strop.learner.megatron.megatron_config import MegatronConfig
from strop.models.attention import TreePlan

SEGMENTS = ((6, -1), (5, 0), (7, 0), (4, 0), (9, -1), (3, 4), (8, 4))  # length and parent: two prompts and their completions


class WholeWorld:
    """A layout of the groups that Megatron Core has in this process."""

    @contextmanager
    def activate(self) -> Iterator[None]:
        yield


def start_layout(config: MegatronConfig) -> WholeWorld:
    """Make Megatron Core's groups anew."""
    from megatron.core import parallel_state, tensor_parallel

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_parallel_size,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    return WholeWorld()


def make_layout(**sizes: Any) -> MegatronConfig:
    """Return a section of short names: tp, sp, pp, vp, ep, etp."""
    names = {
        "tp": "tensor_model_parallel_size",
        "sp": "sequence_parallel",
        "pp": "pipeline_model_parallel_size",
        "vp": "virtual_pipeline_model_parallel_size",
        "ep": "expert_model_parallel_size",
        "etp": "expert_tensor_parallel_size",
    }
    values = {names.get(name, name): value for name, value in sizes.items()}
    return MegatronConfig(enabled=True, **values)


def randomize(model: Any, seed: int = 0) -> None:
    """Draw all weights, with norms around the identity."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * (0.15 if tensor.dim() > 1 else 0.1)
            tensor.copy_(noise + (1.0 if "norm" in name and tensor.mean() > 0.5 else 0.0))


def tree_row(vocab: int, seed: int = 0) -> tuple[Tensor, Tensor, TreePlan]:
    """Return tokens, positions and plan of a row with shared prompts."""
    lengths, parents = ([segment[index] for segment in SEGMENTS] for index in (0, 1))
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    first = [0 if parent < 0 else lengths[parent] for parent in parents]
    positions = torch.cat([torch.arange(begin, begin + length) for begin, length in zip(first, lengths, strict=True)])
    tokens = torch.randint(0, vocab, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    plan = TreePlan(torch.tensor(starts), torch.tensor(lengths), torch.tensor(parents), torch.device("cpu"))
    return tokens, positions, plan
