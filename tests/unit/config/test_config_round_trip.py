"""What is saved with a run loads back as the same configuration."""

import math
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from strop.config import EvalRunConfig, GrpoRunConfig, dump_config, load_config
from strop.config.load.load import escape_values, validate_source
from strop.config.source.yaml_source import ConfigSource
from support.sweep import sweep

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
options = st.dictionaries(names.filter(lambda name: name not in ("type", "options")), values, max_size=3)
runs = st.fixed_dictionaries({
    "policy": policy,
    "data": data,
    "env": st.dictionaries(names, st.none() | options, max_size=2),
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
