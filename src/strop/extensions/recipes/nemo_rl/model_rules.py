"""Models (``policy``, ``value``, ``teacher``), quantisation-aware training, kinds of run, checkpoints, trackers and the cluster."""

from __future__ import annotations

import math

from strop.extensions.recipes.nemo_rl.megatron_options import move_environment
from strop.extensions.recipes.rules import Effect, Recipe, Refused, Renamed, Rule, Unused, describe, is_switched_off

PACKED = "rows are packed without padding"
SAME_MATH = "it chooses how the same numbers are computed"
AUTOMODEL = "*.dtensor_cfg.automodel_kwargs"


def cut_by_tokens(recipe: Recipe) -> None:
    """``dynamic_batching.enabled=true``: micro-batches of a number of tokens, which are packed ones here."""
    for model in ("policy", "value"):
        key = f"{model}.dynamic_batching.enabled"
        if not recipe.is_set(key) or recipe.value(key) is not True:
            continue
        for name in ("train_mb_tokens", "logprob_mb_tokens"):
            if recipe.is_set(f"{model}.dynamic_batching.{name}"):
                budget = recipe.value(f"{model}.dynamic_batching.{name}")
                recipe.set(f"{model}.sequence_packing.{name}", budget, because=f"{model}.dynamic_batching.{name}")
        recipe.set(f"{model}.sequence_packing.enabled", True, because=key)
        text = f"{model}.sequence_packing cuts by the same numbers of tokens here, without padding; the gradient is the same"
        recipe.note(key, Effect.RENAMED, text)
        recipe.drop(key)


def move_environments(recipe: Recipe) -> None:
    for model in ("policy", "value"):
        move_environment(recipe, f"{model}.dtensor_cfg.env_vars")


MODEL_RULES: tuple[Rule, ...] = (
    cut_by_tokens,
    move_environments,
    Renamed("*.activation_checkpointing_enabled", "*.dtensor_cfg.activation_checkpointing"),
    Unused("*.offload_optimizer_for_logprob", "it changes memory only"),
    Unused("*.make_sequence_length_divisible_by", PACKED),
    Unused("*.sequence_length_round", PACKED),
    Unused("*.sequence_packing.algorithm", "groups are packed as a whole"),
    Unused("*.sequence_packing.microbatch_order", "the gradient does not depend on it"),
    Unused("*.sequence_packing.fuse_loss", "the loss of a packed row is computed at once"),
    Unused("policy.refit_buffer_size_gb", "it changes how weights are sent: policy.generation.weight_sync.bucket_mb does here"),
    Unused("*.tokenizer.use_fastokens", "it gives the same tokens"),
    Unused("*.dtensor_cfg._v2", "there is one torch learner"),
    Unused("*.dtensor_cfg.clear_cache_every_n_steps", "the allocator's cache is left alone"),
    Unused("*.dtensor_cfg.defer_fsdp_grad_sync", "gradients are summed over the ranks once an optimizer step"),
    Unused("*.dtensor_cfg.moe_parallelizer.ignore_router_for_ac", "recomputed activations are the same"),
    Refused(("*.dtensor_cfg.moe_parallelizer.*",), "what this option of Automodel would be here is not known", "Remove the key."),
    Unused("*.dtensor_cfg.moe_parallelizer", "nothing else is in it"),
    Unused("*.dtensor_cfg.lora_cfg.lora_dtype", "adapters are float32"),
    Unused(f"{AUTOMODEL}.force_hf", "models are Hugging Face's own"),
    Unused(f"{AUTOMODEL}.attn_implementation", SAME_MATH),
    Unused(f"{AUTOMODEL}.use_liger_kernel", SAME_MATH),
    Unused(f"{AUTOMODEL}.use_sdpa_patching", SAME_MATH),
    Refused(
        (f"{AUTOMODEL}.backend.fake_balanced_gate",),
        "this replaces the router of a mixture of experts for measurements of speed",
        "Set it to false.",
    ),
    Unused(f"{AUTOMODEL}.backend", SAME_MATH),
    Refused(
        (f"{AUTOMODEL}.freeze_config.freeze_language_model",),
        "no part of a model can be frozen in this version",
        "Remove the key.",
    ),
    Unused(f"{AUTOMODEL}.freeze_config", "nothing else is in it"),
    Refused((f"{AUTOMODEL}.*",), "what this option of Automodel would be here is not known", "Remove the key."),
    Unused(AUTOMODEL, "nothing else is in it"),
    Refused(
        ("policy.pretrained_checkpoint",),
        "the weights are those of policy.model_name",
        "Set policy.model_name to a Hugging Face folder with these weights, and remove the key.",
    ),
    Unused("value.reward_model_cfg", "the critic is a sequence classifier with one label"),
    Refused(
        ("policy.reward_model_cfg",),
        "this run trains a language model",
        "Use strop rm to train a reward model, or set enabled=false.",
    ),
)


# Of Transformer Engine's optimizer: in which type it keeps what, which torch's keeps as the weights.
STORAGE = (
    "master_weights", "master_weight_dtype", "store_param_remainders", "exp_avg_dtype", "exp_avg_sq_dtype", "set_grad_none",
    "capturable", "use_decoupled_grad",
)  # fmt: skip


def translate_fused_adam(recipe: Recipe) -> None:
    """Take torch's AdamW, the same formula, for Transformer Engine's fused one."""
    for key in list(recipe.find("*.optimizer.name")):
        if not str(recipe.value(key)).startswith("transformer_engine.") or not str(recipe.value(key)).endswith(".FusedAdam"):
            continue
        options = f"{key.removesuffix('.name')}.kwargs"
        decoupled = recipe.value(f"{options}.adam_w_mode", True)
        name = "torch.optim.AdamW" if decoupled else "torch.optim.Adam"
        recipe.set(key, name, because=key)
        for option in (*STORAGE, "adam_w_mode"):
            recipe.drop(f"{options}.{option}")
        if recipe.value(f"{options}.weight_decay") is None:
            recipe.set(f"{options}.weight_decay", 0.0, because=key)  # its default
        recipe.note(key, Effect.CHANGED, f"{name} here, the same formula, with moments in the type of the trained weights")


OPTIMIZER_RULES: tuple[Rule, ...] = (translate_fused_adam,)


def leave_out_router_losses(recipe: Recipe) -> None:
    """Transformers' own load-balancing loss, which Automodel adds unless its coefficient is 0."""
    for section in ("policy", "value"):
        for parent in (f"{section}.hf_config_overrides", f"{section}.hf_config_overrides.text_config"):
            key = f"{parent}.router_aux_loss_coef"
            if not recipe.is_set(key):
                continue
            if recipe.value(key):
                recipe.refuse(
                    key, "Transformers' load-balancing loss is not computed", f"Set {section}.router_losses.aux_loss_coeff."
                )
                continue
            recipe.unused(key, f"Transformers' load-balancing loss is never added; {section}.router_losses adds one")
            if parent.endswith("text_config") and len(recipe.value(parent)) == 1:
                recipe.drop(parent)


ROUTER_RULES: tuple[Rule, ...] = (leave_out_router_losses,)


CUTS = "teacher.logprob_mb_tokens cuts what the teacher reads"
WHY_UNUSED = {
    "train_*": "the teacher is not trained",
    "optimizer*": "the teacher is not trained",
    "scheduler": "the teacher is not trained",
    "max_grad_norm": "the teacher is not trained",
    "offload_optimizer_for_logprob": "the teacher is not trained",
    "hf_config_overrides.router_aux_loss_coef": "the teacher is not trained",
    "generation*": "the teacher does not sample",
    "logprob_*": CUTS,
    "dynamic_batching*": CUTS,
    "sequence_packing*": CUTS,
    "make_sequence_length_divisible_by": "rows are packed without padding",
    "max_total_sequence_length": "the teacher reads the student's rollouts whole",
}
TEACHER_RULES: tuple[Rule, ...] = (
    *(Unused(f"teacher.{key}", why) for key, why in WHY_UNUSED.items()),
    Refused(
        ("teacher.hf_config_overrides",),
        "a teacher is read with the configuration in its folder",
        "Change config.json in a copy of its folder, and set teacher.model_name to the copy. Remove the key.",
    ),
)


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


def refuse_other_sections(recipe: Recipe) -> None:
    """Refuse sections that belong to another kind of run."""
    commands = {section: section for section in ("grpo", "sft", "dpo", "rm", "ppo", "distillation")}
    purposes = {
        "teacher": "a run with a teacher",
        "value": "a run with a critic",
    }
    for section, command in {
        **commands,
        "teacher": "distillation",
        "value": "ppo",
    }.items():
        if not recipe.is_set(section) or recipe.is_own_key(section):
            continue
        if is_switched_off(recipe.value(section)):
            recipe.unused(section, "it is switched off")
        else:
            purpose = purposes.get(section, "a run with this section")
            recipe.refuse(
                section,
                f"this is not a section of strop {getattr(recipe.root, 'section', 'eval')}",
                f"Use strop {command} for {purpose}. Remove the key.",
            )


def translate_fault_tolerance(recipe: Recipe) -> None:
    """Save as often as the recipe does for resuming: the newest checkpoint is always kept, the others are ranked."""
    key, period = "checkpointing.ft_save_period", "checkpointing.save_period"
    often, latest = recipe.value(key), recipe.value("checkpointing.ft_keep_latest_k")
    if isinstance(often, int) and often > 0:
        saved = recipe.value(period)
        every = math.gcd(often, saved) if isinstance(saved, int) and saved > 0 else often
        recipe.set(period, every, because=key)
        text = f"checkpointing.save_period={every} here: the newest checkpoint is always kept to resume from, besides the keep_top_k best"
        recipe.note(key, Effect.CHANGED, text)
        recipe.drop(key)
    elif recipe.is_set(key):
        recipe.unused(key, "it is switched off")
    if recipe.is_set("checkpointing.ft_keep_latest_k"):
        one = latest in (None, 1)
        text = "the newest checkpoint is always kept" if one else f"the newest checkpoint is kept here, not the newest {latest}"
        recipe.note("checkpointing.ft_keep_latest_k", Effect.UNUSED if one else Effect.CHANGED, text)
        recipe.drop("checkpointing.ft_keep_latest_k")


# NeMo-RL hands logger.wandb and logger.swanlab to wandb.init and swanlab.init, whatever they say.
_KEPT_ID = "the log folder keeps the id of the run, so that a resumed run stays one run"
_SERVICE_RULES: tuple[Rule, ...] = (
    Unused("logger.wandb.log_nemo_gym_full_result_tables", "every rollout is stored, see logger.rollouts"),
    Renamed("logger.swanlab.experiment_name", "logger.swanlab.name"),
    Renamed("logger.swanlab.description", "logger.swanlab.notes"),
    *(Unused(f"logger.{service}.{name}", _KEPT_ID) for service in ("wandb", "swanlab") for name in ("id", "resume", "reinit")),
    *(
        Unused(f"logger.wandb.{name}", "it is an argument of wandb.init that changes no metric")
        for name in ("settings", "config", "save_code", "sync_tensorboard", "monitor_gym", "force", "allow_val_change")
    ),
    *(
        Unused(f"logger.swanlab.{name}", "it is an argument of swanlab.init that changes no metric")
        for name in ("settings", "config", "logdir", "public", "private", "color", "callbacks")
    ),
)

RUN_RULES: tuple[Rule, ...] = (
    refuse_other_sections,
    Unused("checkpointing.model_save_format", "weights are saved as safetensors"),
    Refused(
        ("checkpointing.save_consolidated",),
        "every checkpoint can be exported to a Hugging Face folder afterwards",
        "Remove the key; strop export writes the folder.",
    ),
    *_SERVICE_RULES,
    Unused("cluster.master_port_range_*", "free ports are chosen automatically"),
    Unused("data_plane", "it only says how batches travel between processes, and changes no number"),
    translate_fault_tolerance,
    Renamed("checkpointing.is_async", "checkpointing.async_save"),
    Unused("*._override_", "only a section at the top of a file that inherits replaces that of the base, as in NeMo-RL"),
    Unused("grpo.calculate_advantages_on_gpu", "it changes where advantages are computed, not what they are"),
    Unused("*skip_reference_policy_logprobs_calculation", "they are computed only where a KL term needs them"),
)
