"""The sizes of a Megatron Core layout, and what cannot work with a number of ranks or with a model. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from strop.extensions.megatron.megatron_config import MegatronConfig
from strop.models.local_files import ModelShape, list_divisors
from strop.problems import Problem, raise_problems


@dataclass(frozen=True, kw_only=True)
class MegatronDims:
    """The number of ranks of each parallel dimension. A stage has ``tensor`` x ``context`` x ``data`` ranks.

    The experts of a layer are on ``expert`` x ``expert_tensor`` ranks of a stage, which may be more than ``tensor`` x ``context``.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1  # parts of a stage
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    data: int = 1
    sequence: bool = False  # shard the tokens among tensor ranks between tensor-parallel layers

    @classmethod
    def from_config(cls, config: MegatronConfig, world: int) -> MegatronDims:
        """Return the dimensions of ``world`` ranks. Raises ValueError if the configured sizes do not divide ``world``."""
        raise_problems(config.size_errors("megatron_cfg", world, uses_ray=True))
        tensor, context = config.tensor_model_parallel_size, config.context_parallel_size
        return cls(
            tensor=tensor,
            pipeline=config.pipeline_model_parallel_size,
            virtual=config.virtual_pipeline_model_parallel_size or 1,
            context=context,
            expert=config.expert_model_parallel_size,
            expert_tensor=config.expert_tensor_parallel_size,
            data=world // (tensor * context * config.pipeline_model_parallel_size),
            sequence=config.sequence_parallel and tensor > 1,
        )

    @property
    def world_size(self) -> int:
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def expert_data(self) -> int:
        """The number of ranks that have the same part of the same experts."""
        return self.tensor * self.context * self.data // (self.expert * self.expert_tensor)

    def __str__(self) -> str:
        stages = f"{self.pipeline} stages" if self.pipeline > 1 else "1 stage"
        parts = f" of {self.virtual} parts" if self.virtual > 1 else ""
        experts = f", experts {self.expert} x {self.expert_tensor} ways" if self.expert * self.expert_tensor > 1 else ""
        return f"Megatron Core, {self.data} data x {stages}{parts} x {self.context} context x {self.tensor} tensor{experts}"


def model_errors(config: MegatronConfig, key: str, shape: ModelShape) -> Iterator[Problem]:
    """Yield what sizes cannot divide a model: its heads, layers and experts."""
    yield from _check_heads(config, key, shape)
    yield from _check_stages(config, key, shape)
    yield from _check_experts(config, key, shape)


def _check_heads(config: MegatronConfig, key: str, shape: ModelShape) -> Iterator[Problem]:
    tensor = config.tensor_model_parallel_size
    name, groups = f"{key}.tensor_model_parallel_size", shape.key_value_heads
    if shape.heads % tensor:
        message = f"found {tensor}, which does not divide the {shape.heads} attention heads of {shape.name}"
        yield Problem(name, message, list_divisors(shape.heads))
    elif groups % tensor and tensor % groups:  # with fewer key-value heads than ranks, ranks share them
        message = f"found {tensor}, and ranks cannot share the {groups} key-value heads of {shape.name} evenly"
        yield Problem(name, message, list_divisors(groups))


def _check_stages(config: MegatronConfig, key: str, shape: ModelShape) -> Iterator[Problem]:
    stages, parts = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
    ends = {"first": config.num_layers_in_first_pipeline_stage, "last": config.num_layers_in_last_pipeline_stage}
    if stages == 1 or not shape.layers:
        return
    layers = shape.layers - sum(own or 0 for own in ends.values())
    others = stages - sum(own is not None for own in ends.values())
    name = f"{key}.pipeline_model_parallel_size"
    for end, own in ends.items():
        if own is not None and own % parts:
            what = f"found {own}, which virtual_pipeline_model_parallel_size = {parts} does not divide"
            yield Problem(f"{key}.num_layers_in_{end}_pipeline_stage", what, f"Set it to a multiple of {parts}.")
    if others and (layers < others * parts or layers % (others * parts)):
        each = f"{others} stages" + (f" of {parts} parts each" if parts > 1 else "")
        left = (
            f"the {layers} layers that the first and last stage leave of the {shape.layers}"
            if layers < shape.layers
            else (f"the {layers} layers")
        )
        fix = (
            f"Set {key}.num_layers_in_first_pipeline_stage and {key}.num_layers_in_last_pipeline_stage so that the other stages have as "
            "many layers each, or another number of stages."
        )
        if shape.layers < stages * parts:
            fix = "Lower the number of stages" + (f", or set {key}.virtual_pipeline_model_parallel_size=1." if parts > 1 else ".")
        yield Problem(name, f"found {stages}: {each} cannot share {left} of {shape.name} evenly", fix)
    elif not others and layers:
        message = (
            f"found {stages}: the first and last stage have {shape.layers - layers} of the {shape.layers} layers of {shape.name}"
        )
        yield Problem(name, message, f"Set {key}.num_layers_in_last_pipeline_stage so that they have all.")


def _check_experts(config: MegatronConfig, key: str, shape: ModelShape) -> Iterator[Problem]:
    experts, tensor = config.expert_model_parallel_size, config.tensor_model_parallel_size
    name = f"{key}.expert_model_parallel_size"
    if experts > 1 and not shape.experts:
        yield Problem(name, f"found {experts}, but {shape.name} has no experts", "Set it to 1.")
    elif shape.experts % experts:
        message = f"found {experts}, which does not divide the {shape.experts} experts of a layer of {shape.name}"
        yield Problem(name, message, list_divisors(shape.experts))
    elif shape.experts and tensor > 1 and not config.sequence_parallel:
        # Megatron Core warns of it while it builds the model and refuses it while it trains; a forward pass alone ends the process.
        yield Problem(
            f"{key}.sequence_parallel",
            f"found false, with tensor_model_parallel_size = {tensor}: the experts of {shape.name} need it",
            "Set it to true.",
        )
    elif shape.experts and tensor > 1 and experts == 1 and config.expert_tensor_parallel_size == 1:
        # Megatron Core 0.16.1 does not add the gradients of such experts over the tensor-parallel ranks: wrong weights, no error.
        yield Problem(
            f"{key}.expert_tensor_parallel_size",
            f"found 1, with tensor_model_parallel_size = {tensor} and expert_model_parallel_size = 1: Megatron Core does not add the "
            "gradients of experts that every tensor-parallel rank has whole",
            f"Set it to {tensor}, or {name} to {tensor}.",
        )
