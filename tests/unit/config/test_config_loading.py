"""YAML files, inheritance and interpolation."""

from pathlib import Path
from typing import Any

import pytest

from strop.config import ConfigError, EvalRunConfig, GrpoRunConfig, LoadedConfig, load_config

SMALL = """
policy: {model_name: tiny}
data: {train: {env_name: arithmetic}}
env: {arithmetic: {}}
grpo: {val_period: 0}
checkpointing: {metric_name: null}
"""


def load(folder: Path, text: str, *overrides: str) -> LoadedConfig[GrpoRunConfig]:
    path = folder / "run.yaml"
    path.write_text(text)
    return load_config(path, overrides, root=GrpoRunConfig)


def failure(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *overrides)
    return str(caught.value)


def test_a_file_needs_only_what_has_no_default(tmp_path: Path) -> None:
    loaded = load(tmp_path, SMALL)
    assert loaded.config.policy.model_name == "tiny"
    assert loaded.config.grpo.num_generations_per_prompt == 16
    assert loaded.warnings == ()


def test_without_a_file_overrides_alone_make_a_configuration() -> None:
    overrides = ["policy.model_name=m", "env.arithmetic={}", "data.train.env_name=arithmetic"]
    assert load_config(None, overrides, root=GrpoRunConfig).config.data.train[0].env_name == "arithmetic"


def test_defaults_lay_a_file_over_its_bases_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "first.yaml").write_text(SMALL + "loss_fn: {ratio_clip_min: 0.1, ratio_clip_max: 0.3}")
    (tmp_path / "base" / "second.yaml").write_text("loss_fn: {ratio_clip_max: 0.4}")
    loaded = load(tmp_path, "defaults: [base/first.yaml, base/second.yaml]\nlogger: {log_dir: there}")
    assert (loaded.config.loss_fn.ratio_clip_min, loaded.config.loss_fn.ratio_clip_max) == (0.1, 0.4)
    assert loaded.config.logger.log_dir == "there"
    assert [path.name for path in loaded.files] == ["first.yaml", "second.yaml", "run.yaml"]


def test_defaults_may_be_one_path_and_may_inherit_further(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(SMALL)
    (tmp_path / "b.yaml").write_text("defaults: a.yaml\ngrpo: {seed: 1}")
    assert load(tmp_path, "defaults: b.yaml").config.grpo.seed == 1


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("${policy.max_total_sequence_length}", 512),
        ("${.num_generations_per_prompt}", 16),
        ("${..policy.max_total_sequence_length}", 512),
        ("${mul:${policy.max_total_sequence_length}, ${mul:2,3}}", 3072),
        ("${div:${.num_generations_per_prompt}, 2}", 8),
        ("${add:1,2,3}", 6),
        ("${sub:5,2}", 3),
        ("${env:STROP_TEST_NUMBER_THAT_IS_NOT_SET,12}", 12),
    ],
)
def test_interpolations_refer_to_any_key_and_calculate(tmp_path: Path, written: str, expected: int) -> None:
    assert load(tmp_path, SMALL, f"grpo.max_num_steps={written}").config.grpo.max_num_steps == expected


def test_an_environment_variable_is_read_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_TEST_NAME", "seven")
    assert load(tmp_path, SMALL, "logger.wandb.name=${env:STROP_TEST_NAME}").config.logger.wandb.name == "seven"


def test_followed_keys_have_the_value_of_the_key_they_follow(tmp_path: Path) -> None:
    config = load(tmp_path, SMALL, "policy.max_total_sequence_length=100", "policy.generation.temperature=0.7").config
    assert config.policy.generation.max_new_tokens == 100
    assert config.policy.generation.val_temperature == 0.7
    assert config.data.max_input_seq_length == 100
    assert config.policy.tokenizer.name == "tiny"


def test_null_asks_for_the_key_that_is_followed(tmp_path: Path) -> None:
    config = load(tmp_path, SMALL, "policy.generation.max_new_tokens=null").config
    assert config.policy.generation.max_new_tokens == 512


def test_followed_keys_are_filled_in_python_too() -> None:
    config = load_config(
        None, ["policy.model_name=m", "policy.max_total_sequence_length=64"], root=GrpoRunConfig, check=False
    ).config
    assert config.policy.generation.max_new_tokens == config.data.max_input_seq_length == 64


def test_a_section_with_nothing_under_it_has_its_defaults(tmp_path: Path) -> None:
    config = load(tmp_path, SMALL.replace("{arithmetic: {}}", "\n  arithmetic:\n") + "logger:\n").config
    assert config.logger.log_dir == "logs" and config.env["arithmetic"].options == {}


def test_values_read_as_in_yaml_1_2(tmp_path: Path) -> None:
    text = SMALL.replace("arithmetic: {}", "arithmetic: {a: 5e-6, b: yes, c: 2024-01-01, d: 1:30, e: True, f: ~}")
    assert load(tmp_path, text).config.env["arithmetic"].options == {
        "a": 5e-6, "b": "yes", "c": "2024-01-01", "d": "1:30", "e": True, "f": None,
    }  # fmt: skip


def test_an_optimizer_in_a_file_replaces_the_default_arguments(tmp_path: Path) -> None:
    config = load(tmp_path, SMALL, "policy.optimizer={name: torch.optim.SGD, kwargs: {lr: 0.1}}").config
    assert config.policy.optimizer.kwargs == {"lr": 0.1}


ENTRIES: list[tuple[Any, list[str]]] = [
    ("{env_name: arithmetic}", ["arithmetic"]),
    ("[{env_name: arithmetic, weight: 3}, {env_name: other}]", ["arithmetic", "other"]),
]


@pytest.mark.parametrize(("train", "names"), ENTRIES)
def test_training_data_is_one_entry_or_a_list(tmp_path: Path, train: str, names: list[str]) -> None:
    text = f"policy: {{model_name: m}}\nenv: {{arithmetic: {{}}, other: {{}}}}\ndata: {{train: {train}, default: {{size: 5}}}}"
    entries = load(tmp_path, text).config.data.train
    assert [entry.env_name for entry in entries] == names
    assert {entry.size for entry in entries} == {5}


def test_an_entry_wins_over_the_defaults_even_with_null(tmp_path: Path) -> None:
    text = SMALL.replace("{env_name: arithmetic}", "{env_name: arithmetic, size: null}, default: {size: 5}")
    assert load(tmp_path, text).config.data.train[0].size is None


def test_schedulers_are_written_as_one_or_as_a_list_with_milestones(tmp_path: Path) -> None:
    one = load(tmp_path, SMALL, "policy.scheduler={name: torch.optim.lr_scheduler.ConstantLR}").config.policy.scheduler
    assert one is not None and one.stages[0].name.endswith("ConstantLR") and one.milestones == ()
    two = load(
        tmp_path, SMALL, "policy.scheduler=[{name: a, kwargs: {x: 1}}, {name: b}, {milestones: [50]}]"
    ).config.policy.scheduler
    assert two is not None and [stage.name for stage in two.stages] == ["a", "b"] and two.milestones == (50,)


def test_schedulers_without_a_milestone_between_them_are_an_error(tmp_path: Path) -> None:
    assert "2 schedulers need 1 milestones" in failure(tmp_path, SMALL, "policy.scheduler=[{name: a}, {name: b}]")


def test_an_evaluation_takes_its_lengths_from_the_longest_model_input() -> None:
    overrides = ["generation.model_name=m", "generation.vllm_cfg.max_model_len=99", "env.math={}"]
    config = load_config(None, overrides, root=EvalRunConfig).config
    assert config.generation.max_new_tokens == config.data.max_input_seq_length == 99
    assert config.tokenizer.name == "m"


def test_sampling_options_are_those_of_the_sampler() -> None:
    config = load_config(
        None, ["generation.model_name=m", "generation.temperature=0.6", "env.math={}"], root=EvalRunConfig
    ).config
    options = config.generation.sampling_options(validation=True)
    assert options["temperature"] == 0.6 and options["top_k"] is None and options["stop_strings"] == ()


def test_a_configuration_cannot_be_changed_after_it_was_checked(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="cannot assign"):
        load(tmp_path, SMALL).config.grpo.seed = 3  # type: ignore[misc]


def test_a_file_that_a_configuration_names_may_be_beside_it_or_in_a_folder_above(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("{}")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "run.yaml").write_text(
        "policy: {model_name: m}\nenv: {arithmetic: {}}\ndata: {train: {env_name: arithmetic, size: 8, prompt_file: prompt.txt}}\n"
        "grpo: {val_period: 0, val_at_start: false}\n"
    )
    loaded = load_config(tmp_path / "runs" / "run.yaml", root=GrpoRunConfig)
    assert loaded.config.data.train[0].prompt_file == str(tmp_path / "prompt.txt")
    assert not loaded.differences
