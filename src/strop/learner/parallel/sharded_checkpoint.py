"""Sharded checkpoints of a learner: each rank writes its shards, and any number of ranks can read them with any parallelism.

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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.learner.learner_config import TORCH
from strop.learner.parallel.parallelism import Parallelism
from strop.learner.parallel.shard_files import (
    InMemoryReader,
    SafetensorsReader,
    ShardedReader,
    TensorReader,
    TensorShard,
    is_elsewhere,
    is_sharded,
    local_shard,
    names_with_prefix,
    storage_key,
    write_shards,
)
from strop.learner.training_state import TrainingState
from strop.models.adapters import adapter_folder, load_adapters, lora_layers, save_adapters
from strop.models.load_report import LoadReport
from strop.models.loading import quiet_transformers
from strop.models.rank_shards import find_shards

dist: Any = torch.distributed

STATE_FILE = "state.pt"
BARRIER_TIMEOUT = timedelta(minutes=60)  # how long ranks wait for each other's files


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


@torch.no_grad()
def take_snapshot(
    parallelism: Parallelism, state: TrainingState, *, optimizer: bool = True, copies: bool = True
) -> LearnerSnapshot:
    """Take a snapshot of a learner; all ranks must call it. With ``copies``, which are in CPU memory, training may continue immediately."""
    to_snapshot: Callable[[Tensor], Tensor] = _copy_to_cpu if copies else Tensor.detach
    model = parallelism.network.model
    trainable = _trainable_shards(parallelism, state)
    average = state.average.state_dict() if state.average is not None else None
    weights: dict[str, TensorShard] = {}
    adapters: dict[str, Mapping[str, Tensor]] = {}
    if lora_layers(model):
        adapters = _gather_adapters(parallelism, state)
    else:
        dtype = parallelism.param_dtype
        for name, shard in _model_shards(model):
            tensor = shard.tensor.to(dtype) if dtype is not None and name in trainable else shard.tensor
            weights[name] = shard.with_tensor(to_snapshot(tensor))
    averaged: dict[str, TensorShard] | None = None
    optimizer_shards: dict[str, TensorShard] = {}
    if average is not None:
        average_shards = {name: trainable[name].with_tensor(to_snapshot(tensor)) for name, tensor in average["average"].items()}
        optimizer_shards = {f"average.{name}": shard for name, shard in average_shards.items()}
        averaged = {
            name: shard.with_tensor(average_shards[name].tensor.to(shard.tensor.dtype)) if name in average_shards else shard
            for name, shard in weights.items()
        }
    unsharded: Mapping[str, Any] = {}
    if optimizer:
        entries, unsharded = _optimizer_state(parallelism, state, trainable, to_snapshot)
        optimizer_shards |= entries
    group = gloo_group(dist.group.WORLD) if dist.is_initialized() else None
    return LearnerSnapshot(weights, averaged, optimizer_shards if optimizer else {}, unsharded, adapters, model, group)


def _optimizer_state(
    parallelism: Parallelism,
    state: TrainingState,
    trainable: Mapping[str, TensorShard],
    to_snapshot: Callable[[Tensor], Tensor],
) -> tuple[dict[str, TensorShard], dict[str, Any]]:
    """Return the shards and the unsharded state of the optimizer, the masters, the average and the schedule."""
    saved = state.optimizer.state_dict()
    shards: dict[str, TensorShard] = {}
    unsharded: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(_parameter_names(saved)):
        for key, value in saved["state"].get(number, {}).items():
            if isinstance(value, Tensor) and value.dim() > 0:
                if value.shape != trainable[name].tensor.shape:
                    raise ValueError(
                        f"{type(state.optimizer).__name__} keeps {key} of shape {tuple(value.shape)} for {name}, whose shard has shape "
                        f"{tuple(trainable[name].tensor.shape)}: another number of ranks could not load it. Use torch.optim.AdamW, or set "
                        "checkpointing.save_optimizer=false"
                    )
                shards[f"state.{name}.{key}"] = trainable[name].with_tensor(to_snapshot(value))
            else:
                unsharded.setdefault(name, {})[key] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
    for name, master in _masters(parallelism, state).items():
        shards[f"masters.{name}"] = trainable[name].with_tensor(to_snapshot(master))
    groups = [{key: value for key, value in group.items() if key != "params"} for group in saved["param_groups"]]
    groups, unsharded = _join_stages(parallelism, copy.deepcopy(groups), unsharded)
    return shards, {
        "groups": groups,
        "undivided": unsharded,
        "average_steps": state.average.steps if state.average is not None else None,
        "scheduler": copy.deepcopy(state.schedule_state()),
    }


def _join_stages(
    parallelism: Parallelism, groups: list[dict[str, Any]], unsharded: dict[str, dict[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return the unsharded state of the optimizer for the parameters of all pipeline stages, in the model's order."""
    stages: Sequence[Any] = parallelism.gather_stages((groups, unsharded))
    if len(stages) == 1:
        return groups, unsharded
    order = [name for name, parameter in parallelism.network.model.named_parameters() if parameter.requires_grad]
    values: dict[str, dict[str, Any]] = {}
    for number, group in enumerate(groups):
        names = {name for stage_groups, _ in stages for name in stage_groups[number]["param_names"]}
        group["param_names"] = [name for name in order if name in names]
    for _, stage_values in stages:
        values |= stage_values
    return groups, {name: values[name] for name in order if name in values}


def _gather_adapters(parallelism: Parallelism, state: TrainingState) -> dict[str, Mapping[str, Tensor]]:
    """Gather the full adapters on all ranks; only the first rank keeps them."""

    def gather() -> dict[str, Tensor]:
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in parallelism.adapters().items()}
        return tensors if not dist.is_initialized() or dist.get_rank() == 0 else {}

    adapters: dict[str, Mapping[str, Tensor]] = {"weights": gather()}
    if state.average is not None:
        with state.average.swap_in(state.trainable_parameters):
            adapters["ema"] = gather()
    return adapters


def _save_config(model: Any, folder: Path, weights: Mapping[str, TensorShard]) -> None:
    """Write the model's configuration, including its class name, next to the shards."""
    config = copy.deepcopy(getattr(model, "config", None))
    if config is None:
        return
    config.architectures = [type(model).__name__]
    config.dtype = next((shard.tensor.dtype for shard in weights.values() if shard.tensor.is_floating_point()), None)
    with quiet_transformers():
        config.save_pretrained(folder)
        if getattr(model, "generation_config", None) is not None and model.can_generate():
            model.generation_config.save_pretrained(folder)


# --- loading -------------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def load(parallelism: Parallelism, folder: Path, state: TrainingState) -> None:
    """Load a checkpoint of any number of ranks, in place. Each rank reads what it needs, without communication.

    Raises FileNotFoundError without an optimizer state, and ValueError if the checkpoint does not fit.
    """
    stored, unsharded = _open_optimizer(folder)
    model, weights = parallelism.network.model, folder / "weights"
    if lora_layers(model):
        load_adapters(model, weights, _copy_shard)
    else:
        load_weights(model, weights)
    trainable = _trainable_shards(parallelism, state)
    elsewhere = {name for name, _ in parallelism.elsewhere}
    _load_masters(_masters(parallelism, state), trainable, stored, elsewhere)
    state.masters.write_back()
    state.load_optimizer(_read_optimizer(state, trainable, stored, unsharded, elsewhere))
    state.load_scheduler(unsharded["scheduler"], state.optimizer.state_dict())
    state.load_average(_read_average(state, trainable, stored, unsharded, elsewhere), folder)


@torch.no_grad()
def load_weights(model: Any, folder: Path) -> None:
    """Load shards or a Hugging Face folder into a module, in place. Raises ValueError unless every weight is present (tied ones once)."""
    if adapter_folder(str(folder)) is not None:
        raise ValueError(
            f"{folder} has adapters, and this run trains the full model; set dtensor_cfg.lora_cfg as it was when they were "
            "saved, or start with another checkpointing.checkpoint_dir"
        )
    aliases = _aliases(model)
    shards = dict(_model_shards(model))
    stored = _open_weights(model, folder, {alias for names in aliases.values() for alias in names})
    stored_names = {name: next((alias for alias in aliases[name] if alias in stored.shapes), None) for name in shards}
    missing = [name for name, alias in stored_names.items() if alias is None]
    known = {alias for names in aliases.values() for alias in names}
    unexpected = [name for name in stored.shapes if name not in known]
    mismatched = [
        name for name, alias in stored_names.items() if alias is not None and stored.shapes[alias] != shards[name].shape
    ]
    LoadReport(missing=missing, unexpected=unexpected, mismatched=mismatched).refuse(str(folder), "the model", key="")
    stored.read({alias: shards[name] for name, alias in stored_names.items() if alias is not None})


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
        full, info = type(model).from_pretrained(folder, config=config, dtype="auto", output_loading_info=True)
    LoadReport.of_transformers(info, full).refuse(str(folder), "the model", key="")
    return InMemoryReader(full.state_dict())


def _load_masters(
    masters: Mapping[str, Tensor], trainable: Mapping[str, TensorShard], stored: TensorReader, elsewhere: Collection[str]
) -> None:
    saved = [name for name in names_with_prefix(stored, "masters.") if name not in elsewhere]
    if set(saved) != set(masters):
        raise ValueError(
            f"the checkpoint has float32 masters of {len(saved)} weights and this run keeps {len(masters)}; they differ in "
            f"{', '.join(sorted(set(saved) ^ set(masters))[:3])}; set policy.weights_dtype as it was when the checkpoint was saved"
        )
    stored.read(
        {
            f"masters.{name}": _check_shape(stored, f"masters.{name}", trainable[name].with_tensor(tensor))
            for name, tensor in masters.items()
        }
    )


def _read_optimizer(
    state: TrainingState,
    trainable: Mapping[str, TensorShard],
    stored: TensorReader,
    unsharded: Mapping[str, Any],
    elsewhere: Collection[str],
) -> dict[str, Any]:
    """Return this rank's shard of the optimizer's ``state_dict``."""
    numbers = iter(range(len(trainable)))
    own = [[name for name in group["param_names"] if name not in elsewhere] for group in unsharded["groups"]]
    groups = [
        {**group, "param_names": names, "params": [next(numbers, 0) for _ in names]}
        for group, names in zip(unsharded["groups"], own, strict=True)
    ]
    entries: dict[str, dict[str, Any]] = {name: dict(values) for name, values in unsharded["undivided"].items()}
    into: dict[str, TensorShard] = {}
    for full_name in names_with_prefix(stored, "state."):
        name, _, key = full_name.rpartition(".")
        if name in trainable:
            shard = trainable[name]
            buffer = torch.empty_like(shard.tensor, dtype=stored.dtypes[f"state.{full_name}"])
            into[f"state.{full_name}"] = _check_shape(stored, f"state.{full_name}", shard.with_tensor(buffer))
            entries.setdefault(name, {})[key] = buffer
    stored.read(into)
    names = _parameter_names(state.optimizer.state_dict())
    numbered = {number: entries[name] for number, name in enumerate(names) if name in entries}
    return {"state": numbered, "param_groups": groups}


def _read_average(
    state: TrainingState,
    trainable: Mapping[str, TensorShard],
    stored: TensorReader,
    unsharded: Mapping[str, Any],
    elsewhere: Collection[str],
) -> dict[str, Any] | None:
    """Return this rank's shard of the average's ``state_dict``; None if the run or the checkpoint has no average."""
    if state.average is None or unsharded["average_steps"] is None:
        return None
    current = state.average.state_dict()["average"]
    loaded: dict[str, Tensor] = {}
    saved = (name for name in names_with_prefix(stored, "average.") if name not in elsewhere)
    for name in saved:  # the average reports other names as an error
        loaded[name] = torch.empty_like(current[name]) if name in current else torch.empty(0)
    into = {f"average.{name}": trainable[name].with_tensor(buffer) for name, buffer in loaded.items() if name in current}
    stored.read({name: _check_shape(stored, name, shard) for name, shard in into.items()})
    return {"steps": unsharded["average_steps"], "average": loaded}


def _open_optimizer(folder: Path) -> tuple[TensorReader, Mapping[str, Any]]:
    """Return a reader of the optimizer state of several ranks or a single process, in the sharded format, and the unsharded state."""
    shards, path = folder / "optimizer", folder / "optimizer.pt"
    found = find_shards(folder / "weights") if is_sharded(shards) and not (shards / STATE_FILE).exists() else None
    if found is not None and found[0].section != TORCH:
        raise ValueError(
            f"{folder} was saved by {found[0].title}, whose optimizer keeps its state under other names than torch's: continue with "
            f"policy.{found[0].section}.enabled=true, or begin a run from its weights (`strop export`, then policy.model_name)"
        )
    if is_sharded(shards):
        return ShardedReader(shards), torch.load(shards / STATE_FILE, map_location="cpu", weights_only=True)
    if not path.exists():
        raise FileNotFoundError(
            f"{shards} is missing: the checkpoint was saved with checkpointing.save_optimizer=false and cannot resume"
        )
    saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    names = _parameter_names(saved["optimizer"])
    tensors = {f"masters.{name}": tensor for name, tensor in saved.get("masters", {}).items()}
    unsharded: dict[str, dict[str, Any]] = {}
    for number, values in saved["optimizer"]["state"].items():
        for key, value in values.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                tensors[f"state.{names[number]}.{key}"] = value
            else:
                unsharded.setdefault(names[number], {})[key] = value
    average = saved.get("average")
    if average is not None:
        tensors |= {f"average.{name}": tensor for name, tensor in average["average"].items()}
    return InMemoryReader(tensors), {
        "groups": [
            {key: value for key, value in group.items() if key != "params"} for group in saved["optimizer"]["param_groups"]
        ],
        "undivided": unsharded,
        "average_steps": None if average is None else average["steps"],
        "scheduler": saved["scheduler"],
    }


# --- the parts of a learner ----------------------------------------------------------------------------------------------------------


def _trainable_shards(parallelism: Parallelism, state: TrainingState) -> dict[str, TensorShard]:
    """Return this rank's shards of the trained parameters."""
    return {name: local_shard(parallelism.sharded.get(name, parameter)) for name, parameter in state.trainable_parameters}


def _masters(parallelism: Parallelism, state: TrainingState) -> Mapping[str, Tensor]:
    """Return the float32 masters of low-precision weights: the shards themselves, or the copies of a single process."""
    if parallelism.param_dtype is not None:
        return {name: parameter.detach() for name, parameter in state.trainable_parameters}
    return state.masters.state_dict()


def _model_shards(model: Any) -> Iterator[tuple[str, TensorShard]]:
    """Yield this rank's shards of the model's weights, tied weights once under their first name; not those of other stages."""
    names = _aliases(model)
    for name, tensor in model.state_dict().items():
        if name in names and not is_elsewhere(tensor):
            yield name, local_shard(tensor)


def _aliases(model: Any) -> dict[str, list[str]]:
    """Return all names of each weight by its first name."""
    aliases: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in model.state_dict().items():
        local = local_shard(tensor).tensor
        key = (storage_key(local), local.storage_offset(), tuple(tensor.shape))
        aliases.setdefault(key if local.untyped_storage().nbytes() else (name,), []).append(name)
    return {names[0]: names for names in aliases.values()}


def _parameter_names(saved: Mapping[str, Any]) -> list[str]:
    """Return the parameter names of an optimizer state by parameter number."""
    if any("param_names" not in group for group in saved["param_groups"]):
        raise ValueError(
            "the optimizer state does not name its parameters and cannot be sharded: resume the run in a single process and save it "
            "again"
        )
    return [name for group in saved["param_groups"] for name in group["param_names"]]


def _check_shape(stored: TensorReader, name: str, shard: TensorShard) -> TensorShard:
    if stored.shapes[name] != shard.shape:
        raise ValueError(f"the checkpoint has {name} of shape {stored.shapes[name]}, and this run's is {shard.shape}")
    return shard


def _copy_shard(local: Tensor, full: Tensor) -> None:
    """Copy this rank's shard of ``full`` into ``local``."""
    shard = local_shard(local)
    shard.tensor.copy_(full[shard.index])


def _copy_to_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


@lru_cache(maxsize=1)
def gloo_group(world: Any) -> Any:
    """Return a CPU process group for checkpoints, separate from training, so that both can communicate at the same time."""
    return dist.new_group(backend="gloo", timeout=BARRIER_TIMEOUT)
