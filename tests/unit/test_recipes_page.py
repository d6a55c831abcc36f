"""docs/recipes.md, held against the code: what it says of the printed form, of outcomes and of reasons. Its numbers are dated."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from strop.build.dry_run.recipe_folder import TORCH_LEARNER, Outcome
from strop.config.load.translated_recipe import _describe_differences
from strop.config.recipes.difference import Difference, Effect
from strop.config.recipes.nemo_rl.unsupported_rules import UNSUPPORTED_RULES
from strop.config.recipes.unsupported import Unsupported

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
TEXT = " ".join(PAGE.replace("`", "").split())


def test_every_outcome_has_a_number_and_they_are_all_runs() -> None:
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \|$", PAGE, re.MULTILINE)
    outcomes = {name.replace("`", ""): int(count) for name, count in rows}
    assert list(outcomes) == [str(outcome) for outcome in Outcome if outcome is not Outcome.NO_RUN]
    assert f"of which {sum(outcomes.values())} configure a run" in TEXT and TORCH_LEARNER in TEXT


@pytest.mark.parametrize(
    "rule", [rule for rule in UNSUPPORTED_RULES if isinstance(rule, Unsupported)], ids=lambda rule: rule.asked_by[0]
)
def test_everything_that_is_refused_by_name_is_on_the_page(rule: Unsupported) -> None:
    assert rule.why in TEXT


def test_no_more_recipes_are_refused_for_one_reason_alone_than_for_it() -> None:
    rows = [(int(recipes), int(alone)) for recipes, alone in re.findall(r"\| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)]
    refused = int(re.search(r"\| are refused \| (\d+) \|", PAGE)[1])  # type: ignore[index]
    assert len(rows) >= 10 and all(alone <= recipes for recipes, alone in rows)
    assert sum(alone for _, alone in rows) <= refused <= sum(recipes for recipes, _ in rows)


def test_comments_begin_as_the_page_says_and_in_that_order() -> None:
    differences = [Difference(f"key.{effect}", effect, "text") for effect in (Effect.UNUSED, Effect.RENAMED, Effect.CHANGED)]
    printed = [comment.partition(":")[0] for comment in _describe_differences(differences)]
    assert re.findall(r"^\| `([a-z ]+)` \|", PAGE, re.MULTILINE) == printed
