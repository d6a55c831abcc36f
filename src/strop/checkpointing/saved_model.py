"""The ``step_N`` folders in a checkpoint folder."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from strop.models.rank_shards import RankShardReader, find_shards

_STEP = re.compile(r"step_(0|[1-9][0-9]*)")  # step_05 is not a checkpoint of step 5: a run would write step_5 next to it


def list_steps(folder: Path) -> list[int]:
    """Return the steps that have a checkpoint, in order; empty if there is no folder."""
    if not folder.is_dir():
        return []
    matches = (_STEP.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in matches if match)


RUN_CONFIG = "config.yaml"  # in a log folder and in each checkpoint
ATTACHED_CONFIG = "strop_config.yaml"  # the same, in an exported folder
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_WHOLE_MODEL = ("config.json", "adapter_config.json", "value_head.json")

Layout: TypeAlias = Literal["whole", "shards", "adapters", "value head", "hub"]


class SavedModelNotFound(ValueError):
    """There is no model under this name. The message lists what is there instead."""


@dataclass(frozen=True)
class SavedModel:
    """The weights of a model, and the run they come from if there is one."""

    weights: str  # a folder, or the name of a model on the hub
    checkpoint: Path | None = None  # its step_N folder
    config_file: Path | None = None  # the configuration of its run

    @property
    def layout(self) -> Layout:
        folder = Path(self.weights)
        if not folder.is_dir():
            return "hub"
        if self.shards is not None:
            return "shards"
        if (folder / "adapter_config.json").is_file():
            return "adapters"
        return "value head" if (folder / "value_head.json").is_file() else "whole"

    @property
    def needs_conversion(self) -> bool:
        """Whether ``convert_model`` is needed to make a folder that ``from_pretrained`` reads."""
        return self.layout == "shards"

    @cached_property
    def shards(self) -> tuple[RankShardReader, Path] | None:
        """What reads the shards of ranks, and their folder; None for a model of another layout."""
        return find_shards(Path(self.weights))

    @property
    def step(self) -> int | None:
        """The step of its checkpoint; None if it does not come from a checkpoint."""
        name = "" if self.checkpoint is None else self.checkpoint.resolve().name
        return int(name[5:]) if re.fullmatch(r"step_\d+", name) else None

    @cached_property
    def run_values(self) -> Mapping[str, Any]:
        """The configuration of its run as nested dicts; empty without one."""
        return {} if self.config_file is None else read_yaml(self.config_file)

    @property
    def run_root(self) -> Path:
        """The working directory of its run, as far as its folder names reveal it."""
        if self.config_file is None:
            return Path()
        key, folder = ("logger", "log_dir"), self.config_file.parent
        if self.checkpoint is not None and self.config_file.parent == self.checkpoint:
            key, folder = ("checkpointing", "checkpoint_dir"), self.checkpoint.parent
        return _strip_suffix(folder, str(self.run_values.get(key[0], {}).get(key[1], "")))

    @property
    def log_folder(self) -> Path | None:
        """The log folder of its run, if it exists."""
        written = self.run_values.get("logger", {}).get("log_dir")
        folder = None if written is None else self.run_root / written
        return folder if folder is not None and folder.is_dir() else None

    @property
    def description(self) -> str:
        kinds: dict[Layout, str] = {"adapters": "LoRA adapters", "value head": "a value head"}
        kind = kinds.get(self.layout) if self.shards is None else self.shards[0].shards_title
        return f"{self.weights} ({kind})" if kind else self.weights


def read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        found = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except (YAMLError, UnicodeDecodeError) as error:
        raise SavedModelNotFound(f"{path} cannot be read as the configuration of a run: {str(error).splitlines()[0]}") from error
    return found if isinstance(found, Mapping) else {}


def find_saved_model(
    name: str | Path, *, step: int | None = None, best: bool = False, ema: bool = False, critic: bool = False
) -> SavedModel:
    """Find the weights that ``name`` refers to.

    Args:
        name: A log folder, a folder of checkpoints, a checkpoint (step_N), a folder in it, any Hugging Face folder, or a hub name.
        step: The step of the checkpoint of a run; None is the newest.
        best: The checkpoint of a run with the best value of ``checkpointing.metric_name``.
        ema: The averaged weights.
        critic: The critic of ``strop ppo`` instead of the policy.

    Raises SavedModelNotFound.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return _find_elsewhere(str(name), folder, chosen=step is not None or best or ema or critic)
    checkpoint = _find_checkpoint(folder, step, best)
    if checkpoint is None:
        return _find_weights(folder, ema=ema, critic=critic, chosen=step is not None or best)
    part = "value" if critic else "policy"
    weights = checkpoint / part / ("ema" if ema else "weights")
    if not weights.is_dir():
        raise SavedModelNotFound(_explain_missing_part(checkpoint, ema=ema, critic=critic))
    config = checkpoint / RUN_CONFIG
    return SavedModel(str(weights), checkpoint, config if config.is_file() else None)


def is_hub_name(name: str) -> bool:
    """Whether a name may be a model on the hub, and is not a folder."""
    return bool(_HUB_NAME.fullmatch(name)) and not name.startswith((".", "~")) and not Path(name).exists()


def find_checkpoints(folder: Path, values: Mapping[str, Any]) -> Path:
    """Return the checkpoint folder of the run in a log folder, whose configuration may name it relative to another folder."""
    written = str(values.get("checkpointing", {}).get("checkpoint_dir", "results"))
    root = _strip_suffix(folder, str(values.get("logger", {}).get("log_dir", "")))
    candidates = [root / written, Path(written), *(parent / written for parent in folder.resolve().parents)]
    return next((path for path in candidates if path.is_dir()), candidates[0])


def choose_step(folder: Path, step: int | None, *, best: bool, higher_is_better: bool = True) -> Path:
    """Return the newest step_N folder, the one of a step, or the best one. Raises SavedModelNotFound."""
    steps = list_steps(folder)
    if not steps:
        raise SavedModelNotFound(f"{folder} has no checkpoint yet (checkpointing.save_period says when one is saved)")
    if step is not None and step not in steps:
        raise SavedModelNotFound(f"{folder} has no checkpoint of step {step}; there are: {', '.join(map(str, steps))}")
    if not best:
        return folder / f"step_{steps[-1] if step is None else step}"
    ranked = {each: value for each in steps if (value := _read_metric(folder / f"step_{each}")) is not None}
    if not ranked:
        raise SavedModelNotFound(
            f"none of the checkpoints in {folder} has a value of the metric that ranks them (checkpointing.metric_name); choose one by "
            f"--step; there are: {', '.join(map(str, steps))}"
        )
    return folder / f"step_{max(ranked, key=lambda each: (ranked[each] if higher_is_better else -ranked[each], each))}"


def _find_checkpoint(folder: Path, step: int | None, best: bool) -> Path | None:
    """Return the step_N folder that a folder is, contains or (for a log folder) names; None for a folder of weights."""
    if (folder / "policy").is_dir():
        return folder
    values = read_yaml(folder / RUN_CONFIG) if (folder / RUN_CONFIG).is_file() else {}
    checkpoints = folder
    if not list_steps(folder):
        if not values:
            return None
        checkpoints = find_checkpoints(folder, values)
    higher = True
    if best and (newest := list_steps(checkpoints)):
        saving = values or read_yaml(checkpoints / f"step_{newest[-1]}" / RUN_CONFIG)
        higher = bool(saving.get("checkpointing", {}).get("higher_is_better", True))
    return choose_step(checkpoints, step, best=best, higher_is_better=higher)


def _find_weights(folder: Path, *, ema: bool, critic: bool, chosen: bool) -> SavedModel:
    """Return the model in a folder of weights, which may be part of a checkpoint."""
    if chosen:
        raise SavedModelNotFound(f"{folder} is no run: --step and --best choose among the step_N folders of one")
    if (folder / "weights").is_dir():  # step_N/policy
        folder = folder / "weights"
    if (found := find_shards(folder)) is not None:
        reader, shards = found
        if shards == folder and reader.find_shards(reader.model_folder(folder)) == folder:  # the model is in the folder around it
            folder = reader.model_folder(folder)
    checkpoint = folder.resolve().parents[1]
    belongs = folder.resolve().parent.name in ("policy", "value") and (checkpoint / RUN_CONFIG).is_file()
    if belongs and (ema or critic):
        return find_saved_model(checkpoint, ema=ema, critic=critic)
    if ema or critic:
        raise SavedModelNotFound(f"{folder} is no checkpoint: --ema and --critic choose among the parts of one (step_N)")
    known = found is not None or any((folder / name).is_file() for name in _WHOLE_MODEL)
    if not known and not any(folder.glob("*.gguf")):
        raise SavedModelNotFound(
            f"{folder} holds neither a run (config.yaml), nor checkpoints (step_N), nor a model (config.json, adapter_config.json)"
            f"{_list_names(folder)}"
        )
    if belongs:
        return SavedModel(str(folder), checkpoint, checkpoint / RUN_CONFIG)
    attached = folder / ATTACHED_CONFIG
    return SavedModel(str(folder), None, attached if attached.is_file() else None)


def _find_elsewhere(name: str, path: Path, *, chosen: bool) -> SavedModel:
    """Return a model on the hub. Raises SavedModelNotFound, with similar names, if the name can only be a missing folder."""
    is_path = path.exists() or not is_hub_name(name)
    inside_local = len(path.parts) > 1 and Path(path.parts[0]).is_dir()
    near = suggest_paths(path)
    if is_path or inside_local or (near and len(path.parts) > 1) or chosen:
        reason = "is a file; name the folder it is in" if path.is_file() else "does not exist"
        raise SavedModelNotFound(
            f"{name} {reason}{f'; did you mean {near[0]}?' if near else ''}{'' if near else _list_existing(path)}"
        )
    return SavedModel(name)


def suggest_paths(path: Path) -> list[str]:
    """Return existing folders with similar names, correcting each part of the path in turn; empty if a part resembles none."""
    found = Path(path.anchor) if path.is_absolute() else Path()
    for part in path.parts[1:] if path.is_absolute() else path.parts:
        if part in ("..", ".") or (found / part).exists():
            found = found / part
            continue
        names = sorted(entry.name for entry in found.iterdir() if entry.is_dir()) if found.is_dir() else []
        close = difflib.get_close_matches(part, names, n=1, cutoff=0.6)
        if not close:
            return []
        found = found / close[0]
    return [str(found)]


def _list_existing(path: Path) -> str:
    parent = path.parent
    while not parent.is_dir():
        parent = parent.parent
    return _list_names(parent)


def _list_names(folder: Path) -> str:
    names: Sequence[str] = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    return f"; folders in {folder}: {', '.join(names[:12])}" if names else ""


def _explain_missing_part(checkpoint: Path, *, ema: bool, critic: bool) -> str:
    if critic and not (checkpoint / "value").is_dir():
        return f"{checkpoint} has no critic (no value folder): only strop ppo trains one; leave out --critic"
    if ema:
        return f"{checkpoint} has no averaged weights: the run had policy.ema.enabled=false; leave out --ema"
    return f"{checkpoint} has no weights: the checkpoint is not complete; choose another one with --step"


def _read_metric(checkpoint: Path) -> float | None:
    """Return the ranking metric of a checkpoint; None if it has none."""
    try:
        value = json.loads((checkpoint / "metric.json").read_text())["value"]
    except (OSError, ValueError, KeyError):
        return None
    return float(value) if value is not None and math.isfinite(value) else None


def _strip_suffix(folder: Path, suffix: str) -> Path:
    """Return the folder to which ``suffix`` is relative if ``folder`` ends with it; otherwise the current folder."""
    parts = Path(suffix).parts
    if not parts or Path(suffix).is_absolute():
        return Path()
    for candidate in (folder, folder.resolve()):
        if candidate.parts[-len(parts) :] == parts:
            return candidate.parents[len(parts) - 1]
    return Path()
