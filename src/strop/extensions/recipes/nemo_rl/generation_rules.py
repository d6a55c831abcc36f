"""Recipes of models that see and hear: the torch learner trains on images; sound and video are refused, and so are images where a recipe
insists on Megatron Core."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from strop.extensions.recipes.rules import (
    Effect,
    Recipe,
    Refused,
    Rule,
    Unsupported,
    Unused,
    describe,
    foreign_keys,
    is_switched_off,
)

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


SPECULATION_KEYS = {"model": "model_name"}  # vLLM's names of options, and Strop's
SPECULATION_READ = frozenset(
    {"method", "model_name", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "draft_tensor_parallel_size"}
)
WEIGHT_SYNC = "policy.generation.weight_sync configures how weights are sent"


def translate_logprobs_mode(recipe: Recipe) -> None:
    """Accept raw log-probabilities where they are those of the sampling distribution."""
    for key in list(recipe.find("*generation.vllm_cfg.logprobs_mode")):
        if recipe.value(key) != "raw_logprobs":
            continue
        section = key.removesuffix(".vllm_cfg.logprobs_mode")
        off = {"temperature": (1,), "top_p": (1,), "top_k": (-1,), "min_p": (0,)}
        cut = [name for name, values in off.items() if recipe.value(f"{section}.{name}", values[0]) not in values]
        if not cut:
            recipe.note(
                key, Effect.RENAMED, "processed_logprobs here, which are the same at temperature 1 without top_k, top_p and min_p"
            )
            recipe.set(key, "processed_logprobs", because=key)
        else:
            changed = ", ".join(f"{section}.{name}={recipe.value(f'{section}.{name}')}" for name in cut)
            recipe.refuse(
                key,
                f"found 'raw_logprobs', but with {changed} tokens are sampled from another distribution, of which the learner computes "
                "log-probabilities",
                "Set it to processed_logprobs.",
            )


def translate_sglang_model(recipe: Recipe) -> None:
    """Accept a path of the model that says again which policy is trained."""
    for key in list(recipe.find("*generation.sglang_cfg.model_path")):
        policy = key.replace("generation.sglang_cfg.model_path", "model_name")
        if recipe.value(key) in (None, recipe.value(policy)):
            recipe.unused(key, f"engines serve {policy}")
        else:
            recipe.refuse(
                key,
                f"found {recipe.value(key)!r}, but engines serve the policy, {recipe.value(policy)!r}, whose weights are sent to them",
                f"Remove it, or set {policy} to it.",
            )


def translate_sglang_engines(recipe: Recipe) -> None:
    """Write the number of engines for NeMo-RL's numbers of GPUs of all engines and of each."""
    for key in list(recipe.find("*generation.sglang_cfg.sglang_server_config.num_gpus*")):
        section = key.partition(".sglang_server_config.")[0]
        size = recipe.value(f"{section}.tp_size", 1)
        each = recipe.value(f"{section}.sglang_server_config.num_gpus_per_engine", size)
        if each != size:
            recipe.refuse(
                key,
                f"found {each} GPUs of an engine, but tp_size is {size}, and an engine has a GPU for each rank",
                "Set both alike.",
            )
        elif key.endswith("per_engine"):
            recipe.unused(key, "tp_size says it")
        elif recipe.value(key, 0) % size:
            recipe.refuse(
                key, f"found {recipe.value(key)}, which is not a multiple of tp_size = {size}", f"Set it to a multiple of {size}."
            )
        else:
            recipe.rename(key, f"{section}.num_engines", recipe.value(key) // size)


def pass_on_sglang_arguments(recipe: Recipe) -> None:
    """Pass on what is an argument of SGLang's server and no key of Strop."""
    for key in foreign_keys(recipe, "*generation.sglang_cfg.*"):
        section, _, name = key.rpartition(".")
        if not section.endswith(".sglang_cfg"):
            continue
        if recipe.value(key) is None:
            recipe.unused(key, "null is SGLang's choice")
        else:
            recipe.rename(key, f"{section.removesuffix('sglang_cfg')}sglang_kwargs.{name}")


SGLANG_RULES: tuple[Rule, ...] = (
    translate_sglang_model,
    translate_sglang_engines,
    Unused("*generation.use_async_rollouts", "requests always reach the engine one by one"),
    Unused("*generation.sglang_cfg.random_seed", "every request has its own seed"),
    Unused("*generation.sglang_cfg.skip_tokenizer_init", "stop strings need the tokenizer"),
    Unused("*generation.sglang_cfg.allow_auto_truncate", "prompts that are too long are dropped and counted, none is cut"),
    Unused("*generation.sglang_cfg.skip_server_warmup", "nothing is warmed up before the weights arrive"),
    Unused("*generation.sglang_cfg.disable_piecewise_cuda_graph", "the SGLang that Strop was checked with has no such argument"),
    Unused("*generation.sglang_cfg.disable_cuda_graph_padding", "the SGLang that Strop was checked with has no such argument"),
    Unused("*generation.sglang_cfg.enable_lora", "adapters are merged into the weights that are sent"),
    Unused("*generation.sglang_cfg.max_lora*", "adapters are merged into the weights that are sent"),
    Unused("*generation.sglang_cfg.max_loaded_loras", "adapters are merged into the weights that are sent"),
    Unused("*generation.sglang_cfg.lora_target_modules", "adapters are merged into the weights that are sent"),
    Unused("*generation.sglang_cfg.lora_backend", "adapters are merged into the weights that are sent"),
    Refused(
        ("*generation.sglang_cfg.lora_paths",),
        "the adapters that are trained are the only ones",
        "Merge them into policy.model_name first (strop export --merge). Remove the key.",
    ),
    Refused(
        ("*generation.sglang_cfg.torchao_config",),
        "rollouts use the trained weights, not quantised ones",
        "Remove the key.",
    ),
    Refused(
        ("*generation.sglang_cfg.sglang_router_config.use_external_router",),
        "Strop's own pool sends requests to the engines that it starts",
        "Set it to false, or remove it.",
    ),
    Unused("*generation.sglang_cfg.sglang_router_config.*", "Strop's own pool sends requests to the engine with their prefix"),
    Unused("*generation.sglang_cfg.sglang_router_config", "Strop's own pool sends requests to the engine with their prefix"),
    Unused("*generation.sglang_cfg.sglang_server_config.sglang_server_concurrency", "requests wait in the engine"),
    pass_on_sglang_arguments,
)


def translate_speculation(recipe: Recipe) -> None:
    """Write vLLM's speculative_config as Strop's section ``speculation``."""
    for key in list(recipe.find("*generation.vllm_kwargs.speculative_config")):
        found = recipe.value(key)
        if not isinstance(found, Mapping):
            recipe.unused(key, "it is switched off")
            continue
        section = key.replace("vllm_kwargs.speculative_config", "vllm_cfg.speculation")
        options = {SPECULATION_KEYS.get(str(name), str(name)): value for name, value in found.items() if value is not None}
        if str(options.get("method")).endswith("_mtp"):  # vLLM's older names: deepseek_mtp
            options["method"] = "mtp"
        if options.get("method") == "mtp" and "model_name" not in options:
            options["model_name"] = recipe.value("policy.model_name")
        for name in sorted(set(options) - SPECULATION_READ):
            recipe.refuse(f"{key}.{name}", f"found {options.pop(name)!r}, which {section} does not have", "Remove the key.")
        if options.pop("draft_tensor_parallel_size", None) is not None:
            recipe.note(f"{key}.draft_tensor_parallel_size", Effect.UNUSED, "a draft has the engine's tensor_parallel_size")
        if recipe.value("policy.draft.enabled"):
            options.pop("model_name", None)  # it is the head that is trained
        for name, value in options.items():
            recipe.set(f"{section}.{name}", value, because=key)
        recipe.note(key, Effect.RENAMED, f"{section} here")
        recipe.drop(key)


def note_cache_scales(recipe: Recipe) -> None:
    """NeMo-RL measures the scales of an FP8 cache on data after each refit of a Megatron learner."""
    for key in list(recipe.find("*generation.vllm_cfg.kv_cache_dtype")):
        quantised = recipe.value(key.replace("kv_cache_dtype", "precision")) == "fp8"
        if quantised and str(recipe.value(key)).startswith("fp8"):
            recipe.note(
                key, Effect.CHANGED, "keys and values in FP8 have scale 1, where NeMo-RL measures scales after each publish"
            )


GENERATION_RULES: tuple[Rule, ...] = (
    note_cache_scales,
    *SGLANG_RULES,
    translate_logprobs_mode,
    translate_speculation,
    Unused("*generation.port_range_*", "free ports are chosen automatically"),
    Unused("*generation.refit_*", WEIGHT_SYNC),
    Unused("*.refit_buffer_size_gb", WEIGHT_SYNC),
    Unused("*generation.vllm_cfg.use_tqdm", "the console shows the progress of a step"),
    Unused("*generation.vllm_cfg.*vllm_metrics_logger*", "the engine's statistics are logged at every step"),
    Unused("*generation.vllm_cfg.load_format", "weights are published by the learner"),
    Unused("*generation.vllm_cfg.skip_tokenizer_init", "stop strings need the tokenizer"),
    Refused(
        ("*generation.vllm_cfg.distributed_executor_backend",),
        "the engine chooses it",
        "Use policy.generation.vllm_kwargs. Remove the key.",
    ),
    Unused("*generation.vllm_cfg.*_refit_*", WEIGHT_SYNC),
    Unused("*generation.vllm_cfg.cap_max_tokens_to_context", "a completion ends at the engine's context anyway"),
    Unused("*generation.vllm_cfg.enable_thinking", "NeMo-RL does not read it; policy.tokenizer.chat_template_kwargs sets it"),
    Unused("*generation.vllm_cfg.enforce_monotonicity", "NeMo-RL does not read it"),
    Unused("*generation.vllm_cfg.enable_expert_parallel", "NeMo-RL does not read it; expert_parallel_size says it"),
)


# Megatron Core as the engine of rollouts (backend: megatron), for which vLLM stands here.
ENGINE_SIZES = {"tensor_model_parallel_size": "tensor_parallel_size", "expert_model_parallel_size": "expert_parallel_size"}


def sample_with_vllm(recipe: Recipe) -> None:
    """Sample with vLLM engines of the same sizes: with the same weights and options the distribution is the same.

    A user who requests Megatron Core on the command line is told that it does not sample in this version.
    """
    for key in list(recipe.find("*generation.backend")):
        if recipe.value(key) == "megatron" and not recipe.is_on_command_line(key):
            _translate_backend(recipe, key)
    for key in list(recipe.find("*generation.mcore_generation_config")):
        recipe.unused(key, "it is for Megatron Core's engine; vllm_cfg is for vLLM's")


def _translate_backend(recipe: Recipe, key: str) -> None:
    section = key.removesuffix(".backend")
    for option in list(recipe.find(f"{section}.mcore_generation_config.*")):
        size = ENGINE_SIZES.get(option.rpartition(".")[2])
        if size is not None and not is_switched_off(recipe.value(option)):
            recipe.rename(option, f"{section}.vllm_cfg.{size}", text="vLLM samples")
    recipe.set(key, "vllm", because=key)
    recipe.note(
        key,
        Effect.CHANGED,
        "rollouts are sampled by vLLM and not by Megatron Core, from the same weights with the same options: probabilities differ by "
        "rounding, and the learner's ratio is to what vLLM sampled",
    )
