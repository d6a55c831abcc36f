"""``strop translate``: YAML that loads back without differences, reasons of a refusal, and what becomes of a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop import cli
from strop.config import load_config
from strop.config.schema.run_config import GrpoRunConfig
from strop.config.source.yaml_source import ConfigSource
from strop.extensions.recipes import recipe_format
from strop.extensions.recipes.difference import Difference, Effect
from strop.extensions.recipes.recipe_format import ReadRecipe, RecipeFormat, find_format

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
    "small/gym.yaml": "defaults: ../base.yaml\nenv: {should_use_nemo_gym: true}\ndata_plane: {enabled: true}",
    "small/gym_best.yaml": "defaults: gym.yaml\ngrpo: {use_best_at_k: true}",
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
    assert cli.main(["translate", str(recipes / "small/gym_best.yaml")]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "2 problems" in captured.err
    assert "no key says where they are" in captured.err and "grpo.use_best_at_k" in captured.err


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
        == "2      1  NeMo-Gym's servers run separately from the run, and no key says where they are (env.should_use_nemo_gym)"
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
    formats = {"other": other, **recipe_format.list_formats()}
    monkeypatch.setattr(recipe_format, "list_formats", lambda: formats)
    path = recipes / "other.yaml"
    path.write_text("defaults: [{model: hf}]\ntrainer: {save_freq: 3}")
    assert find_format(path) is other and find_format(recipes / "base.yaml").name == "nemo-rl"
    assert cli.main(["translate", str(path), "grpo.val_period=0", "checkpointing.metric_name=null"]) == 0
    assert "differs in meaning: trainer.save_freq: it counts batches here" in capsys.readouterr().out
