"""Which environment grades a built-in set in an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strop.base_config import validate_section
from strop.config.schema.evaluation_config import assign_graders
from strop.data import builtin_sets
from strop.data.builtin_dataset import BuiltinDataset, Grader
from strop.data.data_config import DataEntryConfig
from strop.environments.environment_config import EnvironmentConfig
from strop.runs.tasks import make_mixture

CHOICES = {"verifier_type": "english_multichoice"}


@pytest.fixture(autouse=True)
def sets(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {
        "exam": BuiltinDataset("owner/exam", grader=Grader("math", CHOICES)),
        "programs": BuiltinDataset("owner/programs", grader=Grader("code")),
        "worded": BuiltinDataset("owner/worded", grader=Grader("code", {"wording": "benchmark"})),
        "plain": BuiltinDataset("owner/plain"),
    }
    for name, entry in known.items():
        monkeypatch.setitem(builtin_sets.BUILTIN_DATASETS, name, entry)  # type: ignore[arg-type]


def grade(name: str | None, env: dict[str, dict[str, Any]], env_name: str | None = None) -> tuple[str | None, Any]:
    entry = validate_section(DataEntryConfig, {"dataset_name": name, "env_name": env_name})
    sections = {alias: EnvironmentConfig(type=given.pop("type", None), options=given) for alias, given in env.items()}
    (graded,), known = assign_graders([entry], sections)
    assert all(known[alias] == section for alias, section in sections.items())
    alias = graded.env_name
    if alias is None or alias not in known:
        return alias, None
    return alias, (known[alias].type_of(alias), known[alias].options)


def test_the_alias_of_an_entry_holds() -> None:
    assert grade("exam", {"math": {}}, "math") == ("math", ("math", {}))


def test_the_only_environment_holds_unless_it_is_of_the_default_type() -> None:
    assert grade("exam", {"task": {"reward": "mine.py:correct"}})[0] is None
    assert grade("programs", {"judge": {"type": "mine.py:Judge"}})[0] is None


def test_a_set_is_graded_as_it_is_reported() -> None:
    assert grade("exam", {}) == ("exam", ("math", CHOICES))
    assert grade("exam", {"math": {}}) == ("exam", ("math", CHOICES))
    assert grade("programs", {"math": {}}) == ("programs", ("code", {}))
    assert grade("programs", {"math": {}, "code": {}}) == ("code", ("code", {}))


def test_options_of_an_alias_of_the_same_type_are_laid_over_those_of_the_grader() -> None:
    assert grade("exam", {"math": {"verifier_type": "multilingual_multichoice"}})[1] == (
        "math",
        {"verifier_type": "multilingual_multichoice"},
    )
    assert grade("exam", {"math": {"timeout": 3}}) == ("exam", ("math", {**CHOICES, "timeout": 3}))
    assert grade("exam", {"exam": {"type": "math", "timeout": 3}})[0] == "exam_as_reported"
    assert grade("worded", {"code": {"timeout_s": 3}}) == ("worded", ("code", {"wording": "benchmark", "timeout_s": 3}))
    assert grade("programs", {"code": {"timeout_s": 3}}) == ("code", ("code", {"timeout_s": 3}))


@pytest.mark.parametrize("name", ["plain", "rows.jsonl", None])
def test_other_data_are_graded_by_the_configured_environment(name: str | None) -> None:
    assert grade(name, {"math": {}})[0] is None


def test_what_is_reported_is_read_in_an_evaluation(local_hub: Path) -> None:
    entry = validate_section(DataEntryConfig, {"dataset_name": "gsm8k", "env_name": "math"})
    env = {"math": EnvironmentConfig(type=None)}
    mixture = make_mixture([entry], env, "validation", seed=0, purpose="evaluation")
    trained = make_mixture([entry], env, "train", seed=0)
    assert mixture.at(0)[2].question != trained.at(0)[2].question
