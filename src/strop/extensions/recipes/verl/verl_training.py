"""Lengths, sizes, optimizers and parallelism of verl's trainers."""

from __future__ import annotations

from typing import Any

from strop.extensions.recipes.library_recipe import PROJECTS, RUN_NAMES, LibraryRecipe, enable_services, name_in_services
from strop.extensions.recipes.rules import Effect

ACTOR, ROLLOUT, REF, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "ref", "model"))
PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size")


def translate_run(recipe: LibraryRecipe) -> None:
    """Epochs and steps of batches, validation, checkpoints."""
    recipe.carry("trainer.total_epochs", "{section}.max_num_epochs", recipe.value("trainer.total_epochs"))
    steps = recipe.value("trainer.total_training_steps")
    if steps is not None:
        recipe.set("{section}.max_num_epochs", None, because="trainer.total_training_steps")
    recipe.carry("trainer.total_training_steps", "{section}.max_num_steps", -1 if steps is None else steps)
    period = max(recipe.value("trainer.test_freq"), 0)
    recipe.carry("trainer.test_freq", "{section}.val_period", period)
    recipe.set("{section}.val_at_end", period > 0, because="trainer.test_freq")
    if recipe.kind != "sft":
        recipe.carry("trainer.val_before_train", "{section}.val_at_start", recipe.value("trainer.val_before_train"))
        most = recipe.value("data.val_max_samples")
        recipe.carry("data.val_max_samples", "{section}.max_val_samples", None if most < 0 else most)
    saves = recipe.value("trainer.save_freq")
    if saves > 0:
        recipe.carry("trainer.save_freq", "checkpointing.save_period", saves)
    else:
        recipe.carry("trainer.save_freq", "checkpointing.enabled", False)
    recipe.set("checkpointing.metric_name", None, because="trainer.max_actor_ckpt_to_keep")
    keep = "trainer.max_ckpt_to_keep" if recipe.kind == "sft" else "trainer.max_actor_ckpt_to_keep"
    recipe.carry(keep, "checkpointing.keep_top_k", recipe.value(keep))
    _translate_folders(recipe)
    warmup = recipe.value("trainer.critic_warmup")
    if recipe.kind == "ppo" and warmup:
        recipe.carry("trainer.critic_warmup", "ppo.policy_training_start_step", warmup - 1)  # verl counts steps from 1
    else:
        recipe.unused("trainer.critic_warmup", "there is no critic")
    if recipe.value("trainer.val_only"):
        recipe.refuse("trainer.val_only", "a training run trains", "Run `strop eval`. Remove the key.")


def _translate_folders(recipe: LibraryRecipe) -> None:
    folder = str(recipe.value("trainer.default_local_dir"))
    recipe.carry("trainer.default_local_dir", "checkpointing.checkpoint_dir", folder)
    resume = recipe.value("trainer.resume_mode")
    if resume == "resume_path" or recipe.value("trainer.resume_from_path"):
        key = "trainer.resume_mode" if resume == "resume_path" else "trainer.resume_from_path"
        fix = "Set actor_rollout_ref.model.path to its weights as a Hugging Face folder, and trainer.resume_mode=auto."
        recipe.refuse(key, "checkpoints of verl's are not continued", fix)
    recipe.carry("trainer.resume_mode", "checkpointing.resume", "never" if resume == "disable" else "auto")
    _translate_services(recipe)


def _translate_services(recipe: LibraryRecipe) -> None:
    """Both names are verl's for all services: MLflow calls a project an experiment."""
    asked = recipe.value("trainer.logger")
    names = [asked] if isinstance(asked, str) else list(asked or [])
    services = enable_services(recipe, "trainer.logger", names, silent=("console", "file"), same={"tracking": "wandb"})
    for key, keys in (("trainer.project_name", PROJECTS), ("trainer.experiment_name", RUN_NAMES)):
        if not name_in_services(recipe, key, keys, services):
            recipe.unused(key, "it names runs in services, and the folder of checkpoints")


def translate_machines(recipe: LibraryRecipe) -> None:
    recipe.carry("trainer.n_gpus_per_node", "cluster.gpus_per_node", recipe.value("trainer.n_gpus_per_node"))
    recipe.carry("trainer.nnodes", "cluster.num_nodes", recipe.value("trainer.nnodes"))


def translate_batches(recipe: LibraryRecipe) -> None:
    """verl counts prompts; an optimizer step here counts completions."""
    prompts, group = recipe.value("data.train_batch_size"), recipe.value(f"{ROLLOUT}.n")
    mini = recipe.value(f"{ACTOR}.ppo_mini_batch_size")
    recipe.carry("data.train_batch_size", "{section}.num_prompts_per_step", prompts)
    recipe.carry(f"{ROLLOUT}.n", "{section}.num_generations_per_prompt", group)
    if mini > prompts:
        recipe.refuse(
            f"{ACTOR}.ppo_mini_batch_size", "a batch has fewer prompts", "Set it to a divisor of data.train_batch_size."
        )
    else:
        recipe.carry(f"{ACTOR}.ppo_mini_batch_size", "policy.train_global_batch_size", mini * group)
    epochs = recipe.value(f"{ACTOR}.ppo_epochs")
    recipe.carry(f"{ACTOR}.ppo_epochs", "grpo.update_epochs" if recipe.kind == "grpo" else "ppo.ppo_epochs", epochs)
    _translate_micro_batches(recipe, ACTOR, "policy", group)
    if recipe.kind == "ppo":
        critic = recipe.values.get("critic.ppo_mini_batch_size", mini)
        recipe.carry("critic.ppo_mini_batch_size", "value.train_global_batch_size", critic * group)
        _translate_micro_batches(recipe, "critic", "value", group)
        if recipe.values.get("critic.ppo_epochs", epochs) != epochs:
            recipe.refuse("critic.ppo_epochs", "policy and critic make as many passes", f"Set it to {ACTOR}.ppo_epochs.")


def _translate_micro_batches(recipe: LibraryRecipe, section: str, to: str, group: int) -> None:
    budget, rows = f"{section}.ppo_max_token_len_per_gpu", f"{section}.ppo_micro_batch_size_per_gpu"
    dynamic = recipe.value(f"{section}.use_dynamic_bsz")
    dynamic = recipe.value(f"{ACTOR}.use_dynamic_bsz") if dynamic is None else dynamic
    ranks = recipe.value(f"{section}.ulysses_sequence_parallel_size") or 1
    if dynamic and recipe.value(budget):
        recipe.carry(budget, f"{to}.sequence_packing.train_mb_tokens", recipe.value(budget) * ranks)
        recipe.unused(rows, "use_dynamic_bsz cuts by tokens")
    elif recipe.value(rows):
        recipe.carry(rows, f"{to}.train_micro_batch_size", recipe.value(rows))
        recipe.unused(budget, "use_dynamic_bsz is off")


def translate_critic(recipe: LibraryRecipe) -> None:
    """The critic is a separate network; its loss is half the squared error, clipped."""
    if recipe.kind != "ppo":
        return
    recipe.carry("critic.model.path", "value.model_name", recipe.value("critic.model.path"))
    recipe.carry("critic.cliprange_value", "value_loss_fn.cliprange", recipe.value("critic.cliprange_value"))
    recipe.carry("critic.grad_clip", "value.max_grad_norm", recipe.value("critic.grad_clip"))
    checkpointing = "critic.model.enable_gradient_checkpointing"
    recipe.carry(checkpointing, "value.dtensor_cfg.activation_checkpointing", recipe.value(checkpointing))
    ranks = "critic.ulysses_sequence_parallel_size"
    recipe.carry(ranks, "value.dtensor_cfg.context_parallel_size", recipe.value(ranks))
    _translate_optimizer(recipe, "critic.optim", "value")
    _translate_lora(recipe, "critic.model", "value")


def translate_actor_optimizer(recipe: LibraryRecipe) -> None:
    _translate_optimizer(recipe, f"{ACTOR}.optim", "policy")
    own, clip = recipe.value(f"{ACTOR}.grad_clip"), recipe.value(f"{ACTOR}.optim.clip_grad")
    key = f"{ACTOR}.optim.clip_grad" if is_megatron(recipe) else f"{ACTOR}.grad_clip"
    recipe.carry(key, "policy.max_grad_norm", clip if is_megatron(recipe) else own)
    recipe.unused(f"{ACTOR}.grad_clip" if is_megatron(recipe) else f"{ACTOR}.optim.clip_grad", f"verl reads {key}")


def translate_sft_optimizer(recipe: LibraryRecipe) -> None:
    _translate_optimizer(recipe, "optim", "policy")
    recipe.carry("optim.clip_grad", "policy.max_grad_norm", recipe.value("optim.clip_grad"))


def _translate_optimizer(recipe: LibraryRecipe, section: str, to: str) -> None:
    if is_megatron(recipe):
        translate_megatron_optimizer(recipe, section, f"{to}.megatron_cfg")
        return
    name, package = recipe.value(f"{section}.optimizer"), recipe.value(f"{section}.optimizer_impl")
    name = "AdamW" if str(name).lower() in ("adam", "adamw") else name
    recipe.set(f"{to}.optimizer.name", f"{package}.{name}", because=f"{section}.optimizer")
    recipe.carry(f"{section}.lr", f"{to}.optimizer.kwargs.lr", recipe.value(f"{section}.lr"))
    recipe.carry(f"{section}.weight_decay", f"{to}.optimizer.kwargs.weight_decay", recipe.value(f"{section}.weight_decay"))
    recipe.carry(f"{section}.betas", f"{to}.optimizer.kwargs.betas", list(recipe.value(f"{section}.betas")))
    prefix = f"{section}.override_optimizer_config."
    options = {key.removeprefix(prefix): key for key in recipe.values if key.startswith(prefix)}
    for option, key in options.items():
        if "offload" in option or "overlap" in option or "precision_aware" in option:
            recipe.unused(key, "it says where the optimizer keeps its state")
        else:
            recipe.carry(key, f"{to}.optimizer.kwargs.{option}", recipe.value(key))
    if "eps" not in options:
        recipe.set(f"{to}.optimizer.kwargs.eps", 1e-8, because=f"{section}.optimizer")
    _translate_schedule(recipe, section, to)


def _translate_schedule(recipe: LibraryRecipe, section: str, to: str) -> None:
    """A warm-up from 0, then constant or half a cosine, in batches."""
    keys = [f"{section}.{name}" for name in ("lr_scheduler_type", "warmup_style", "lr_scheduler", "lr_decay_style")]
    kinds = {key: recipe.value(key) for key in keys if recipe.value(key) is not None}
    key = next((key for key in kinds if recipe.is_written(key)), keys[2] if keys[2] in kinds else keys[0])
    kind, kwargs = kinds.get(key, "constant"), dict[str, Any]()
    if kind not in ("constant", "cosine", "linear", "wsd"):
        recipe.refuse(key, "there is no counterpart", "Set constant or cosine.")
        return
    steps, ratio = recipe.value(f"{section}.lr_warmup_steps"), recipe.value(f"{section}.lr_warmup_steps_ratio")
    written = f"{section}.lr_warmup_steps" if steps and steps > 0 else f"{section}.lr_warmup_steps_ratio"
    if steps and steps > 0:
        kwargs |= {"warmup_steps": steps, "warmup_init_ratio": 0.0}
    elif ratio:
        kwargs |= {"warmup_ratio": ratio, "warmup_init_ratio": 0.0}
    if kwargs and recipe.is_written(written):
        recipe.note(written, Effect.RENAMED, f"{to}.scheduler.kwargs has it here, from a rate of 0")
    least = recipe.value(f"{section}.min_lr_ratio") or 0.0
    if kind != "constant" and least:
        kwargs["min_ratio"] = least
    if recipe.value(f"{section}.num_cycles") != 0.5 and kind == "cosine":
        recipe.refuse(f"{section}.num_cycles", "half a cosine is what there is", "Set 0.5.")
    recipe.set(f"{to}.scheduler_unit", "batch", because=key)
    if kind != "constant" or kwargs:
        recipe.carry(key, f"{to}.scheduler", {"name": kind, "kwargs": kwargs}, f"{to}.scheduler.name={kind} here")
    elif recipe.is_written(key):
        recipe.note(key, Effect.RENAMED, f"{to}.scheduler is null, the same rate in each step, here")


def translate_parallelism(recipe: LibraryRecipe) -> None:
    """FSDP shards over all ranks, ulysses splits sequences; Megatron Core has its own sizes."""
    strategy = recipe.value(f"{ACTOR}.strategy")
    if strategy == "megatron":
        recipe.carry(f"{ACTOR}.strategy", "policy.megatron_cfg.enabled", True)
        recipe.set("policy.dtensor_cfg.enabled", False, because=f"{ACTOR}.strategy")
        for name in PARALLEL:
            key = f"{ACTOR}.megatron.{name}"
            recipe.carry(key, f"policy.megatron_cfg.{name}", recipe.value(key))
            if recipe.kind == "ppo":
                own = f"critic.megatron.{name}" if recipe.is_written(f"critic.megatron.{name}") else key
                recipe.set(f"value.megatron_cfg.{name}", recipe.value(own), because=own)
        if recipe.kind == "ppo":
            recipe.set("value.megatron_cfg.enabled", True, because=f"{ACTOR}.strategy")
            recipe.set("value.dtensor_cfg.enabled", False, because=f"{ACTOR}.strategy")
    elif strategy not in ("fsdp", "fsdp2"):
        recipe.refuse(f"{ACTOR}.strategy", "there is no such learner in this version", f"Set {ACTOR}.strategy=fsdp2.")
    elif recipe.is_written(f"{ACTOR}.strategy"):
        recipe.note(f"{ACTOR}.strategy", Effect.RENAMED, "policy.dtensor_cfg.enabled=true, fully sharded, here")
    key = f"{ACTOR}.ulysses_sequence_parallel_size"
    recipe.carry(key, "policy.dtensor_cfg.context_parallel_size", recipe.value(key))
    size, key = recipe.value(f"{ACTOR}.fsdp_config.fsdp_size"), f"{ACTOR}.fsdp_config.fsdp_size"
    ranks = recipe.value("trainer.n_gpus_per_node") * recipe.value("trainer.nnodes")
    if isinstance(size, int) and isinstance(ranks, int) and 0 < size < ranks:
        if ranks % size:
            recipe.refuse(key, f"{ranks} GPUs are no whole number of such groups", "Set -1 to shard over all.")
        else:
            recipe.carry(key, "policy.dtensor_cfg.dp_replicate_size", ranks // size)
    else:
        recipe.unused(key, "the model is sharded over all GPUs")
    dtypes = {"fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}
    for name, to in (("model_dtype", "policy.weights_dtype"), ("dtype", "policy.precision")):
        key = f"{ACTOR}.fsdp_config.{name}"
        if recipe.value(key) not in dtypes:
            recipe.refuse(key, "weights and arithmetic are float32 or bfloat16 here", "Set bfloat16.")
        elif name == "model_dtype" and dtypes[recipe.value(key)] == "bfloat16":
            text = f"{to}=bfloat16 here, whose optimizer keeps float32 master weights"
            recipe.carry(key, to, "bfloat16", text, changed=True)
        else:
            recipe.carry(key, to, dtypes[recipe.value(key)])


def translate_frozen_tower(recipe: LibraryRecipe) -> None:
    """``freeze_vision_tower``: the tower of a model that reads images is not trained."""
    key = f"{ACTOR}.freeze_vision_tower"
    recipe.carry(key, "policy.freeze_vision_tower", bool(recipe.value(key)))


def translate_router_replay(recipe: LibraryRecipe) -> None:
    """R3 replays the experts of the rollout, which the engine is then asked for."""
    key, asked = f"{ACTOR}.router_replay.mode", f"{ROLLOUT}.enable_rollout_routing_replay"
    mode = recipe.value(key)
    if mode == "R3":
        recipe.carry(key, "policy.router_replay.enabled", True)
        recipe.unused(asked, "policy.router_replay.enabled asks the engine too")
    elif mode == "disabled":
        recipe.unused(key, "experts are not replayed")
        recipe.unused(asked, f"{key} does not replay what the engine says")
    else:
        recipe.refuse(
            key, "experts are replayed from the rollout, not from an earlier pass of the learner", "Set R3 or disabled."
        )


def translate_actor_lora(recipe: LibraryRecipe) -> None:
    _translate_lora(recipe, MODEL, "policy")


def translate_sft_lora(recipe: LibraryRecipe) -> None:
    _translate_lora(recipe, "model", "policy")


def _translate_lora(recipe: LibraryRecipe, section: str, to: str) -> None:
    rank, lora = recipe.value(f"{section}.lora_rank"), f"{to}.dtensor_cfg.lora_cfg"
    if not rank:
        for name in ("lora_alpha", "target_modules", "exclude_modules"):
            recipe.unused(f"{section}.{name}", "lora_rank is 0")
        return
    recipe.set(f"{lora}.enabled", True, because=f"{section}.lora_rank")
    recipe.carry(f"{section}.lora_rank", f"{lora}.dim", rank)
    recipe.carry(f"{section}.lora_alpha", f"{lora}.alpha", recipe.value(f"{section}.lora_alpha"))
    recipe.set(f"{lora}.lora_A_init", "uniform", because=f"{section}.lora_rank")
    modules = recipe.value(f"{section}.target_modules")
    if modules in ("all-linear", ["all-linear"], None):
        recipe.carry(f"{section}.target_modules", f"{lora}.match_all_linear", True)
    else:
        recipe.carry(
            f"{section}.target_modules", f"{lora}.target_modules", [modules] if isinstance(modules, str) else list(modules)
        )
    if excluded := recipe.value(f"{section}.exclude_modules"):
        names = [excluded] if isinstance(excluded, str) else list(excluded)
        if any(set(name) & set("()|\\^$") for name in names):
            recipe.refuse(f"{section}.exclude_modules", "patterns are names or use * here", "Write them so.")
        else:
            recipe.carry(f"{section}.exclude_modules", f"{lora}.exclude_modules", names)


MEGATRON_STYLES = ("constant", "linear", "cosine")


def is_megatron(recipe: LibraryRecipe) -> bool:
    return "megatron" in (recipe.value("actor_rollout_ref.actor.strategy"), recipe.value("engine.strategy"))


def translate_megatron_optimizer(recipe: LibraryRecipe, section: str, to: str) -> None:
    """Set ``optimizer`` and ``scheduler`` of ``megatron_cfg``: a warm-up from 0, then a decay to 0 by the end of the run."""
    name = str(recipe.value(f"{section}.optimizer")).lower()
    if name not in ("adam", "adamw", "sgd"):
        recipe.refuse(f"{section}.optimizer", "Megatron Core has adam and sgd", "Set adam.")
        return
    recipe.set(f"{to}.optimizer.optimizer", "sgd" if name == "sgd" else "adam", because=f"{section}.optimizer")
    recipe.carry(f"{section}.lr", f"{to}.optimizer.lr", recipe.value(f"{section}.lr"))
    recipe.set(f"{to}.optimizer.min_lr", 0.0, because=f"{section}.lr")
    recipe.carry(f"{section}.weight_decay", f"{to}.optimizer.weight_decay", recipe.value(f"{section}.weight_decay"))
    for number, beta in enumerate(recipe.value(f"{section}.betas"), 1):
        recipe.set(f"{to}.optimizer.adam_beta{number}", beta, because=f"{section}.betas")
    if recipe.is_written(f"{section}.betas"):
        recipe.note(f"{section}.betas", Effect.RENAMED, f"{to}.optimizer has adam_beta1 and adam_beta2 here")
    prefix = f"{section}.override_optimizer_config."
    for key in [key for key in recipe.values if key.startswith(prefix)]:
        option = key.removeprefix(prefix)
        if "offload" in option or "overlap" in option or "precision_aware" in option:
            recipe.unused(key, "it says where the optimizer keeps its state")
        else:
            recipe.carry(key, f"{to}.optimizer.{option}", recipe.value(key))
    _translate_megatron_schedule(recipe, section, f"{to}.scheduler")


def _translate_megatron_schedule(recipe: LibraryRecipe, section: str, to: str) -> None:
    keys = [f"{section}.{name}" for name in ("lr_decay_style", "lr_scheduler_type", "warmup_style", "lr_scheduler")]
    key = next((key for key in keys if recipe.is_written(key) and recipe.value(key) is not None), keys[0])
    style = recipe.value(key) or "constant"
    if style not in MEGATRON_STYLES:
        recipe.refuse(key, "there is no counterpart", f"Set one of {', '.join(MEGATRON_STYLES)}.")
        return
    recipe.carry(key, f"{to}.lr_decay_style", style)
    steps, ratio = recipe.value(f"{section}.lr_warmup_steps"), recipe.value(f"{section}.lr_warmup_steps_ratio")
    recipe.set(f"{to}.lr_decay_iters", None, because=key)
    recipe.set(f"{to}.lr_warmup_init", 0.0, because=key)
    recipe.set(f"{to}.lr_warmup_iters", max(steps or 0, 0), because=f"{section}.lr_warmup_steps")
    if ratio and not (steps and steps > 0):
        recipe.set(f"{to}.lr_warmup_fraction", ratio, because=f"{section}.lr_warmup_steps_ratio")
    for name in ("lr_warmup_steps", "lr_warmup_steps_ratio"):
        if recipe.is_written(f"{section}.{name}"):
            recipe.note(f"{section}.{name}", Effect.RENAMED, f"{to} has the warm-up here, from a rate of 0")
