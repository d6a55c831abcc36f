"""Stages of Megatron Core's models on the ranks of a test, beside the Hugging Face models they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from strop.extensions.megatron.megatron_config import MegatronConfig
from strop.extensions.megatron.megatron_dims import MegatronDims
from strop.models.attention.tree_plan import TreePlan
from strop.models.mixers.mixer_interface import install_mixers

SEGMENTS = ((6, -1), (5, 0), (7, 0), (4, 0), (9, -1), (3, 4), (10, 4))  # length and parent: two prompts and their completions


_entered: list[Any] = []  # a context that nothing holds is left


def start_layout(config: MegatronConfig) -> Any:
    """Return a layout of all ranks of the test, active until another is."""
    from strop.extensions.megatron.layout import MegatronLayout

    layout = MegatronLayout(MegatronDims.from_config(config, torch.distributed.get_world_size()), "cpu", gloo_groups=True)
    _entered.append(layout.activate())
    _entered[-1].__enter__()
    return layout


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


def tree_row(vocab: int, seed: int = 0) -> tuple[Tensor, Tensor, TreePlan]:
    """Return tokens, positions and plan of a row with shared prompts."""
    lengths, parents = ([segment[index] for segment in SEGMENTS] for index in (0, 1))
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    first = [0 if parent < 0 else lengths[parent] for parent in parents]
    positions = torch.cat([torch.arange(begin, begin + length) for begin, length in zip(first, lengths, strict=True)])
    tokens = torch.randint(0, vocab, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    plan = TreePlan(torch.tensor(starts), torch.tensor(lengths), torch.tensor(parents), torch.device("cpu"))
    return tokens, positions, plan


def read_paths(model: Any, tokens: Tensor) -> Tensor:
    """Return the last hidden states [T, H] of the same row, by one pass of Transformers' own attention for each path."""
    starts = [sum(length for length, _ in SEGMENTS[:index]) for index in range(len(SEGMENTS))]
    parts = []
    for start, (length, parent) in zip(starts, SEGMENTS, strict=True):
        prompt = tokens[:0] if parent < 0 else tokens[starts[parent] : starts[parent] + SEGMENTS[parent][0]]
        path = torch.cat((prompt, tokens[start : start + length]))
        parts.append(model.base_model(path[None], use_cache=False).last_hidden_state[0, len(prompt) :])
    return torch.cat(parts)


def read_tree(model: Any, tokens: Tensor, positions: Tensor, plan: TreePlan) -> Tensor:
    """Return the last hidden states [T, H] of a row by Transformers' model."""
    if model.config.model_type == "nemotron":  # its layers do not hand the plan on
        return read_paths(model, tokens)
    install_mixers(model)
    model.set_attn_implementation("strop")
    output = model.base_model(tokens[None], position_ids=positions[None], plan=plan, use_cache=False)
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def run_stages(stages: Any, row: Any) -> Tensor:
    """Run the stages of all pipeline ranks one after the other, without a schedule. Return what the last one does, on its rank."""
    group = stages[0].pg_collection.pp
    hidden: Any = None
    for stage in stages:
        for rank in range(group.size()):
            if hidden is not None and group.size() > 1:
                stage.set_input_tensor(hidden)
            if rank == group.rank() or group.size() == 1:
                output = stage(row)
            else:
                share = stage.config.tensor_model_parallel_size if stage.config.sequence_parallel else 1
                output = torch.empty(len(row.tokens) // share, 1, stage.config.hidden_size, dtype=stage.config.params_dtype)
            if group.size() > 1:
                output = output.detach().clone()
                torch.distributed.broadcast(output, torch.distributed.get_global_rank(group, rank), group=group)
            hidden = output
    return hidden
