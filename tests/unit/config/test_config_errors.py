"""A mistake is named with its place, its key, what was found, and what to write instead."""

from pathlib import Path
from typing import Any

import pytest

from strop.config import TRAINING_RUNS, ConfigError, EvalRunConfig, GrpoRunConfig, load_config
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


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("polcy.model_name", "policy"),
        ("data.train.datset_name", "data.train.dataset_name"),
    ],
)
def test_an_unknown_key_is_reported_with_the_key_that_was_meant(tmp_path: Path, key: str, meant: str) -> None:
    message = str(failure(tmp_path, "", f"{key}=1"))
    assert "there is no such key" in message and f"Did you mean {meant}" in message


def test_an_unknown_key_in_a_file_is_reported_with_its_line(tmp_path: Path) -> None:
    assert "run.yaml, line 6: grpo.num_promts_per_step: there is no such key" in str(
        failure(tmp_path, "grpo:\n  num_promts_per_step: 3\n")
    )


def test_a_key_that_resembles_none_is_reported_with_the_sections(tmp_path: Path) -> None:
    assert "The sections are algorithm, checkpointing, policy" in str(failure(tmp_path, "", "xyzzy=1"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("grpo.num_prompts_per_step=many", "found 'many' (a text); it must be int >= 1"),
        ("grpo.num_prompts_per_step=0", "found 0 (a whole number); it must be int >= 1"),
        ("grpo.num_prompts_per_step=2.5", "found 2.5 (a number); it must be int >= 1"),
        ("grpo.num_prompts_per_step=null", "found None (null); it must be int >= 1"),
        ("grpo.normalize_rewards=yes", "found 'yes' (a text); it must be true or false"),
        ("grpo.normalize_rewards=1", "found 1 (a whole number); it must be true or false"),
        ("loss_fn.reference_policy_kl_type=k4", "it must be one of k1, k2, k3"),
        ("loss_fn.ratio_clip_c=1.0", "it must be float > 1 or null"),
        ("policy.generation.top_p=0", "it must be float > 0 and <= 1"),
        ("policy.generation.top_k=0", "null or -1 keeps every token"),
        ("policy.precision=float16", "loss scaling"),
        ("grpo=5", "this is a section"),
        ("policy.generation.stop_token_ids=[1, a]", "list of int"),
    ],
)
def test_a_wrong_value_is_reported_with_what_was_found_and_what_it_must_be(tmp_path: Path, override: str, message: str) -> None:
    error = failure(tmp_path, "", override)
    assert message in str(error) and override.partition("=")[0] in str(error)
    assert len(error.problems) == 1


def test_a_number_where_a_text_is_wanted_should_be_quoted(tmp_path: Path) -> None:
    assert "Put it in quotes" in str(failure(tmp_path, "logger: {log_dir: 7}"))


def test_a_wrong_value_is_not_reported_again_for_the_keys_that_follow_it(tmp_path: Path) -> None:
    assert len(failure(tmp_path, "", "policy.max_total_sequence_length=long").problems) == 1


def test_a_fault_in_the_defaults_of_entries_is_reported_there_alone(tmp_path: Path) -> None:
    error = failure(tmp_path, "", "data.default.weight=heavy")
    assert [problem.key for problem in error.problems] == ["data.default.weight"]


def test_a_required_key_that_is_missing_is_reported_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [], root=GrpoRunConfig)
    assert [problem.key for problem in caught.value.problems] == ["policy.model_name"]


def test_all_mistakes_are_reported_together(tmp_path: Path) -> None:
    error = failure(tmp_path, "grpo:\n  sed: 1\n  val_period: often\n", "oops", "logger.log_dir=${nowhere}")
    assert {problem.key for problem in error.problems} == {"grpo.sed", "grpo.val_period", "", "logger.log_dir"}
    assert str(error).startswith("4 problems in the configuration:")


def test_a_key_of_another_system_that_asks_for_nothing_is_left_out_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        SMALL
        + "grpo: {val_period: 0, val_batch_size: 256, batch_multiplier: 1}\n"
        + "data_plane: {enabled: false}\ncheckpointing: {metric_name: null}\n"
    )
    (warning,) = load_config(path, root=GrpoRunConfig).warnings
    assert "grpo.val_batch_size, grpo.batch_multiplier, data_plane" in str(warning)


def test_a_key_of_another_system_that_asks_for_something_is_an_error(tmp_path: Path) -> None:
    message = str(failure(tmp_path, "on_policy_distillation: {enabled: true}"))
    assert "on_policy_distillation" in message and "not in this version" in message


def test_a_misspelled_section_in_an_override_is_reported_as_of_the_command_line_and_beside_other_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("policy:\n  model_name: m\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["policy.optimzer.kwargs.lr=1e-4", "grpo.num_prompts_per_step=abc"], root=GrpoRunConfig)
    assert "command line: policy.optimzer: there is no such key" in str(caught.value)
    assert "Did you mean policy.optimizer" in str(caught.value)
    assert "grpo.num_prompts_per_step: found 'abc'" in str(caught.value)


@pytest.mark.parametrize("root", [TRAINING_RUNS["sft"], EvalRunConfig])
def test_a_file_of_another_command_is_refused_in_one_line_that_names_it(root: Any, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("policy: {model_name: m}\ngrpo: {num_prompts_per_step: 4}\nloss_fn: {}\n")
    with pytest.raises(ConfigError) as refusal:
        load_config(path, root=root)
    assert "is a configuration of `strop grpo`" in str(refusal.value) and len(refusal.value.problems) == 1
    assert "strop grpo --config" in str(refusal.value)


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
