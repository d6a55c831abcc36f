"""``strop translate``: YAML that loads back without differences, reasons of a refusal, and what becomes of a folder."""

from __future__ import annotations

import random
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest

from strop import cli
from strop.base_config import BaseConfig, KeyPath
from strop.config import ConfigError, load_config
from strop.config.load.recipe_library import translate_source
from strop.config.schema.run_config import TRAINING_RUNS, EvalRunConfig, GrpoRunConfig
from strop.config.source.keys import iter_keys
from strop.config.source.yaml_source import ConfigSource, merge_sections
from strop.extensions.recipes import libraries, library_recipe
from strop.extensions.recipes.libraries import is_recipe, translate_nemo_rl
from strop.extensions.recipes.library_recipe import ReadRecipe, RecipeFormat, find_format
from strop.extensions.recipes.rules import Difference, Effect
from support.sweep import sweep

BASE = """
policy:
  model_name: m
  max_total_sequence_length: 512
  dtensor_cfg: {_v2: true, enabled: true, tensor_parallel_size: 2}
  make_sequence_length_divisible_by: ${policy.dtensor_cfg.tensor_parallel_size}
  generation: {max_new_tokens: "${div:${policy.max_total_sequence_length},2}", port_range_low: 3000, port_range_high: 4999}
grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 4, val_period: 0}
env: {arithmetic: {}}
data: {train: {env_name: arithmetic}}
checkpointing: {metric_name: null, save_period: 10}
logger: {log_dir: "logs/${policy.model_name}", monitor_gpus: true}
cluster: {gpus_per_node: 8, num_nodes: 2}
"""
FILES = {
    "base.yaml": BASE,
    "small/faults.yaml": "defaults: ../base.yaml\ncheckpointing: {ft_save_period: 5, is_async: true}",
    "small/teachers.yaml": "defaults: ../base.yaml\non_policy_distillation: {enabled: true}\ndata_plane: {enabled: true}",
    "small/teachers_best.yaml": "defaults: teachers.yaml\ngrpo: {use_best_at_k: true}",
    "small/too_large.yaml": "defaults: ../base.yaml\npolicy: {dtensor_cfg: {tensor_parallel_size: 3}}",
    "quant/weights.yaml": "quant_cfg: {num_bits: 4}",
}


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "recipes"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return folder


def test_the_printed_file_loads_back_to_the_same_run_without_differences(
    recipes: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = recipes / "small/faults.yaml"
    assert cli.main(["translate", str(path), "grpo.max_num_steps=7"]) == 0
    printed = capsys.readouterr().out
    mine = tmp_path / "mine.yaml"
    mine.write_text(printed)
    loaded, original = (
        load_config(file, overrides, root=GrpoRunConfig) for file, overrides in ((mine, ()), (path, ["grpo.max_num_steps=7"]))
    )
    assert loaded.config == original.config and not loaded.differences and len(original.differences) >= 6


def test_comments_name_every_difference_changes_first(recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["translate", str(recipes / "small/faults.yaml")])
    comments = [line for line in capsys.readouterr().out.splitlines() if line.startswith("# ")]
    kinds = [line.split(":")[0] for line in comments if not line.startswith("#     ")]
    assert kinds[:4] == ["# made by", "# start it with", "# differs in meaning", "# says the same in another key"]
    assert "# start it with: strop grpo --config FILE" in comments and set(kinds[4:]) == {"# left out"}
    text = " ".join(line.lstrip("# ") for line in comments)
    assert "checkpointing.ft_save_period: checkpointing.save_period=5 here" in text
    assert "policy.generation.port_range_low, policy.generation.port_range_high: free ports" in text


def test_a_refused_recipe_says_why_and_exits_with_2(recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["translate", str(recipes / "small/teachers_best.yaml")]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "2 problems" in captured.err
    assert "a teacher for each agent" in captured.err and "grpo.use_best_at_k" in captured.err


def test_a_folder_is_counted_by_outcome_and_reason(recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["translate", "--all", str(recipes)]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith("5 run configurations below")
    assert lines[1:4] == [
        "1 pass the dry run, with the same meaning",
        "1 pass the dry run, with differences in meaning",
        "3 are refused",
    ]
    assert "1 other files, which have no section of a run:" in lines and "quant/weights.yaml" in lines
    reasons = lines[lines.index("recipes  alone  refused because") + 1 :]
    assert (
        reasons[0]
        == "2      1  GRPO with a teacher for each agent (on_policy_distillation) is not in this version (on_policy_distillation)"
    )
    assert len(reasons) == 3 and any(reason.startswith("1      1") and "tensor_parallel_size" in reason for reason in reasons)


def test_another_library_is_a_format_that_reads_its_files(
    recipes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(path: Path) -> ReadRecipe:
        values = {"policy": {"model_name": "m"}, "env": {"arithmetic": {}}, "data": {"train": {"env_name": "arithmetic"}}}
        changed = Difference("trainer.save_freq", Effect.CHANGED, "it counts batches here")
        return ReadRecipe("grpo", ConfigSource.from_python(values), (changed,))

    other = RecipeFormat("other", lambda values: "trainer" in values, read)
    formats = {"other": other, **library_recipe.list_formats()}
    monkeypatch.setattr(library_recipe, "list_formats", lambda: formats)
    path = recipes / "other.yaml"
    path.write_text("defaults: [{model: hf}]\ntrainer: {save_freq: 3}")
    assert find_format(path) is other and find_format(recipes / "base.yaml").name == "nemo-rl"
    assert cli.main(["translate", str(path), "grpo.val_period=0", "checkpointing.metric_name=null"]) == 0
    assert "differs in meaning: trainer.save_freq: it counts batches here" in capsys.readouterr().out


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


@pytest.mark.parametrize("kind", sweep(ROOTS, "grpo", "dpo"))
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
                patched.setattr(libraries, "is_recipe", lambda source, root: True)
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
