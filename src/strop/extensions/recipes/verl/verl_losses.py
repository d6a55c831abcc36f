"""Advantages and losses of verl as parts of an algorithm."""

from __future__ import annotations

from typing import Any

from strop.algorithms.catalogue import all_parts
from strop.extensions.recipes.difference import Effect
from strop.extensions.recipes.library_recipe import LibraryRecipe
from strop.extensions.recipes.verl.verl_training import ACTOR

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
