"""Quantisation-aware training by ModelOpt (``policy.quant_cfg``): the engine always samples with what the learner computes with."""

from __future__ import annotations

from strop.extensions.recipes.difference import Effect
from strop.extensions.recipes.recipe import Recipe
from strop.extensions.recipes.rules import describe, is_switched_off

POLICY, ENGINE = "policy.quant_cfg", "policy.generation.quant_cfg"
CALIBRATION = ("quant_calib_size", "quant_batch_size", "quant_sequence_length")
FOLLOWS = "the engine samples with the weights that the learner rounds"


def translate_modelopt(recipe: Recipe) -> None:
    wanted = recipe.value(POLICY)
    for name in CALIBRATION:
        if recipe.is_set(f"policy.{name}") and recipe.value(f"policy.{name}") is None:
            recipe.drop(f"policy.{name}")  # as if it were not there
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
