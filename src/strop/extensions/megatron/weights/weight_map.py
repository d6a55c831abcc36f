"""The weights of the ordinary Hugging Face model, and where each is: the same list on every rank, without communication."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from strop.extensions.megatron.families.find_family import find_family
from strop.extensions.megatron.families.weight_rules import Piece, WeightRule
from strop.extensions.megatron.models.gpt_stage import GptStage, Head
from strop.models.export import describe_model

LAYER = re.compile(r"^model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class HfWeight:
    """A weight of the Hugging Face model."""

    name: str
    shape: tuple[int, ...]
    storage: int  # equal for tied weights


@dataclass(frozen=True)
class StagePlace:
    """A virtual stage of a pipeline rank, and the layer in it."""

    pipeline_rank: int
    stage: int
    layer: int = 0


@dataclass(frozen=True)
class PlacedWeight:
    """A weight of the Hugging Face model, its rule, and the stage that has it."""

    weight: HfWeight
    rule: WeightRule
    layer: int | None
    place: StagePlace

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """The shape without the dimension of experts."""
        return self.weight.shape[1:] if self.rule.of_experts else self.weight.shape

    def parameter_name(self, expert: int | None = None) -> str:
        name = re.sub(r"^layers\.", f"decoder.layers.{self.place.layer}.", self.rule.parameter)
        return name.format(expert=expert)

    def file_name(self, name: str, expert: int | None = None) -> str:
        """Return a name of the rule as it stands in a file."""
        return re.sub(r"^layers\.", f"model.layers.{self.layer}.", name).format(expert=expert)

    def pieces_of_rank(self, rank: int, ranks: int) -> list[Piece]:
        """Return the rows, or columns, of this weight that a tensor-parallel rank has; ``whole`` counts from the rank's first."""
        if self.rule.dim is None:
            return []
        rows = self.matrix_shape[self.rule.dim]
        share = self.rule.order.size(rows, ranks) // ranks
        low, high = rank * share, (rank + 1) * share
        return [
            Piece(first - low, start + first - whole, last - first)
            for whole, start, length in self.rule.order.pieces(rows, ranks)
            if (first := max(whole, low)) < (last := min(whole + length, high))
        ]


class WeightMap:
    """Every weight of the Hugging Face model, placed in the stages of all pipeline ranks."""

    def __init__(self, stages: Sequence[GptStage], hf_config: Any) -> None:
        self.stages = stages
        self.config = stages[0].config
        self.groups: Any = stages[0].pg_collection
        rules = {rule.name: rule for rule in find_family(hf_config).rules(hf_config)}
        layers = layer_places(self.config)
        self.weights = [place_weight(weight, rules, layers) for weight in hf_weights(hf_config, stages[0].head)]
        self._parameters: list[Mapping[str, Tensor]] = [
            dict(stage.named_parameters()) | dict(stage.named_buffers()) for stage in stages
        ]

    def is_local(self, placed: PlacedWeight) -> bool:
        """Return whether this rank has the stage of a weight."""
        return bool(placed.place.pipeline_rank == self.groups.pp.rank())

    def parameter(self, placed: PlacedWeight, expert: int | None = None) -> Tensor:
        """Return this rank's part of the parameter that has a weight; ``expert`` counts the experts of this rank."""
        name = placed.parameter_name(expert)
        parameters = self._parameters[placed.place.stage]
        if name not in parameters and expert is not None:  # Transformer Engine's grouped experts
            name = re.sub(r"local_experts\.\d+\.(\w+\.weight)", rf"\g<1>{expert}", name)
        if name not in parameters and name == "output_layer.weight":
            return self.stages[placed.place.stage].output_weight
        return parameters[name]

    def ranks_of(self, placed: PlacedWeight) -> tuple[int, int]:
        """Return this rank among those that divide a weight's rows or columns, and their number."""
        group = self.groups.expt_tp if placed.rule.of_experts else self.groups.tp
        return group.rank(), group.size()

    def local_experts(self, placed: PlacedWeight) -> range:
        """Return the experts of this rank."""
        count = placed.weight.shape[0] // self.groups.ep.size()
        return range(self.groups.ep.rank() * count, (self.groups.ep.rank() + 1) * count)

    def dtype(self, placed: PlacedWeight) -> torch.dtype:
        dtype: torch.dtype = placed.rule.dtype or self.config.params_dtype
        return dtype


def place_weight(weight: HfWeight, rules: Mapping[str, WeightRule], layers: Sequence[StagePlace]) -> PlacedWeight:
    match = LAYER.match(weight.name)
    short = LAYER.sub("layers.", weight.name)
    if short not in rules:
        raise ValueError(f"{weight.name} has no place in Megatron Core's model: set policy.backend=torch")
    first, last = StagePlace(0, 0), StagePlace(layers[-1].pipeline_rank, layers[-1].stage)
    layer = None if match is None else int(match[1])
    outer = first if rules[short].parameter.startswith("embedding.") else last
    return PlacedWeight(weight, rules[short], layer, outer if layer is None else layers[layer])


def layer_places(config: Any) -> list[StagePlace]:
    """Return the stage of each layer of the model."""
    virtual = config.virtual_pipeline_model_parallel_size
    places: dict[int, StagePlace] = {}
    for pipeline_rank in range(config.pipeline_model_parallel_size):
        for stage in range(virtual or 1):
            vp_stage = stage if virtual else None
            first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pipeline_rank)
            for layer in range(get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pipeline_rank)):
                places[first + layer] = StagePlace(pipeline_rank, stage, layer)
    return [places[layer] for layer in range(config.num_layers)]


def hf_weights(hf_config: Any, head: Head) -> tuple[HfWeight, ...]:
    """Return the weights of the ordinary model in its order, without making it."""
    kind: Any = type(hf_config)
    return _hf_weights(kind, hf_config.to_json_string(use_diff=False), head)


@cache
def _hf_weights(kind: Any, json_text: str, head: Head) -> tuple[HfWeight, ...]:
    model = describe_model(kind.from_dict(json.loads(json_text)), classifier=head == "scalar")
    storages: dict[int, int] = {}
    return tuple(
        HfWeight(name, tuple(tensor.shape), storages.setdefault(id(tensor), len(storages)))
        for name, tensor in model.state_dict(keep_vars=True).items()
    )
