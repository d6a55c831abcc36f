"""An algorithm that is set by flat keys, which are NeMo-RL's, is the one that is set by its parts, in loss and gradient."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import pytest
import torch

from conformance.cases import PAIRS, STEPS
from conformance.harness import Candidates, Outcome, assert_same, column, through_strop
from strop.algorithm_factory import make_algorithm
from strop.algorithms.base import Algorithm
from strop.base_config import BaseConfig, fields_of, iter_sections
from strop.config import TrainingRunConfig, load_config
from strop.config.schema.run_config import TRAINING_RUNS
from strop.runs.run_algorithm import collect_settings

SECTIONS = ("grpo", "loss_fn", "ppo", "value_loss_fn", "distillation", "dpo", "rm")  # that set an algorithm
KINDS = ("grpo", "ppo", "distillation", "dpo", "rm")
NOT_OF_A_LOSS = (  # keys of these sections that are about the run
    "val_", "stop_at_", "max_", "num_", "async_", "seed", "reward_scaling", "update_epochs", "ppo_epochs", "topk_logits_k",
    "precompute_reference", "dynamic_sampling_max_gen_batches", "failures.",
)  # fmt: skip


@dataclass(frozen=True)
class KeyCase:
    kind: str
    keys: str
    parts: dict[str, Any] = field(default_factory=dict)  # the same as ``algorithm.kwargs``
    name: str = ""  # of the algorithm, where it is not the default

    def __str__(self) -> str:
        return f"{self.kind} {self.keys}"


PENALTY = "loss_fn.reference_policy_kl_penalty=0.1"
IMPORTANCE = "loss_fn.use_importance_sampling_correction=true"
TRUNCATED = f"{IMPORTANCE} loss_fn.truncated_importance_sampling_type"
OVERLONG = {"name": "soft_overlong", "max_length": 9, "buffer": 4, "penalty": 0.7}
STOPPED = {"name": "soft_overlong", "max_length": 9, "buffer": 128, "penalty": 0.0, "truncated_factor": 0.5}
SHAPED = "{0}.enabled=true {0}.max_response_length=9 {0}.overlong_buffer_length=4 {0}.overlong_buffer_penalty=0.7"
STOP_PROPERLY = (
    "{0}.enabled=true {0}.max_response_length=9 {0}.stop_properly_penalty_coef=0.5"  # in place of the overlong penalty
)

LOSS: list[tuple[str, dict[str, Any]]] = [  # of policy gradients with and without a critic
    (PENALTY, {"kl": {"weight": 0.1}}),
    (f"{PENALTY} loss_fn.reference_policy_kl_type=k1", {"kl": {"weight": 0.1, "estimator": "k1"}}),
    (f"{PENALTY} loss_fn.use_on_policy_kl_approximation=true", {"kl": {"weight": 0.1, "unbiased": True}}),
    (f"{PENALTY} loss_fn.kl_input_clamp_value=0.3", {"kl": {"weight": 0.1, "input_clamp": 0.3}}),
    (f"{PENALTY} loss_fn.kl_output_clamp_value=null", {"kl": {"weight": 0.1, "output_clamp": None}}),
    ("loss_fn.ratio_clip_min=0.1", {"objective": {"low": 0.1}}),
    ("loss_fn.ratio_clip_max=0.4", {"objective": {"high": 0.4}}),
    ("loss_fn.ratio_clip_c=1.5", {"objective": {"dual": 1.5}}),
    ("loss_fn.token_level_loss=false", {"aggregation": "sequence_mean"}),
    ("loss_fn.token_level_loss=true", {"aggregation": "token_mean"}),
    ("loss_fn.aggregation=constant_length loss_fn.constant_length=7", {"aggregation": "constant_length", "constant_length": 7}),
    ("loss_fn.force_on_policy_ratio=true", {"on_policy_ratio": True}),
    (
        "loss_fn.sequence_level_importance_ratios=true loss_fn.token_level_loss=false",
        {"objective": "sequence_clip", "aggregation": "sequence_mean"},
    ),
    ("loss_fn.use_cispo=true loss_fn.ratio_clip_max=0.3", {"objective": {"name": "cispo", "high": 0.3}}),
    ("loss_fn.disable_ppo_ratio=true", {"objective": "reinforce"}),
    ("loss_fn.positive_example_nll_weight=0.3", {"positive_nll": 0.3}),
    (IMPORTANCE, {"corrections": ["importance"]}),
    (f"{TRUNCATED}=tis loss_fn.truncated_importance_sampling_ratio=1.1", {"corrections": [{"name": "tis", "cap": 1.1}]}),
    (
        f"{TRUNCATED}=tis loss_fn.truncated_importance_sampling_ratio=1.1 loss_fn.truncated_importance_sampling_ratio_min=0.9",
        {"corrections": [{"name": "tis", "cap": 1.1, "floor": 0.9}]},
    ),
    (
        f"{TRUNCATED}=icepop loss_fn.truncated_importance_sampling_ratio=1.4 loss_fn.truncated_importance_sampling_ratio_min=0.7",
        {"corrections": [{"name": "icepop", "low": 0.7, "high": 1.4}]},
    ),
    (
        f"{TRUNCATED}=seq-mask-tis loss_fn.truncated_importance_sampling_ratio=1.2 loss_fn.truncated_importance_sampling_ratio_min=0.8",
        {"corrections": [{"name": "sequence_mask_tis", "low": 0.8, "high": 1.2}]},
    ),
    (
        f"{IMPORTANCE} loss_fn.sequence_level_importance_ratios=true loss_fn.token_level_loss=false",
        {
            "corrections": [{"name": "importance", "level": "sequence"}],
            "objective": "sequence_clip",
            "aggregation": "sequence_mean",
        },
    ),
    ("loss_fn.entropy_bonus=0.2", {"entropy_bonus": 0.2}),
]

CASES = [
    *(KeyCase("grpo", keys, parts) for keys, parts in LOSS),
    KeyCase("grpo", f"{PENALTY} loss_fn.use_kl_in_reward=true", {"kl": {"weight": 0.1, "place": "reward"}}),
    KeyCase("grpo", "grpo.normalize_rewards=false", {"advantage": {"normalize": False}}),
    KeyCase("grpo", "grpo.use_leave_one_out_baseline=true", {"advantage": {"leave_one_out": True}}),
    KeyCase("grpo", "grpo.minus_baseline=false", {"advantage": {"baseline": False}}),
    KeyCase("grpo", "grpo.adv_estimator.name=leave_one_out", {"advantage": "leave_one_out"}),
    KeyCase("grpo", "grpo.advantage_clip_low=-0.5", {"advantage_low": -0.5}),
    KeyCase("grpo", "grpo.advantage_clip_high=0.5", {"advantage_high": 0.5}),
    KeyCase("grpo", "grpo.overlong_filtering=true", {"overlong_filtering": True}),
    KeyCase("grpo", "grpo.use_dynamic_sampling=true", {"drop_constant_groups": True}),
    KeyCase("grpo", SHAPED.format("grpo.reward_shaping"), {"shaping": OVERLONG}),
    KeyCase("grpo", STOP_PROPERLY.format("grpo.reward_shaping"), {"shaping": STOPPED}),
    KeyCase("grpo", "grpo.adv_estimator.deviation=unbiased", {"advantage": {"deviation": "unbiased"}}),
    KeyCase("grpo", "grpo.seq_logprob_error_threshold=1.2", {"seq_logprob_error_threshold": 1.2}),
    *(KeyCase("ppo", keys, parts) for keys, parts in LOSS),
    KeyCase("ppo", f"{PENALTY} loss_fn.use_kl_in_reward=true", {"kl": {"weight": 0.1, "place": "token_reward"}}),
    KeyCase("ppo", "ppo.adv_estimator.name=gae ppo.adv_estimator.gae_lambda=0.8", {"advantage": {"lambda_policy": 0.8}}),
    KeyCase("ppo", "ppo.adv_estimator.gae_gamma=0.9", {"advantage": {"gamma": 0.9}}),
    KeyCase("ppo", "ppo.adv_estimator.normalize_advantages=false", {"advantage": {"whiten": False}}),
    KeyCase("ppo", "ppo.adv_estimator.gae_lambda_policy=0.7", {"advantage": {"lambda_policy": 0.7, "lambda_value": 0.95}}),
    KeyCase("ppo", "ppo.adv_estimator.gae_lambda_value=1.0", {"advantage": {"lambda_value": 1.0}}),
    KeyCase(
        "ppo",
        "ppo.adv_estimator.gae_lambda=0.8 ppo.adv_estimator.gae_lambda_policy=0.7",
        {"advantage": {"lambda_policy": 0.7, "lambda_value": 0.8}},
    ),
    KeyCase("ppo", "ppo.adv_estimator.length_adaptive_alpha=0.5", {"advantage": {"length_adaptive_alpha": 0.5}}),
    KeyCase("ppo", "ppo.advantage_clip_low=-0.5", {"advantage_low": -0.5}),
    KeyCase("ppo", "ppo.advantage_clip_high=0.5", {"advantage_high": 0.5}),
    KeyCase("ppo", "ppo.policy_training_start_step=3", {"policy_training_start_step": 3}),
    KeyCase("ppo", "ppo.overlong_filtering=true", {"overlong_filtering": True}),
    KeyCase("ppo", "ppo.use_dynamic_sampling=true", {"drop_constant_groups": True}),
    KeyCase("ppo", SHAPED.format("ppo.reward_shaping"), {"shaping": OVERLONG}),
    KeyCase("ppo", STOP_PROPERLY.format("ppo.reward_shaping"), {"shaping": STOPPED}),
    KeyCase("ppo", "ppo.seq_logprob_error_threshold=1.2", {"seq_logprob_error_threshold": 1.2}),
    KeyCase("ppo", "value_loss_fn.scale=0.3", {"value_scale": 0.3}),
    KeyCase("ppo", "ppo.adv_estimator.normalize_advantages=true", {"advantage": {"deviation": "unbiased"}}),
    KeyCase("ppo", "ppo.adv_estimator.deviation=unbiased", {"advantage": {"deviation": "unbiased"}}),
    KeyCase("ppo", "value_loss_fn.cliprange=null", {"value_clip": None}),
    KeyCase("ppo", "value_loss_fn.cliprange=0.1", {"value_clip": 0.1}),
    KeyCase("ppo", "value_loss_fn.cliprange=0", {"value_clip": None}),
    KeyCase("distillation", "loss_fn.kl_type=forward", {"kl_type": "forward", "outside": "renormalise"}),
    KeyCase(
        "distillation", "loss_fn.mixed_kl_weight=0.2", {"kl_type": "mixed", "mixed_kl_weight": 0.2, "outside": "renormalise"}
    ),
    KeyCase("distillation", "loss_fn.kl_type=jsd loss_fn.beta=0.3", {"kl_type": "jsd", "beta": 0.3, "outside": "renormalise"}),
    KeyCase("distillation", "loss_fn.zero_outside_topk=true", {"kl_type": "mixed", "outside": "bucket"}),
    KeyCase("distillation", "distillation.overlong_filtering=true", {"overlong_filtering": True}, "distillation"),
    KeyCase(
        "distillation",
        "distillation.use_dynamic_sampling=true algorithm.advantage.reward_weight=0.5",
        {"drop_constant_groups": True, "advantage": {"reward_weight": 0.5}},
        "distillation",
    ),
    KeyCase(
        "distillation",
        f"{SHAPED.format('distillation.reward_shaping')} algorithm.advantage.reward_weight=0.5",
        {"shaping": OVERLONG, "advantage": {"reward_weight": 0.5}},
        "distillation",
    ),
    KeyCase(
        "distillation",
        f"{STOP_PROPERLY.format('distillation.reward_shaping')} algorithm.advantage.reward_weight=0.5",
        {"shaping": STOPPED, "advantage": {"reward_weight": 0.5}},
        "distillation",
    ),
    KeyCase("dpo", "dpo.reference_policy_kl_penalty=0.3", {"beta": 0.3}),
    KeyCase("dpo", "dpo.preference_average_log_probs=true", {"average_log_probs": True}),
    KeyCase("dpo", "dpo.preference_loss_weight=2 dpo.sft_loss_weight=0.5", {"preference_weight": 2.0, "sft_weight": 0.5}),
    KeyCase("dpo", "dpo.preference_loss_weight=0 dpo.sft_loss_weight=1", {"preference_weight": 0.0, "sft_weight": 1.0}),
    KeyCase(
        "dpo", "dpo.sft_loss_weight=0.5 dpo.sft_average_log_probs=false", {"sft_weight": 0.5, "sft_aggregation": "sequence_sum"}
    ),
    KeyCase("rm", "rm.use_margin=true", {"use_margin": True}),
    KeyCase("rm", "rm.centering=0.1", {"centering": 0.1}),
]


def config(kind: str, *overrides: str) -> TrainingRunConfig:
    base = ["policy.model_name=m", f"{kind}.val_period=0"]
    base += (
        ["data.train.dataset_name=squad"] if kind in ("dpo", "rm") else ["data.train.env_name=arithmetic", "env.arithmetic={}"]
    )
    base += ["teacher.model_name=t"] if kind == "distillation" else []
    return load_config(None, [*base, *overrides], root=TRAINING_RUNS[kind]).config


def by_keys(case: KeyCase) -> Algorithm:
    loaded = config(case.kind, *([f"algorithm.name={case.name}"] if case.name else []), *case.keys.split())
    return make_algorithm(loaded.algorithm.name, loaded.algorithm.kwargs, collect_settings(loaded))


def by_parts(case: KeyCase) -> Algorithm:
    names = {"distillation": "topk_distillation", "rm": "reward_model"}
    return make_algorithm(case.name or names.get(case.kind, case.kind), case.parts)


def outcome(algorithm: Algorithm, learner: str) -> Outcome:
    """On rollouts of a stale sampler, or on pairs."""
    if algorithm.recorded_data:
        return through_strop(algorithm, PAIRS["margins"], learner=learner)
    step = STEPS["random"]
    count = len(column(step, "now"))
    draws = torch.randn(2, count, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(-1)[..., :4]
    ids = torch.arange(4).repeat(count, 1)
    return through_strop(algorithm, step, learner=learner, candidates=Candidates(ids, draws[0], draws[1]))


def is_repeated(case: KeyCase) -> bool:
    """``strop ppo`` reads the keys of ``loss_fn`` with the same code as ``strop grpo``."""
    return case.kind == "ppo" and (case.keys, case.parts) in LOSS


@pytest.mark.extensions
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=[pytest.mark.exhaustive] * is_repeated(case)) for case in CASES]
)
def test_an_objective_set_by_keys_is_the_one_set_by_parts(case: KeyCase) -> None:
    found, wanted = by_keys(case), by_parts(case)
    assert found == wanted
    for learner in wanted.losses(10**9) if wanted.predict == "tokens" else ():
        assert_same(outcome(found, learner), outcome(wanted, learner))


def keys_of_a_loss(kind: str) -> list[str]:
    """The keys of the sections that set an algorithm, except those about the run."""
    return [
        f"{section}.{name}"
        for section, values in iter_sections(config(kind))
        if section.partition(".")[0] in SECTIONS
        for name in fields_of(type(values))
        if not isinstance(getattr(values, name), BaseConfig)
        and not f"{section}.{name}".partition(".")[2].startswith(NOT_OF_A_LOSS)
    ]


@pytest.mark.extensions
@pytest.mark.parametrize("kind", KINDS)
def test_every_key_has_a_case(kind: str) -> None:
    tested = {key.partition("=")[0] for case in CASES if case.kind == kind for key in case.keys.split()}
    missing = sorted(set(keys_of_a_loss(kind)) - tested)
    assert not missing, f"write a case, or say in NOT_OF_A_LOSS that it is about the run: {missing}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_keys_are_applied_together_in_whatever_order(kind: str) -> None:
    """Every sixth pair of cases that set different options: either order of the keys gives one algorithm, or is refused in both."""

    def made(*cases: KeyCase) -> object:
        keys = [key for case in cases for key in case.keys.split()]
        try:
            name = next((case.name for case in cases if case.name), "")
            loaded = config(kind, *([f"algorithm.name={name}"] if name else []), *keys)
            return make_algorithm(loaded.algorithm.name, loaded.algorithm.kwargs, collect_settings(loaded))
        except ValueError as error:
            return str(error)

    cases = [case for case in CASES if case.kind == kind]
    for one, other in list(combinations(cases, 2))[::6]:
        shared = {key.partition("=")[0] for key in one.keys.split()} & {key.partition("=")[0] for key in other.keys.split()}
        if not shared:
            assert made(one, other) == made(other, one), (one, other)
