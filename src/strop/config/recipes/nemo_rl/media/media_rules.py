"""Recipes of models that see and hear: images are trained on by the torch learner; sound, video and images on Megatron Core are refused."""

from __future__ import annotations

from collections.abc import Iterator

from strop.config.recipes.difference import Effect
from strop.config.recipes.recipe import Recipe
from strop.config.recipes.rules import Rule, Unused, describe, is_switched_off
from strop.config.recipes.unsupported import Unsupported

IMAGE_DATASETS = ("clevr-cogent", "geometry3k", "refcoco", "mmpr-tiny")
SOUND_DATASETS = ("audiomcq", "avqa", "daily-omni", "intent-train", "intent-bench", "mmau", "TwinkStart/MMAU")
CONVERSATIONS_OF_FILES = "general-conversation-jsonl"
ASKED_FOR = ("data.*", "env.*", "*generation.bad_words", "*.automodel_kwargs.freeze_config")  # only follows from it
LIMITS = ("*generation.vllm_cfg.limit_mm_per_prompt", "*generation.vllm_kwargs.limit_mm_per_prompt")
MEGATRON = "policy.megatron_cfg.enabled"

SOUND_AND_VIDEO = Unsupported(
    (
        *("*.tokenizer.audio", "*.tokenizer.video", "tokenizer.audio", "tokenizer.video"),
        *("*generation.vllm_cfg.video", "*generation.vllm_cfg.audio"),
        *(f"{limit}.{kind}" for limit in LIMITS for kind in ("audio", "video")),
        *(f"data.*dataset_name={name}" for name in SOUND_DATASETS),
        *(f"*.limit_mm_per_prompt.{kind}" for kind in ("audio", "video")),
    ),
    "models read text and images in this version, no audio and no video",
    "Take a recipe on text or images, or set policy.model_name and data.train to a model and to data without sound and video.",
    hides=(
        *ASKED_FOR,
        "policy.is_vlm",
        "*.use_processor",
        *LIMITS,
        "*generation.vllm_cfg.reset_encoder_cache_after_weight_update",
    ),
)


def refuse_images_on_megatron(recipe: Recipe) -> None:
    """Refuse a recipe of images that Megatron Core would train."""
    if not recipe.value(MEGATRON) or recipe.value("policy.backend", "auto") == "torch":
        return
    key = next(_find_images(recipe), None)
    if key is not None:
        recipe.refuse(
            key,
            f"found {describe(recipe.value(key))}, but Megatron Core trains models of text alone in this version",
            "Set policy.backend=torch: the torch learner trains models that read images, and takes over what policy.megatron_cfg says.",
        )
        recipe.explained += [*ASKED_FOR, "policy.megatron_cfg"]


def _find_images(recipe: Recipe) -> Iterator[str]:
    """Yield the keys that ask for images."""
    names = (key for key in recipe.find("data.*dataset_name") if recipe.value(key) in (*IMAGE_DATASETS, CONVERSATIONS_OF_FILES))
    limits = (key for limit in LIMITS for key in recipe.find(f"{limit}.image") if not is_switched_off(recipe.value(key)))
    asked = (key for key in recipe.find("policy.is_vlm") if recipe.value(key))
    yield from (*asked, *names, *limits)


def translate_encoder_reset(recipe: Recipe) -> None:
    """``reset_encoder_cache_after_weight_update``: kept outputs of the vision tower."""
    for key in list(recipe.find("*generation.vllm_cfg.reset_encoder_cache_after_weight_update")):
        recipe.unused(key, "what the engine keeps of images is reset with its other caches, by policy.generation.weight_sync")


def translate_frozen_parts(recipe: Recipe) -> None:
    """Automodel's ``freeze_config``: the parts of a model that are not trained."""
    for section in list(recipe.find("*.dtensor_cfg.automodel_kwargs.freeze_config")):
        model = section.partition(".")[0]
        if recipe.is_set(f"{section}.freeze_vision_tower") and recipe.is_own_key(f"{model}.freeze_vision_tower"):
            recipe.rename(f"{section}.freeze_vision_tower", f"{model}.freeze_vision_tower")
        recipe.unused_if_set(f"{section}.freeze_audio_tower", "models read no audio here")


def use_processor_template(recipe: Recipe) -> None:
    """Render messages with the model's own template, as NeMo-RL does where there are images: a recipe's is the tokenizer's there."""
    key = "policy.tokenizer.chat_template"
    template = recipe.value(key)
    if next(_find_images(recipe), None) is None or not isinstance(template, str) or template == "default" or "image" in template:
        return
    recipe.set(key, "default", because=key)
    recipe.note(key, Effect.RENAMED, "default here: with images, NeMo-RL renders with the template of the model's processor, too")


UNSUPPORTED_MEDIA: tuple[Rule, ...] = (SOUND_AND_VIDEO, refuse_images_on_megatron)
MEDIA_RULES: tuple[Rule, ...] = (
    translate_encoder_reset,
    translate_frozen_parts,
    use_processor_template,
    Unused("policy.is_vlm", "the model's own configuration says whether it reads images"),
    Unused("*.tokenizer.use_processor", "a model that reads images brings its processor"),
    Unused("grpo.deduplicate_multimodal_data", "the images of a prompt are held once for the rollouts of its group"),
    Unused("grpo.debug_payload_metrics", "it measures NeMo-RL's messages between processes"),
)


def note_image_options(recipe: Recipe, key: str, name: str) -> None:
    """Translate the options of a built-in set of images at ``key``, which NeMo-RL's class of that name takes."""
    if name == "refcoco":
        recipe.note(
            f"{key}.dataset_name",
            Effect.CHANGED,
            "of several phrases for a region, its number draws one, the same in every epoch; NeMo-RL draws one anew",
        )
    if name in ("refcoco", "mmpr-tiny") and recipe.is_set(f"{key}.download_dir"):
        text = "media_data_dir here: images are not downloaded, and are expected in this folder as NeMo-RL leaves them there"
        recipe.rename(f"{key}.download_dir", f"{key}.media_data_dir", text=text)
