"""Recipes of models that see and hear: the torch learner trains on images; sound and video are refused, and so are images where a recipe
insists on Megatron Core."""

from __future__ import annotations

import re
from collections.abc import Iterator

from strop.extensions.recipes.difference import Effect
from strop.extensions.recipes.recipe import Recipe
from strop.extensions.recipes.rules import Rule, Unsupported, Unused, describe, is_switched_off

IMAGE_DATASETS = ("clevr-cogent", "geometry3k", "refcoco", "mmpr-tiny")
SOUND_DATASETS = ("audiomcq", "avqa", "daily-omni", "intent-train", "intent-bench", "mmau", "TwinkStart/MMAU")
CONVERSATIONS_OF_FILES = "general-conversation-jsonl"
ASKED_FOR = ("data.*", "env.*", "*generation.bad_words", "*.automodel_kwargs.freeze_config")  # only follows from it
LIMITS = ("*generation.vllm_cfg.limit_mm_per_prompt", "*generation.vllm_kwargs.limit_mm_per_prompt")
MEGATRON = "policy.megatron_cfg.enabled"
MEDIA_TOKEN = re.compile(r"</?(?:image|img|video|audio|sound|so_(?:embedding|start|end))>")

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
    """Refuse a recipe of images that says ``policy.backend=megatron``."""
    key = find_images(recipe)
    if not recipe.value(MEGATRON) or recipe.value("policy.backend") != "megatron":
        return
    if key is not None:
        recipe.refuse(
            key,
            f"found {describe(recipe.value(key))}, but Megatron Core trains models of text alone in this version",
            "Set policy.backend=torch: the torch learner trains models that read images, and takes over what policy.megatron_cfg says.",
        )
        recipe.explained += [*ASKED_FOR, "policy.megatron_cfg"]


def find_images(recipe: Recipe) -> str | None:
    """Return the first key that asks for images; None if there is none."""
    return next(_find_images(recipe), None)


def _find_images(recipe: Recipe) -> Iterator[str]:
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
    if find_images(recipe) is None or not isinstance(template, str) or template == "default" or "image" in template:
        return
    recipe.set(key, "default", because=key)
    recipe.note(key, Effect.RENAMED, "default here: with images, NeMo-RL renders with the template of the model's processor, too")


def leave_media_tokens_out(recipe: Recipe) -> None:
    """``bad_words`` that are only tokens of images and sound: a policy that samples one has sampled a token, and no image."""
    for key in list(recipe.find("*generation.bad_words")):
        words = recipe.value(key)
        if isinstance(words, list) and words and all(isinstance(word, str) and MEDIA_TOKEN.fullmatch(word) for word in words):
            recipe.note(
                key,
                Effect.CHANGED,
                "tokens of images and sound are not forbidden here, so that the learner has the engine's distribution: one that is sampled "
                "is read as a token, and stands for no image",
            )
            recipe.drop(key)


UNSUPPORTED_MEDIA: tuple[Rule, ...] = (SOUND_AND_VIDEO, refuse_images_on_megatron, leave_media_tokens_out)
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
            "of several phrases for a region, its number draws one, the same in every epoch; NeMo-RL draws a new one",
        )
    if name in ("refcoco", "mmpr-tiny") and recipe.is_set(f"{key}.download_dir"):
        text = "media_data_dir here: images are not downloaded, and are expected in this folder as NeMo-RL leaves them there"
        recipe.rename(f"{key}.download_dir", f"{key}.media_data_dir", text=text)
