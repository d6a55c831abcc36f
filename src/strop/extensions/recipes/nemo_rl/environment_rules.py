"""Section ``env``, and what whole recipes need and this version lacks: each is one refusal, whatever number of keys requests it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from strop.config.source.yaml_source import get_at
from strop.extensions.recipes.nemo_rl.generation_rules import UNSUPPORTED_MEDIA, sample_with_vllm
from strop.extensions.recipes.nemo_rl.nemo_gym_rules import NEMO_GYM_RULES
from strop.extensions.recipes.rules import Effect, Recipe, Rule, Unsupported, is_switched_off

MATH_VERIFIERS = {"hf_math_verify": "math_verify", "dapo_math_verify": "dapo"}
CHOICE_VERIFIERS = ("english_multichoice", "multilingual_multichoice")

GAME = "sliding_puzzle_game"

# How NeMo-RL places, batches and trains a reward model changes none of its scores.
ONLY_SCORES = "the reward model is loaded whole and only scores"
REWARD_MODEL_LAYOUT = {
    "resources": "the reward model is whole in the driver's process, on its first GPU; cluster.environment_hosts=1 with "
    "cluster.roles.environment.num_gpus=1 gives it one of its own",
    **dict.fromkeys(("dtensor_cfg", "megatron_cfg", "dynamic_batching", "sequence_packing", "max_grad_norm"), ONLY_SCORES),
    **dict.fromkeys(("num_workers", "offload_optimizer_for_logprob", "make_sequence_length_divisible_by"), ONLY_SCORES),
    **dict.fromkeys(("processor", "logprob_batch_size", "generation"), ONLY_SCORES),
}
REWARD_MODEL_KEYS = {*REWARD_MODEL_LAYOUT, "tokenizer", "max_model_len", "reward_model_cfg", "checkpoint_path"}  # NeMo-RL's alone

INTERPRETER_KEYS = {"num_workers", "terminate_on_evaluation"}  # of NeMo-RL's environment code


_drop = Recipe.unused_if_set  # (recipe, key, why)


def translate_environments(recipe: Recipe) -> None:
    """Translate the options of each environment."""
    written = get_at(recipe.source.values, ("env",))
    if not isinstance(written, Mapping):
        return
    if isinstance(written.get("dapo"), Mapping) and "dapo" not in _used_aliases(recipe):
        recipe.unused("env.dapo", "NeMo-RL has no environment of this name, and no data names it")
    if not any(written.get(alias) for alias in TRANSLATIONS) and not list(recipe.find("env.*.reward_functions")):
        return
    for alias, options in list((recipe.value("env") or {}).items()):
        key = f"env.{alias}"
        if not isinstance(options, Mapping) or options.get("type") or {"reward", "rewards"} & set(options):
            continue
        if translate := _translate_vlm if "reward_functions" in options else TRANSLATIONS.get(alias):
            translate(recipe, key, options)
        elif set(options) <= {"type", "num_workers"} and alias not in _used_aliases(recipe):
            recipe.unused(key, "no data names it, and NeMo-RL starts only environments that data name")


def _used_aliases(recipe: Recipe) -> Iterator[str]:
    for part in ("train", "validation", "default"):
        entries = recipe.value(f"data.{part}")
        for entry in entries if isinstance(entries, list) else [entries]:
            if isinstance(entry, Mapping) and entry.get("env_name"):
                yield str(entry["env_name"])
    if name := recipe.value("data.env_name"):
        yield str(name)


def _translate_math(recipe: Recipe, key: str, options: Mapping[str, Any]) -> None:
    if key == "env.math_default":
        recipe.set(f"{key}.type", "math", because=key)
    kind, checker = options.get("verifier_type"), options.get("math_verify_impl")
    if str(kind) in CHOICE_VERIFIERS:
        recipe.rename(f"{key}.verifier_type", f"{key}.verifier", kind)
        checker = None  # not read with it
    elif kind in (None, "math"):
        _drop(recipe, f"{key}.verifier_type", "math is how the environment checks answers anyway")
        if recipe.is_written("data.processor") and "verifier" not in options:  # an evaluation, graded as there
            recipe.set(f"{key}.verifier", "math_verify", because=key)
    else:
        _refuse_value(recipe, f"{key}.verifier_type", kind, ("math", *CHOICE_VERIFIERS))
    if str(checker) in MATH_VERIFIERS:
        recipe.rename(f"{key}.math_verify_impl", f"{key}.verifier", MATH_VERIFIERS[str(checker)])
    elif checker is None:
        _drop(recipe, f"{key}.math_verify_impl", "it does not apply to this kind of answer")
    else:
        _refuse_value(recipe, f"{key}.math_verify_impl", checker, tuple(MATH_VERIFIERS))
    _drop(recipe, f"{key}.stop_strings", "the environment does not read it; policy.generation.stop_strings stops a turn")


def _translate_math_multi_reward(recipe: Recipe, key: str, options: Mapping[str, Any]) -> None:
    if (checker := options.get("math_verify_impl", "hf_math_verify")) != "hf_math_verify":
        _refuse_value(recipe, f"{key}.math_verify_impl", checker, ("hf_math_verify",))
    _drop(recipe, f"{key}.math_verify_impl", "the answer is compared as text, there too")
    _drop(recipe, f"{key}.verifier_type", "there is one verifier")
    _drop(recipe, f"{key}.stop_strings", "the environment does not read it; policy.generation.stop_strings stops a turn")


def _play_game(recipe: Recipe, key: str, options: Mapping[str, Any]) -> None:
    """Play the game that the recipe has a section for. In NeMo-RL a script of its own makes its tasks, whatever data the recipe names."""
    entries = recipe.value("data.train")
    listed = entries if isinstance(entries, list) else [entries]
    made = [entry for entry in listed if not (isinstance(entry, Mapping) and entry.get("dataset_name"))]
    steps, prompts = recipe.value("grpo.max_num_steps"), recipe.value("grpo.num_prompts_per_step")
    if GAME in _used_aliases(recipe) or (made and entries) or not recipe.is_own_key("grpo.max_num_steps"):
        return
    if not isinstance(steps, int) or not isinstance(prompts, int):
        return  # refused where they stand
    recipe.drop("data.default")
    recipe.set("data.train", {"env_name": GAME, "size": steps * prompts}, because=key)
    recipe.set("data.validation", {"env_name": GAME, "size": recipe.value("grpo.max_val_samples", 256)}, because=key)
    recipe.note(
        key,
        Effect.CHANGED,
        "the game makes its own tasks, as with NeMo-RL's run_grpo_sliding_puzzle.py, and data.train and data.validation are not read "
        f"(~{key} trains on them instead); answers of the game are messages of the user in the chat template, which NeMo-RL appends "
        "without one, and an episode ends with its last move, where NeMo-RL samples one more turn",
    )
    offload, ranks = (
        "policy.dtensor_cfg.cpu_offload",
        recipe.value("cluster.gpus_per_node", 1) * recipe.value("cluster.num_nodes", 1),
    )
    if (
        recipe.value(offload)
        and ranks == 1
        and recipe.value("cluster.backend") != "ray"
        and not recipe.is_on_command_line(offload)
    ):
        recipe.note(
            offload, Effect.CHANGED, "one rank keeps its parameters on its device; cluster.backend=ray offloads them, too"
        )
        recipe.drop(offload)


def _translate_reward_model(recipe: Recipe, key: str, options: Mapping[str, Any]) -> None:
    if not REWARD_MODEL_KEYS & options.keys():
        return  # Strop's own keys
    _divide_reward_model(recipe, key)
    for name, why in REWARD_MODEL_LAYOUT.items():
        _drop(recipe, f"{key}.{name}", why)
    if isinstance(tokenizer := options.get("tokenizer"), Mapping):
        template = tokenizer.get("chat_template")
        if template not in (None, "default"):
            recipe.set(f"{key}.chat_template", template, because=f"{key}.tokenizer.chat_template")
        if tokenizer.get("name", options.get("model_name")) != options.get("model_name"):
            recipe.refuse(
                f"{key}.tokenizer.name", "the reward model has its own tokenizer here", f"Set it to ${{{key}.model_name}}."
            )
        _drop(recipe, f"{key}.tokenizer", "its name is the model's, and its chat template is chat_template here")
    if options.get("max_model_len") is not None:
        recipe.rename(f"{key}.max_model_len", f"{key}.max_length")
    kind = options.get("reward_model_cfg")
    if isinstance(kind, Mapping) and kind.get("reward_model_type", "bradley_terry") != "bradley_terry":
        _refuse_value(recipe, f"{key}.reward_model_cfg.reward_model_type", kind["reward_model_type"], ("bradley_terry",))
    _drop(recipe, f"{key}.reward_model_cfg", "a reward model has one score here, too")
    if is_switched_off(options.get("checkpoint_path")):
        _drop(recipe, f"{key}.checkpoint_path", "it is switched off")
    else:
        recipe.refuse(
            f"{key}.checkpoint_path",
            "weights are read from the folder of the model, not from a checkpoint of training",
            f"Export the checkpoint, set {key}.model_name to its folder, and remove the key.",
        )
    recipe.note(
        key,
        Effect.CHANGED,
        "the reward model reads the messages in its own chat template; NeMo-RL gives it the prompt as the policy's template renders it, "
        "inside a message of the user",
    )


def _translate_vlm(recipe: Recipe, key: str, options: Mapping[str, Any]) -> None:
    """An environment with ``reward_functions``, whatever its name: in NeMo-RL every environment of a run with images is this one."""
    recipe.set(f"{key}.type", "vlm", because=key)
    recipe.rename(f"{key}.reward_functions", f"{key}.rewards", text="rewards here, with the same names and weights")
    _drop(recipe, f"{key}.stop_strings", "the environment does not read it; policy.generation.stop_strings stops a turn")


def _translate_interpreter(recipe: Recipe, key: str, options: Mapping[str, Any]) -> None:
    if not INTERPRETER_KEYS & options.keys():
        return  # problems with tests, which Strop calls code
    recipe.set(f"{key}.type", "code_interpreter", because=key)
    _drop(recipe, f"{key}.num_workers", "sandbox.workers says how many programs run at a time")
    recipe.note(
        key,
        Effect.CHANGED,
        "code runs in the sandbox, where any module may be imported; the reward is 1 where the last value is the reference answer, which "
        "NeMo-RL leaves to an environment around it",
    )


def _translate_code_jaccard(recipe: Recipe, key: str, options: Mapping[str, Any]) -> None:
    _drop(recipe, f"{key}.num_workers", "words are compared where the episode runs")
    _drop(recipe, f"{key}.stop_strings", "the environment does not read it; policy.generation.stop_strings stops a turn")


def _divide_reward_model(recipe: Recipe, key: str) -> None:
    """Place the layers on all GPUs where a size is above 1: who divides a reward model does so because one GPU does not hold it."""
    for name in ("tensor_parallel_size", "context_parallel_size", "expert_parallel_size"):
        size = recipe.value(f"{key}.dtensor_cfg.{name}")
        if isinstance(size, int) and size > 1:
            recipe.set(f"{key}.device_map", "balanced", because=f"{key}.dtensor_cfg.{name}")
            recipe.note(
                f"{key}.dtensor_cfg.{name}",
                Effect.CHANGED,
                "layers stand on all GPUs of the process (device_map); cluster.environment_hosts=1 with "
                "cluster.roles.environment.num_gpus gives it several of its own",
            )
            return


TRANSLATIONS: Mapping[str, Callable[[Recipe, str, Mapping[str, Any]], None]] = {
    "code": _translate_interpreter,
    "code_jaccard": _translate_code_jaccard,
    "math": _translate_math,
    "math_default": _translate_math,
    "math_multi_reward": _translate_math_multi_reward,
    "reward_model": _translate_reward_model,
    GAME: _play_game,
}


def _refuse_value(recipe: Recipe, key: str, value: Any, known: tuple[str, ...]) -> None:
    recipe.refuse(key, f"found {value!r:.80}; NeMo-RL has {' and '.join(known)}", f"Set it to {' or '.join(known)}.")


ENVIRONMENT_RULES: tuple[Rule, ...] = (translate_environments,)


def engine(backend: str, name: str, *options: str) -> Unsupported:
    """Return what becomes of an inference engine that Strop does not have."""
    return Unsupported(
        (f"*generation.backend={backend}",),
        f"the {name} generation backend is not in this version",
        "Set policy.generation.backend to vllm, or to torch, the engine built into Strop.",
        details=tuple(f"*generation.{option}" for option in options),
        hides=("*generation.*",),
    )


ENGINES = (
    engine("trtllm", "TensorRT-LLM", "trtllm_cfg", "trtllm_kwargs"),
    engine("dynamo", "Dynamo", "dynamo_cfg"),
    engine("megatron", "Megatron"),
)
CROSS_TOKENIZER = Unsupported(
    ("teachers=[[]*", "loss_fn.xtoken_loss", "loss_fn.gold_loss"),
    "distillation from teachers with another tokenizer is not in this version",
    "Name one teacher with the student's vocabulary: teacher.model_name=...",
    details=(
        *(
            f"loss_fn.{name}"
            for name in (
                "alpha", "ce_loss_scale", "dynamic_loss_scaling", "exact_token_match_only", "kd_loss_mode", "kl_loss_weight",
                "normalize_teacher_by_vocab", "reverse_kl", "sum_weights_metric", "temperature", "uncommon_topk", "vocab_topk",
            )
        ),
        "token_aligner",
    ),
    hides=("teacher", "data.*", "distillation.*"),
)  # fmt: skip
ON_POLICY_DISTILLATION = Unsupported(
    ("on_policy_distillation",),
    "GRPO with a teacher for each agent (on_policy_distillation) is not in this version",
    "Use strop distillation, where teachers.NAME.env_names says whose rollouts each teacher scores.",
    details=("_teachers",),
    hides=("grpo.adv_estimator.name", "policy.dtensor_cfg.*_parallel_size"),  # its teachers take nodes from the policy
)
BEST_AT_K = Unsupported(
    ("grpo.use_best_at_k", "grpo.use_combined_training"),
    "advantages of best@k are not in this version",
    "Set it to false; algorithm.name=pass_at_k trains for the best of k samples.",
    details=("grpo.best_at_k_*", "grpo.combined_training_*"),
)
BAD_WORDS = Unsupported(
    ("*generation.bad_words",),
    "words cannot be forbidden: the learner would compute log-probabilities of another distribution than the engine sampled",
    "Remove the key, and let the reward count them.",
)


def explain_learner(recipe: Recipe) -> None:
    """Say nothing of the torch learner that a recipe switches off, once it is refused for the learner that it asks for."""
    if any(difference.effect is Effect.REFUSED and ".megatron_cfg." in difference.key for difference in recipe.differences):
        recipe.explained.append("*.dtensor_cfg")


def refuse_template(recipe: Recipe) -> None:
    """Refuse a recipe that leaves the choice of model to its user."""
    key = "policy.model_name" if recipe.is_own_key("policy.model_name") else "generation.model_name"
    if recipe.is_set(key) and get_at(recipe.source.values, tuple(key.split("."))) is None:
        recipe.refuse(key, "found null: the file is a template that leaves the model open", f"Set {key}=...")
        section = key.partition(".")[0]
        recipe.explained += [f"{section}.model_name", f"{section}.tokenizer.name", "tokenizer.name"]


UNSUPPORTED_RULES: tuple[Rule, ...] = (
    refuse_template,
    *NEMO_GYM_RULES,
    *UNSUPPORTED_MEDIA,
    *ENGINES,
    sample_with_vllm,
    CROSS_TOKENIZER,
    ON_POLICY_DISTILLATION,
    BEST_AT_K,
    BAD_WORDS,
)
