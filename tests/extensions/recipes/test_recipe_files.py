"""Files as NeMo-RL's loader reads them: sections that replace the base's, values left open, resolvers."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.config import ConfigError, load_config
from strop.config.schema.run_config import GrpoRunConfig
from strop.config.source.interpolation import resolve_interpolations
from strop.config.source.yaml_source import read_config_file


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder / f"{next(reversed(files))}.yaml"


def test_a_section_that_overrides_replaces_that_of_the_base(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        base="data: {train: {seed: 1, split: a}, shuffle: true}\ngrpo: {seed: 3}",
        middle="defaults: base.yaml\ngrpo: {max_num_steps: 2}",
        recipe="defaults: middle.yaml\ndata: {_override_: true, train: {split: b}}",
    )
    source = read_config_file(path)
    assert source.values == {"data": {"train": {"split": "b"}}, "grpo": {"seed": 3, "max_num_steps": 2}}
    assert ("data", "shuffle") not in source.origins and ("data", "_override_") not in source.origins


def test_below_the_top_a_section_merges_as_it_does_there(tmp_path: Path) -> None:
    path = write(tmp_path, base="a: {b: {c: 1}}", recipe="defaults: base.yaml\na: {b: {_override_: true, d: 2}}")
    assert read_config_file(path).values == {"a": {"b": {"c": 1, "_override_": True, "d": 2}}}


def test_resolvers_of_nemo_rl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_SOME_FOLDER", "/data")
    values = {
        "a": 3,
        "b": "${max:${a},${mul:2,4}}",
        "c": "${min:${a},1.5}",
        "d": "${oc.env:STROP_SOME_FOLDER}/x",
        "e": "${oc.env:NO_SUCH,y}",
    }
    resolved, errors = resolve_interpolations({**values, "e": "${oc.env:NO_SUCH,y}"})
    assert resolved == {"a": 3, "b": 8, "c": 1.5, "d": "/data/x", "e": "y"} and not errors


def test_a_value_that_is_left_open_is_the_problem(tmp_path: Path) -> None:
    path = write(tmp_path, recipe="policy: {model_name: '???', tokenizer: {name: '${policy.model_name}'}}\ngrpo: {seed: 1}")
    with pytest.raises(ConfigError) as caught:
        load_config(path, root=GrpoRunConfig)
    (problem,) = caught.value.problems
    assert problem.key == "policy.model_name" and "???" in problem.message and "policy.model_name=" in problem.fix
    rest = ["policy.model_name=m", "data.train.env_name=arithmetic", "env.arithmetic={}"]
    assert load_config(path, rest, root=GrpoRunConfig, check=False).config.policy.tokenizer.name == "m"
