"""Quantisation-aware training by ModelOpt (``policy.quant_cfg``): the engine always samples with what the learner computes with."""

from __future__ import annotations

from pathlib import Path

from strop.config.recipes.difference import Effect
from strop.config.recipes.recipe import Recipe
from strop.config.recipes.rules import describe, is_switched_off
from strop.models.fake_quant.modelopt_presets import PRESETS

POLICY, ENGINE = "policy.quant_cfg", "policy.generation.quant_cfg"
CALIBRATION = ("quant_calib_data", "quant_calib_size", "quant_batch_size", "quant_sequence_length")
FOLLOWS = "the engine samples with the weights that the learner rounds"


def translate_modelopt(recipe: Recipe) -> None:
    wanted = recipe.value(POLICY)
    for name in CALIBRATION:
        if recipe.is_set(f"policy.{name}") and recipe.value(f"policy.{name}") is None:
            recipe.drop(f"policy.{name}")  # as if it were not there
    if isinstance(wanted, str) and (found := _find_file(recipe, POLICY, wanted)) is not None:
        recipe.set(POLICY, found, because=POLICY)
    _drop_engine_keys(recipe, wanted)
    if recipe.is_set("policy.disable_modelopt_layer_spec"):
        recipe.unused("policy.disable_modelopt_layer_spec", "layers are those of Transformers, with or without quantisation")


def _drop_engine_keys(recipe: Recipe, wanted: str | None) -> None:
    engine, real = recipe.value(ENGINE), recipe.value("policy.generation.real_quant", False)
    if engine and engine != wanted:
        recipe.refuse(
            ENGINE,
            f"found {describe(engine)}, but {POLICY} is {wanted or 'null'}, and {FOLLOWS}",
            f"Set {POLICY} to it too, or both to null.",
        )
    elif recipe.is_set(ENGINE):
        same = wanted is None or engine is not None
        text = FOLLOWS if same else f"{FOLLOWS}, where NeMo-RL's would sample with weights that are not rounded"
        recipe.note(ENGINE, Effect.UNUSED if same else Effect.CHANGED, text)
        recipe.drop(ENGINE)
    key = "policy.generation.real_quant"
    if recipe.is_set(key):
        text = "weights are rounded before they are sent, and multiplied in the engine's precision: the same values, without FP4 kernels"
        recipe.note(key, Effect.CHANGED if real else Effect.UNUSED, text if real else "it is switched off")
        recipe.drop(key)
    ignored = "policy.generation.real_quant_ignore"
    if recipe.is_set(ignored):
        asked = wanted and not is_switched_off(recipe.value(ignored))
        text = f"{FOLLOWS}: the layers of {POLICY}, on both sides" if asked else "nothing is quantised"
        recipe.note(ignored, Effect.CHANGED if asked else Effect.UNUSED, text)
        recipe.drop(ignored)
    recipe.unused_if_set("policy.generation.real_quant_export_cpu_offload", "rounded weights are sent as others are")


def _find_file(recipe: Recipe, key: str, wanted: str) -> str | None:
    """Return the file that a recipe names relative to the folder that its library is run from, which is above the recipe."""
    path, origin = Path(wanted).expanduser(), recipe.source.find_origin(tuple(key.split(".")))
    if wanted in PRESETS or path.is_absolute() or path.is_file() or origin is None or not isinstance(origin.source, Path):
        return None
    above = (folder / path for folder in origin.source.resolve().parents)
    return next((str(file) for file in above if file.is_file()), None)
