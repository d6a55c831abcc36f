"""Keys of earlier versions: refused with what to do instead, unless they asked for nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strop.config import ConfigError, GrpoRunConfig, load_config
from strop.config.source.keys import find_field
from strop.config.source.removed_keys import REMOVED_KEYS, RemovedKey
from support.overrides import RUN


def key_of(removed: RemovedKey) -> str:
    return removed.pattern.replace("*.async_*", "grpo.async_grpo")


@pytest.mark.parametrize("removed", REMOVED_KEYS, ids=lambda removed: removed.pattern)
def test_a_key_that_is_gone_is_refused_with_what_to_do_instead(removed: RemovedKey, tmp_path: Path) -> None:
    key, asked = key_of(removed), f"{key_of(removed)}=7"
    assert find_field(GrpoRunConfig, tuple(key.split("."))) is None, "the schema has it again"
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*RUN, asked], root=GrpoRunConfig)
    (problem,) = caught.value.problems
    assert (problem.key, problem.message, problem.fix) == (key, "found 7, and this key is gone", removed.instead)
    unset = f"{key}={json.dumps(removed.default)}"  # as the config.yaml of a run that did not set it
    assert load_config(None, [*RUN, unset], root=GrpoRunConfig).config == load_config(None, RUN, root=GrpoRunConfig).config
    load_config(None, [*RUN, asked], root=GrpoRunConfig, check=False)  # a saved run is read, whatever it asked for


def test_a_key_that_is_gone_is_refused_at_its_line_beside_other_problems(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("grpo:\n  max_num_stepz: 3\n  async_grpo:\n    enabled: true\n    repeatable: true\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file, RUN, root=GrpoRunConfig)
    lines = {problem.key: getattr(problem.origin, "line", None) for problem in caught.value.problems}
    assert lines == {"grpo.max_num_stepz": 2, "grpo.async_grpo.repeatable": 5}
