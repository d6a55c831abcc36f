"""Loading: files, defaults, interpolation, overrides, the name of a run; what is dumped loads back."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from strop.config import ConfigError, EvalRunConfig, GrpoRunConfig, LoadedConfig, dump_config, load_config
from strop.config.load.load import escape_values, validate_source
from strop.config.source.interpolation import LONGEST, format_overrides
from strop.config.source.yaml_source import ConfigSource
from support.each import each
from support.sweep import sweep

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
    assert load(tmp_path, SMALL, "logger.log_dir=${env:STROP_TEST_NAME}").config.logger.log_dir == "seven"


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


SMALL_OVERRIDES = """
policy: {model_name: tiny, max_total_sequence_length: 64}
data: {train: {env_name: arithmetic}}
env: {arithmetic: {}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(SMALL_OVERRIDES)
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
    assert load_config(file, ["logger.log_dir=0042"], root=GrpoRunConfig).config.logger.log_dir == "0042"


@pytest.mark.parametrize("key", ["data.train.size", "data.train.0.size"])
@pytest.mark.parametrize("entries", ["{env_name: arithmetic}", "[{env_name: arithmetic}]"])
def test_a_single_entry_goes_by_its_number_or_without(file: Path, key: str, entries: str) -> None:
    file.write_text(SMALL_OVERRIDES.replace("{env_name: arithmetic}", entries))
    assert load_config(file, [f"{key}=5"], root=GrpoRunConfig).config.data.train[0].size == 5


def test_an_entry_of_a_list_goes_by_its_number(file: Path) -> None:
    file.write_text(SMALL_OVERRIDES.replace("{env_name: arithmetic}", "[{size: 1}, {size: 2}]"))
    entries = load_config(file, ["data.train.1.weight=2"], root=GrpoRunConfig).config.data.train
    assert [entry.weight for entry in entries] == [1.0, 2.0]
    with pytest.raises(ConfigError, match=r"data\.train is a list of 2"):
        load_config(file, ["data.train.weight=2"], root=GrpoRunConfig)


def folders(*overrides: str, named_file: Path | None = None) -> tuple[str | None, str, str]:
    given = [*([] if named_file else ["policy.model_name=m"]), *overrides]
    config = load_config(named_file, given, root=GrpoRunConfig, check=False).config
    return config.run_name, config.logger.log_dir, config.checkpointing.checkpoint_dir


@pytest.fixture
def named_file(tmp_path: Path) -> Path:
    path = tmp_path / "my.yaml"
    path.write_text(
        "policy: {model_name: m}\nlogger: {log_dir: logs/mine}\ncheckpointing: {checkpoint_dir: '/big/${run_name}/steps'}\n"
    )
    return path


def test_a_name_names_both_folders_and_without_one_they_are_the_defaults() -> None:
    assert folders("run_name=first") == ("first", "logs/first", "results/first")
    assert folders() == (None, "logs", "results/grpo")


def test_a_folder_that_is_named_beside_the_name_stays_and_one_of_an_earlier_file_gives_way(named_file: Path) -> None:
    assert folders("run_name=a", "logger.log_dir=here/${run_name}") == ("a", "here/a", "results/a")
    assert folders("run_name=a", named_file=named_file) == ("a", "logs/a", "/big/a/steps"), "what contains the name stays too"
    named_file.write_text(named_file.read_text() + "run_name: b\n")
    assert folders(named_file=named_file) == ("b", "logs/mine", "/big/b/steps")
    assert folders("run_name=c", named_file=named_file) == ("c", "logs/c", "/big/c/steps")


def test_overrides_in_a_name_do_not_depend_on_their_order_and_leave_out_what_makes_no_other_run() -> None:
    given = ["grpo.seed=2", "+policy.precision=float32", "grpo.seed=3"]
    others = [
        "run_name=x",
        "logger.log_dir=y",
        "checkpointing.checkpoint_dir=z",
        "checkpointing.resume=never",
        "logger.console=plain",
    ]
    assert format_overrides([*given, *others]) == "grpo.seed=3-policy.precision=float32"
    assert format_overrides([*others, *given]) == format_overrides([given[1], given[2]])


@each(
    "swept",
    [
        ("policy.optimizer.kwargs.lr", "1e-6", "3e-6"),
        ("grpo.num_generations_per_prompt", "8", "16"),
        ("algorithm.objective.clip_high", "0.2", "0.28"),
    ],
)
def test_the_names_of_a_sweep_show_what_is_swept_beside_many_shared_settings(swept: tuple[str, str, str]) -> None:
    key, *values = swept
    shared = [
        "checkpointing.metric_name=null",
        "data.validation=null",
        "grpo.max_num_steps=2",
        "loss_fn.reference_policy_kl_penalty=0.01",
        "policy.generation.max_new_tokens=256",
        "~policy.scheduler",
        "policy.train_global_batch_size=8",
    ]
    names = [format_overrides([*shared, f"{key}={value}"]) for value in values]
    for name, value in zip(names, values, strict=True):
        assert f"={value}" in name and len(name) <= LONGEST + 9
        assert all(f"={text.partition('=')[2]}" in name for text in shared if "=" in text)
    assert len(set(names)) == len(names) and names[0] == format_overrides([f"{key}={values[0]}", *reversed(shared)])


def test_a_name_that_is_no_folder_or_nothing_is_refused() -> None:
    for name, said in (
        ("../up", "write a relative path without .."),
        ("/root", "write a relative path"),
        ("{overrides}", "nothing is left"),
    ):
        with pytest.raises(ConfigError, match=f"run_name: (.|\n)*{said}"):
            folders(f"run_name={name}") if name != "{overrides}" else load_config(
                None, [f"run_name={name}"], root=GrpoRunConfig, values={"policy": {"model_name": "m"}}, check=False
            )


texts = st.text(max_size=12) | st.sampled_from(
    ["5e-6", "true", "null", "${a}", r"\${a}", r"\\${", "$", "{}", "- a", "1:30", "yes", "0x1f", "<<"]
)
numbers = st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts.filter(lambda key: key != "???"), inner, max_size=3),
    max_leaves=6,
)
names = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
optional_texts = st.none() | texts
entries = st.fixed_dictionaries({}, optional={
    "dataset_name": optional_texts, "system_prompt": optional_texts, "env_name": optional_texts,
    "weight": st.floats(0.01, 100), "size": st.none() | st.integers(1, 100), "split_validation_size": st.floats(0, 0.5),
})  # fmt: skip
stage = st.fixed_dictionaries({"name": names, "kwargs": st.dictionaries(names, numbers, max_size=2)})
top_k = st.none() | st.just(-1) | st.integers(1, 50)
generation = st.fixed_dictionaries({}, optional={
    "temperature": st.floats(0, 2),
    "top_k": top_k,
    "val_top_k": top_k,
    "stop_strings": st.none() | st.lists(texts, max_size=2),
    "stop_token_ids": st.none() | st.lists(st.integers(0, 9), max_size=2),
})  # fmt: skip
policy = st.fixed_dictionaries({"model_name": texts.filter(bool)}, optional={
    "max_total_sequence_length": st.integers(2, 10**5),
    "train_micro_batch_size": st.integers(1, 64),
    "precision": st.sampled_from(["bfloat16", "float32"]),
    "optimizer": st.fixed_dictionaries({"kwargs": st.dictionaries(names, values, max_size=3)}),
    "scheduler": st.none() | stage | st.tuples(stage, stage, st.just({"milestones": [3]})).map(list),
    "tokenizer": st.fixed_dictionaries({"chat_template": optional_texts}),
    "generation": generation,
})  # fmt: skip
data = st.fixed_dictionaries({"train": entries | st.lists(entries, max_size=3)}, optional={
    "validation": st.none() | entries | st.lists(entries, max_size=2),
    "default": entries,
})  # fmt: skip
drawn_options = st.dictionaries(names.filter(lambda name: name not in ("type", "options")), values, max_size=3)
runs = st.fixed_dictionaries({
    "policy": policy,
    "data": data,
    "env": st.dictionaries(names, st.none() | drawn_options, max_size=2),
    "grpo": st.fixed_dictionaries({}, optional={"max_num_epochs": st.none() | st.integers(1, 9)}),
})  # fmt: skip


def reload(config: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(dump_config(config), encoding="utf-8")
        return load_config(path, root=type(config), check=False).config


@pytest.mark.parametrize("count", sweep([10, 60], 10))
def test_a_dumped_training_configuration_loads_back_equal(count: int) -> None:
    settings(max_examples=count, deadline=None)(given(runs)(assert_it_loads_back_equal))()


def assert_it_loads_back_equal(values: dict[str, Any]) -> None:
    config, problems = validate_source(ConfigSource(escape_values(values)), GrpoRunConfig)
    assert not problems
    assert reload(config) == config


def test_a_dumped_evaluation_loads_back_equal() -> None:
    overrides = ["generation.model_name=m", "env.math={}", "eval.metric=cons@k", "generation.stop_strings=['${', 'a']"]
    config = load_config(None, [*overrides[:3], r"generation.stop_strings=['\${', a]"], root=EvalRunConfig).config
    assert config.generation.stop_strings == ("${", "a")
    assert reload(config) == config


def test_overrides_work_on_a_saved_configuration(tmp_path: Path) -> None:
    overrides = ["policy.model_name=m", "env.arithmetic={}", "data.train.env_name=arithmetic", "data.default.size=4"]
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(load_config(None, overrides, root=GrpoRunConfig).config))
    config = load_config(path, ["data.train.size=9", "policy.optimizer.kwargs.lr=0.5"], root=GrpoRunConfig).config
    assert config.data.train[0].size == 9 and math.isclose(config.policy.optimizer.kwargs["lr"], 0.5)
    assert config.policy.optimizer.kwargs["weight_decay"] == 0.01
