"""Files of sharded tensors, readable with any other sharding.

The files are torch's distributed checkpoints (DCP): ``.metadata`` records which file has which part of which tensor, so they can be read by
another number of ranks, with another sharding, or by a single process without a process group.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Protocol, TypeAlias

import torch
import torch.distributed.checkpoint
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

dcp: Any = torch.distributed.checkpoint  # some of its names are not exported for type checkers

ClassName: TypeAlias = tuple[str, str]  # its module, and it
METADATA = ".metadata"  # the file that marks a DCP folder


@dataclass(frozen=True, eq=False)
class TensorShard:
    """A block of a full tensor; the full tensor itself if it is not sharded."""

    tensor: Tensor
    offset: tuple[int, ...]  # offset of its first element in the full tensor
    shape: tuple[int, ...]  # of the full tensor

    def with_tensor(self, tensor: Tensor) -> TensorShard:
        """Return the same block of another tensor."""
        if tensor.shape != self.tensor.shape:
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} cannot replace a shard of shape {tuple(self.tensor.shape)}"
            )
        return TensorShard(tensor, self.offset, self.shape)

    @property
    def index(self) -> tuple[slice, ...]:
        """The slices of this block in the full tensor."""
        return tuple(slice(begin, begin + size) for begin, size in zip(self.offset, self.tensor.shape, strict=True))


NamedShard: TypeAlias = tuple[str, TensorShard]  # a block, with the name of its full tensor


def local_shard(tensor: Tensor) -> TensorShard:
    """Return this rank's shard of a tensor, sharing its memory. Raises ValueError for placements that are not blocks."""
    if not isinstance(tensor, DTensor):
        return TensorShard(tensor.detach(), (0,) * tensor.dim(), tuple(tensor.shape))
    local: Tensor = tensor.to_local().detach()
    offset, size = [0] * tensor.dim(), list(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate() or ()
    # FSDP splits the shards of tensor parallelism, so its splits (strided, since they come first in the mesh) are the inner ones.
    splits = sorted(enumerate(tensor.placements), key=lambda item: isinstance(item[1], _StridedShard))
    for dimension, placement in splits:
        if placement.is_replicate():
            continue
        along = getattr(placement, "dim", None)
        if along is None:
            raise ValueError(f"a tensor with placements {tensor.placements} is not sharded into blocks")
        length = -(-size[along] // tensor.device_mesh.size(dimension))
        begin = min(coordinate[dimension] * length, size[along])
        offset[along] += begin
        size[along] = min(length, size[along] - begin)
    if tuple(size) != tuple(local.shape):
        raise ValueError(
            f"a tensor of {tuple(tensor.shape)} with placements {tensor.placements} has a local shard of {tuple(local.shape)}, but "
            f"{size} was expected"
        )
    return TensorShard(local, tuple(offset), tuple(tensor.shape))


def is_elsewhere(tensor: Tensor) -> bool:
    """Return whether a tensor of the model is only a description of a weight on other pipeline stages."""
    return tensor.device.type == "meta"


def storage_key(tensor: Tensor) -> int:
    """Return a value that is equal only for tied weights, including empty shards, which FSDP pads, and weights without memory."""
    local: Tensor = tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor
    storage: Any = local.untyped_storage()
    return int(storage._cdata if is_elsewhere(local) else storage.data_ptr())


def is_sharded(folder: Path) -> bool:
    """Return whether a folder contains shards."""
    return (folder / METADATA).is_file()


def write_shards(folder: Path, shards: Mapping[str, TensorShard], group: Any | None) -> None:
    """Write the shards of all ranks of ``group``, or of this process only if it is None. All ranks of ``group`` must call it.

    Replicated shards are written once. Files are flushed to disk, ``.metadata`` last. Raises if the shards do not cover the tensors.
    """
    write_blocks(folder, list(shards.items()), group)


def write_blocks(folder: Path, blocks: Sequence[NamedShard], group: Any | None) -> None:
    """Like ``write_shards``, but a rank may have several blocks of one tensor."""
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    with _ignore_single_process_warnings():
        dcp.save({}, storage_writer=writer, planner=_SavePlanner(blocks), process_group=group, no_dist=group is None)


class ForeignMetadata(ValueError):
    """``.metadata`` names something that no checkpoint of tensors contains."""


class _MetadataUnpickler(pickle.Unpickler):
    """Reads DCP's ``.metadata``, a pickle, without executing code that it might contain."""

    def __init__(self, file: BinaryIO, renamed: Mapping[ClassName, ClassName]) -> None:
        super().__init__(file)
        self.renamed = renamed

    def find_class(self, module: str, name: str) -> Any:
        module, name = self.renamed.get((module, name), (module, name))
        if (module, name) not in _METADATA_CLASSES:
            raise ForeignMetadata(
                f"{METADATA} names {module}.{name}, which no checkpoint of tensors contains and which could run code; the folder was not "
                "written by Strop or torch's distributed checkpoints: do not use it"
            )
        return super().find_class(module, name)


_CHECKPOINT = "torch.distributed.checkpoint"
_METADATA_CLASSES = {
    *((f"{_CHECKPOINT}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata")),
    *((f"{_CHECKPOINT}.metadata", name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties")),
    (f"{_CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    # Others than torch keep the plans of all ranks.
    *((f"{_CHECKPOINT}.planner", name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # of Python 3.13
    ("collections", "OrderedDict"),
    *(("torch", str(dtype).removeprefix("torch.")) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)),
}


class _SafeReader(dcp.FileSystemReader):  # type: ignore[misc]
    """Reads only files in its folder, and from ``.metadata`` only descriptions of tensors."""

    def __init__(self, folder: Path, renamed: Mapping[ClassName, ClassName]) -> None:
        super().__init__(folder)
        self.renamed = renamed

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        with open(Path(self.path) / METADATA, "rb") as file:
            metadata = _MetadataUnpickler(file, self.renamed).load()
        if not isinstance(metadata, Metadata):
            raise ForeignMetadata(f"{METADATA} is {metadata!r:.80}, not the metadata of a checkpoint")
        for index, info in (metadata.storage_data or {}).items():
            if Path(info.relative_path).name != str(info.relative_path):
                raise ForeignMetadata(f"{METADATA} places {index.fqn} outside of the folder: {str(info.relative_path)!r:.200}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class TensorReader(Protocol):
    """Reads shards of stored tensors."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]: ...

    def read(self, into: Mapping[str, TensorShard]) -> None:
        """Read into the tensors of shards, in place."""
        ...


class ShardedReader:
    """Reads a folder that ``write_shards`` wrote on any number of ranks. Raises FileNotFoundError.

    ``renamed``: what classes of torch are called in ``.metadata`` of another library."""

    def __init__(self, folder: Path, renamed: Mapping[ClassName, ClassName] = MappingProxyType({})) -> None:
        if not is_sharded(folder):
            raise FileNotFoundError(f"{folder / METADATA} is missing")
        self.folder, self._renamed = folder, renamed
        stored = _SafeReader(folder, renamed).read_metadata().state_dict_metadata
        tensors = {name: data for name, data in stored.items() if isinstance(data, TensorStorageMetadata)}
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tuple(data.size) for name, data in tensors.items()}
        self.dtypes: Mapping[str, torch.dtype] = {name: data.properties.dtype for name, data in tensors.items()}

    def read(self, into: Mapping[str, TensorShard]) -> None:
        self.read_blocks(list(into.items()))

    def read_blocks(self, blocks: Sequence[NamedShard]) -> None:
        """Like ``read``, but several blocks may belong to one tensor."""
        with _ignore_single_process_warnings():
            dcp.load({}, storage_reader=_SafeReader(self.folder, self._renamed), planner=_LoadPlanner(blocks), no_dist=True)


def read_whole(reader: TensorReader) -> dict[str, Tensor]:
    """Return all tensors, whole."""
    tensors = {name: torch.empty(shape, dtype=reader.dtypes[name]) for name, shape in reader.shapes.items()}
    reader.read({name: TensorShard(tensor, (0,) * tensor.dim(), tuple(tensor.shape)) for name, tensor in tensors.items()})
    return tensors


@dataclass(frozen=True, eq=False)
class InMemoryReader:
    """Reads tensors in memory or in a memory-mapped file."""

    tensors: Mapping[str, Tensor]
    shapes: Mapping[str, tuple[int, ...]] = field(init=False)
    dtypes: Mapping[str, torch.dtype] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shapes", {name: tuple(tensor.shape) for name, tensor in self.tensors.items()})
        object.__setattr__(self, "dtypes", {name: tensor.dtype for name, tensor in self.tensors.items()})

    def read(self, into: Mapping[str, TensorShard]) -> None:
        for name, shard in into.items():
            shard.tensor.copy_(self.tensors[name][shard.index])


class SafetensorsReader:
    """Reads only the requested parts of the safetensors files of a Hugging Face folder."""

    def __init__(self, folder: Path) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._files: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with _open(path) as file:
                names: list[str] = file.keys()
                for name in names:
                    entry = file.get_slice(name)
                    self._files[name] = path
                    self.shapes[name] = tuple(entry.get_shape())
                    self.dtypes[name] = _DTYPES[entry.get_dtype()]

    def read(self, into: Mapping[str, TensorShard]) -> None:
        for path in sorted({self._files[name] for name in into}):
            with _open(path) as file:
                for name in (name for name in into if self._files[name] == path):
                    values = file.get_slice(name)[into[name].index] if into[name].index else file.get_tensor(name)
                    into[name].tensor.copy_(values)


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def _open(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(path, framework="pt")


def _chunk_metadata(shard: TensorShard) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(shard.offset), sizes=shard.tensor.shape)


def _by_index(blocks: Sequence[NamedShard]) -> dict[MetadataIndex, Tensor]:
    """Return the tensors of blocks by name and offset, as DCP requests them."""
    return {MetadataIndex(name, torch.Size(shard.offset)): shard.tensor for name, shard in blocks if shard.tensor.numel()}


class _SavePlanner(DefaultSavePlanner):
    """Plans the writing of shards."""

    def __init__(self, blocks: Sequence[NamedShard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.blocks = blocks
        self.tensors = _by_index(blocks)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_make_write_item(name, shard) for name, shard in self.blocks if shard.tensor.numel()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.tensors[index]


def _make_write_item(name: str, shard: TensorShard) -> WriteItem:
    data = TensorWriteData(_chunk_metadata(shard), TensorProperties(dtype=shard.tensor.dtype), torch.Size(shard.shape))
    return WriteItem(MetadataIndex(name, torch.Size(shard.offset)), WriteItemType.SHARD, tensor_data=data)


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, blocks: Sequence[NamedShard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.blocks = blocks
        self.tensors = _by_index(blocks)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored: Mapping[str, Any] = self.metadata.state_dict_metadata
        return LoadPlan(
            [
                item
                for name, shard in self.blocks
                if shard.tensor.numel()
                for item in create_read_items_for_chunk_list(name, stored[name], [_chunk_metadata(shard)])
            ]
        )

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.tensors[index]


@contextmanager
def _ignore_single_process_warnings() -> Iterator[None]:
    """Suppress DCP's warnings about reading and writing in a single process, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to (load|save) in a single process")
        yield


def names_with_prefix(stored: TensorReader, prefix: str) -> Sequence[str]:
    """Return the names that begin with ``prefix``, without it."""
    return [name.removeprefix(prefix) for name in stored.shapes if name.startswith(prefix)]
