"""From the shards of Megatron Core to the weights of the ordinary Hugging Face model, and back.

The rules by which a stage reads and sends its weights say where each lies in the whole tensors that the shards are of. So this needs
neither Megatron Core nor a process group, and one copy of the weights in memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.extensions.export.model_folder import find_model_class
from strop.extensions.megatron.checkpoint.stage_shards import possible_keys, saved_key
from strop.extensions.megatron.checkpoint.torch_dist import ITERATION, LATEST, open_shards, write_common
from strop.extensions.megatron.families.architecture import LAYER, Piece, WeightRule, find_rule, name_in_file
from strop.extensions.megatron.families.find_family import find_family
from strop.learner.parallel.shard_files import NamedShard, ShardedReader, TensorShard, write_blocks
from strop.models.loading import quiet_transformers

MANY_PIECES = 2  # a stored block is read once for each piece that is wanted of it: read it whole if there are more


@dataclass(frozen=True)
class StoredMatrix:
    """Where a weight of the Hugging Face model, or that of one expert of it, is in a whole tensor of the shards."""

    name: str  # in the Hugging Face model
    expert: int | None
    key: str  # of the whole tensor
    place: tuple[int, ...]  # indices of the layer and the expert in the whole tensor, as far as it has these dimensions
    rule: WeightRule
    shape: tuple[int, ...]  # of the matrix, in the order of the parameter

    def at(self, parameter: str, *, stacked: bool) -> StoredMatrix:
        """Return it with its place in shards whose layers are ``stacked`` in one tensor, or each have a name."""
        match = LAYER.match(self.name)
        layer = (int(match[1]),) if match is not None and stacked else ()
        prefix = "decoder.layers." if stacked or match is None else f"decoder.layers.{match[1]}."
        key = re.sub(r"^layers\.", prefix, parameter)
        return replace(self, key=key, place=layer if self.expert is None else (*layer, self.expert))

    @property
    def axis(self) -> int:
        return self.rule.dim or 0

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the parameter that the matrix is part of."""
        size = self.rule.order.size(self.shape[self.axis], 1)
        return tuple(size if axis == self.axis else length for axis, length in enumerate(self.shape))

    def pieces(self) -> Sequence[Piece]:
        return self.rule.order.pieces(self.shape[self.axis], 1)

    def block(self, matrix: Tensor, piece: Piece, shape: tuple[int, ...]) -> NamedShard:
        """Return a piece of the matrix as a block of the whole tensor of ``shape``."""
        part = piece.of(matrix, self.axis)
        offset = [0] * len(self.shape)
        offset[self.axis] = piece.whole
        return self.key, TensorShard(part[(None,) * len(self.place)], (*self.place, *offset), shape)


@dataclass(frozen=True, eq=False)
class WeightShapes:
    """The weights of the ordinary model, tied ones once, and the rules that say where they are."""

    shapes: Mapping[str, tuple[int, ...]]
    rules: Mapping[str, WeightRule]

    @classmethod
    def of(cls, config: Any) -> WeightShapes:
        """Read a configuration, which names the model's class. Raises ValueError for a model that is of no family."""
        with torch.device("meta"), quiet_transformers():
            model = find_model_class(config)(config)
        first: dict[int, str] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            first.setdefault(id(tensor), name)
        tensors = model.state_dict()
        rules = {rule.name: rule for rule in find_family(config).rules(config)}
        return cls({name: tuple(tensors[name].shape) for name in first.values()}, rules)

    @property
    def num_layers(self) -> int:
        return 1 + max((int(match[1]) for name in self.shapes if (match := LAYER.match(name))), default=-1)

    def rule(self, name: str) -> WeightRule:
        return find_rule(self.rules, name)


def read_hugging_face_weights(iteration: Path, config: Any) -> dict[str, Tensor]:
    """Read an iter_XXXXXXX folder that any layout saved. Returns the weights under the names of the ordinary model, tied ones once.

    Raises ValueError if they are not those of ``config``.
    """
    reader, model = open_shards(iteration), WeightShapes.of(config)
    weights: dict[str, Tensor] = {}
    blocks: list[NamedShard] = []
    unused = {name for name in reader.shapes if name.startswith("decoder.layers.")}
    for name, shape in model.shapes.items():
        rule = model.rule(name)
        experts = shape[:1] * rule.of_experts
        matrices = [
            _find_stored(each, model.num_layers, experts, reader, iteration) for each in _list_matrices(name, shape, rule)
        ]
        unused -= {matrix.key for matrix in matrices}
        weights[name] = torch.empty(shape, dtype=reader.dtypes[matrices[0].key])
        for matrix in matrices:
            target = weights[name] if matrix.expert is None else weights[name][matrix.expert]
            target = target.T if rule.transposed else target
            if len(matrix.pieces()) > MANY_PIECES:
                _read_pieces(reader, matrix, target)
            else:
                blocks += [matrix.block(target, piece, reader.shapes[matrix.key]) for piece in matrix.pieces()]
    if unused:
        raise ValueError(
            f"{iteration} has {', '.join(sorted(unused)[:3])}, which {type(config).__name__} has not: it is of another model"
        )
    reader.read_blocks(blocks)
    return weights


def write_megatron_weights(weights: Mapping[str, Tensor], config: Any, folder: Path) -> None:
    """Write weights under the names of the ordinary model as ``folder/iter_0000000``, which any layout reads.

    Experts may be separate, as many files have them. Raises ValueError if they are not those of ``config``.
    """
    model = WeightShapes.of(config)
    layers = _layer_parameters(model)
    stacked = all(names == layers[0] for names in layers)
    blocks: list[NamedShard] = []
    for name, shape in model.shapes.items():
        rule, match = model.rule(name), LAYER.match(name)
        leading = (len(layers),) * (match is not None and stacked) + shape[:1] * rule.of_experts
        key = saved_key(rule.parameter, layers[int(match[1])] if match else ())
        for matrix in _list_matrices(name, shape, rule):
            placed = matrix.at(key, stacked=stacked)
            values = _find_matrix(weights, placed)
            values = values.T if rule.transposed else values
            if tuple(values.shape) != placed.shape:
                raise ValueError(f"{name} has shape {tuple(values.shape)}, and the configuration says {placed.shape}")
            blocks += [placed.block(values, piece, (*leading, *placed.whole_shape)) for piece in placed.pieces()]
    write_blocks(folder / ITERATION, blocks, None)
    write_common(folder / ITERATION, {"iteration": 0, "checkpoint_version": 3.0})
    (folder / LATEST).write_text("0")


def _list_matrices(name: str, shape: tuple[int, ...], rule: WeightRule) -> Iterator[StoredMatrix]:
    """Yield a weight, or each expert's part of one, without its place."""
    experts = range(shape[0]) if rule.of_experts else (None,)
    shape = shape[1:] if rule.of_experts else shape
    for expert in experts:
        yield StoredMatrix(name, expert, "", (), rule, shape[::-1] if rule.transposed else shape)


def _find_stored(
    matrix: StoredMatrix, layers: int, experts: tuple[int, ...], reader: ShardedReader, source: Path
) -> StoredMatrix:
    """Return a matrix with its place in stored shards. Raises ValueError if they do not have it."""
    for key in possible_keys(matrix.rule.parameter):
        for placed in (matrix.at(key, stacked=True), matrix.at(key, stacked=False)):
            shape = reader.shapes.get(placed.key)
            if shape is None:
                continue
            whole = ((layers,) * (len(placed.place) - len(experts))) + experts + placed.whole_shape
            padded = getattr(matrix.rule.order, "padded", False) and shape[1:] == whole[1:] and shape[:1] >= whole[:1]
            if shape != whole and not padded:
                raise ValueError(
                    f"{source} has {placed.key} of shape {shape}, where {matrix.name} needs {whole}: it is of another model"
                )
            return placed
    raise ValueError(f"{source} lacks {matrix.at(matrix.rule.parameter, stacked=True).key}, which has {matrix.name}")


def _read_pieces(reader: ShardedReader, matrix: StoredMatrix, target: Tensor) -> None:
    """Read a parameter whole, and copy the pieces of a matrix from it."""
    whole = torch.empty(matrix.whole_shape, dtype=target.dtype)
    size = whole.shape[matrix.axis]
    reader.read_blocks([matrix.block(whole, Piece(0, 0, size), reader.shapes[matrix.key])])
    for piece in matrix.pieces():
        piece.of(target, matrix.axis).copy_(whole.narrow(matrix.axis, piece.whole, piece.length))


def _find_matrix(weights: Mapping[str, Tensor], matrix: StoredMatrix) -> Tensor:
    """Return the values of a matrix: those of its weight under one of its names, or of what an expert has in a file."""
    match = LAYER.match(matrix.name)
    layer = int(match[1]) if match else None
    for name in (matrix.name, *(name_in_file(each, layer, matrix.expert) for each in matrix.rule.aliases)):
        if name in weights:
            return weights[name] if matrix.expert is None else weights[name][matrix.expert]
    names = [name_in_file(each, layer, matrix.expert) for each in matrix.rule.expert_files]
    if not names or any(name not in weights for name in names):
        raise ValueError(f"the weights lack {', '.join(names) or matrix.name}")
    parts = [weights[name] for name in names]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _layer_parameters(model: WeightShapes) -> list[set[str]]:
    """Return the parameters of each layer."""
    names: list[set[str]] = [set() for _ in range(model.num_layers)]
    for name in model.shapes:
        if match := LAYER.match(name):
            names[int(match[1])].add(model.rule(name).parameter)
    return names
