"""``a.b=c`` on the command line."""

from pathlib import Path
from typing import Any

import pytest

from strop.config import ConfigError, GrpoRunConfig, load_config

SMALL = """
policy: {model_name: tiny, max_total_sequence_length: 64}
data: {train: {env_name: arithmetic}}
env: {arithmetic: {}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(SMALL)
    return path


def options(file: Path, text: str) -> Any:
    return load_config(file, [f"env.arithmetic.x={text}"], root=GrpoRunConfig).config.env["arithmetic"].options["x"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("True", True), ("false", False), ("null", None), ("5e-6", 5e-6), ("1e-5", 1e-5), ("-3", -3),
        ("1_000", 1000), (".5", 0.5),
        ("[1, a, 2.0]", [1, "a", 2.0]), ("{a: 1, b: {c: null}}", {"a": 1, "b": {"c": None}}), ("'5'", "5"), ('"a b"', "a b"),
        ("Qwen/Qwen2.5-32B", "Qwen/Qwen2.5-32B"), ("a=b", "a=b"),
        ("*star", "*star"), ("val:accuracy", "val:accuracy"), ("", None),
    ],
)  # fmt: skip
def test_values_are_read_as_yaml(file: Path, text: str, value: Any) -> None:
    assert options(file, text) == value


@pytest.mark.parametrize("mark", ["", "+", "++"])
def test_every_spelling_of_set_sets(file: Path, mark: str) -> None:
    assert load_config(file, [f"{mark}grpo.seed=7"], root=GrpoRunConfig).config.grpo.seed == 7


def test_later_overrides_win(file: Path) -> None:
    assert load_config(file, ["grpo.seed=7", "grpo.seed=8"], root=GrpoRunConfig).config.grpo.seed == 8


def test_a_tilde_takes_away_what_the_file_sets(file: Path) -> None:
    assert (
        load_config(file, ["~policy.max_total_sequence_length"], root=GrpoRunConfig).config.policy.max_total_sequence_length
        == 512
    )


def test_taking_away_what_is_not_set_is_an_error(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"grpo\.seed is not set"):
        load_config(file, ["~grpo.seed"], root=GrpoRunConfig)


def test_a_mapping_is_merged_into_a_section(file: Path) -> None:
    policy = load_config(file, ["policy={precision: float32}"], root=GrpoRunConfig).config.policy
    assert (policy.precision, policy.max_total_sequence_length) == ("float32", 64)


def test_a_number_is_a_text_where_a_text_is_wanted(file: Path) -> None:
    assert load_config(file, ["logger.wandb.name=0042"], root=GrpoRunConfig).config.logger.wandb.name == "0042"


@pytest.mark.parametrize("key", ["data.train.size", "data.train.0.size"])
@pytest.mark.parametrize("entries", ["{env_name: arithmetic}", "[{env_name: arithmetic}]"])
def test_a_single_entry_goes_by_its_number_or_without(file: Path, key: str, entries: str) -> None:
    file.write_text(SMALL.replace("{env_name: arithmetic}", entries))
    assert load_config(file, [f"{key}=5"], root=GrpoRunConfig).config.data.train[0].size == 5


def test_an_entry_of_a_list_goes_by_its_number(file: Path) -> None:
    file.write_text(SMALL.replace("{env_name: arithmetic}", "[{size: 1}, {size: 2}]"))
    entries = load_config(file, ["data.train.1.weight=2"], root=GrpoRunConfig).config.data.train
    assert [entry.weight for entry in entries] == [1.0, 2.0]
    with pytest.raises(ConfigError, match=r"data\.train is a list of 2"):
        load_config(file, ["data.train.weight=2"], root=GrpoRunConfig)
