"""``loss_fn.ratio_clip_max`` and ``algorithm.objective.high`` are two names of one option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strop.algorithm_factory import make_algorithm
from strop.algorithms.base import Algorithm
from strop.base_config import option_set_by
from strop.config import TRAINING_RUNS, ConfigError, load_config
from strop.config.source.keys import iter_keys
from strop.runs.algorithm.run_algorithm import collect_settings
from support.each import each

NEEDED = ["policy.model_name=m", "value.model_name=m", "teacher.model_name=t"]
SYNONYMS = [
    (section, key.dotted, option)
    for section, root in TRAINING_RUNS.items()
    for key in iter_keys(root)
    if (option := option_set_by(key.field))
]


def make(section: str, overrides: list[str], path: Path | None = None) -> Algorithm:
    root: Any = TRAINING_RUNS[section]
    needed = [key for key in NEEDED if key.split(".")[0] in {k.path[0] for k in iter_keys(root)}]
    config = load_config(path, [*needed, *overrides], root=root, check=False).config
    return make_algorithm(config.algorithm.name, config.algorithm.kwargs, collect_settings(config))


def test_there_are_synonyms_to_check() -> None:
    assert len(SYNONYMS) > 30


OTHER_VALUES = {  # options that 0.25 does not suit
    "advantage.deviation": "unbiased",
    "advantage.leave_one_out": "true",
    "advantage.normalize": "false",
    "advantage.baseline": "false",
    "advantage.whiten": "false",
    "average_log_probs": "true",
    "constant_length": "7",
    "drop_constant_groups": "true",
    "kl.estimator": "k2",
    "kl.unbiased": "true",
    "objective.dual": "3.5",
    "on_policy_ratio": "true",
    "overlong_filtering": "true",
    "policy_training_start_step": "7",
    "seq_logprob_error_threshold": "2.5",
    "use_margin": "true",
}


@each("section, key, option", SYNONYMS, ids=lambda part: str(part))
def test_a_key_and_its_option_make_the_same_algorithm(section: str, key: str, option: str) -> None:
    value = OTHER_VALUES.get(option, "0.25")
    base = ["algorithm.name=distillation", "algorithm.advantage.reward_weight=0.5"] if section == "distillation" else []
    alone = ["algorithm.advantage.lambda_value=0.95"] if option == "advantage.lambda_policy" else []  # the critic keeps its own
    by_key, by_option = make(section, [*base, f"{key}={value}"]), make(section, [*base, *alone, f"algorithm.{option}={value}"])
    assert by_key == by_option != make(section, base)


def test_the_command_line_holds_over_the_file_whatever_the_name(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("loss_fn: {ratio_clip_max: 0.3}\nalgorithm: {objective: {low: 0.1}}\n")
    found: Any = make("grpo", ["algorithm.objective.high=0.28", "loss_fn.ratio_clip_min=0.15"], path)
    assert (found.objective.low, found.objective.high) == (0.15, 0.28)


def test_two_values_for_one_option_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"ratio_clip_max: found 0\.2, and algorithm\.objective\.high, another name .* is 0\.28"
    ):
        make("grpo", ["loss_fn.ratio_clip_max=0.2", "algorithm.objective.high=0.28"])
    assert make("grpo", ["loss_fn.ratio_clip_max=0.3", "algorithm.objective.high=0.3"]) == make(
        "grpo", ["algorithm.objective.high=0.3"]
    )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algorithm.objectve.high=0.3"], r"algorithm\.objectve: grpo has no such field; did you mean 'objective'\?"),
        (["algorithm.objective.hgh=0.3"], r"algorithm\.objective\.hgh: Clip has no such option; did you mean 'high'\?"),
        (["algorithm.objective.high=wide"], r"algorithm\.objective\.high: found 'wide'"),
        (
            ["loss_fn.use_cispo=true", "algorithm.objective=clip"],
            r"use_cispo chooses the objective, and algorithm\.objective names one",
        ),
    ],
)
def test_mistakes_are_named_by_the_key_that_was_written(overrides: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make("grpo", overrides)


def test_options_of_a_part_that_another_key_chose_apply_to_it() -> None:
    found: Any = make("grpo", ["loss_fn.use_cispo=true", "algorithm.objective.high=3.0"])
    assert type(found.objective).__name__ == "ClippedWeight" and found.objective.high == 3.0
