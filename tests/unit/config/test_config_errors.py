"""A mistake is named with its place, its key, what was found, and what to write instead."""

from pathlib import Path

import pytest

from strop.config import ConfigError, GrpoRunConfig, load_config
from strop.config.source.keys import iter_keys

SMALL = """
policy: {model_name: tiny}
data: {train: {env_name: arithmetic}}
env: {arithmetic: {}}
"""


def failure(folder: Path, text: str, *overrides: str) -> ConfigError:
    path = folder / "run.yaml"
    path.write_text(SMALL + text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, root=GrpoRunConfig)
    return caught.value


def test_a_wrong_value_is_not_reported_again_for_the_keys_that_follow_it(tmp_path: Path) -> None:
    assert len(failure(tmp_path, "", "policy.max_total_sequence_length=long").problems) == 1


def test_a_fault_in_the_defaults_of_entries_is_reported_there_alone(tmp_path: Path) -> None:
    error = failure(tmp_path, "", "data.default.weight=heavy")
    assert [problem.key for problem in error.problems] == ["data.default.weight"]


def test_all_mistakes_are_reported_together(tmp_path: Path) -> None:
    error = failure(tmp_path, "grpo:\n  sed: 1\n  val_period: often\n", "oops", "logger.log_dir=${nowhere}")
    assert {problem.key for problem in error.problems} == {"grpo.sed", "grpo.val_period", "", "logger.log_dir"}
    assert str(error).startswith("4 problems in the configuration:")


@pytest.mark.parametrize("value", ["[1]", "{a: 1}"])
@pytest.mark.parametrize(
    "key",
    ["data.train.dataset_name", "data.default.dataset_name", "grpo.adv_estimator.name", "policy.offload", "policy.scheduler"],
)
def test_a_value_of_another_type_is_one_problem_whatever_a_translation_expects(tmp_path: Path, key: str, value: str) -> None:
    error = failure(tmp_path, "", f"{key}={value}")
    assert all(problem.key.startswith(key) for problem in error.problems)
    assert len(error.problems) == 1 or (key, value) == ("policy.scheduler", "{a: 1}")


@pytest.mark.exhaustive
@pytest.mark.parametrize("value", ["many", "[1]", "{a: 1}", "-3", "${env:STROP_UNSET}", "true"])
def test_no_value_of_any_key_is_a_traceback_or_blames_an_unrelated_key(tmp_path: Path, value: str) -> None:
    for schema_key in iter_keys(GrpoRunConfig, repeated=True):
        key = schema_key.dotted
        if "<" in key:
            continue
        path = tmp_path / "run.yaml"
        path.write_text(SMALL)
        try:
            load_config(path, [f"{key}={value}"], root=GrpoRunConfig, check=False)
        except ConfigError as error:
            section = key.rpartition(".")[0]
            assert all(problem.key.startswith(section) for problem in error.problems), (key, value, error)


def test_the_alternatives_of_a_value_are_one_problem(tmp_path: Path) -> None:
    (problem,) = failure(tmp_path, "", "policy.offload=many").problems
    assert problem.key == "policy.offload" and "found 'many'" in problem.message


def test_what_refers_to_a_wrong_value_is_not_reported_beside_it(tmp_path: Path) -> None:
    text = "grpo:\n  num_prompts_per_step: many\n  seed: '${grpo.val_period}'\n  val_period: '${grpo.num_prompts_per_step}'\n"
    assert [problem.key for problem in failure(tmp_path, text).problems] == ["grpo.num_prompts_per_step"]


def test_keys_that_refer_to_each_other_in_a_circle_are_all_reported(tmp_path: Path) -> None:
    error = failure(tmp_path, "logger: {log_dir: '${run_name}'}\nrun_name: '${logger.log_dir}'\n")
    assert {problem.key for problem in error.problems} == {"logger.log_dir", "run_name"}


def test_a_section_that_nobody_brings_may_be_that_of_an_extension(tmp_path: Path) -> None:
    (problem,) = failure(tmp_path, "", "policy.nobodys_learner={enabled: true}").problems
    assert problem.key == "policy.nobodys_learner" and "install the package that brings it" in problem.fix
