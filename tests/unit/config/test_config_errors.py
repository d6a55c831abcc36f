"""A mistake is named with its place, its key, what was found, and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from strop import plugins
from strop.base_config import BaseConfig
from strop.config import ConfigError, GrpoRunConfig, load_config
from strop.config.load.recipe_library import RecipeLibrary, Translation
from strop.config.source.keys import iter_keys
from strop.config.source.yaml_source import ConfigSource, delete_key, get_at, set_key
from strop.problems import Origin, Problem
from support.overrides import RUN

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


STEPS, ENGINE = ("toy", "steps"), ("toy", "engine")


class Toy(RecipeLibrary):
    """A library with ``toy.steps``, which is a key here under another name, and ``toy.engine``, which is none."""

    def translate(self, source: ConfigSource, root: type[BaseConfig]) -> Translation | None:
        if get_at(source.values, ("toy",)) is None:
            return None
        steps, engine = get_at(source.values, STEPS), get_at(source.values, ENGINE)
        _, source = delete_key(source, ("toy",), Origin("a test"))
        _, source = set_key(source, ("grpo", "max_num_steps"), steps, Origin("a test"))
        refused = Problem("toy.engine", f"found {engine}, which is not here", "Remove it.")
        said = Problem("toy.steps", "it counts batches here")
        problems = () if engine is None else (refused,)
        return Translation(source, problems, (said,), ("a difference",), lambda key: key.startswith("grpo.stop"))

    def explain_key(self, kind: str, name: str, value: Any) -> str:
        return f"toy's {name} is grpo.seed here" if (kind, name) == ("grpo", "toy_seed") else ""


TOY = Toy()


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = plugins.declared

    def with_toy(group: str) -> Mapping[str, EntryPoint]:
        own = {"toy": EntryPoint("toy", f"{__name__}:TOY", f"strop.{group}")} if group == "recipes" else {}
        return {**declared(group), **own}

    monkeypatch.setattr(plugins, "declared", with_toy)


def test_a_library_translates_its_words_and_says_how_they_differ() -> None:
    loaded = load_config(None, [*RUN, "toy.steps=7"], root=GrpoRunConfig)
    assert loaded.config.grpo.max_num_steps == 7
    assert "a difference" in loaded.differences
    assert "toy.steps: it counts batches here" in [str(warning).splitlines()[0] for warning in loaded.warnings]


def test_a_library_refuses_what_strop_would_not_do_once() -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(None, [*RUN, "toy.steps=7", "toy.engine=x", "grpo.stop_at_validation_metric=accuracy"], root=GrpoRunConfig)
    assert [problem.key for problem in refused.value.problems] == ["toy.engine"], "the other problem follows from it"


def test_an_unknown_key_is_explained_by_the_library_that_has_it() -> None:
    with pytest.raises(ConfigError, match=r"toy's toy_seed is grpo\.seed here"):
        load_config(None, [*RUN, "toy_seed=3"], root=GrpoRunConfig)
