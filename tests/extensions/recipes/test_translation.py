"""Which configurations are translated: those that say anything in NeMo-RL's words, and no other."""

from __future__ import annotations

import random
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest

from strop.base_config import BaseConfig, KeyPath
from strop.config import ConfigError, load_config
from strop.config.load.recipe_library import translate_source
from strop.config.schema.run_config import TRAINING_RUNS, EvalRunConfig, GrpoRunConfig
from strop.config.source.keys import iter_keys
from strop.config.source.yaml_source import ConfigSource, merge_sections
from strop.extensions.recipes import translation
from strop.extensions.recipes.translation import is_recipe, translate_nemo_rl

ROOTS: dict[str, type[BaseConfig]] = {**TRAINING_RUNS, "eval": EvalRunConfig}
PLAIN = {bool: (True, False), int: (0, 1, 3, 512), float: (0.0, 0.5, 1.0), str: ("a", "auto", "math"), type(None): (None,)}


def nest(path: KeyPath, value: Any) -> dict[str, Any]:
    for name in reversed(path):
        value = {name: value}
    nested: dict[str, Any] = value
    return nested


def possible_values(annotation: Any) -> Iterator[Any]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        yield from arguments
    elif origin is Annotated:
        yield from possible_values(arguments[0])
    elif origin in (Union, types.UnionType):
        yield from (value for argument in arguments for value in possible_values(argument))
    elif origin is dict:
        yield from ({}, {"a": 1})
    else:
        yield from PLAIN.get(annotation, ())


def test_a_configuration_in_strop_s_own_words_imports_no_rule() -> None:
    run = ["policy.model_name=m", "data.train.env_name=arithmetic", "env.arithmetic={}"]
    code = f"""
import sys
from strop.config import GrpoRunConfig, load_config
load_config(None, {run}, root=GrpoRunConfig)
rules = ("nemo_rl", "trl", "verl", "recipe")
print([name for name in rules if f"strop.extensions.recipes.{{name}}" in sys.modules], "strop.extensions.recipes.libraries" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[] True\n"


@pytest.mark.parametrize("kind", ROOTS)
def test_the_rules_have_nothing_to_say_of_what_is_no_recipe(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a key of Strop would mean one thing in a recipe and another in a file of Strop's own."""
    generator, root, own = random.Random(kind), ROOTS[kind], 0
    keys = [(key.path, values) for key in iter_keys(root) if (values := list(possible_values(key.field.annotation)))]
    keys = [pair for pair in keys if "megatron_cfg" not in pair[0]]  # the rules list what a section says that is switched off
    for _ in range(3):
        generator.shuffle(keys)
        for start in range(0, len(keys), 8):
            tree: dict[str, Any] = {}
            for path, values in keys[start : start + 8]:
                tree = merge_sections(tree, nest(path, generator.choice(values)))
            source = ConfigSource.from_python(tree)
            if is_recipe(source, root):
                continue
            own += 1
            with monkeypatch.context() as patched:
                patched.setattr(translation, "is_recipe", lambda source, root: True)
                translated = translate_nemo_rl(source, root)
                assert translated is not None
            assert translated.source.values == tree and not translated.differences
    assert own > 30


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("policy.dtensor_cfg._v2", True),  # a key that only NeMo-RL has
        ("grpo.max_num_stps", 3),  # or nobody
        ("env.math.num_workers", 8),
        ("env.should_use_nemo_gym", True),
        ("grpo.val_period", -1),  # a value that only NeMo-RL has
        ("data.train.dataset_name", "ResponseDataset"),
        ("policy.generation.vllm_kwargs.speculative_config", {"method": "ngram"}),
        ("policy.backend", "megatron"),
    ],
)
def test_one_word_of_nemo_rl_makes_a_recipe(key: str, value: Any) -> None:
    assert is_recipe(ConfigSource.from_python(nest(tuple(key.split(".")), value)), GrpoRunConfig)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("algorithm.objective.high", 0.3),
        ("env.math.verifier", "math_verify"),
        ("policy.optimizer.kwargs.offload_optimizer_for_logprob", 1),  # an option of whatever optimizer is named
        ("data.train", [{"dataset_name": "gsm8k"}, {"dataset_name": "${policy.model_name}"}]),
        ("policy.scheduler", [{"name": "linear", "kwargs": {"total_steps": 3}}, {"milestones": [3]}]),
    ],
)
def test_options_of_strop_s_own_parts_make_no_recipe(key: str, value: Any) -> None:
    source = ConfigSource.from_python(nest(tuple(key.split(".")), value))
    assert not is_recipe(source, GrpoRunConfig)
    assert translate_nemo_rl(source, GrpoRunConfig) is None
    assert translate_source(source, GrpoRunConfig).source is source


RUN = ["policy.model_name=m", "data.train.env_name=arithmetic", "env.arithmetic={}", "checkpointing.metric_name=null"]


def test_a_key_that_asks_for_nothing_is_left_out_with_a_warning() -> None:
    unused = ["grpo.val_period=0", "grpo.val_batch_size=256", "grpo.batch_multiplier=1", "data_plane={enabled: false}"]
    (warning,) = load_config(None, [*RUN, *unused], root=GrpoRunConfig).warnings
    assert "grpo.val_batch_size, grpo.batch_multiplier, data_plane" in str(warning)


def test_a_key_that_asks_for_something_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"on_policy_distillation.*not in this version"):
        load_config(None, [*RUN, "on_policy_distillation={enabled: true}"], root=GrpoRunConfig)
