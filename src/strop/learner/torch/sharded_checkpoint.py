"""Sharded checkpoints of a learner: each rank writes its shards, and any number of ranks reads them with any parallelism.

    weights/           shards (DCP) under the model's names, in the dtype of the computation; the model's configuration.
                       A LoRA run has full adapters there, in PEFT's format
    ema/               the same for the averaged weights
    optimizer/         shards: state.NAME.KEY, masters.NAME (float32 masters of weights in lower precision), average.NAME
    optimizer/state.pt unsharded state: parameter groups, counters, the schedule

Values are copied bitwise: a checkpoint of two ranks, loaded by four and saved again, is identical. A checkpoint of a single process (a
Hugging Face folder and ``optimizer.pt``) can be loaded by several ranks, and a sharded checkpoint by a single process.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from strop.learner.parallel.parallelism import NamedParameters, Parallelism, SingleDevice
from strop.learner.parallel.shard_files import (
    InMemoryReader,
    SafetensorsReader,
    ShardedReader,
    TensorReader,
    TensorShard,
    is_sharded,
    local_shard,
    names_with_prefix,
    write_shards,
)
from strop.learner.parallel.sharded import Sharded
from strop.learner.torch.master_weights import MasterWeights
from strop.learner.torch.optimizer import load_optimizer
from strop.learner.torch.weight_average import AveragedWeights
from strop.models.adapters import adapter_folder, load_adapters, lora_layers, save_adapters
from strop.models.loading import quiet_transformers

dist: Any = torch.distributed

STATE_FILE = "state.pt"
BARRIER_TIMEOUT = timedelta(minutes=60)  # how long ranks wait for each other's files


class ShardedLearner(Protocol):
    """What a checkpoint saves of a learner."""

    model: nn.Module
    parallelism: Parallelism
    trainable_parameters: NamedParameters
    masters: MasterWeights
    average: AveragedWeights | None
    optimizer: Optimizer
    scheduler: LRScheduler | None

    def load_average(self, state: Mapping[str, Any] | None, path: Path) -> None: ...


def is_sharded_checkpoint(folder: Path) -> bool:
    """Return whether a learner's folder is a sharded checkpoint."""
    return is_sharded(folder / "weights") or is_sharded(folder / "optimizer")


# --- saving --------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LearnerSnapshot:
    """This rank's part of a learner at one moment. If it was taken with copies, ``save`` may run during training."""

    weights: Mapping[str, TensorShard]
    average: Mapping[str, TensorShard] | None
    optimizer: Mapping[str, TensorShard]
    state: Mapping[str, Any]  # unsharded state
    adapters: Mapping[str, Mapping[str, Tensor]]  # full tensors by folder, on the first rank only
    model: Any
    process_group: Any | None

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        """Write the snapshot under ``folder``. All ranks must call it; when it returns, the files of all ranks are flushed."""
        first = self.process_group is None or dist.get_rank() == 0
        if self.weights:
            write_shards(folder / "weights", self.weights, self.process_group)
        if self.average is not None and self.weights:
            write_shards(folder / "ema", self.average, self.process_group)
        if optimizer:
            write_shards(folder / "optimizer", self.optimizer, self.process_group)
        if first:
            for name, tensors in self.adapters.items():
                save_adapters(self.model, folder / name, tensors)
            for name in ("weights", "ema"):
                if is_sharded(folder / name):
                    _save_config(self.model, folder / name, self.weights)
            if optimizer:
                torch.save(dict(self.state), folder / "optimizer" / STATE_FILE)
        if self.process_group is not None:
            dist.barrier(group=self.process_group)


class AsyncWrite:
    """Writes a snapshot in a background thread. All ranks must start it, one write at a time."""

    def __init__(self, snapshot: LearnerSnapshot, folder: Path, *, optimizer: bool = True) -> None:
        self._failed: BaseException | None = None
        self._thread = threading.Thread(
            target=self._write, args=(snapshot, folder, optimizer), name="strop-checkpoint", daemon=True
        )
        self._thread.start()

    def _write(self, snapshot: LearnerSnapshot, folder: Path, optimizer: bool) -> None:
        torch.set_num_threads(1)  # leave the other cores to the trainer
        try:
            snapshot.save(folder, optimizer=optimizer)
        except BaseException as error:
            self._failed = error

    def done(self) -> bool:
        """Return whether the files of all ranks are flushed. Raises the error of a failed write."""
        if self._thread.is_alive():
            return False
        if self._failed is not None:
            raise self._failed
        return True


def save(learner: ShardedLearner, folder: Path, *, optimizer: bool = True) -> None:
    """Save a sharded learner. All ranks must call it."""
    take_snapshot(learner, optimizer=optimizer, copies=False).save(folder, optimizer=optimizer)


@torch.no_grad()
def take_snapshot(learner: ShardedLearner, *, optimizer: bool = True, copies: bool = True) -> LearnerSnapshot:
    """Take a snapshot of a learner; all ranks must call it. With ``copies`` in CPU memory, training may continue immediately."""
    keep: Callable[[Tensor], Tensor] = _copy_to_cpu if copies else Tensor.detach
    places = _trainable_shards(learner)
    adapted = bool(lora_layers(learner.model))
    average = learner.average.state_dict() if learner.average is not None else None
    weights: dict[str, TensorShard] = {}
    adapters: dict[str, Mapping[str, Tensor]] = {}
    if adapted:
        adapters = _gather_adapters(learner)
    else:
        rounded = _param_dtype(learner)
        for name, piece in _model_shards(learner.model):
            tensor = piece.tensor.to(rounded) if rounded is not None and name in places else piece.tensor
            weights[name] = piece.with_tensor(keep(tensor))
    averaged: dict[str, TensorShard] | None = None
    pieces: dict[str, TensorShard] = {}
    if average is not None:
        kept = {name: places[name].with_tensor(keep(tensor)) for name, tensor in average["average"].items()}
        pieces = {f"average.{name}": piece for name, piece in kept.items()}
        averaged = {
            name: piece.with_tensor(kept[name].tensor.to(piece.tensor.dtype)) if name in kept else piece
            for name, piece in weights.items()
        }
    state: Mapping[str, Any] = {}
    if optimizer:
        found, state = _optimizer_state(learner, places, keep)
        pieces |= found
    group = _gloo_group(dist.group.WORLD) if dist.is_initialized() else None
    return LearnerSnapshot(weights, averaged, pieces if optimizer else {}, state, adapters, learner.model, group)


def _optimizer_state(
    learner: ShardedLearner, places: Mapping[str, TensorShard], keep: Callable[[Tensor], Tensor]
) -> tuple[dict[str, TensorShard], dict[str, Any]]:
    """Return the shards and the unsharded state of the optimizer, the masters, the average and the schedule."""
    saved = learner.optimizer.state_dict()
    pieces: dict[str, TensorShard] = {}
    undivided: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(_parameter_names(saved)):
        for key, value in saved["state"].get(number, {}).items():
            if isinstance(value, Tensor) and value.dim() > 0:
                if value.shape != places[name].tensor.shape:
                    raise ValueError(
                        f"{type(learner.optimizer).__name__} keeps {key} of shape {tuple(value.shape)} for {name}, whose shard has shape "
                        f"{tuple(places[name].tensor.shape)}: another number of ranks could not load it. Use torch.optim.AdamW, or set "
                        "checkpointing.save_optimizer=false"
                    )
                pieces[f"state.{name}.{key}"] = places[name].with_tensor(keep(value))
            else:
                undivided.setdefault(name, {})[key] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
    for name, master in _masters(learner).items():
        pieces[f"masters.{name}"] = places[name].with_tensor(keep(master))
    groups = [{key: value for key, value in group.items() if key != "params"} for group in saved["param_groups"]]
    return pieces, {
        "groups": copy.deepcopy(groups),
        "undivided": undivided,
        "average_steps": learner.average.steps if learner.average is not None else None,
        "scheduler": copy.deepcopy(learner.scheduler.state_dict()) if learner.scheduler is not None else None,
    }


def _gather_adapters(learner: ShardedLearner) -> dict[str, Mapping[str, Tensor]]:
    """Gather the full adapters on all ranks; only the first rank keeps them."""

    def whole() -> dict[str, Tensor]:
        found = {name: tensor.detach().cpu().clone() for name, tensor in learner.parallelism.adapters().items()}
        return found if not dist.is_initialized() or dist.get_rank() == 0 else {}

    adapters: dict[str, Mapping[str, Tensor]] = {"weights": whole()}
    if learner.average is not None:
        with learner.average.swap_in(learner.trainable_parameters):
            adapters["ema"] = whole()
    return adapters


def _save_config(model: Any, folder: Path, weights: Mapping[str, TensorShard]) -> None:
    """Write the model's configuration, which names its class, beside the shards."""
    config = copy.deepcopy(getattr(model, "config", None))
    if config is None:
        return
    config.architectures = [type(model).__name__]
    config.dtype = next((piece.tensor.dtype for piece in weights.values() if piece.tensor.is_floating_point()), None)
    with quiet_transformers():
        config.save_pretrained(folder)
        if getattr(model, "generation_config", None) is not None and model.can_generate():
            model.generation_config.save_pretrained(folder)


# --- loading -------------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def load(learner: ShardedLearner, folder: Path) -> None:
    """Load a checkpoint of any number of ranks, in place. Each rank reads what it needs, without communication.

    Raises FileNotFoundError without an optimizer state, and ValueError if the checkpoint does not fit.
    """
    optimizer, state = _open_optimizer(folder)
    weights = folder / "weights"
    if lora_layers(learner.model):
        load_adapters(learner.model, weights, _copy_shard)
    else:
        load_weights(learner.model, weights)
    _load_masters(learner, optimizer)
    _load_optimizer(learner, optimizer, state)
    if learner.scheduler is not None and state["scheduler"] is not None:
        learner.scheduler.load_state_dict(state["scheduler"])
    _load_average(learner, optimizer, state, folder)


@torch.no_grad()
def load_weights(model: Any, folder: Path) -> None:
    """Load shards or a Hugging Face folder into a module, in place. Raises ValueError unless every weight is present, tied ones once."""
    if adapter_folder(str(folder)) is not None:
        raise ValueError(
            f"{folder} has adapters, and this run trains the full model; set dtensor_cfg.lora_cfg as it was when they were "
            "saved, or start with another checkpointing.checkpoint_dir"
        )
    aliases = _aliases(model)
    own = dict(_model_shards(model))
    stored = _open_weights(model, folder, {alias for names in aliases.values() for alias in names})
    found = {name: next((alias for alias in aliases[name] if alias in stored.shapes), None) for name in own}
    missing = [name for name, alias in found.items() if alias is None]
    known = {alias for names in aliases.values() for alias in names}
    unexpected = [name for name in stored.shapes if name not in known]
    other = [name for name, alias in found.items() if alias is not None and stored.shapes[alias] != own[name].shape]
    if missing or unexpected or other:
        raise ValueError(
            f"the weights in {folder} do not fit the model: missing {missing[:3]}, unexpected {unexpected[:3]}, of another shape "
            f"{other[:3]}"
        )
    stored.read({alias: own[name] for name, alias in found.items() if alias is not None})


def _open_weights(model: Any, folder: Path, known: set[str]) -> TensorReader:
    """Return a reader of the weights in a folder under the model's names.

    If a Hugging Face folder has other names (such as one tensor per expert instead of one per layer), Transformers converts them, and each
    rank loads the full model.
    """
    if is_sharded(folder):
        return ShardedReader(folder)
    stored = SafetensorsReader(folder)
    if not stored.shapes:
        raise FileNotFoundError(f"{folder} has no weights: neither .metadata nor safetensors files")
    if stored.shapes.keys() <= known:
        return stored
    with quiet_transformers():
        config = copy.deepcopy(model.config)
        whole, found = type(model).from_pretrained(folder, config=config, dtype="auto", output_loading_info=True)
    if odd := {kind: sorted(names)[:3] for kind, names in found.items() if names}:
        raise ValueError(f"the weights in {folder} do not fit the model: {odd}")
    return InMemoryReader(whole.state_dict())


def _load_masters(learner: ShardedLearner, stored: TensorReader) -> None:
    saved, own = names_with_prefix(stored, "masters."), _masters(learner)
    if set(saved) != set(own):
        raise ValueError(
            f"the checkpoint has float32 masters of {len(saved)} weights and this run keeps {len(own)}; they differ in "
            f"{', '.join(sorted(set(saved) ^ set(own))[:3])}; set policy.weights_dtype as it was when the checkpoint was saved"
        )
    places = _trainable_shards(learner)
    stored.read(
        {
            f"masters.{name}": _check_shape(stored, f"masters.{name}", places[name].with_tensor(tensor))
            for name, tensor in own.items()
        }
    )
    learner.masters.write_back()


def _load_optimizer(learner: ShardedLearner, stored: TensorReader, state: Mapping[str, Any]) -> None:
    """Load the optimizer state through ``load_optimizer``, which checks the parameter groups."""
    places = _trainable_shards(learner)
    numbers = iter(range(len(places)))
    groups = [{**group, "params": [next(numbers, 0) for _ in group["param_names"]]} for group in state["groups"]]
    entries: dict[str, dict[str, Any]] = {name: dict(values) for name, values in state["undivided"].items()}
    into: dict[str, TensorShard] = {}
    for full in names_with_prefix(stored, "state."):
        name, _, key = full.rpartition(".")
        if name in places:
            place = places[name]
            room = torch.empty_like(place.tensor, dtype=stored.dtypes[f"state.{full}"])
            into[f"state.{full}"] = _check_shape(stored, f"state.{full}", place.with_tensor(room))
            entries.setdefault(name, {})[key] = room
    stored.read(into)
    names = _parameter_names(learner.optimizer.state_dict())
    numbered = {number: entries[name] for number, name in enumerate(names) if name in entries}
    load_optimizer(learner.optimizer, {"state": numbered, "param_groups": groups})


def _load_average(learner: ShardedLearner, stored: TensorReader, state: Mapping[str, Any], folder: Path) -> None:
    if learner.average is None or state["average_steps"] is None:
        return learner.load_average(None, folder)
    own, places = learner.average.state_dict()["average"], _trainable_shards(learner)
    found: dict[str, Tensor] = {}
    for name in names_with_prefix(stored, "average."):  # the average reports other names as an error
        found[name] = torch.empty_like(own[name]) if name in own else torch.empty(0)
    into = {f"average.{name}": places[name].with_tensor(room) for name, room in found.items() if name in own}
    stored.read({name: _check_shape(stored, name, piece) for name, piece in into.items()})
    learner.load_average({"steps": state["average_steps"], "average": found}, folder)


def _open_optimizer(folder: Path) -> tuple[TensorReader, Mapping[str, Any]]:
    """Return a reader of the optimizer state of several ranks or a single process, in the sharded format, and the unsharded state."""
    pieces, file = folder / "optimizer", folder / "optimizer.pt"
    if is_sharded(pieces):
        return ShardedReader(pieces), torch.load(pieces / STATE_FILE, map_location="cpu", weights_only=True)
    if not file.exists():
        raise FileNotFoundError(
            f"{pieces} is missing: the checkpoint was saved with checkpointing.save_optimizer=false and cannot resume"
        )
    saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    names = _parameter_names(saved["optimizer"])
    tensors = {f"masters.{name}": tensor for name, tensor in saved.get("masters", {}).items()}
    undivided: dict[str, dict[str, Any]] = {}
    for number, values in saved["optimizer"]["state"].items():
        for key, value in values.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                tensors[f"state.{names[number]}.{key}"] = value
            else:
                undivided.setdefault(names[number], {})[key] = value
    average = saved.get("average")
    if average is not None:
        tensors |= {f"average.{name}": tensor for name, tensor in average["average"].items()}
    return InMemoryReader(tensors), {
        "groups": [
            {key: value for key, value in group.items() if key != "params"} for group in saved["optimizer"]["param_groups"]
        ],
        "undivided": undivided,
        "average_steps": None if average is None else average["steps"],
        "scheduler": saved["scheduler"],
    }


# --- the parts of a learner ----------------------------------------------------------------------------------------------------------


def _trainable_shards(learner: ShardedLearner) -> dict[str, TensorShard]:
    """Return this rank's shards of the trained parameters."""
    divided: Mapping[str, Tensor] = getattr(learner.parallelism, "sharded", {})
    return {name: local_shard(divided.get(name, parameter)) for name, parameter in learner.trainable_parameters}


def _param_dtype(learner: ShardedLearner) -> torch.dtype | None:
    """Return the dtype of the computation if the shards have a higher precision, else None."""
    placement = learner.parallelism
    return None if isinstance(placement, SingleDevice) else cast("Sharded", placement).param_dtype


def _masters(learner: ShardedLearner) -> Mapping[str, Tensor]:
    """Return the float32 masters of low-precision weights: the shards themselves, or the copies of a single process."""
    if _param_dtype(learner) is not None:
        return {name: parameter.detach() for name, parameter in learner.trainable_parameters}
    return learner.masters.state_dict()


def _model_shards(model: Any) -> Iterator[tuple[str, TensorShard]]:
    """Yield this rank's shards of the model's weights, tied weights once under their first name."""
    names = _aliases(model)
    for name, tensor in model.state_dict().items():
        if name in names:
            yield name, local_shard(tensor)


def _aliases(model: Any) -> dict[str, list[str]]:
    """Return all names of each weight by its first name."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in model.state_dict().items():
        piece = local_shard(tensor).tensor
        key = (piece.untyped_storage().data_ptr(), piece.storage_offset(), tuple(tensor.shape))
        found.setdefault(key if piece.untyped_storage().nbytes() else (name,), []).append(name)
    return {names[0]: names for names in found.values()}


def _parameter_names(saved: Mapping[str, Any]) -> list[str]:
    """Return the parameter names of an optimizer state by parameter number."""
    if any("param_names" not in group for group in saved["param_groups"]):
        raise ValueError(
            "the optimizer state does not name its parameters and cannot be sharded: resume the run in a single process and save it "
            "again"
        )
    return [name for group in saved["param_groups"] for name in group["param_names"]]


def _check_shape(stored: TensorReader, name: str, piece: TensorShard) -> TensorShard:
    if stored.shapes[name] != piece.shape:
        raise ValueError(f"the checkpoint has {name} of shape {stored.shapes[name]}, and this run's is {piece.shape}")
    return piece


def _copy_shard(own: Tensor, whole: Tensor) -> None:
    """Copy this rank's shard of ``whole`` into ``own``."""
    piece = local_shard(own)
    piece.tensor.copy_(whole[piece.index])


def _copy_to_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


@lru_cache(maxsize=1)
def _gloo_group(world: Any) -> Any:
    """Return a CPU process group for checkpoints, separate from training, so that both can communicate at the same time."""
    return dist.new_group(backend="gloo", timeout=BARRIER_TIMEOUT)
