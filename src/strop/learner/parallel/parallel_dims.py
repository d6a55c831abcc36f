"""Parallel dimensions and the device meshes of their ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from strop.lazy_torch import Tensor, torch
from strop.learner.parallel.dtensor_config import DtensorConfig
from strop.problems import raise_problems


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """The number of ranks of each parallel dimension, outermost first: adjacent ranks communicate the most.

    The layers are split over ``pipeline`` ranks, and the other dimensions divide each stage. A stage has ``replicate`` copies, each
    sharded over ``shard`` x ``context`` ranks (FSDP2; with several copies HSDP). ``context`` x ``tensor`` ranks read the same
    micro-batch, each some of its tokens. The experts of each layer are sharded over ``expert`` ranks, counted from the innermost; with
    tensor parallelism over at least ``tensor`` ranks. Raises ValueError for sizes that do not fit together.
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    sequence: bool = False  # shard the tokens among tensor ranks between tensor-parallel layers
    interleaved: bool = False  # each pipeline rank has several stages
    layers_per_stage: int | None = None  # of interleaved stages; None: two stages on each pipeline rank

    def __post_init__(self) -> None:
        sizes = (self.pipeline, self.replicate, self.shard, self.context, self.tensor, self.expert)
        if min(sizes) < 1:
            raise ValueError(f"parallel sizes {sizes} must all be at least 1")
        if self.sequence and self.tensor == 1:
            raise ValueError(
                "sequence_parallel is true and tensor_parallel_size is 1: there are no ranks to shard the tokens over; "
                "set sequence_parallel=false, or raise tensor_parallel_size"
            )
        if self.expert > 1 and self.expert % self.tensor:
            raise ValueError(
                f"expert_parallel_size {self.expert} is not a multiple of tensor_parallel_size {self.tensor}: experts are sharded over the "
                "tensor ranks too; set it to a multiple, or to 1"
            )
        if (self.shard * self.context * self.tensor) % self.expert_size:
            raise ValueError(
                f"expert_parallel_size {self.expert_size} does not divide the {self.shard * self.context * self.tensor} ranks of one copy "
                "of the model; set it to a number that does"
            )

    @classmethod
    def from_config(cls, config: DtensorConfig, world: int) -> ParallelDims:
        """Return the dimensions of ``world`` ranks. Raises ValueError if the configured sizes do not divide ``world``."""
        raise_problems(config.size_errors("dtensor_cfg", world, uses_ray=True))
        tensor, context, copies = config.tensor_parallel_size, config.context_parallel_size, config.dp_replicate_size
        stages = config.pipeline_parallel_size
        return cls(
            pipeline=stages,
            replicate=copies,
            shard=world // (tensor * context * copies * stages),
            context=context,
            tensor=tensor,
            expert=config.expert_parallel_size,
            sequence=config.sequence_parallel and config.tensor_parallel_size > 1,
            interleaved=stages > 1 and config.pipeline_parallel_schedule == "Interleaved1F1B",
            layers_per_stage=config.pipeline_parallel_layers_per_stage if stages > 1 else None,
        )

    def __str__(self) -> str:
        copies = "1 copy" if self.replicate == 1 else f"{self.replicate} copies"
        experts = f", experts {self.expert_size} ways" if self.expert > 1 else ""
        schedule = " (interleaved)" if self.interleaved else ""
        stages = "" if self.pipeline == 1 else f"{self.pipeline} pipeline{schedule} x "
        return f"{stages}{copies} x {self.shard} shards x {self.context} context x {self.tensor} tensor{experts}"

    @property
    def world_size(self) -> int:
        return self.pipeline * self.stage_size

    @property
    def stage_size(self) -> int:
        """The number of ranks that have the same layers."""
        return self.replicate * self.shard * self.context * self.tensor

    @property
    def data(self) -> int:
        """The number of ranks, or groups of ranks, that read different micro-batches."""
        return self.replicate * self.shard

    @property
    def sample(self) -> int:
        """The number of ranks that read the same micro-batch."""
        return self.context * self.tensor

    @property
    def expert_size(self) -> int:
        """The number of ranks that the experts of a layer are sharded over."""
        return max(self.expert, self.tensor)


class DeviceMeshes:
    """The device meshes of a learner's ranks. All ranks create it at the same time, after the default process group."""

    def __init__(self, dims: ParallelDims, device_type: str) -> None:
        dist: Any = torch.distributed
        if dist.get_world_size() != dims.world_size:
            raise ValueError(f"{dims!r} needs {dims.world_size} ranks, and there are {dist.get_world_size()}")
        self.dims = dims
        self.dense: Any = dist.init_device_mesh(
            device_type,
            (dims.pipeline, dims.replicate, dims.shard, dims.context, dims.tensor),
            mesh_dim_names=("pipeline", "replicate", "shard", "context", "tensor"),
        )
        outer = dims.shard * dims.context * dims.tensor // dims.expert_size
        self.experts: Any = dist.init_device_mesh(
            device_type,
            (dims.pipeline, dims.replicate, outer, dims.expert_size),
            mesh_dim_names=("pipeline", "replicate", "expert_shard", "expert"),
        )

    @cached_property
    def fsdp(self) -> Any:
        """The mesh of ordinary parameters: [shard x context], or [replicate, shard x context] with several copies."""
        sharded = self.dense["shard", "context"]._flatten("shard_context")
        return self.dense["replicate", "shard_context"] if self.dims.replicate > 1 else sharded

    @cached_property
    def expert_fsdp(self) -> Any:
        """The mesh that FSDP shards the experts of an expert rank over."""
        return self.experts["replicate", "expert_shard"] if self.dims.replicate > 1 else self.experts["expert_shard"]

    @cached_property
    def sample(self) -> Any:
        """The process group of the ranks that read the same micro-batch."""
        return self.dense["context", "tensor"]._flatten("sample").get_group()

    @property
    def pipeline(self) -> Any:
        """The process group of the ranks that hold the stages of one copy and read the same tokens."""
        return self.dense["pipeline"].get_group()

    @property
    def pipeline_rank(self) -> int:
        return int(self.dense.get_coordinate()[0])

    @property
    def tensor(self) -> Any:
        return self.dense["tensor"].get_group()

    @property
    def context(self) -> Any:
        return self.dense["context"].get_group()

    @property
    def expert(self) -> Any:
        return self.experts["expert"].get_group()

    @property
    def data_rank(self) -> int:
        """The index of this rank's micro-batches among ``dims.data``."""
        coordinate: Sequence[int] = self.dense.get_coordinate()
        return coordinate[1] * self.dims.shard + coordinate[2]

    @property
    def is_leader(self) -> bool:
        """Whether this rank reports the results for all ranks that read the same micro-batch; the last pipeline rank has them."""
        coordinate = self.dense.get_coordinate()
        return coordinate[0] == self.dims.pipeline - 1 and not any(coordinate[3:])


def shard_parameter(parameter: torch.nn.Parameter, mesh: Any, dimension: int) -> torch.nn.Parameter:
    """Shard a parameter along one dimension over a mesh; the last shards are smaller if it does not split evenly.

    Every rank has it in full, so there is no communication.
    """
    from torch.distributed.tensor import DTensor, Shard

    size: int = parameter.shape[dimension]
    width = -(-size // mesh.size())
    first = min(mesh.get_local_rank() * width, size)
    shard = parameter.detach().narrow(dimension, first, min(width, size - first)).contiguous().clone()
    shape, stride = parameter.shape, parameter.stride()
    sharded = DTensor.from_local(shard, mesh, [Shard(dimension)], run_check=False, shape=shape, stride=stride)
    return torch.nn.Parameter(sharded, requires_grad=parameter.requires_grad)


def to_local(tensor: Any) -> Tensor:
    """Return this rank's shard of a DTensor, differentiably; return any other tensor unchanged."""
    from torch.distributed.tensor import DTensor

    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local
