"""Every algorithm of the catalogue trains a tiny model from the command line, and what it is about moves the right way.

A new algorithm is tested here by being there. ``OPTIONS`` are what some need besides their name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from loop.kinds import train_to_end
from loop.runs import metrics_of
from loop.tiny import build_tiny
from strop.algorithm_factory import all_algorithms
from strop.runs.run_algorithm import infer_section
from support.sweep import sweep

pytestmark = pytest.mark.slow

Logged = dict[int, dict[str, float]]

IN_TURNS = f"{Path(__file__).with_name('graded.py')}:GradedByTurns"
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "gigpo": {"env.graded.type": IN_TURNS, "grpo.max_rollout_turns": 2},
    "turn_returns": {"env.graded.type": IN_TURNS, "grpo.max_rollout_turns": 2},
    "bi_level_gae": {"env.graded.type": IN_TURNS, "ppo.max_rollout_turns": 2, "env.graded.reward_weights.sevens": 0.5},
    "dr_grpo": {"loss_fn.constant_length": 4},
    "gdpo": {"algorithm.kwargs.advantage.weights": {"sevens": 1.0, "digits": 0.1}},
    "process_supervision": {"env.graded.type": f"{Path(__file__).with_name('graded.py')}:GradedBySteps"},
    "vapo": {"ppo.policy_training_start_step": 3},
    "apo_down": {"dpo.max_num_steps": 80},
    "discopop": {
        "algorithm.tau": 1.0
    },  # with the paper's 0.05 its slope at margin 0 is positive: pairs begin by moving the wrong way
}
FAMILIES = (  # as one of which all of a kind learn
    "grpo",  # a ratio for each token
    "gspo",  # for each sequence
    "reinforce_pp",  # credit that is whitened over the batch
    "remax",  # a baseline of greedy rollouts
    "ppo",
    "distillation",
    "topk_distillation",
    "sft",
    "dpo",  # pairs and a reference
    "kto",  # judgements
    "reward_model",
)
QUICK = ("grpo", "ppo", "topk_distillation", "dpo")
AT_THE_REFERENCE = {  # the first loss of those that compare with a reference, when the policy still is it
    "dpo": math.log(2),
    "cdpo": math.log(2),
    "robust_dpo": math.log(2),
    "apo_zero": 1.0,
    "apo_down": 1.0,
    "slic": 1.0,
    "kto": 0.5,
    "apo_zero_unpaired": 0.5,
    "nca_pair": 2 * math.log(2),
    "bco_pair": 2 * math.log(2),
    "discopop": (math.log(2) + 1) / 2,
    "aot": math.log(2),
    "aot_unpaired": math.log(2),
}


def of_section(section: str) -> list[str]:
    """Those that are for one kind of run."""
    return [name for name, kind in all_algorithms().items() if infer_section(kind()) == section]


def each_of(*sections: str) -> pytest.MarkDecorator:
    """A run for each; `make test` has one of each section, and of data of each shape."""
    names = [name for section in sections for name in of_section(section)]
    return pytest.mark.parametrize("name", sweep(names, *(name for name in QUICK if name in names)))


def mean(logged: Logged, name: str, steps: range) -> float:
    return sum(logged[step][name] for step in steps) / len(steps)


def run(section: str, name: str, model: Path, folder: Path, **changes: Any) -> Logged:
    train_to_end(
        section, model, folder, **{"algorithm.name": name, "checkpointing.enabled": False, **changes, **OPTIONS.get(name, {})}
    )
    return metrics_of(folder / "logs")


WITHOUT_VALIDATION = {"data.validation.env_name": ..., "data.validation.size": ...}


def sampled(section: str, name: str, model: Path, folder: Path, **changes: Any) -> Logged:
    return run(section, name, model, folder, **{f"{section}.val_period": 0, **WITHOUT_VALIDATION, **changes})


# --- policy gradients --------------------------------------------------------------------------------------------------------------


@each_of("grpo")
def test_the_reward_of_a_policy_gradient_rises(name: str, tiny: Path, tmp_path: Path) -> None:
    """Two optimizer steps on each batch, so that there is a ratio, and a policy before the update."""
    changes = {
        "grpo.max_num_steps": 8,
        "grpo.num_prompts_per_step": 8,
        "policy.train_global_batch_size": 32,
        "policy.optimizer.kwargs.lr": 0.006,
    }
    logged = sampled("grpo", name, tiny, tmp_path, **changes)
    assert mean(logged, "train/reward", range(6, 9)) > mean(logged, "train/reward", range(1, 3)) + 0.4
    assert all(math.isfinite(line["train/loss"]) for line in logged.values())
    assert sum(line["train/steps_skipped_for_nonfinite_gradient"] for line in logged.values()) == 0
    assert logged[8]["train/token_mult_prob_error"] < 1.0001


ASYNCHRONOUS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {
        "loss_fn.use_importance_sampling_correction": True,
        "loss_fn.truncated_importance_sampling_type": "tis",
        "loss_fn.truncated_importance_sampling_ratio": 2.0,
    },
    "dapo": {"algorithm.kwargs.corrections": [{"name": "mis", "high": 5.0}], "env.graded.flat": 3},
    "gspo": {"algorithm.kwargs.corrections": ["opsm"]},
    "cispo": {"algorithm.kwargs.corrections": [{"name": "icepop"}]},
    "decoupled_ppo": {},
}
WEIGHTS = {
    "grpo": "tis_weight",
    "dapo": "mis_cut",
    "gspo": "opsm_cut",
    "cispo": "icepop_cut",
    "decoupled_ppo": "importance_weight",
}


@pytest.mark.parametrize("name", sweep(ASYNCHRONOUS, "decoupled_ppo"))
def test_the_reward_rises_on_rollouts_that_ran_ahead(name: str, tiny: Path, tmp_path: Path) -> None:
    changes = {
        "grpo.async_grpo.enabled": True,
        "grpo.async_grpo.max_trajectory_age_steps": 2,
        "grpo.max_num_steps": 16,
        "grpo.num_prompts_per_step": 8,
        "policy.train_global_batch_size": 32,
        **ASYNCHRONOUS[name],
    }
    logged = sampled("grpo", name, tiny, tmp_path, **changes)
    assert max(line["train/staleness_max"] for line in logged.values()) == 2
    assert mean(logged, "train/reward", range(14, 17)) > mean(logged, "train/reward", range(1, 3)) + 0.4
    assert all(f"train/{WEIGHTS[name]}" in line for line in logged.values())
    assert logged[16]["train/token_mult_prob_error"] > 1.001, "the learner is ahead of the weights that sampled"


# --- a critic ------------------------------------------------------------------------------------------------------------------------


@each_of("ppo")
@pytest.mark.exhaustive
def test_the_reward_rises_and_the_critic_explains_variance(name: str, tiny: Path, tmp_path: Path) -> None:
    """Half of the tasks earn half a point more, and their prompt says so: what a critic can learn."""
    changes = {
        "env.graded.easy": 0.5,
        "ppo.max_num_steps": 20,
        "ppo.num_prompts_per_step": 16,
        "ppo.num_generations_per_prompt": 2,
        "ppo.ppo_epochs": 2,
    }
    logged = sampled("ppo", name, tiny, tmp_path, **changes)
    assert mean(logged, "train/reward", range(18, 21)) > mean(logged, "train/reward", range(1, 4)) + 0.4
    assert logged[1]["train/explained_variance"] < 0.2
    assert mean(logged, "train/explained_variance", range(16, 21)) > 0.2
    assert mean(logged, "train/value_loss", range(16, 21)) < logged[1]["train/value_loss"]


# --- a teacher -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another tiny model, with the same tokens."""
    return build_tiny(tmp_path_factory.mktemp("teacher") / "tiny", seed=1)


@each_of("distillation")
def test_the_student_comes_nearer_to_its_teacher(name: str, tiny: Path, teacher: Path, tmp_path: Path) -> None:
    """In either direction where the divergence itself is known; else by its estimate from sampled tokens."""
    changes = {
        "distillation.max_num_steps": 8,
        "distillation.topk_logits_k": 24,
        "distillation.num_prompts_per_step": 8,
        "policy.optimizer.kwargs.lr": 0.01,
    }
    logged = sampled("distillation", name, tiny, tmp_path, **{"teacher.model_name": str(teacher), **changes})
    measured = ["train/kl_forward", "train/kl_reverse"] if "train/kl_forward" in logged[1] else ["train/teacher_kl"]
    for metric in measured:
        assert mean(logged, metric, range(6, 9)) < 0.6 * mean(logged, metric, range(1, 4)), metric


# --- recorded data -------------------------------------------------------------------------------------------------------------------


@each_of("sft")
def test_sft_learns_its_examples_by_heart(name: str, tiny: Path, tmp_path: Path) -> None:
    changes = {
        "sft.max_num_steps": 60,
        "sft.val_period": 0,
        "data.validation.dataset_name": ...,
        "policy.train_global_batch_size": 8,
    }
    logged = run("sft", name, tiny, tmp_path, **changes, **{"data.train.size": 8, "policy.optimizer.kwargs.lr": 0.01})
    assert logged[60]["train/loss"] < 0.1 * logged[1]["train/loss"]
    assert logged[60]["train/nll"] < 0.3


@each_of("dpo", "rm")
def test_pairs_are_told_apart(name: str, tiny: Path, tmp_path: Path) -> None:
    section = infer_section(all_algorithms()[name]())
    steps, rate = (20, 0.02) if name in FAMILIES else (40, 0.01)  # not all learn as well by large steps
    changes = {f"{section}.max_num_steps": steps, f"{section}.val_period": 0, "data.validation.dataset_name": ...}
    logged = run(
        section, name, tiny, tmp_path, **changes, **{"policy.train_global_batch_size": 16, "policy.optimizer.kwargs.lr": rate}
    )
    last = max(logged)
    if name in AT_THE_REFERENCE:
        assert logged[1]["train/loss"] == pytest.approx(AT_THE_REFERENCE[name], abs=1e-5)
    assert logged[last]["train/loss"] < logged[1]["train/loss"] - 0.2
    if all_algorithms()[name].recorded_data == "judgements":
        assert logged[last]["train/rewards_desirable"] > 0.2 > -0.2 > logged[last]["train/rewards_undesirable"]
    else:
        assert logged[1]["train/accuracy"] < 0.8
        assert max(logged[step]["train/accuracy"] for step in range(last - 10, last + 1)) == 1.0
        assert logged[last]["train/margin"] > logged[1]["train/margin"] + 0.3


@pytest.mark.extensions
def test_every_algorithm_is_in_one_of_these_tests() -> None:
    tested = [name for section in ("grpo", "ppo", "distillation", "sft", "dpo", "rm") for name in of_section(section)]
    assert sorted(tested) == sorted(all_algorithms()) and set(QUICK) <= set(FAMILIES) <= set(tested)
