"""What whole recipes of NeMo-RL need and this version lacks: each is one refusal, whatever number of keys is about it.

They come before all other rules, which then say nothing of keys that only follow from it.
"""

from __future__ import annotations

from strop.config.source.yaml_source import get_at
from strop.extensions.recipes.difference import Effect
from strop.extensions.recipes.nemo_rl.environment_rules import has_nemo_gym_servers, translate_nemo_gym
from strop.extensions.recipes.nemo_rl.generation_rules import sample_with_vllm
from strop.extensions.recipes.nemo_rl.media_rules import UNSUPPORTED_MEDIA
from strop.extensions.recipes.recipe import Recipe
from strop.extensions.recipes.rules import Rule, Unsupported

NEMO_GYM = Unsupported(
    (
        "env.should_use_nemo_gym",
        "data.*dataset_name=NemoGymDataset",
        "data.*env_name=nemo_gym",
        "*generation.vllm_cfg.expose_http_server",
        "env.nemo_gym.config_paths",
    ),
    "NeMo-Gym's servers run separately from the run, and no key says where they are",
    "Start them (gym env start) and set env.nemo_gym.head_url to the address of their head server, or env.nemo_gym.servers to those of the "
    "resource servers (docs/adapters.md).",
    details=(
        "*generation.vllm_cfg.http_server_serving_chat_kwargs",
        "*generation.vllm_cfg.reasoning_parser_plugin",
        "env.should_*",
        "sif_dir",
    ),
    hides=("env.*", "data.*", "grpo.*invalid_tool_call*", "grpo.*malformed_thinking*", "reward_penalties"),
)


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


def translate_or_refuse_nemo_gym(recipe: Recipe) -> None:
    if has_nemo_gym_servers(recipe):
        translate_nemo_gym(recipe)
    else:
        NEMO_GYM(recipe)


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
    translate_or_refuse_nemo_gym,
    *UNSUPPORTED_MEDIA,
    *ENGINES,
    sample_with_vllm,
    CROSS_TOKENIZER,
    ON_POLICY_DISTILLATION,
    BEST_AT_K,
    BAD_WORDS,
)
