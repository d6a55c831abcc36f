"""The model, data, rewards, engine, advantages and losses of verl's trainers."""

from __future__ import annotations

from typing import Any

from strop.algorithm_factory import all_parts
from strop.extensions.recipes.library_recipe import LibraryRecipe
from strop.extensions.recipes.rules import Effect
from strop.extensions.recipes.verl.verl_training import ACTOR, MODEL, ROLLOUT

VLLM = "policy.generation.vllm_cfg"
SCORED_BY_DATA = "verl chooses the reward of each row by its column data_source"
VERIFIERS = {"dapo": "dapo", "aime": "dapo", "math_dapo": "dapo"}  # a part of a file's path -> a verifier of env.math


def translate_model(recipe: LibraryRecipe) -> None:
    recipe.carry(f"{MODEL}.path", "policy.model_name", recipe.value(f"{MODEL}.path"))
    if tokenizer := recipe.value(f"{MODEL}.tokenizer_path"):
        recipe.carry(f"{MODEL}.tokenizer_path", "policy.tokenizer.name", tokenizer)
    trusted = bool(recipe.value(f"{MODEL}.trust_remote_code") or recipe.value("data.trust_remote_code"))
    recipe.set("policy.trust_remote_code", trusted, because=f"{MODEL}.trust_remote_code")
    for key in (f"{MODEL}.trust_remote_code", "data.trust_remote_code", "critic.model.trust_remote_code"):
        if recipe.is_written(key):
            recipe.note(key, Effect.RENAMED, f"policy.trust_remote_code={str(trusted).lower()} here")
    prefix = f"{MODEL}.override_config."
    for key in (key for key in recipe.values if key.startswith(prefix)):
        option = key.removeprefix(prefix).removeprefix("model_config.")
        if option in ("attn_implementation", "torch_dtype"):
            recipe.unused(key, "it chooses kernels, not what is computed")
        else:
            recipe.carry(key, f"policy.hf_config_overrides.{option}", recipe.value(key))


def translate_data(recipe: LibraryRecipe) -> None:
    """Parquet files with a list of messages as prompt, and the answer in reward_model.ground_truth."""
    for key, to, size in (("train_files", "train", "train_max_samples"), ("val_files", "validation", None)):
        files = recipe.value(f"data.{key}")
        names = [str(files)] if isinstance(files, str) else [str(name) for name in files or []]
        most = recipe.value(f"data.{size}") if size else -1
        entries: list[dict[str, Any]] = [{"dataset_name": name} | ({"size": most} if most > 0 else {}) for name in names]
        if len(entries) == 1:
            recipe.carry(f"data.{key}", f"data.{to}", entries[0], f"data.{to}.dataset_name={names[0]} here")
        elif entries:
            recipe.carry(f"data.{key}", f"data.{to}", [entry | {"weight": None} for entry in entries])
        if size and recipe.is_written(f"data.{size}"):
            recipe.note(f"data.{size}", Effect.RENAMED, f"data.{to}.size here")
    prompt = recipe.value("data.prompt_key")
    recipe.carry("data.prompt_key", "data.default.input_key", f"{prompt}.0.content", f"the first message of {prompt} here")
    recipe.set("data.default.output_key", "reward_model.ground_truth", because="data.train_files")
    recipe.carry("data.shuffle", "data.shuffle", recipe.value("data.shuffle"))
    if recipe.value("data.seed") is not None:
        recipe.carry("data.seed", "{section}.seed", recipe.value("data.seed"))
    if recipe.is_written("data.image_key") and recipe.value("data.image_key") and not _is_dump(recipe):
        recipe.carry("data.image_key", "data.default.image_key", recipe.value("data.image_key"))
    if recipe.is_written("data.video_key") and recipe.value("data.video_key") and not _is_dump(recipe):
        recipe.refuse(
            "data.video_key", "models read text and images in this version, no video", "Train on data of text and images."
        )


def _is_dump(recipe: LibraryRecipe) -> bool:
    """Return whether a file has every key of verl's, as hydra writes it, so that a key in it asks for nothing."""
    return len(recipe.values) > 250


def translate_lengths(recipe: LibraryRecipe) -> None:
    prompt, response = recipe.value("data.max_prompt_length"), recipe.value("data.max_response_length")
    recipe.carry("data.max_prompt_length", "data.max_input_seq_length", prompt)
    recipe.carry("data.max_response_length", "policy.generation.max_new_tokens", response)
    recipe.set("policy.max_total_sequence_length", prompt + response, because="data.max_response_length")
    key, how = "data.truncation", recipe.value("data.truncation")
    if how in ("left", "right", "middle") and not recipe.value("data.filter_overlong_prompts"):
        recipe.note(key, Effect.CHANGED, "longer prompts are dropped and counted, not cut")
    else:
        recipe.unused(key, "longer prompts are dropped and counted")
    recipe.unused("data.filter_overlong_prompts", "longer prompts are dropped and counted")


def translate_rewards(recipe: LibraryRecipe) -> None:
    function, manager = recipe.value("custom_reward_function.path"), recipe.value("reward_model.reward_manager")
    if recipe.value("reward_model.enable"):
        model = recipe.value("reward_model.model.path")
        recipe.set("env.reward_model.model_name", model, because="reward_model.model.path")
        recipe.carry("reward_model.enable", "data.default.env_name", "reward_model", f"env.reward_model.model_name={model} here")
    elif function:
        name = recipe.value("custom_reward_function.name")
        recipe.set("env.rewards.reward", f"{function}:{name}", because="custom_reward_function.path")
        text = (
            f"env.rewards.reward={function}:{name} here; it gets (task, rollout), not data_source and solution_str: rewrite it so"
        )
        recipe.carry("custom_reward_function.path", "data.default.env_name", "rewards", text, changed=True)
    else:
        _translate_verifier(recipe, manager)
    if manager in ("naive", "dapo", "batch", "prime"):
        if recipe.is_written("reward_model.reward_manager"):
            recipe.note("reward_model.reward_manager", Effect.RENAMED, "environments score each rollout here")
    else:
        recipe.refuse("reward_model.reward_manager", "there is no counterpart", "Write an environment, and set naive.")
    _translate_overlong(recipe)


def _translate_verifier(recipe: LibraryRecipe, manager: str) -> None:
    files = recipe.value("data.train_files")
    names = " ".join([files] if isinstance(files, str) else map(str, files or [])).lower()
    verifier = next((found for part, found in VERIFIERS.items() if part in names or part == manager), None)
    verifier = verifier or ("exact" if "gsm8k" in names else "math_verify")
    text = f"env.math.verifier={verifier} here for all rows; {SCORED_BY_DATA}"
    recipe.set("env.math.verifier", verifier, because="data.train_files")
    recipe.carry("data.reward_fn_key", "data.default.env_name", "math", text, changed=True)


def _translate_overlong(recipe: LibraryRecipe) -> None:
    section = "reward_model.reward_kwargs"
    keys = {"enable": "enabled", "len": "overlong_buffer_length", "penalty_factor": "overlong_buffer_penalty"}
    on = recipe.value(f"{section}.overlong_buffer_cfg.enable")
    for name, to in keys.items():
        key = f"{section}.overlong_buffer_cfg.{name}"
        if on and recipe.is_written(key):
            recipe.carry(key, f"{{section}}.reward_shaping.{to}", recipe.value(key))
        else:
            recipe.unused(key, "it is switched off")
    key = f"{section}.max_resp_len"
    if on:
        length = recipe.value(key) or recipe.value("data.max_response_length")
        recipe.carry(key, "{section}.reward_shaping.max_response_length", length)
    else:
        recipe.unused(key, "it is switched off")


def translate_engine(recipe: LibraryRecipe) -> None:
    name = recipe.value(f"{ROLLOUT}.name") or "vllm"
    key = f"{ROLLOUT}.name"
    if name in ("sglang", "trtllm"):
        recipe.carry(
            key, "policy.generation.backend", "vllm", "policy.generation.backend=vllm here, the same distribution", changed=True
        )
    else:
        recipe.carry(key, "policy.generation.backend", "torch" if name == "hf" else "vllm")
    recipe.carry(f"{ROLLOUT}.temperature", "policy.generation.temperature", recipe.value(f"{ROLLOUT}.temperature"))
    recipe.carry(f"{ROLLOUT}.top_p", "policy.generation.top_p", float(recipe.value(f"{ROLLOUT}.top_p")))
    top_k = recipe.value(f"{ROLLOUT}.top_k")
    recipe.carry(f"{ROLLOUT}.top_k", "policy.generation.top_k", top_k if top_k > 0 else None)
    if not recipe.value(f"{ROLLOUT}.do_sample"):
        recipe.refuse(f"{ROLLOUT}.do_sample", "training samples", "Set true.")
    _translate_validation_sampling(recipe)
    for theirs, ours in (
        ("tensor_model_parallel_size", "tensor_parallel_size"),
        ("pipeline_model_parallel_size", "pipeline_parallel_size"),
        ("expert_parallel_size", "expert_parallel_size"),
        ("gpu_memory_utilization", "gpu_memory_utilization"),
        ("enforce_eager", "enforce_eager"),
        ("max_num_seqs", "max_num_seqs"),
        ("enable_prefix_caching", "enable_prefix_caching"),
    ):
        recipe.carry(f"{ROLLOUT}.{theirs}", f"{VLLM}.{ours}", recipe.value(f"{ROLLOUT}.{theirs}"))
    key, length = f"{ROLLOUT}.max_model_len", recipe.value(f"{ROLLOUT}.max_model_len")
    if length and length >= recipe.value("data.max_prompt_length") + recipe.value("data.max_response_length"):
        recipe.carry(key, f"{VLLM}.max_model_len", length)
    else:
        recipe.unused(key, "it is policy.max_total_sequence_length")
    precision = {"bfloat16": "bfloat16", "float32": "float32", "bf16": "bfloat16"}.get(recipe.value(f"{ROLLOUT}.dtype"))
    if precision is None:
        recipe.refuse(f"{ROLLOUT}.dtype", "engines compute in bfloat16 or float32 here", "Set bfloat16.")
    else:
        recipe.carry(f"{ROLLOUT}.dtype", f"{VLLM}.precision", precision)


def _translate_validation_sampling(recipe: LibraryRecipe) -> None:
    section = f"{ROLLOUT}.val_kwargs"
    samples = recipe.value(f"{section}.do_sample")
    recipe.carry(f"{section}.n", "{section}.val_num_generations_per_prompt", recipe.value(f"{section}.n"))
    greedy = not samples or not recipe.value(f"{section}.temperature")
    temperature = 0.0 if greedy else recipe.value(f"{section}.temperature")
    recipe.carry(f"{section}.temperature", "policy.generation.val_temperature", temperature)
    recipe.carry(f"{section}.top_p", "policy.generation.val_top_p", float(recipe.value(f"{section}.top_p")))
    recipe.carry(f"{section}.top_k", "policy.generation.val_top_k", recipe.value(f"{section}.top_k"))
    if recipe.is_written(f"{section}.do_sample"):
        recipe.note(f"{section}.do_sample", Effect.RENAMED, f"policy.generation.val_temperature={temperature} here")


def translate_turns(recipe: LibraryRecipe) -> None:
    """Tools and interactions are environments here."""
    section = f"{ROLLOUT}.multi_turn"
    loop = recipe.value(f"{ROLLOUT}.agent.default_agent_loop")
    tools = next(
        (
            key
            for key in (f"{section}.tool_config_path", "data.tool_config_path", f"{section}.interaction_config_path")
            if recipe.value(key)
        ),
        None,
    )
    key = tools or (f"{section}.enable" if recipe.value(f"{section}.enable") else None)
    key = key or (f"{ROLLOUT}.agent.default_agent_loop" if loop != "single_turn_agent" else None)
    if key is not None:
        fix = "Write an environment with tools, docs/guides/multi_turn.md, and set grpo.max_rollout_turns. Remove the key."
        recipe.refuse(key, "tools and turns of verl are custom code", fix)


def translate_sft_model(recipe: LibraryRecipe) -> None:
    key = "model.path" if recipe.value("model.path") else "model.partial_pretrain"
    recipe.carry(key, "policy.model_name", recipe.value(key))
    recipe.carry("model.trust_remote_code", "policy.trust_remote_code", recipe.value("model.trust_remote_code"))
    checkpointing = "model.enable_gradient_checkpointing"
    recipe.carry(checkpointing, "policy.dtensor_cfg.activation_checkpointing", recipe.value(checkpointing))
    key = "model.fsdp_config.model_dtype"
    if recipe.value(key) in ("bf16", "bfloat16"):
        recipe.carry(
            key,
            "policy.weights_dtype",
            "bfloat16",
            "policy.weights_dtype=bfloat16 here, with float32 master weights",
            changed=True,
        )
    recipe.carry(
        "ulysses_sequence_parallel_size",
        "policy.dtensor_cfg.context_parallel_size",
        recipe.value("ulysses_sequence_parallel_size"),
    )
    for name in ("strategy", "engine.strategy"):
        if recipe.value(name) == "megatron":
            recipe.carry(name, "policy.megatron_cfg.enabled", True)


def translate_sft_data(recipe: LibraryRecipe) -> None:
    batch = recipe.value("data.train_batch_size")
    recipe.carry("data.train_batch_size", "policy.train_global_batch_size", batch)
    recipe.set("sft.val_global_batch_size", batch, because="data.train_batch_size")
    rows = "data.micro_batch_size_per_gpu" if recipe.value("data.micro_batch_size") is None else "data.micro_batch_size"
    recipe.carry(rows, "policy.train_micro_batch_size", recipe.value(rows))
    length = recipe.value("data.max_length")
    recipe.carry("data.max_length", "policy.max_total_sequence_length", length)
    if recipe.value("data.truncation") != "error":
        recipe.note("data.truncation", Effect.CHANGED, "longer examples are dropped and counted, not cut")
    else:
        recipe.unused("data.truncation", "longer examples are dropped and counted")
    for key, to, size in (("train_files", "train", "train_max_samples"), ("val_files", "validation", "val_max_samples")):
        files = recipe.value(f"data.{key}")
        names = [str(files)] if isinstance(files, str) else [str(name) for name in files or []]
        most = recipe.value(f"data.{size}")
        entries: list[dict[str, Any]] = [{"dataset_name": name} | ({"size": most} if most > 0 else {}) for name in names]
        if entries:
            text = f"data.{to}.dataset_name={', '.join(names)} here"
            recipe.carry(
                f"data.{key}", f"data.{to}", entries[0] if len(entries) == 1 else [e | {"weight": None} for e in entries], text
            )
        if recipe.is_written(f"data.{size}"):
            recipe.note(f"data.{size}", Effect.RENAMED, f"data.{to}.size here")
    _translate_columns(recipe)


def _translate_columns(recipe: LibraryRecipe) -> None:
    multi = recipe.value("data.multiturn.enable") or recipe.is_written("data.messages_key") or recipe.is_written("model.path")
    if multi:
        key = "data.messages_key" if recipe.is_written("data.messages_key") else "data.multiturn.messages_key"
        recipe.carry(key, "data.default.messages_key", recipe.value(key))
        if recipe.is_written("data.multiturn.enable"):
            recipe.note("data.multiturn.enable", Effect.RENAMED, "data.default.messages_key here")
        for key in ("data.prompt_key", "data.response_key", "data.prompt_dict_keys", "data.response_dict_keys"):
            recipe.unused(key, "conversations are read from messages")
        return
    for name, to in (("prompt", "input_key"), ("response", "output_key")):
        column, inner = recipe.value(f"data.{name}_key"), recipe.value(f"data.{name}_dict_keys") or []
        recipe.carry(f"data.{name}_key", f"data.default.{to}", ".".join([column, *map(str, inner)]))
        if inner:
            recipe.note(f"data.{name}_dict_keys", Effect.RENAMED, f"data.default.{to} here")


AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "constant_length",
}
OF_ROLLOUTS = ("gspo", "sapo", "geo_mean")  # losses that verl reduces by rollouts, whatever loss_agg_mode says
ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
LOSSES = {
    "vanilla": "clip", "gspo": "sequence_clip", "sapo": "soft_gate", "gpg": "reinforce", "clip_cov": "covariance_clip",
    "kl_cov": "covariance_kl", "geo_mean": "geometric_mean", "cispo": "cispo",
}  # fmt: skip
CLIPS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")


def translate_loss(recipe: LibraryRecipe) -> None:
    key = f"{ACTOR}.policy_loss.loss_mode"
    mode = recipe.value(key)
    if mode not in LOSSES:
        recipe.refuse(key, "there is no counterpart", f"Set one of {', '.join(LOSSES)}.")
        return
    made = _make_objective(recipe, mode)
    recipe.set("algorithm.name", recipe.kind, because=key)
    recipe.carry(key, "algorithm.objective", made, f"algorithm.objective.name={made['name']} here")
    for name in CLIPS:
        if recipe.is_written(f"{ACTOR}.{name}"):
            read = name in _clips_of(mode)
            text = f"an option of algorithm.objective, {made['name']}, here" if read else f"loss_mode {mode} does not read it"
            recipe.note(f"{ACTOR}.{name}", Effect.RENAMED if read else Effect.UNUSED, text)
    _translate_aggregation(recipe, mode)
    recipe.carry(f"{ACTOR}.entropy_coeff", "loss_fn.entropy_bonus", recipe.value(f"{ACTOR}.entropy_coeff"))


def _clips_of(mode: str) -> tuple[str, ...]:
    if mode in ("vanilla", "clip_cov"):
        return CLIPS if mode == "vanilla" else CLIPS[:3]
    return CLIPS[:3] if mode in ("gspo", "geo_mean", "cispo") else ()


def _make_objective(recipe: LibraryRecipe, mode: str) -> dict[str, Any]:
    low, high = (recipe.value(f"{ACTOR}.clip_ratio_{end}") for end in ("low", "high"))
    if recipe.is_written(f"{ACTOR}.clip_ratio"):  # verl reads it where the ends are null
        low, high = (recipe.value(f"{ACTOR}.clip_ratio") if end is None else end for end in (low, high))
    loss = f"{ACTOR}.policy_loss"
    made: dict[str, Any] = {"name": LOSSES[mode]}
    match mode:
        case "vanilla":
            made |= {"low": low, "high": high, "dual": recipe.value(f"{ACTOR}.clip_ratio_c")}
        case "gspo" | "geo_mean":
            made |= {"low": low, "high": high}
        case "cispo":
            made |= {"low": min(low, 1.0), "high": high}  # a weight is not negative
        case "sapo":
            made |= {"tau_positive": recipe.value(f"{ACTOR}.tau_pos"), "tau_negative": recipe.value(f"{ACTOR}.tau_neg")}
        case "clip_cov":
            made |= {"low": low, "high": high, "share": recipe.value(f"{loss}.clip_cov_ratio")}
            made |= {"lowest": recipe.value(f"{loss}.clip_cov_lb"), "highest": recipe.value(f"{loss}.clip_cov_ub")}
        case "kl_cov":
            made |= {"share": recipe.value(f"{loss}.kl_cov_ratio"), "weight": recipe.value(f"{loss}.ppo_kl_coef")}
    return made


def _translate_aggregation(recipe: LibraryRecipe, mode: str) -> None:
    key = f"{ACTOR}.loss_agg_mode"
    asked = recipe.value(key)
    if mode in OF_ROLLOUTS:
        recipe.set("loss_fn.aggregation", "sequence_mean", because=f"{ACTOR}.policy_loss.loss_mode")
        recipe.unused(key, f"loss_mode {mode} is a mean over rollouts, whatever it says")
        return
    if asked not in AGGREGATIONS:
        recipe.refuse(key, "there is no counterpart", f"Set one of {', '.join(AGGREGATIONS)}.")
        return
    if asked == "seq-mean-token-sum-norm":
        length = recipe.value(f"{ACTOR}.loss_scale_factor") or recipe.value("data.max_response_length")
        recipe.set("loss_fn.constant_length", length, because=key)
        text = "loss_fn.aggregation=constant_length here, which divides by the number of rollouts of an optimizer step too"
        recipe.carry(key, "loss_fn.aggregation", AGGREGATIONS[asked], text, changed=True)
        return
    recipe.carry(key, "loss_fn.aggregation", AGGREGATIONS[asked])


def translate_advantage(recipe: LibraryRecipe) -> None:
    key = "algorithm.adv_estimator"
    name, scaled = recipe.value(key), recipe.value("algorithm.norm_adv_by_std_in_grpo")
    if name == "gae":
        recipe.set("ppo.adv_estimator.gae_lambda", recipe.value("algorithm.lam"), because="algorithm.lam")
        recipe.set("ppo.adv_estimator.gae_gamma", recipe.value("algorithm.gamma"), because="algorithm.gamma")
        recipe.set("ppo.adv_estimator.normalize_advantages", True, because=key)
        for read in ("lam", "gamma"):
            if recipe.is_written(f"algorithm.{read}"):
                recipe.note(f"algorithm.{read}", Effect.RENAMED, "ppo.adv_estimator here")
        if recipe.is_written(key):
            recipe.note(key, Effect.RENAMED, "`strop ppo` here")
        recipe.unused("algorithm.norm_adv_by_std_in_grpo", "gae does not read it")
        return
    parts: dict[str, dict[str, Any]] = {
        "grpo": {"name": "group_relative", "normalize": scaled, "deviation": "unbiased"},
        "grpo_vectorized": {"name": "group_relative", "normalize": scaled, "deviation": "unbiased"},
        "rloo": {"name": "leave_one_out"},
        "rloo_vectorized": {"name": "leave_one_out"},
        "reinforce_plus_plus": {"name": "batch_whitened"},
        "reinforce_plus_plus_baseline": {"name": "batch_whitened", "group_mean": True},
        "remax": {"name": "greedy_baseline"},
        "opo": {"name": "length_weighted"},
        "gpg": {"name": "group_relative", "normalize": False},
    }
    if name not in parts or parts[name]["name"] not in all_parts():
        recipe.refuse(key, "there is no counterpart in this version", f"Set one of gae, {', '.join(parts)}.")
        return
    made, text = parts[name], f"algorithm.advantage.name={parts[name]['name']} here"
    if name == "gpg":
        text += "; verl multiplies by rollouts over rollouts with a reward, which Adam and clipping mostly undo"
    recipe.carry(key, "algorithm.advantage", made, text, changed=name == "gpg")
    if name in ("grpo", "grpo_vectorized"):
        if recipe.is_written("algorithm.norm_adv_by_std_in_grpo"):
            recipe.note("algorithm.norm_adv_by_std_in_grpo", Effect.RENAMED, "algorithm.advantage.normalize here")
    else:
        recipe.unused("algorithm.norm_adv_by_std_in_grpo", f"{name} does not read it")
    recipe.unused("algorithm.lam", f"{name} does not read it")
    if name == "reinforce_plus_plus" and recipe.value("algorithm.gamma") != 1:
        recipe.refuse("algorithm.gamma", "the reward is not discounted over tokens here", "Set 1.0.")
    else:
        recipe.unused("algorithm.gamma", f"{name} does not read it")


def translate_kl(recipe: LibraryRecipe) -> None:
    """A KL term in the loss, or in the reward."""
    in_loss, in_reward = recipe.value(f"{ACTOR}.use_kl_loss"), recipe.value("algorithm.use_kl_in_reward")
    reward_keys = [f"algorithm.kl_ctrl.{name}" for name in ("kl_coef", "type", "horizon", "target_kl")] + ["algorithm.kl_penalty"]
    if not in_loss:
        for name in ("kl_loss_coef", "kl_loss_type"):
            recipe.unused(f"{ACTOR}.{name}", "use_kl_loss is off")
    if not in_reward:
        for key in reward_keys:
            recipe.unused(key, "use_kl_in_reward is off")
    for key, on in ((f"{ACTOR}.use_kl_loss", in_loss), ("algorithm.use_kl_in_reward", in_reward)):
        if recipe.is_written(key):
            where = "in the loss" if key.endswith("loss") else "in the reward"
            recipe.note(key, Effect.RENAMED, f"a KL term {where} here" if on else f"no KL term {where} here")
    if in_loss and in_reward:
        fix = f"Set one of {ACTOR}.use_kl_loss and algorithm.use_kl_in_reward to false."
        recipe.refuse("algorithm.use_kl_in_reward", "the loss has a KL term too, and a run has one", fix)
    elif in_loss or in_reward:
        _translate_kl_term(recipe, in_reward)
    else:
        recipe.set("loss_fn.reference_policy_kl_penalty", 0.0, because=f"{ACTOR}.use_kl_loss")


def _translate_kl_term(recipe: LibraryRecipe, in_reward: bool) -> None:
    weight_key = "algorithm.kl_ctrl.kl_coef" if in_reward else f"{ACTOR}.kl_loss_coef"
    type_key = "algorithm.kl_penalty" if in_reward else f"{ACTOR}.kl_loss_type"
    asked = str(recipe.value(type_key))
    kind = ESTIMATORS.get(asked.removesuffix("+"))
    if kind is None:
        recipe.refuse(type_key, "there is no such estimator of single tokens", "Set low_var_kl.")
        return
    recipe.carry(weight_key, "loss_fn.reference_policy_kl_penalty", recipe.value(weight_key))
    if asked.endswith("+") and not in_reward:
        text = "loss_fn.reference_policy_kl_type=k2 here, whose gradient is the one that it takes"
        recipe.carry(type_key, "loss_fn.reference_policy_kl_type", "k2", text, changed=kind != "k2")
    else:
        recipe.carry(type_key, "loss_fn.reference_policy_kl_type", kind)
    if not in_reward:
        return
    per_token = recipe.value("algorithm.adv_estimator") in ("gae", "reinforce_plus_plus", "remax")
    recipe.set("algorithm.kl.place", "token_reward" if per_token else "reward", because="algorithm.use_kl_in_reward")
    if recipe.value("algorithm.kl_ctrl.type") == "adaptive":
        recipe.carry("algorithm.kl_ctrl.target_kl", "algorithm.kl.target", recipe.value("algorithm.kl_ctrl.target_kl"))
        recipe.carry("algorithm.kl_ctrl.horizon", "algorithm.kl.horizon", recipe.value("algorithm.kl_ctrl.horizon"))
        recipe.carry("algorithm.kl_ctrl.type", "algorithm.kl.target", recipe.value("algorithm.kl_ctrl.target_kl"))
    else:
        recipe.unused("algorithm.kl_ctrl.horizon", "the weight is fixed")
        recipe.unused("algorithm.kl_ctrl.target_kl", "the weight is fixed")


def translate_correction(recipe: LibraryRecipe) -> None:
    """Weights and rejection by the mismatch of engine and trainer."""
    section = "algorithm.rollout_correction"
    weighs, rejects, bypass = (recipe.value(f"{section}.{name}") for name in ("rollout_is", "rollout_rs", "bypass_mode"))
    corrections: list[dict[str, Any]] = []
    if weighs in ("token", "sequence"):
        cap = recipe.value(f"{section}.rollout_is_threshold")
        if isinstance(cap, str):
            recipe.refuse(f"{section}.rollout_is_threshold", "the bound is one number here", "Set 2.0.")
            return
        corrections.append({"name": "tis", "cap": float(cap), "level": weighs})
    elif weighs:
        recipe.refuse(f"{section}.rollout_is", "there is no counterpart", "Set token or sequence.")
    if rejects:
        if rejects == "seq_mean_k3" and isinstance(recipe.value(f"{section}.rollout_rs_threshold"), int | float):
            corrections.append({"name": "k3_rejection", "cap": float(recipe.value(f"{section}.rollout_rs_threshold"))})
        else:
            fix = "Set algorithm.corrections to divergence_rejection, k3_rejection or geometric_rejection. Remove the key."
            recipe.refuse(f"{section}.rollout_rs", "it is said with other numbers here", fix)
    if recipe.value(f"{section}.rollout_is_batch_normalize"):
        recipe.refuse(f"{section}.rollout_is_batch_normalize", "weights are not divided by their mean here", "Set false.")
    if bypass:
        if recipe.value(f"{section}.loss_type") == "reinforce":
            recipe.set("algorithm.objective", {"name": "reinforce"}, because=f"{section}.loss_type")
        elif corrections:
            recipe.refuse(f"{section}.rollout_is", "with bypass_mode the ratio is to the engine already", "Set it to null.")
        else:
            recipe.set("algorithm.ratio_to", "sampler", because=f"{section}.bypass_mode")
    if corrections:
        recipe.set("algorithm.corrections", corrections, because=f"{section}.rollout_is")
    for name in ("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold", "bypass_mode", "loss_type"):
        if recipe.is_written(f"{section}.{name}") and recipe.value(f"{section}.{name}") not in (None, False):
            recipe.note(f"{section}.{name}", Effect.RENAMED, "algorithm.corrections and algorithm.ratio_to here")
