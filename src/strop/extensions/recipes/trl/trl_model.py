"""The model of TRL's commands, its adapters, its data, and the engine that samples."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from strop.extensions.recipes.library_recipe import LibraryRecipe
from strop.extensions.recipes.rules import Effect

LORA = "policy.dtensor_cfg.lora_cfg"
VLLM = "policy.generation.vllm_cfg"
PROMPT_TOKENS = 1024  # where nothing says how long a prompt may be
OWN_MODEL_OPTIONS = ("dtype", "torch_dtype", "attn_implementation", "trust_remote_code", "revision", "use_cache", "device_map")
DATA_FILES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
REWARDS = "rewards"  # alias of the environment that is written for reward functions


def translate_model(recipe: LibraryRecipe) -> None:
    options = recipe.value("model_init_kwargs") or {}
    if name := recipe.value("model_name_or_path"):
        recipe.carry("model_name_or_path", "policy.model_name", name)
    for key, revision in (
        ("model_revision", recipe.value("model_revision")),
        ("model_init_kwargs", options.get("revision", "main")),
    ):
        if revision not in (None, "main"):
            recipe.refuse(key, "models are read at their main revision", "Download that revision, and name its folder.")
    trusted = bool(recipe.value("trust_remote_code") or options.get("trust_remote_code"))
    recipe.carry("trust_remote_code", "policy.trust_remote_code", trusted)
    if unknown := [name for name in options if name not in OWN_MODEL_OPTIONS]:
        fix = "Set what of the model's own configuration is meant in policy.hf_config_overrides. Remove the others."
        recipe.refuse("model_init_kwargs", f"{', '.join(unknown)} is not an option of loading a model here", fix)
    if recipe.value("use_cpu"):
        recipe.carry("use_cpu", "policy.device", "cpu")


def translate_adapters(recipe: LibraryRecipe) -> None:
    """PEFT's LoRA: dropout before the adapter, A drawn uniformly."""
    keys = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "use_rslora")
    if not recipe.value("use_peft"):
        for key in keys:
            recipe.unused(key, "use_peft is off")
        return
    recipe.carry("use_peft", f"{LORA}.enabled", True)
    recipe.carry("lora_r", f"{LORA}.dim", recipe.value("lora_r"))
    recipe.carry("lora_alpha", f"{LORA}.alpha", recipe.value("lora_alpha"))
    recipe.carry("use_rslora", f"{LORA}.use_rslora", recipe.value("use_rslora"))
    recipe.set(f"{LORA}.lora_A_init", "uniform", because="use_peft")
    dropout = recipe.value("lora_dropout")
    if recipe.kind == "grpo" and dropout:
        text = "no dropout here: an adapter that drops in training would not be the policy that sampled"
        recipe.note("lora_dropout", Effect.CHANGED, text)
    else:
        recipe.carry("lora_dropout", f"{LORA}.dropout", dropout)
        recipe.set(f"{LORA}.dropout_position", "pre", because="lora_dropout")
    modules = recipe.value("lora_target_modules")
    if modules in ("all-linear", ["all-linear"]):
        recipe.carry("lora_target_modules", f"{LORA}.match_all_linear", True)
    elif modules is None:
        text = f"{LORA}.target_modules=[q_proj, v_proj] here, PEFT's own for most models"
        recipe.carry("lora_target_modules", f"{LORA}.target_modules", ["q_proj", "v_proj"], text, changed=True)
    else:
        recipe.carry("lora_target_modules", f"{LORA}.target_modules", [modules] if isinstance(modules, str) else list(modules))


def translate_data(recipe: LibraryRecipe) -> None:
    mixture = recipe.value("datasets") or []
    if mixture:
        _translate_mixture(recipe, mixture)
        return
    name = recipe.value("dataset_name")
    if name is None:
        return
    recipe.carry("dataset_name", "data.train.dataset_name", name)
    subset, is_file = recipe.value("dataset_config"), PurePath(str(name)).suffix in DATA_FILES
    if subset is not None:
        recipe.carry("dataset_config", "data.train.subset", subset)
    if not is_file:
        recipe.carry("dataset_train_split", "data.train.split", recipe.value("dataset_train_split"))
    if recipe.value("eval_strategy") == "no":
        recipe.unused("dataset_test_split", "eval_strategy is no")
        return
    recipe.set("data.validation.dataset_name", name, because="dataset_test_split")
    if subset is not None:
        recipe.set("data.validation.subset", subset, because="dataset_test_split")
    recipe.carry("dataset_test_split", "data.validation.split", recipe.value("dataset_test_split"))


def _translate_mixture(recipe: LibraryRecipe, mixture: list[dict[str, Any]]) -> None:
    entries = []
    for entry in mixture:
        if unknown := [
            key for key, value in entry.items() if key not in ("path", "name", "split", "columns") and value is not None
        ]:
            recipe.refuse(
                "datasets", f"an entry has no {unknown[0]} here", "Name the files or the part of the data in data.train."
            )
            return
        made = {"dataset_name": entry.get("path"), "subset": entry.get("name"), "split": entry.get("split"), "weight": None}
        entries.append({key: value for key, value in made.items() if value is not None or key == "weight"})
    size = recipe.value("test_split_size")
    if size and recipe.value("eval_strategy") != "no":
        for made in entries:
            made["split_validation_size"] = size
        recipe.note("test_split_size", Effect.RENAMED, "split_validation_size of each entry of data.train here")
    recipe.carry("datasets", "data.train", entries)


def translate_rewards(recipe: LibraryRecipe) -> None:
    """Rewards of TRL's command. A dump of a config has none: they are arguments of the trainer."""
    functions = list(recipe.value("reward_funcs") or [])
    model = recipe.value("reward_model_name_or_path") or recipe.value("reward_model_path")
    key = "reward_model_path" if recipe.value("reward_model_path") else "reward_model_name_or_path"
    if model and functions:
        recipe.refuse(
            key, "a model and functions are not added up in one environment", "Keep one of reward_funcs and the reward model."
        )
    elif model:
        recipe.set("env.reward_model.model_name", model, because=key)
        recipe.carry(key, "data.default.env_name", "reward_model", f"env.reward_model.model_name={model} here")
    elif functions:
        _translate_functions(recipe, functions)
    weights = recipe.value("reward_weights")
    if weights is not None and len(weights) != len(functions):
        fix = "Set weight of each in env.NAME.rewards. Remove the key."
        recipe.refuse("reward_weights", "the functions that they weigh are not in the file, one for each", fix)


def _translate_functions(recipe: LibraryRecipe, functions: list[str]) -> None:
    if functions == ["accuracy_reward"] and recipe.value("reward_weights") in (None, [1.0], [1]):
        recipe.set("env.math.verifier", "math_verify", because="reward_funcs")
        recipe.set("data.default.output_key", "solution", because="reward_funcs")
        text = "env.math here, whose verifier reads the same column solution with math-verify"
        recipe.carry("reward_funcs", "data.default.env_name", "math", text, changed=True)
        return
    own = [name for name in functions if "." not in name]
    if own:
        fix = "Write it as a function of (task, rollout), and set env.NAME.rewards; docs/environments.md shows how."
        recipe.refuse("reward_funcs", f"{', '.join(own)} is a function of TRL's package", fix)
        return
    weights = recipe.value("reward_weights") or [1.0] * len(functions)
    rewards = {
        name.rpartition(".")[2]: {"function": ":".join(name.rsplit(".", 1)), "weight": weight}
        for name, weight in zip(functions, weights, strict=False)
    }
    recipe.set(f"env.{REWARDS}.rewards", rewards, because="reward_funcs")
    text = f"env.{REWARDS}.rewards here; a function gets (task, rollout) instead of prompts and completions: rewrite it so"
    recipe.carry("reward_funcs", "data.default.env_name", REWARDS, text, changed=True)
    if recipe.is_written("reward_weights") and recipe.value("reward_weights") is not None:
        recipe.note("reward_weights", Effect.RENAMED, f"env.{REWARDS}.rewards.NAME.weight here")


def translate_engine(recipe: LibraryRecipe) -> None:
    """transformers' generate is the built-in engine, vLLM is vLLM."""
    uses_vllm = bool(recipe.value("use_vllm"))
    recipe.carry("use_vllm", "policy.generation.backend", "vllm" if uses_vllm else "torch")
    recipe.carry("top_k", "policy.generation.top_k", recipe.value("top_k") or None)
    recipe.carry("min_p", "policy.generation.min_p", recipe.value("min_p") or 0.0)
    if not uses_vllm:
        for key in ("vllm_mode", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size"):
            recipe.unused(key, "use_vllm is off")
        return
    if recipe.value("vllm_mode") == "server":
        fix = "Set vllm_mode: colocate; or then policy.generation.colocated.enabled=false, and its resources.gpus_per_node."
        recipe.refuse("vllm_mode", "the file does not say which GPUs the server has, and the run starts its own engines", fix)
    recipe.carry("vllm_mode", "policy.generation.colocated.enabled", True)
    for key, to in (
        ("vllm_gpu_memory_utilization", "gpu_memory_utilization"),
        ("vllm_tensor_parallel_size", "tensor_parallel_size"),
    ):
        recipe.carry(key, f"{VLLM}.{to}", recipe.value(key))


def translate_sequence_length(recipe: LibraryRecipe) -> None:
    """TRL limits completions, and prompts only by vLLM's context; here the sum of both is limited."""
    key = "max_completion_length" if recipe.value("max_completion_length") else "max_new_tokens"
    completion, context = recipe.value(key), recipe.value("vllm_max_model_length")
    recipe.carry(key, "policy.generation.max_new_tokens", completion)
    prompt = recipe.value("max_prompt_length")
    if prompt:
        recipe.carry(
            "max_prompt_length", "data.max_input_seq_length", prompt, "longer prompts are dropped here, not cut", changed=True
        )
    if context and recipe.value("use_vllm"):
        recipe.carry("vllm_max_model_length", "policy.max_total_sequence_length", context)
        return
    recipe.unused("vllm_max_model_length", "use_vllm is off")
    total = completion + (prompt or PROMPT_TOKENS)
    recipe.set("policy.max_total_sequence_length", total, because=key)
    if not prompt:
        text = f"policy.max_total_sequence_length={total} here, so that prompts may have {PROMPT_TOKENS} tokens; there they may be longer"
        recipe.note(key, Effect.CHANGED, text)


def translate_recorded_length(recipe: LibraryRecipe) -> None:
    """A longer example is cut there, and dropped and counted here."""
    length = recipe.value("max_length")
    if length is None:
        recipe.refuse("max_length", "an example needs a limit here", "Set max_length: 4096, or what fits the GPU.")
        return
    text = f"policy.max_total_sequence_length={length} here, and longer examples are dropped, not cut"
    recipe.carry("max_length", "policy.max_total_sequence_length", length, text, changed=True)
