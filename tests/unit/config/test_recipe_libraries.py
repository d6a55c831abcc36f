"""Words of another library in a configuration, which a package translates that Strop does not know."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from strop import plugins
from strop.base_config import BaseConfig
from strop.config import ConfigError, GrpoRunConfig, load_config
from strop.config.load.recipe_library import RecipeLibrary, Translation
from strop.config.source.yaml_source import ConfigSource, delete_key, get_at, set_key
from strop.problems import Origin, Problem
from support.overrides import RUN

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
