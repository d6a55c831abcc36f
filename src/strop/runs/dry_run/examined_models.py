"""Checks that folders named as models contain one. Hub names are not looked up."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from strop.base_config import BaseConfig
from strop.config.schema.run_config import EvalRunConfig, iter_model_names
from strop.models.rank_shards import find_shards
from strop.packages import are_assumed
from strop.problems import Problem
from strop.user_code import find_near_paths

ADAPTERS_FILE = "adapter_config.json"


HUB_MODEL = re.compile(r"([\w-][\w.-]*/)?[\w-][\w.-]*", re.ASCII)


def find_model_problems(config: BaseConfig) -> Iterator[Problem]:
    """Yield a problem for each key that names a folder without a model."""
    reported: set[str] = set()
    for key, name in iter_model_names(config):
        if is_elsewhere(name):
            continue
        reason = explain_missing_model(name) or (None if isinstance(config, EvalRunConfig) else _explain_shards(name))
        if name not in reported and reason:
            reported.add(name)
            yield Problem(key, reason, "Set it to a folder with a model, or to OWNER/NAME of the hub.")


def list_models_elsewhere(config: BaseConfig) -> list[str]:
    """Return a note for each model in a folder that is assumed to exist on the run's machines."""
    return [
        f"{key}: {name} is not on this machine: it was not examined"
        for key, name in iter_model_names(config)
        if is_elsewhere(name)
    ]


def is_elsewhere(name: str) -> bool:
    return are_assumed() and Path(name).is_absolute() and not Path(name).exists()


def explain_missing_model(name: str) -> str | None:
    """Explain why a name does not refer to a model; None if it may."""
    try:
        path = Path(os.path.expanduser(name))
        if path.is_dir():
            return _explain_folder(path)
        if path.is_file():
            return f"{name:.300} is a file, and a model is a folder"
    except (OSError, ValueError, RuntimeError) as error:
        return f"{name!r:.300} cannot be the path of a model: {error!s:.300}"
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        where = "" if path.is_absolute() else f" in the working directory {Path.cwd()}"
        near = find_near_paths(path)
        return f"there is no folder {name:.300}{where}" + (f"; did you mean {near[0]}?" if near else "")
    if not HUB_MODEL.fullmatch(name):
        hint = "; ${oc.env:NAME} reads an environment variable" if "$" in name else ""
        return f"{name!r:.300} is neither a folder nor a name that the hub can have{hint}"
    return None


def _explain_folder(path: Path) -> str | None:
    if any(path.glob("*.gguf")) or (path / ADAPTERS_FILE).exists() or find_shards(path) is not None:
        return None
    file = path / "config.json"
    if not file.exists():
        steps = sorted(path.glob("step_*/policy/weights"))
        inside = f"; the weights of a run are in {steps[-1]}" if steps else ""
        return f"the folder {path} has no model (no config.json, no .gguf file){inside}"
    try:
        values = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        return f"{file} cannot be read: {error!s:.300}"
    if not isinstance(values, dict) or not (values.get("model_type") or values.get("architectures")):
        return f"{file} names no model_type, so the folder is not a model's"
    return None


def _explain_shards(name: str) -> str | None:
    """Return how to convert a folder of checkpoint shards into a model; only an evaluation reads shards directly."""
    if find_shards(Path(name).expanduser()) is None:
        return None
    from strop.models.loading import ModelNotFound, locate_model  # imports Transformers

    try:
        locate_model(name)
    except ModelNotFound as error:
        return str(error).removeprefix("policy.model_name: ")
    return None
