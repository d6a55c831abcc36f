"""Files of TRL: the YAML that its commands take, and a dump of a trainer's arguments as YAML or JSON. Their keys are flat."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from strop.config.source.yaml_source import read_config_file
from strop.extensions.recipes.key_table import apply_table, find_entry
from strop.extensions.recipes.library_recipe import LibraryRecipe
from strop.extensions.recipes.recipe_format import ReadRecipe, RecipeFormat
from strop.extensions.recipes.trl.trl_batches import ROLLOUTS
from strop.extensions.recipes.trl.trl_defaults import COMMON, SCRIPT, TRAINERS
from strop.extensions.recipes.trl.trl_keys import TRL_KEYS
from strop.problems import ConfigError, Problem

KINDS = {"grpo": "grpo", "rloo": "grpo", "online_dpo": "grpo", "sft": "sft", "dpo": "dpo", "kto": "dpo", "reward": "rm"}
TELLING = ("output_dir", "model_name_or_path", "per_device_train_batch_size", "learning_rate", "num_train_epochs", "max_steps")
SCRIPT_OF_SAMPLING = ("reward_model_name_or_path", "reward_funcs")
OF_THE_COMMAND = ("env", "config", "output_router_logits")  # read by TrlParser, not by a trainer


def is_trl(values: Mapping[str, Any]) -> bool:
    """Return whether a file is flat and has keys of TRL."""
    return sum(key in values for key in TELLING) >= 2 and any(key in COMMON or key in SCRIPT for key in values)


def find_command(values: Mapping[str, Any], path: Path) -> str:
    """Return the command of TRL whose arguments these are. Its file's name may tell. Raises ConfigError if several could be."""
    fitting = [name for name in TRL_KEYS if all(find_entry(TRL_KEYS[name], key) is not None for key in values)]
    fitting = [name for name in fitting if name in ROLLOUTS or not any(key in values for key in SCRIPT_OF_SAMPLING)]
    own = {name: sum(key in TRAINERS[name] for key in values) for name in fitting or TRL_KEYS}
    likely = [name for name, count in own.items() if count == max(own.values())]
    distinct = [name for name in likely if any(key in TRAINERS[name] and all(
        key not in TRAINERS[other] for other in likely if other != name) for key in values)]  # fmt: skip
    likely = distinct or likely
    likely = [name for name in likely if name in path.stem.lower().replace("-", "_").split("_")] or likely
    if len(likely) != 1:
        fix = "Say which: " + " or ".join(f"--from trl-{name}" for name in likely) + "."
        raise ConfigError([Problem("", f"{path} does not say which of TRL's trainers it is for", fix)])
    return likely[0]


def read_trl(path: Path, gpus: int | None = None, command: str | None = None) -> ReadRecipe:
    """Translate a file for a number of GPUs, or the number that a dump was made for. Raises ConfigError."""
    if path.suffix in (".bin", ".pt", ".pkl"):
        fix = "Write it as JSON: json.dump(args.to_dict(), file), with args = torch.load(path, weights_only=False)."
        raise ConfigError([Problem("", f"{path} is a pickle, which may run code when it is read", fix)])
    source = read_config_file(path)
    values = {key: value for key, value in source.values.items() if key not in OF_THE_COMMAND}
    command = command or find_command(values, path)
    defaults = _list_defaults(command)
    world = gpus or _infer_gpus({**defaults, **values})
    recipe = LibraryRecipe(
        KINDS[command],
        values,
        {".".join(key): origin for key, origin in source.origins.items()},
        {**defaults, "gpus": world or 1, "gpus_known": world is not None},
        "TRL",
    )
    apply_table(recipe, TRL_KEYS[command])
    return recipe.finish(values, source.files)


def explain_key(kind: str, name: str, value: Any) -> str:
    """Return what an argument of TRL's trainer for this kind of run is here; empty if it has none of this name."""
    command = next((command for command, own in KINDS.items() if own == kind), "")
    if command not in TRL_KEYS or (entry := find_entry(TRL_KEYS[command], name)) is None:
        return ""
    recipe = LibraryRecipe(kind, {name: value}, {}, {**_list_defaults(command), "gpus": 1, "gpus_known": True}, "TRL")
    try:
        apply_table(recipe, TRL_KEYS[command])
    except Exception:  # a value of another type than TRL's
        return "It is an argument of TRL's; `strop translate` says what becomes of it in a file."
    said = [f"{each.text}. {each.fix}".strip() for each in recipe.differences if each.key == name]
    if said and "=" in said[0] and type(value) in (int, float) and str(value) not in said[0]:
        said.append("That is with TRL's defaults for the rest.")
    words = set(name.split("_"))
    near = [key for key in map(recipe.name_key, entry.to) if len(words & set(re.split(r"[._]", key))) > 1]
    if near and not any("=" in text for text in said):
        said.append(f"Look at {' and '.join(near)}.")
    return f"TRL's {name}: {' '.join(said) or 'it has its default there, for which nothing is set here.'}"


def _list_defaults(command: str) -> dict[str, Any]:
    sampled = {} if command in ROLLOUTS else dict.fromkeys(SCRIPT_OF_SAMPLING)
    return {**COMMON, **{key: value for key, value in SCRIPT.items() if key not in sampled}, **TRAINERS[command]}


def _infer_gpus(values: Mapping[str, Any]) -> int | None:
    """A dump has both the completions of a batch and how often each process trains on a part: it knows its number of processes."""
    batch, steps = values.get("generation_batch_size"), values.get("steps_per_generation")
    own = (steps or 0) * values["per_device_train_batch_size"]
    return batch // own if batch and own and batch % own == 0 else None


def _make_format(name: str, command: str | None, matches: Callable[[Mapping[str, Any]], bool]) -> RecipeFormat:
    read = partial(read_trl, command=command)
    return RecipeFormat(name, matches, read, (".yaml", ".yml", ".json", ".bin"), lambda path, gpus: read(path, gpus))


FORMATS = (
    _make_format("trl", None, is_trl),
    *(_make_format(f"trl-{name}", name, lambda values: False) for name in TRL_KEYS),
)
