"""Read the weights of this rank's stages: each rank reads its own rows and columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strop.extensions.megatron.models.gpt_stage import GptStage
from strop.extensions.megatron.weights.weight_map import HfWeight, PlacedWeight, WeightMap
from strop.extensions.megatron.weights.weight_reader import WeightReader
from strop.models.classifiers import draw_score_weight


@dataclass(frozen=True)
class ScoreInit:
    """The initial score layer of a model with values, where its files have none: a normal distribution with mean 0."""

    seed: int
    deviation: float | None = None  # None: the model's initializer_range


@torch.no_grad()
def load_weights(
    stages: Sequence[GptStage], hf_config: Any, reader: WeightReader, *, score_init: ScoreInit = ScoreInit(seed=0)
) -> None:
    """Copy the weights of a Hugging Face model into this rank's stages. Raises KeyError for one that the files lack.

    A score layer that a language model's files lack is drawn as for the torch learner.
    """
    weights = WeightMap(stages, hf_config)
    for placed in filter(weights.is_local, weights.weights):
        source = _find_source(placed, weights, reader)
        if source is not None:
            load_weight(placed, source, weights, reader)
        else:
            score = weights.parameter(placed)
            score.copy_(draw_score_weight(hf_config, score.shape, score_init.seed, score_init.deviation))


def _find_source(placed: PlacedWeight, weights: WeightMap, reader: WeightReader) -> str | None:
    """Return the name that the files have for a weight: of tied ones they may have another's. None: they lack the score layer."""
    if placed.rule.expert_files and placed.weight.name not in reader:
        return placed.weight.name
    same: list[HfWeight] = [other.weight for other in weights.weights if other.weight.storage == placed.weight.storage]
    aliases = [placed.file_name(name) for name in placed.rule.aliases]
    for name in (placed.weight.name, *aliases, *(weight.name for weight in same)):
        if name in reader:
            return name
    if placed.rule.parameter == "score.weight":
        return None
    raise KeyError(f"{placed.weight.name} is not in the model's files")


def load_weight(placed: PlacedWeight, source: str, weights: WeightMap, reader: WeightReader) -> None:
    """Copy this rank's part of a weight from the files' ``source`` into its parameter. Call it without gradients."""
    rank, ranks = weights.ranks_of(placed)
    experts = enumerate(weights.local_experts(placed)) if placed.rule.of_experts else [(None, None)]
    for local, expert in experts:
        parameter = weights.parameter(placed, local)
        if placed.rule.dim is None:
            parameter.copy_(_read(placed, source, expert, 0, slice(None), reader))
        for whole, start, length in placed.pieces_of_rank(rank, ranks):
            assert placed.rule.dim is not None
            part = _read(placed, source, expert, placed.rule.dim, slice(start, start + length), reader)
            parameter.narrow(placed.rule.dim, whole, length).copy_(part)


def _read(placed: PlacedWeight, source: str, expert: int | None, dim: int | None, rows: slice, reader: WeightReader) -> Tensor:
    """Read ``rows`` of a weight, or columns if ``dim`` is 1, of one expert."""
    index = tuple(rows if axis == dim else slice(None) for axis in range(len(placed.matrix_shape)))
    if expert is None:
        return reader.read(source, index)
    if source in reader:
        return reader.read(source, (slice(expert, expert + 1), *index)).squeeze(0)
    names = [placed.file_name(name, expert) for name in placed.rule.expert_files]
    if len(names) == 1:
        return reader.read(names[0], index)
    size = placed.matrix_shape[0] // len(names)  # rows of gate and up: a piece is in one of them
    part = rows.start // size
    return reader.read(names[part], (slice(rows.start - part * size, rows.stop - part * size), *index[1:]))
