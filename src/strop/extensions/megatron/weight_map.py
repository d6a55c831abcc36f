"""The weights of the ordinary Hugging Face model: where each is in the stages, read and exported by parts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from strop.extensions.megatron.families.architecture import LAYER, Piece, WeightRule, find_rule, name_in_file, text_name
from strop.extensions.megatron.families.find_family import find_family
from strop.extensions.megatron.models.gpt_stage import GptStage, Head
from strop.models.checkpoint_names import describe_model
from strop.models.load_report import LoadReport, find_not_finite
from strop.models.value_network import draw_score_weight
from strop.weight_sync.weight_source import Weight


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
        """The shape without the dimension of experts, in the order of the parameter."""
        shape = self.weight.shape[1:] if self.rule.of_experts else self.weight.shape
        return shape[::-1] if self.rule.transposed else shape

    def parameter_name(self, expert: int | None = None) -> str:
        name = re.sub(r"^layers\.", f"decoder.layers.{self.place.layer}.", self.rule.parameter)
        return name.format(expert=expert)

    def file_name(self, name: str, expert: int | None = None) -> str:
        """Return a name of the rule as it stands in a file."""
        return name_in_file(name, self.layer, expert)

    def pieces_of_rank(self, rank: int, ranks: int) -> list[Piece]:
        """Return the rows, or columns, of this weight that a tensor-parallel rank has; ``whole`` counts from the rank's first."""
        if self.rule.dim is None:
            return []
        rows = self.matrix_shape[self.rule.dim]
        share = self.rule.order.size(rows, ranks) // ranks
        low, high = rank * share, (rank + 1) * share
        return [
            Piece(first - low, start + (first - whole) * step, last - first, step)
            for whole, start, length, step in self.rule.order.pieces(rows, ranks)
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
            name = re.sub(r"local_experts\.\d+\.(\w+\.(?:weight|bias))", rf"\g<1>{expert}", name)
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
    rule = find_rule(rules, weight.name)
    first, last = StagePlace(0, 0), StagePlace(layers[-1].pipeline_rank, layers[-1].stage)
    layer = None if match is None else int(match[1])
    outer = first if rule.parameter.startswith("embedding.") else last
    return PlacedWeight(weight, rule, layer, outer if layer is None else layers[layer])


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
    return _hf_weights(kind, json.dumps(hf_config.to_dict()), head)


@cache
def _hf_weights(kind: Any, json_text: str, head: Head) -> tuple[HfWeight, ...]:
    model = describe_model(kind.from_dict(json.loads(json_text)), classifier=head == "scalar")
    storages: dict[int, int] = {}
    return tuple(
        HfWeight(name, tuple(tensor.shape), storages.setdefault(id(tensor), len(storages)))
        for name, tensor in model.state_dict(keep_vars=True).items()
    )


Take = Callable[[Tensor], Tensor]


def iter_weights(
    stages: Sequence[GptStage],
    hf_config: Any,
    take: Take = torch.Tensor.detach,
    place: Callable[[PlacedWeight], PlacedWeight] = lambda placed: placed,
) -> Iterator[Weight]:
    """Yield the weights in the order and under the names of the ordinary model. ``gather`` is a collective of all ranks.

    Every rank knows all shapes and data types. ``take`` returns what is sent of a parameter: with its main copy in float32, or an adapter,
    that; ``place`` says in which data type.
    """
    weights = WeightMap(stages, hf_config)
    for placed in map(place, weights.weights):
        like = torch.empty(placed.weight.shape, dtype=weights.dtype(placed), device="meta")
        yield Weight(placed.weight.name, like, partial(gather_weight, placed, weights, take), (placed.weight.storage,))


@torch.no_grad()
def gather_weight(placed: PlacedWeight, weights: WeightMap, take: Take = torch.Tensor.detach) -> Tensor:
    """Gather a weight over the ranks of its stage, and send it to the other stages."""
    group = weights.groups.pp
    if weights.is_local(placed):
        whole = _gather_in_stage(placed, weights, take)
    else:
        whole = torch.empty(placed.weight.shape, dtype=weights.dtype(placed), device=torch.cuda.current_device())
    if group.size() > 1:
        dist.broadcast(whole, dist.get_global_rank(group, placed.place.pipeline_rank), group=group)
    return whole


def _gather_in_stage(placed: PlacedWeight, weights: WeightMap, take: Take) -> Tensor:
    if placed.rule.of_experts:
        count = len(weights.local_experts(placed))
        local = torch.stack([take(weights.parameter(placed, expert)) for expert in range(count)])
        group, dim = weights.groups.tp_ep, None if placed.rule.dim is None else placed.rule.dim + 1
    else:
        local = take(weights.parameter(placed))
        group, dim = weights.groups.tp, placed.rule.dim
    if dim is None and not placed.rule.of_experts:
        return local
    return _assemble(placed, local, dim, group, weights)


def _assemble(placed: PlacedWeight, local: Tensor, dim: int | None, group: Any, weights: WeightMap) -> Tensor:
    """Gather the parts of a weight over a group and put them in their places."""
    rank, ranks = weights.ranks_of(placed)
    parts = [placed.pieces_of_rank(other, ranks) for other in range(ranks)]
    sizes = [sum(piece.length for piece in pieces) for pieces in parts]
    if dim is None:  # each of the ranks that divide an expert has it
        copies = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(copies, local.contiguous(), group=group)
        return torch.cat(copies[::ranks])
    mine = [local.narrow(dim, piece.whole, piece.length) for piece in parts[rank]]
    shape = [max(sizes) if axis == dim else size for axis, size in enumerate(local.shape)]
    sent = local.new_zeros(shape)  # of equal size on all ranks; with more ranks than groups of heads some have more rows
    torch.cat([*mine, local.narrow(dim, 0, 0)], dim, out=sent.narrow(dim, 0, sizes[rank]))
    gathered = [torch.empty_like(sent) for _ in range(group.size())]
    dist.all_gather(gathered, sent, group=group)
    whole = local.new_empty(placed.weight.shape)
    matrix = whole.mT if placed.rule.transposed else whole
    for member, part in enumerate(gathered):  # tensor-parallel ranks are next to each other in the group
        target = matrix if not placed.rule.of_experts else matrix.narrow(0, member // ranks * len(part), len(part))
        taken = 0
        for piece in parts[member % ranks]:
            piece.of(target, dim).copy_(part.narrow(dim, taken, piece.length))
            taken += piece.length
    return whole


INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"


class WeightReader(Protocol):
    """Reads parts of tensors by name."""

    def __contains__(self, name: str) -> bool: ...

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Return a part of a tensor."""
        ...


class MemoryWeights:
    """Reads tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        return self.tensors[name][index]


class FileWeights:
    """Reads the safetensors files of a model's folder, one or several with an index."""

    def __init__(self, folder: Path | str) -> None:
        """Raises FileNotFoundError if the folder has none."""
        self.folder = Path(folder)
        self.files = _find_files(self.folder)
        self._stored = {text_name(name): name for name in self.files}  # by the name that the language model has alone
        self._open: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        stored = self._stored[name]
        part: Tensor = self._file(self.files[stored]).get_slice(stored)[index]
        LoadReport(not_finite=list(find_not_finite([(name, part)]))).refuse(str(self.folder), "the model", key="")
        return part

    def _file(self, name: str) -> Any:
        from safetensors import safe_open

        if name not in self._open:
            opened: Any = safe_open
            self._open[name] = opened(self.folder / name, framework="pt")
        return self._open[name]


def _find_files(folder: Path) -> dict[str, str]:
    """Return the file of each tensor."""
    from safetensors import safe_open

    if (folder / INDEX_FILE).exists():
        files: dict[str, str] = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
        return files
    if not (folder / SINGLE_FILE).exists():
        raise FileNotFoundError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}: Megatron Core's models are read from safetensors; save the model "
            "again with save_pretrained"
        )
    with safe_open(folder / SINGLE_FILE, framework="pt") as file:  # type: ignore[no-untyped-call]
        return dict.fromkeys(file.keys(), SINGLE_FILE)


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
        for piece in placed.pieces_of_rank(rank, ranks):
            assert placed.rule.dim is not None
            part = _read(placed, source, expert, placed.rule.dim, piece.rows, reader)
            parameter.narrow(placed.rule.dim, piece.whole, piece.length).copy_(part)


def _read(placed: PlacedWeight, source: str, expert: int | None, dim: int | None, rows: slice, reader: WeightReader) -> Tensor:
    """Read ``rows`` of a weight, or columns if ``dim`` is 1, of one expert. Files are read without steps."""
    index = tuple(slice(rows.start, rows.stop) if axis == dim else slice(None) for axis in range(len(placed.matrix_shape)))
    index = index[::-1] if placed.rule.transposed else index
    if expert is None:
        part = reader.read(source, index)
    elif source in reader:
        part = reader.read(source, (slice(expert, expert + 1), *index)).squeeze(0)
    else:
        part = _read_expert(placed, expert, index, reader)
    part = part.T if placed.rule.transposed else part
    return part if dim is None or rows.step in (None, 1) else part[(slice(None),) * dim + (slice(None, None, rows.step),)]


def _read_expert(placed: PlacedWeight, expert: int, index: tuple[slice, ...], reader: WeightReader) -> Tensor:
    """Read a part of an expert's matrix from files that have experts, or their gates and ups, separately."""
    names = [placed.file_name(name, expert) for name in placed.rule.expert_files]
    if len(names) == 1:
        return reader.read(names[0], index)
    size = placed.matrix_shape[0] // len(names)  # rows of gate and up: a piece is in one of them
    rows = index[0]
    part = rows.start // size
    return reader.read(names[part], (slice(rows.start - part * size, rows.stop - part * size), *index[1:]))
