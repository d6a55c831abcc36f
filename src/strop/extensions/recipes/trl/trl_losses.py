"""Losses and advantages of TRL's trainers as algorithms and their parts."""

from __future__ import annotations

from typing import Any

from strop.algorithm_factory import all_algorithms
from strop.extensions.recipes.library_recipe import LibraryRecipe
from strop.extensions.recipes.rules import Effect
from strop.extensions.recipes.trl.trl_optimizer import count_batches

CLIPPED = ("grpo", "bnpo", "dapo", "dr_grpo", "luspo")
AGGREGATIONS = {  # over an optimizer step
    "grpo": "sequence_mean",
    "sapo": "sequence_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "vespo": "token_mean",
    "dr_grpo": "constant_length",
    "luspo": "sequence_sum",
}
PREFERENCES = {
    "sigmoid": "dpo", "hinge": "slic", "ipo": "ipo", "exo_pair": "exo_pair", "nca_pair": "nca_pair", "robust": "robust_dpo",
    "bco_pair": "bco_pair", "sppo_hard": "sppo_hard", "aot": "aot", "aot_unpaired": "aot_unpaired", "apo_zero": "apo_zero",
    "apo_down": "apo_down", "discopop": "discopop",
}  # fmt: skip
SMOOTHED = ("robust_dpo", "cdpo", "exo_pair", "aot", "aot_unpaired")


def translate_policy_loss(recipe: LibraryRecipe) -> None:
    """GRPO's loss_type is an objective and a reduction."""
    loss = recipe.value("loss_type")
    if loss not in AGGREGATIONS:
        recipe.refuse("loss_type", "there is no counterpart", f"Set one of {', '.join(AGGREGATIONS)}.")
        return
    objective = _make_objective(recipe, loss)
    recipe.set("algorithm.name", "grpo", because="loss_type")
    recipe.set("algorithm.objective", objective, because="loss_type")
    said = f"algorithm.objective.name={objective['name']} and loss_fn.aggregation={AGGREGATIONS[loss]} here"
    accumulates = recipe.value("gradient_accumulation_steps") > 1 or recipe.value("gpus") > 1
    if loss == "bnpo" and accumulates:
        text = f"{said}, over the whole optimizer step instead of each micro-batch"
        recipe.carry("loss_type", "loss_fn.aggregation", AGGREGATIONS[loss], text, changed=True)
    else:
        recipe.carry("loss_type", "loss_fn.aggregation", AGGREGATIONS[loss], said)
    if loss == "dr_grpo":
        recipe.set("loss_fn.constant_length", recipe.value("max_completion_length"), because="loss_type")
    _translate_importance_level(recipe, loss)
    _translate_engine_correction(recipe, loss)
    _translate_kl(recipe)


def _make_objective(recipe: LibraryRecipe, loss: str) -> dict[str, Any]:
    low, high = recipe.value("epsilon"), recipe.value("epsilon_high")
    high = low if high is None else high
    sequence = recipe.value("importance_sampling_level") == "sequence"
    reads = {"epsilon", "epsilon_high", "delta"}
    made: dict[str, Any]
    if loss in CLIPPED:
        made = {"name": "sequence_clip" if sequence else "clip", "low": low, "high": high, "two_sided": recipe.value("delta")}
    elif loss == "cispo":
        reads = {"epsilon_high"}
        made = {"name": "cispo", "low": 1.0, "high": max(0.0, high - 1.0)}  # there epsilon_high itself is the largest weight
        if high < 1:
            text = f"the largest weight is 1 here: there {high} would scale down every token on-policy"
            recipe.note("epsilon_high", Effect.CHANGED, text)
    elif loss == "sapo":
        reads = {"sapo_temperature_pos", "sapo_temperature_neg"}
        made = {
            "name": "soft_gate",
            "tau_positive": recipe.value("sapo_temperature_pos"),
            "tau_negative": recipe.value("sapo_temperature_neg"),
        }
    else:
        names = {"k_positive": "k_pos", "lambda_positive": "lambda_pos", "k_negative": "k_neg", "lambda_negative": "lambda_neg"}
        reads = {f"vespo_{name}" for name in names.values()}
        made = {"name": "gamma_weight"} | {ours: recipe.value(f"vespo_{theirs}") for ours, theirs in names.items()}
    for key in OBJECTIVE_KEYS:
        if key not in reads:
            recipe.unused(key, f"loss_type {loss} does not read it")
        elif recipe.is_written(key):
            recipe.note(key, Effect.RENAMED, f"an option of algorithm.objective, {made['name']}, here")
    return made


OBJECTIVE_KEYS = (
    "epsilon", "epsilon_high", "delta", "sapo_temperature_pos", "sapo_temperature_neg",
    "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg",
)  # fmt: skip


def _translate_importance_level(recipe: LibraryRecipe, loss: str) -> None:
    key = "importance_sampling_level"
    if recipe.value(key) != "sequence":
        if recipe.is_written(key):
            recipe.note(key, Effect.RENAMED, "the objectives' own ratio, of each token, here")
    elif loss not in CLIPPED:
        recipe.refuse(key, f"loss_type {loss} has its own ratio here", "Remove the key.")
    elif AGGREGATIONS[loss] == "token_mean":
        recipe.refuse(key, "a mean over tokens gives long rollouts more weight", "Set loss_type: grpo, as TRL advises too.")
    elif recipe.is_written(key):
        recipe.note(key, Effect.RENAMED, "algorithm.objective.name=sequence_clip here")


def _translate_engine_correction(recipe: LibraryRecipe, loss: str) -> None:
    """A weight by the mismatch of vLLM and the trainer."""
    mode, cap = recipe.value("vllm_importance_sampling_mode"), recipe.value("vllm_importance_sampling_clip_max")
    key, keys = "vllm_importance_sampling_correction", ("mode", "clip_max", "clip_min", "cap")
    cap = recipe.value("vllm_importance_sampling_cap") or cap
    floor = recipe.value("vllm_importance_sampling_clip_min") or 0.0
    corrections: list[dict[str, Any]] = []
    if recipe.value("use_vllm") and recipe.value(key):
        level = "sequence" if mode.startswith("sequence") else "token"
        if loss == "vespo":
            recipe.refuse(key, "vespo's ratio is to the engine already here", "Set vllm_importance_sampling_correction: false.")
            return
        if cap is None:
            corrections.append({"name": "importance", "level": level})
        elif mode.endswith("mask"):
            corrections.append({"name": "mis", "low": floor, "high": cap, "level": level})
        else:
            corrections.append({"name": "tis", "cap": cap, "floor": floor, "level": level})
        for option in (f"vllm_importance_sampling_{name}" for name in keys):
            if recipe.is_written(option):
                recipe.note(option, Effect.RENAMED, f"algorithm.corrections.0, {corrections[0]['name']}, here")
    else:
        for option in (key, *(f"vllm_importance_sampling_{name}" for name in keys)):
            recipe.unused(option, "nothing is corrected without use_vllm and vllm_importance_sampling_correction")
    if recipe.value("off_policy_mask_threshold") is not None:
        corrections.append({"name": "opsm", "delta": recipe.value("off_policy_mask_threshold")})
        recipe.note("off_policy_mask_threshold", Effect.RENAMED, "algorithm.corrections, opsm, here")
    if corrections:
        recipe.carry(key, "algorithm.corrections", corrections, "algorithm.corrections here")


def _translate_kl(recipe: LibraryRecipe) -> None:
    weight = recipe.value("beta")
    recipe.carry("beta", "loss_fn.reference_policy_kl_penalty", weight)
    if not weight:
        recipe.unused("use_bias_correction_kl", "beta is 0")
        return
    unbiased = recipe.value("use_bias_correction_kl")
    if recipe.value("importance_sampling_level") == "sequence" and unbiased:
        text = "multiplied by the ratio of each token here, not of the rollout"
        recipe.carry("use_bias_correction_kl", "algorithm.kl.unbiased", True, text, changed=True)
    else:
        recipe.carry("use_bias_correction_kl", "algorithm.kl.unbiased", unbiased)


def translate_advantage(recipe: LibraryRecipe) -> None:
    """Scaled by the unbiased deviation of the group or of the batch, or not."""
    scale = {True: "group", False: "none"}.get(recipe.value("scale_rewards"), recipe.value("scale_rewards"))
    apart = recipe.value("multi_objective_aggregation") == "normalize_then_sum"
    if apart:
        made: dict[str, Any] = {"name": "decoupled_rewards", "deviation": "unbiased"}
        made |= {"weights": list(weights)} if (weights := recipe.value("reward_weights")) else {}
        recipe.unused("scale_rewards", "multi_objective_aggregation normalizes each reward")
    elif scale == "batch":
        made = {"name": "batch_scaled"}
    else:
        made = {"name": "group_relative", "normalize": scale == "group", "deviation": "unbiased"}
    key = "multi_objective_aggregation" if apart else "scale_rewards"
    text = (
        "algorithm.advantage.name="
        + made["name"]
        + " here"
        + ("" if apart or scale == "batch" else f", with normalize={str(scale == 'group').lower()}")
    )
    recipe.carry(key, "algorithm.advantage", made, text)


def translate_entropy(recipe: LibraryRecipe) -> None:
    recipe.carry("entropy_coef", "loss_fn.entropy_bonus", recipe.value("entropy_coef"))
    share = recipe.value("top_entropy_quantile")
    if share < 1:
        recipe.carry("top_entropy_quantile", "algorithm.selection", {"name": "top_entropy", "share": share})
    if recipe.value("use_adaptive_entropy"):
        fix = "Set algorithm.entropy_target in its place, which pays the bonus only below it. Remove the key."
        recipe.refuse("use_adaptive_entropy", "the weight of the entropy is not adapted step by step here", fix)
    for key in ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"):
        recipe.unused(key, "use_adaptive_entropy reads it")


def translate_rloo(recipe: LibraryRecipe) -> None:
    """One optimizer step for a batch: the gradient of RLOO's clipped ratio of a rollout at 1 is that of REINFORCE."""
    recipe.set("algorithm.name", "rloo", because="beta")
    if count_batches(recipe).optimizer_steps > 1:
        key = "num_iterations" if recipe.value("num_iterations") > 1 else "steps_per_generation"
        fix = "Train once on each batch: num_iterations: 1, and no more steps_per_generation than gradient_accumulation_steps."
        recipe.refuse(key, "the clipped ratio of a whole rollout, a product over its tokens, is not in this version", fix)
    for key in ("epsilon", "epsilon_high"):
        recipe.unused(key, "a ratio of 1 is not clipped")
    weight = recipe.value("beta")
    recipe.carry(
        "beta", "loss_fn.reference_policy_kl_penalty", weight, f"loss_fn.reference_policy_kl_penalty={weight} here, in the reward"
    )
    if weight:
        recipe.set("loss_fn.reference_policy_kl_type", "k1", because="beta")
        recipe.set("loss_fn.use_kl_in_reward", True, because="beta")
    if limits := recipe.value("reward_clip_range"):
        low, high = limits
        ends = {"source_min": low, "source_max": high, "target_min": low, "target_max": high}
        recipe.carry(
            "reward_clip_range",
            "grpo.reward_scaling",
            {"enabled": True, **ends},
            "grpo.reward_scaling here, from the range to itself",
        )


def translate_online_dpo(recipe: LibraryRecipe) -> None:
    """Two completions of a prompt, the better one by the reward."""
    if "online_dpo" not in all_algorithms():
        recipe.refuse("loss_type", "online DPO is not in this version", "Train with `trl grpo`'s keys.")
        return
    recipe.set("algorithm.name", "online_dpo", because="loss_type")
    if recipe.value("loss_type") != "sigmoid":
        recipe.carry("loss_type", "algorithm.loss_type", recipe.value("loss_type"))
    beta = recipe.value("beta")
    beta = beta[0] if isinstance(beta, list) and len(beta) == 1 else beta
    if isinstance(beta, list):
        recipe.refuse("beta", "it is the same in every epoch here", "Set one number.")
    else:
        recipe.carry("beta", "algorithm.beta", beta)
    recipe.set("grpo.num_generations_per_prompt", 2, because="beta")
    accumulated = recipe.value("per_device_train_batch_size") * recipe.value("gpus") * recipe.value("gradient_accumulation_steps")
    recipe.set("grpo.num_prompts_per_step", accumulated, because="per_device_train_batch_size")
    recipe.set("policy.train_global_batch_size", 2 * accumulated, because="per_device_train_batch_size")


def translate_preference_loss(recipe: LibraryRecipe) -> None:
    """DPO's loss_type, alone or together with an SFT term."""
    asked = recipe.value("loss_type")
    losses = [asked] if isinstance(asked, str) else list(asked)
    weights = dict(zip(losses, recipe.value("loss_weights") or [1.0] * len(losses), strict=False))
    sft = weights.pop("sft", 0.0)
    if len(weights) != 1 or next(iter(weights)) not in PREFERENCES:
        fix = f"Set one of {', '.join(PREFERENCES)}, and optionally sft."
        recipe.refuse("loss_type", "a run has one preference loss, and an SFT term", fix)
        return
    loss, weight = next(iter(weights.items()))
    smoothing = recipe.value("label_smoothing")
    name = "cdpo" if loss == "sigmoid" and smoothing else PREFERENCES[loss]
    if name not in all_algorithms():
        recipe.refuse("loss_type", f"{name} is not in this version", "Set loss_type: sigmoid.")
        return
    recipe.carry("loss_type", "algorithm.name", name)
    recipe.carry("beta", "dpo.reference_policy_kl_penalty", recipe.value("beta"))
    recipe.carry("loss_weights", "dpo.preference_loss_weight", weight)
    if sft:
        recipe.set("dpo.sft_loss_weight", sft, because="loss_weights")
        recipe.set("algorithm.sft_aggregation", "token_mean", because="loss_type")
    _translate_options(recipe, name, smoothing)


def _translate_options(recipe: LibraryRecipe, name: str, smoothing: float) -> None:
    known = {field for field in getattr(all_algorithms()[name], "__dataclass_fields__", {})}
    for key, to, off in (
        ("label_smoothing", "label_smoothing", 0.0),
        ("ld_alpha", "ld_alpha", None),
        ("use_weighting", "use_weighting", False),
        ("f_divergence_type", "f_divergence_type", "reverse_kl"),
        ("f_alpha_divergence_coef", "f_alpha_divergence_coef", 0.5),
        ("discopop_tau", "tau", 0.05),
    ):
        value = recipe.value(key)
        if to in known and (value != off or (name in SMOOTHED and key == "label_smoothing")):
            recipe.carry(key, f"algorithm.{to}", value)
        elif to not in known and value != off and key in ("ld_alpha", "use_weighting", "f_divergence_type"):
            recipe.refuse(key, f"{name} has no {to}", "Remove the key.")
        elif to not in known:
            recipe.unused(key, f"{name} does not read it")


def translate_kto(recipe: LibraryRecipe) -> None:
    name = recipe.value("loss_type")
    if name not in ("kto", "apo_zero_unpaired") or name not in all_algorithms():
        recipe.refuse("loss_type", "it is not in this version", "Set loss_type: kto.")
        return
    recipe.carry("loss_type", "algorithm.name", name)
    recipe.carry("beta", "dpo.reference_policy_kl_penalty", recipe.value("beta"))
    for key in ("desirable_weight", "undesirable_weight"):
        recipe.carry(key, f"algorithm.{key}", recipe.value(key))


def translate_sft_loss(recipe: LibraryRecipe) -> None:
    """Loss on what the assistant says."""
    loss = recipe.value("loss_type")
    recipe.carry("loss_type", "algorithm.dft", loss == "dft")
    if loss not in ("nll", "chunked_nll", "dft"):
        recipe.refuse("loss_type", "there is no counterpart", "Set loss_type: nll, or dft.")
    if recipe.value("assistant_only_loss"):
        recipe.note("assistant_only_loss", Effect.RENAMED, "always so here")
    elif recipe.value("completion_only_loss") is not True:
        key = "completion_only_loss" if recipe.value("completion_only_loss") is False else "assistant_only_loss"
        recipe.note(
            key, Effect.CHANGED, "the loss is on what the assistant says here; there, without it, on all of a conversation"
        )
    elif recipe.is_written("completion_only_loss"):
        recipe.note("completion_only_loss", Effect.RENAMED, "always so here")
