"""Files of verl: the YAML that hydra composes, a list of overrides, or a shell script with the command that has them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.config.source import yaml_text
from strop.config.source.yaml_source import ConfigSource, describe_missing_file, parse_once
from strop.extensions.recipes.difference import Effect
from strop.extensions.recipes.key_table import apply_table
from strop.extensions.recipes.library_recipe import LibraryRecipe
from strop.extensions.recipes.recipe_format import ReadRecipe, RecipeFormat
from strop.extensions.recipes.verl.shell_script import ShellScript, read_script
from strop.extensions.recipes.verl.verl_defaults import PPO_DEFAULTS, SFT_DEFAULTS
from strop.extensions.recipes.verl.verl_keys import VERL_PPO_KEYS, VERL_SFT_KEYS
from strop.problems import ConfigError, Origin, Problem

REFERENCE = re.compile(r"\$\{\s*(?:oc\.select:)?\s*(?P<key>\.*[A-Za-z_][\w.]*)\s*(?:,(?P<default>[^${}]*))?\}")
SFT_MODULES = ("fsdp_sft_trainer", "sft_trainer")
OWN_CONFIGS = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine")
MOST_REFERENCES = 10  # that follow each other


def is_verl(values: Mapping[str, Any]) -> bool:
    """Return whether a file has the sections of verl's trainers."""
    is_sft = "trainer" in values and "optim" in values and isinstance(values.get("model"), Mapping)
    return "actor_rollout_ref" in values or is_sft


def read_verl(path: Path) -> ReadRecipe:
    """Translate a file. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError([describe_missing_file(path, (), error)]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([Problem("", f"{path} is not a UTF-8 text file: {error.reason} at byte {error.start}")]) from error
    try:
        parsed, lines = parse_once(text)
    except yaml_text.YamlError:
        parsed, lines = None, {}
    if isinstance(parsed, dict) and path.suffix != ".sh":
        parsed.pop("defaults", None)
        if not is_verl(parsed):
            return ReadRecipe(None, ConfigSource(files=(path,)))
        values, script = _flatten(parsed), ShellScript()
        origins = {".".join(key): Origin(path, line) for key, line in lines.items()}
    else:
        script = read_script(text)
        values = _read_own_config(path, script) | {key: _parse(value) for key, value in script.overrides.items()}
        origins = {key: Origin(path, line) for key, line in script.lines.items()}
        _check_script(path, script)
    is_sft = script.module in SFT_MODULES or (
        script.module is None and "actor_rollout_ref" not in {key.split(".")[0] for key in values}
    )
    return _translate(path, values, origins, script, is_sft=is_sft)


def _read_own_config(path: Path, script: ShellScript) -> dict[str, Any]:
    """Return what a file that --config-name names sets on top of verl's own, if it is here; forget the name of such a file."""
    stem = Path(script.flags.get("config-name", "")).stem
    if not stem or stem in OWN_CONFIGS:
        return {}
    for folder in (Path(), *path.resolve().parents):
        file = folder / script.flags.get("config-path", "") / f"{stem}.yaml"
        if file.is_file():
            try:
                parsed, _ = parse_once(file.read_text(encoding="utf-8-sig"))
            except (OSError, UnicodeDecodeError, yaml_text.YamlError):
                return {}
            bases = [base for base in parsed.pop("defaults", []) if base in OWN_CONFIGS]
            script.flags["config-name"] = bases[0] if bases else OWN_CONFIGS[0]
            return {key: value for key, value in _flatten(parsed).items() if not key.startswith("hydra.")}
    return {}


def _check_script(path: Path, script: ShellScript) -> None:
    if script.module in ("main_generation", "main_eval"):
        fix = "Run `strop eval`, or `strop rollouts`, in its place."
        raise ConfigError([Problem("", f"{path} starts verl.trainer.{script.module}, which trains nothing", fix)])
    if not script.overrides:
        message = (
            f"{path} has no command of verl's with overrides, such as python3 -m verl.trainer.main_ppo data.train_batch_size=256"
        )
        raise ConfigError([Problem("", message, "Name the script that starts verl, or the config.yaml that hydra writes.")])


def _translate(
    path: Path, values: dict[str, Any], origins: Mapping[str, Origin], script: ShellScript, *, is_sft: bool
) -> ReadRecipe:
    defaults = dict(SFT_DEFAULTS if is_sft else PPO_DEFAULTS)
    config = Path(script.flags.get("config-name", "")).stem
    if "megatron" in config:
        defaults |= {"actor_rollout_ref.actor.strategy": "megatron"}
    if is_sft and (ranks := script.flags.get("nproc-per-node", "")).isdigit():
        defaults["trainer.n_gpus_per_node"] = int(ranks)
    values = {key: _resolve(value, key, values, defaults) for key, value in values.items()}
    defaults = {key: _resolve(value, key, values, defaults) for key, value in defaults.items()}
    kind = "sft" if is_sft else ("ppo" if values.get("algorithm.adv_estimator", "gae") == "gae" else "grpo")
    recipe = LibraryRecipe(kind, values, origins, defaults, "verl")
    if config and config not in OWN_CONFIGS:
        fix = "Run it once with --cfg job, and translate what that prints; or copy the file's keys into the command."
        recipe.note("--config-name", Effect.REFUSED, f"the script starts from its own file, {config}", fix)
    if script.has_conditions:
        text = "the script has conditions or loops, and its assignments were read one after another"
        recipe.note(path.name, Effect.CHANGED, text)
    for name, key in script.unassigned.items():
        recipe.note(key, Effect.RENAMED, f"the script does not assign {name}: it stays as ${{oc.env:{name}}}")
    if problems := _find_wrong_numbers(values, defaults, recipe):
        raise ConfigError(problems)
    apply_table(recipe, VERL_SFT_KEYS if is_sft else VERL_PPO_KEYS)
    if is_sft:
        recipe.set("data.add_eos", True)
    return recipe.finish(values, (path,))


def _find_wrong_numbers(values: Mapping[str, Any], defaults: Mapping[str, Any], recipe: LibraryRecipe) -> list[Problem]:
    """A number with which the translation calculates has to be one, not a shell variable that nothing assigns."""
    return [
        Problem(
            key, f"found {value!r}; it must be a number", f"Write it in the file in the place of {value}.", recipe.origin_of(key)
        )
        for key, value in values.items()
        if isinstance(defaults.get(key), int | float) and not isinstance(defaults[key], bool) and isinstance(value, str)
    ]


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name != "_target_":  # a class of verl's
            flat |= _flatten(value, f"{key}.") if isinstance(value, Mapping) and value else {key: value}
    return flat


def _parse(text: str) -> Any:
    try:
        value = yaml_text.parse_value(text)
    except yaml_text.YamlError:
        return text
    if isinstance(value, dict) and not text.lstrip().startswith("{"):
        return text
    return value


def _resolve(value: Any, key: str, values: Mapping[str, Any], defaults: Mapping[str, Any], depth: int = 0) -> Any:
    """Return a value with references to other keys; ``${oc.env:NAME}`` stays for Strop to read."""
    if isinstance(value, list):
        return [_resolve(inner, key, values, defaults, depth) for inner in value]
    if isinstance(value, str) and value.startswith("~/"):
        value = "${oc.env:HOME}" + value[1:]
    if not isinstance(value, str) or "${" not in value or depth > MOST_REFERENCES:
        return value

    def find(match: re.Match[str]) -> Any:
        target = match["key"]
        dots = len(target) - len(target.lstrip("."))
        around = key.split(".")[:-dots] if dots else []
        target = ".".join([*around, target.lstrip(".")])
        default = _parse(match["default"].strip()) if match["default"] is not None else None
        found = values[target] if target in values else defaults.get(target, default)
        return _resolve(found, target, values, defaults, depth + 1)

    whole = REFERENCE.fullmatch(value.strip())
    if whole is not None:
        return find(whole)
    return REFERENCE.sub(lambda match: str(find(match)), value)


FORMAT = RecipeFormat("verl", is_verl, read_verl, (".yaml", ".yml", ".sh"))
